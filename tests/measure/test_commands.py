"""`foretrain compare` from the command line, with a real text and a very small model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.cli.app import main
from foretrain.config import from_mapping
from foretrain.errors import InputError
from foretrain.measure.commands import default_folder, parse_arm
from foretrain.measure.ladder import rungs
from foretrain.measure.plan import ComparisonPlan, Options

TINY = {
    "max_steps": 10,
    "batch_size": 4,
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.context": 16,
    "evaluation.batches": 2,
    "hybrid.warmup_steps": 4,
    "device": "cpu",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = " ".join(f"the {number} cats sat on mat {number % 7}." for number in range(2000))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    lines = [f"{name} = {json.dumps(value)}" for name, value in TINY.items() if "." not in name]
    lines += [f"{name} = {json.dumps(value)}" for name, value in TINY.items() if "." in name]
    (tmp_path / "my.toml").write_text("\n".join([*lines, 'data.path = "book.txt"', 'data.cache = "cache"']), "utf-8")
    return tmp_path / "my.toml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    return int(ended.value.code or 0)


def test_a_comparison_from_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(config), "--seeds", "1", "--rates", "1", "--out", "cmp") == 0
    shown = capsys.readouterr()
    assert " ".join(shown.out.split()).startswith("Identical runs: hybrid made no move")
    for arm in ("plain", "hybrid", "hybrid, not moving", "plain, equal seconds"):
        assert arm.split(",")[0] in shown.out
    assert "report.html" in shown.out
    page = Path("cmp/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    for harmless in ("http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"):  # a name, and a comment
        page = page.replace(harmless, "")
    assert "://" not in page
    ran = shown.err.count(" steps, seed 1: loss")
    assert ran >= 6
    assert run(str(config), "--seeds", "1", "--rates", "1", "--out", "cmp", "--json") == 0
    again = capsys.readouterr()
    assert " steps, seed 1: loss" not in again.err, "nothing is run twice"
    result = json.loads(again.out)
    assert result["complete"]
    assert len(result["runs"]) == ran
    assert str(config.parent) not in json.dumps(result), "no folder of this machine"


def test_time_is_up_before_it_is_finished(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(config), "--minutes", "0", "--out", "cmp") == 0
    assert "Not finished: run the same command again" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--budgets", "1", "2"], "--budgets"),
        (["--arm", "muon"], "name: key=value"),
        (["--arm", "plain: hybrid.full_steps=3"], "same name"),
        (["--arm", "half: max_steps=3"], "must be the same in all arms"),
        (["--arm", "other: data.path=x"], "must be the same in all arms"),
        (["--minutes", "-1"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--out", "my.toml"], "my.toml"),
        (["--out", "/proc/nowhere/x"], "/proc/nowhere"),
        (["--arm", "x: optimizer.typ=adam"], "--arm 'x': unknown key optimizer.typ; did you mean optimizer.type?"),
        (["--set", "hybrid.mode=off"], "nothing to compare"),
        (["--ladder"], "optimizer.type=adamw"),
    ],
)
def test_wrong_arguments_are_explained(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(str(config), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error


def test_the_same_configuration_finds_its_folder_again() -> None:
    one, other = (from_mapping({"max_steps": steps}) for steps in (10, 11))
    assert default_folder(one) == default_folder(from_mapping({"max_steps": 10}))
    assert default_folder(one) != default_folder(other)


def test_an_arm_in_words() -> None:
    arm = parse_arm("bold: audit.time_budget=0.05, optimizer.type=adam")
    assert (arm.name, arm.settings) == ("bold", {"audit.time_budget": 0.05, "optimizer.type": "adam"})


def test_every_rung_changes_one_thing_on_top_of_the_one_below() -> None:
    base = from_mapping({"optimizer.type": "adamw", "device": "cpu"})
    ladder = rungs(base, blocks=4)
    plan = ComparisonPlan(base, Options(arms=ladder), lambda _: None)
    configs = [plan.spec(arm, 1).config(base).model_dump() for arm in ladder]

    def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
        parts = {name for name in one if one[name] != other[name]} - {"max_steps", "schedule"}
        return {f"{part}.{key}" for part in parts for key in one[part] if one[part][key] != other[part][key]}

    steps = [differing(below, above) for below, above in itertools.pairwise(configs)]
    assert [step - {"optimizer.muon_scale", "optimizer.learning_rate"} for step in steps] == [
        {"optimizer.type"},
        {"growth.layers"},
        {"predictor.beta"},
        {"hybrid.mode"},
        {"evaluation.ema_decay"},
    ]
    assert ladder[2].settings["growth.layers"] == 2
    with pytest.raises(InputError, match="adamw"):
        rungs(from_mapping({"optimizer.type": "sgd"}))


@pytest.mark.parametrize(
    ("settings", "blocks", "grows"),
    [({}, 4, True), ({}, 1, False), ({}, 0, False), ({"max_steps": 12}, 4, False), ({"growth.layers": 2}, 4, False)],
)
def test_growth_is_a_rung_where_it_can_be_judged(settings: dict[str, Any], blocks: int, grows: bool) -> None:
    ladder = rungs(from_mapping({"optimizer.type": "adamw", "device": "cpu", **settings}), blocks)
    assert ("... and growth" in [arm.name for arm in ladder]) == grows
    assert all(("growth.layers" in arm.settings) == grows for arm in ladder[2:])
