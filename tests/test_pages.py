"""What is written for people stays true."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.worlds import QUICK, Net, Regression

from foretrain import HybridTrainer, config
from foretrain.sweep.space import read_space

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_configuration_page_is_generated_from_the_schema() -> None:
    command = [sys.executable, ROOT / "docs" / "generate_configuration.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_the_pages_exist(page: Path) -> None:
    sections = {name.partition(".")[0] for name in config.KNOWN if "." in name}
    names = re.findall(r"`(?:--set )?([a-z_]+\.[a-z_0-9]+)(?: ?=[^`]*)?`", page.read_text(encoding="utf-8"))
    from foretrain.config.names import KEY_ALIASES, RESERVED

    for name in names:
        if name.partition(".")[0] in sections and name.rpartition(".")[2] not in (
            "json",
            "toml",
            "jsonl",
            "safetensors",
        ):
            assert name in config.KNOWN or name in KEY_ALIASES or name in RESERVED, name


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_load(example: Path) -> None:
    content = tomllib.loads(example.read_text(encoding="utf-8"))
    if "space" in content:
        assert read_space(example).ranges
    else:
        assert config.load(example).notices == ()


def test_example_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"accuracy ([0-9.]+)%", printed)[1])
    assert accuracy > 95, printed


def test_the_hook_of_the_page_sees_what_it_says_and_a_rollback_takes_it_back() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").partition("## Watch full steps")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    model, data = Net(), Regression()
    trainer = HybridTrainer(model, config=config.from_mapping(QUICK))
    known = {"torch": torch, "model": model, "trainer": trainer}
    exec(code, known)  # noqa: S102
    hook, seen = known["hook"], []
    for position in range(3):
        trainer.step(data(position))
        seen.append(float(hook.largest))
    assert 0 < seen[0] <= seen[1] <= seen[2]
    trainer.policy.tools.snapshots.take()
    hook.largest = hook.largest + 1
    trainer.policy.tools.snapshots.rewind()
    assert float(hook.largest) == seen[2]
    other = HybridTrainer(Net(), config=config.from_mapping(QUICK))
    exec(code, known | {"model": other.model, "trainer": other})  # noqa: S102
    other.load_state_dict(trainer.state_dict())
    assert other.global_step == 3


def test_the_example_of_fine_tuning_makes_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foretrain.data.examples import read_examples

    target = tmp_path / "which_keyword.jsonl"
    monkeypatch.setattr(sys, "argv", ["which_keyword.py", str(target)])
    runpy.run_path(str(ROOT / "examples" / "which_keyword.py"), run_name="__main__")
    found = read_examples(target)
    assert f"{len(found)} examples of 11 keywords" in capsys.readouterr().out
    assert len({example.answer for example in found}) == 11


def test_every_predictor_has_a_page_that_opens_with_its_verdict() -> None:
    from foretrain.motion.predictors.registry import NAMES, VERDICTS

    assert set(VERDICTS) == set(NAMES)
    for name in NAMES:
        title, _, first = (ROOT / "docs" / "predictors" / f"{name}.md").read_text(encoding="utf-8").split("\n")[:3]
        assert title == f"# {name}"
        assert first.startswith("**Verdict: ")
        pays = "pay" in VERDICTS[name] or "time not shown" in VERDICTS[name]
        assert pays, "a verdict says whether it pays"


def test_a_run_can_be_drawn(tmp_path: Path) -> None:
    events = [
        '{"event": "Progress", "step": 1, "loss": 3.0}',
        '{"event": "PhaseChanged", "step": 2, "phase": "full", "reason": ""}',
        '{"event": "Moved", "step": 3, "horizon": 10, "verdict": "kept"}',
        '{"event": "Evaluated", "step": 4, "loss": 2.0}',
        '{"event": "Progress", "step": 4, "loss": 2.5}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(events), encoding="utf-8")
    command = [sys.executable, ROOT / "docs" / "draw_run.py", tmp_path, tmp_path / "run.svg"]
    assert subprocess.run(command).returncode == 0
    picture = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert picture.count("polyline") == 1
    assert "10 steps ahead: kept" in picture


def test_the_arms_of_a_campaign_can_be_drawn(tmp_path: Path) -> None:
    speedups = {"hybrid <b>": (1.2, 1.1, 1.3), "plain, again": (1.0, 0.9, 1.1), "one run": None}
    arms = [
        {"arm": name, "label": name, "n": 3, "speedup": told and dict(zip(("mean", "low", "high"), told, strict=True))}
        for name, told in speedups.items()
    ]
    result = {"config": {"optimizer": {"type": "muon"}}, "analysis": {"ladder": [], "arms": arms}}
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    command = [sys.executable, ROOT / "docs" / "draw_campaign.py", tmp_path / "arms.svg", tmp_path / "result.json"]
    assert subprocess.run(command).returncode == 0
    picture = ET.parse(tmp_path / "arms.svg").getroot()  # noqa: S314
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-3:-1] == ["Muon: hybrid <b>", "Muon: plain, again"]
    hybrid, plain = (float(dot.attrib["cx"]) for dot in picture.iter("{http://www.w3.org/2000/svg}circle"))
    assert hybrid > plain
