"""`--json`: on every command, one document on standard output and nothing else, errors included."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from tests.conftest import TINY, words
from tests.finetuning import config_for, write_base, write_colors

from foretrain.cli.app import app, main

pytestmark = pytest.mark.xdist_group("json")  # the world below is made once

Path_ = tuple[str, ...]


def commands(group: App = app, path: Path_ = ()) -> Iterator[tuple[Path_, App]]:
    """Every command that does something, with the words that call it."""
    for name in group:
        if not name.startswith("-"):
            found = group[name]
            inner = list(commands(found, (*path, name)))
            yield from inner or [((*path, name), found)]


COMMANDS = dict(commands())
LONG = [("train",), ("finetune",), ("compare",), ("sweep",), ("bench", "run")]


def options(command: App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_it(path: Path_) -> None:
    assert "--json" in options(COMMANDS[path])
    assert ({"--quiet", "--verbose"} <= options(COMMANDS[path])) is (path in LONG)


# --- every command for real -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, examples, a trained run, a fine-tuned one, a sweep, and results of benchmarks."""
    from foretrain import config
    from foretrain.recipes import finetune as tuning
    from foretrain.recipes import train as run
    from foretrain.sweep.run import open_sweep
    from foretrain.sweep.worker import Worker

    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "tiny.txt").write_text(words(1200), encoding="utf-8")
        lines = [
            f"{name} = {json.dumps(value)}" for name, value in sorted(TINY.items(), key=lambda item: "." in item[0])
        ]
        text = "\n".join([*lines, f"data.path = {json.dumps(str(folder / 'tiny.txt'))}"])
        (folder / "tiny.toml").write_text(text, encoding="utf-8")
        run.train(config.load(folder / "tiny.toml").config, folder / "run", progress=False)
        (folder / "space.toml").write_text(f"base = '{folder / 'tiny.toml'}'\n[space]\nbatch_size = [4]\n")
        Worker(*open_sweep(folder / "space.toml", folder / "sweep")).work()
        base, data = write_base(folder / "base"), write_colors(folder / "colors.jsonl")
        tuning.finetune(config_for(base, data, max_steps=1, evaluation__answers=2), folder / "tuned", progress=False)
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text('{"step": [1.0, 1.1, 1.2, 1.3, 1.4]}', encoding="utf-8")
    rows = [f"{step},{2 + 3 * step**-0.5}" for step in range(5, 101, 5)]
    (folder / "log.csv").write_text("step,val_loss\n" + "\n".join(rows), encoding="utf-8")
    return folder


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world, as the working folder."""
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("foretrain.show.pages.watch.WatchServer.run", lambda server: server._socket.close())
    monkeypatch.setattr("foretrain.cli.doctor.installed_gpu", lambda: "")
    return tmp_path / "here"


def _settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


TUNE = _settings("max_steps=2", "device=cpu", "engine.compile=false", "evaluation.answers=2", "batch_size=4")
CALLS: dict[Path_, tuple[list[str], Callable[[Any], object]]] = {
    ("train",): (["tiny.toml", "--out", "new"], lambda found: found["files"]["report"] == "new/report.html"),
    ("finetune",): (
        ["--base", "base", "--data", "colors.jsonl", "--out", "new", *TUNE],
        lambda found: found["files"]["adapter"] == "new/adapter" and found["reason"] == "finished",
    ),
    ("compare",): (["tiny.toml", "--minutes", "0"], lambda found: Path(found["page"]).is_file() and found["missing"]),
    ("sweep",): (["--out", "sweep"], lambda found: found["complete"] and found["best"]["number"] == 0),
    ("bench", "run"): (
        ["--only", "confidence estimate", "--processes", "1", "--out", "x.json"],
        lambda found: found["written"] == "x.json" and found["benchmarks"],
    ),
    ("bench", "list"): ([], lambda found: {"full step"} <= {row["name"] for row in found}),
    ("bench", "compare"): (["a.json", "b.json"], lambda found: found["step"]["ratio"] == 1.0),
    ("bench", "history"): (["a.json", "b.json"], lambda found: found["step"]["medians"] == [1.2, 1.2]),
    ("config", "init"): (["my.toml"], lambda found: found["command"] == "foretrain train my.toml"),
    ("config", "show"): ([], lambda found: found["log"]["console"] == "normal"),
    ("config", "check"): (["tiny.toml"], lambda found: found == {"ok": True, "notices": []}),
    ("generate",): (
        ["base", "--prompt", "sky", "--prompt", "ä", "--max-tokens", "2", "--device", "cpu"],
        lambda found: [row["prompt"] for row in found] == ["sky", "ä"],
    ),
    ("evaluate",): (
        ["tuned", "--data", "colors.jsonl", "--answers", "3", "--device", "cpu"],
        lambda found: found["answered"] == 3 and found["examples"] == 240,
    ),
    ("adapters", "list"): (
        [
            ".",
        ],
        lambda found: [row["folder"] for row in found] == ["tuned/adapter"],
    ),
    ("adapters", "merge"): (["tuned", "merged"], lambda found: found == {"written": "merged"}),
    ("adapters", "export"): (["tuned", "exported"], lambda found: found == {"written": "exported"}),
    ("export",): (["run", "exported"], lambda found: found == {"written": "exported"}),
    ("plan",): (["tiny.toml"], lambda found: found["estimate"]),
    ("forecast",): (
        ["log.csv", "--at", "0.5"],
        lambda found: found[0]["run"] == "log.csv" and found[0]["seen_steps"] == 50 and found[0]["held"] is not None,
    ),
    ("report",): (["run"], lambda found: found["page"] == "run/report.html"),
    ("watch",): (["run"], lambda found: found["address"].startswith("http://127.0.0.1:")),
    ("doctor",): ([], lambda found: {"device", "disk"} <= {row["name"] for row in found}),
    ("predictors",): ([], lambda found: "linear" in {row["name"] for row in found}),
}


def test_every_command_is_called() -> None:
    assert set(CALLS) == set(COMMANDS)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def document(text: str) -> Any:
    """Exactly one, without the words that JSON does not have."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    assert text.isascii()
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("path", CALLS, ids=" ".join)
def test_its_output_is_one_document(path: Path_, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, is_right = CALLS[path]
    assert call(*path, *arguments, "--json") == 0
    assert is_right(document(capfd.readouterr().out))


BAD = {
    ("train",): ["nowhere.toml"],
    ("finetune",): ["--base", "nowhere", "--data", "nowhere.jsonl"],
    ("generate",): ["nowhere"],
    ("config", "check"): ["nowhere.toml"],
    ("bench", "compare"): ["nowhere.json", "a.json"],
    ("report",): ["nowhere"],
    ("forecast",): ["nowhere"],
    ("export",): [],
    ("sweep",): ["nowhere.toml"],
    ("nothing like it",): [],
}


@pytest.mark.parametrize("path", BAD, ids=" ".join)
def test_an_error_is_a_document_too(path: Path_, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*path, *BAD[path]) == 2
    plain = capfd.readouterr()
    assert plain.out == ""
    assert call(*path, *BAD[path], "--json") == 2
    shown = capfd.readouterr()
    found = document(shown.out)
    assert plain.err == shown.err == f"error: {found['error']}\n"
    assert found["exit_code"] == 2
    assert found["type"].endswith("Error")


def test_what_else_is_known_of_an_error_is_beside_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "check", "tiny.toml", "--set", "max_steps=0", "--json") == 2
    assert document(capsys.readouterr().out)["ok"] is False
    assert call("plan", "tiny.toml", "--budget", "1KB", "--json") == 2
    found = document(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["smallest_bytes"] > 1000


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError("no memory"), 3)])
def test_a_command_that_breaks_off(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("foretrain.cli.doctor.examine", fail)
    assert call("doctor", "--json") == code
    assert document(capsys.readouterr().out)["exit_code"] == code


def test_a_fault_of_ours_is_told_and_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.cli.doctor.examine", [].pop)
    with pytest.raises(IndexError):
        main(["doctor", "--json"])
    assert document(capsys.readouterr().out)["error"].startswith("IndexError: ")


def test_what_others_print_is_kept_off_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.cli.doctor.examine", lambda: print("a library's chatter") or [])
    assert call("doctor", "--json") == 0
    shown = capsys.readouterr()
    assert document(shown.out) == []
    assert "chatter" in shown.err
    assert call("doctor") == 0
    assert "chatter" in capsys.readouterr().out
