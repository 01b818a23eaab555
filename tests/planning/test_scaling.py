"""`foretrain plan --time`: which model would end lowest, by a law and by what this machine does."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from foretrain.cli import advice
from foretrain.config import from_mapping
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning import scaling, speed
from foretrain.planning.scaling import LossLaw, Speed, candidate, finished_runs, law_by

Command = Callable[..., int]
SMALL = GPT2Shape(12, 12, 768)
H200 = Speed(((1.0, 252e12),))


@pytest.fixture(autouse=True)
def no_runs_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`foretrain plan` goes by finished runs in the working directory: no test finds somebody's."""
    monkeypatch.chdir(tmp_path)


def test_more_time_wants_a_larger_model_and_a_larger_batch() -> None:
    found = [scaling.best(SMALL, 1024, hours * 3600, H200, LossLaw()) for hours in (0.25, 2, 24)]
    sizes = [one.parameters for one in found if one is not None]
    assert len(sizes) == 3
    assert sizes == sorted(sizes)
    assert sizes[2] > 3 * sizes[0]
    assert found[2].batch_size > found[0].batch_size  # type: ignore[union-attr]
    assert found[0].loss > found[1].loss > found[2].loss  # type: ignore[union-attr]


def test_the_best_is_lower_than_what_was_asked_for_and_fits() -> None:
    asked = candidate(GPT2Shape(48, 25, 1600), 1024, 600, H200, LossLaw(), 8)
    best = scaling.best(SMALL, 1024, 600, H200, LossLaw())
    assert best is not None
    assert best.loss < asked.loss
    assert asked.tokens == pytest.approx(0.9 * 600 * 252e12 / scaling.operations(GPT2Shape(48, 25, 1600), 1024))
    smaller = scaling.best(SMALL, 1024, 600, H200, LossLaw(), lambda one: one.width <= 128)
    assert smaller is not None
    assert smaller.width <= 128
    assert scaling.best(SMALL, 1024, 1e-6, H200, LossLaw()) is None


def test_speeds_between_two_that_were_measured() -> None:
    known = Speed(((1e6, 1e9), (1e8, 4e9)))
    assert [known.at(size) for size in (1e5, 1e6, 1e8, 1e9)] == [1e9, 1e9, 4e9, 4e9]
    assert known.at(1e7) == pytest.approx(2e9)


def test_finished_runs_set_the_level(tmp_path: Path) -> None:
    model = {"vocab_size": 257, "weights": ""}
    good = {"reason": "finished", "config": {"model": model}, "parameters": 8e5, "tokens": 5e6, "final_val_loss": 1.5}
    runs = {
        "good": good,
        "interrupted": good | {"reason": "interrupted"},
        "other": good | {"config": {"model": model | {"vocab_size": 50257}}},
        "tuned": good | {"config": {"model": model | {"weights": "base"}}},
        "short": good | {"tokens": 500},
        "broken": {"reason": "finished"},
    }
    for name, summary in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "summary.json").symlink_to(tmp_path / "good" / "summary.json")
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "summary.json").write_text(json.dumps(good) + " " * 2**22)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "summary.json")  # reading it would wait for ever
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "summary.json").write_text("[]")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "summary.json").write_text("{")
    assert finished_runs(tmp_path, 257) == [(8e5, 5e6, 1.5)]
    law = law_by(finished_runs(tmp_path, 257), 257)
    assert law.runs == 1
    assert law.loss(8e5, 5e6) == pytest.approx(1.5)
    assert law.loss(8e6, 5e7) < 1.5
    assert law_by([], 50257) == LossLaw()


def test_a_real_step_is_measured() -> None:
    now = iter(range(1000))
    config = from_mapping({"device": "cpu", "batch_size": 2, "max_time": "1h"})
    shape = GPT2Shape(1, 1, 8, context=8, vocab_size=32)
    found = speed.operations_per_second(config, shape, 2.0, lambda: float(next(now)))
    assert found == pytest.approx(2 * 2 * 8 * scaling.operations(shape, 8) / 3)  # two steps in three looks at the clock


def test_steps_are_measured_without_a_race_of_learning_rates() -> None:
    now = iter(range(1000))
    asked = {"optimizer.learning_rate": "auto", "forecast.copies": [0.25], "device": "cpu", "batch_size": 2}
    shape = GPT2Shape(1, 1, 8, context=8, vocab_size=32)
    assert speed.operations_per_second(from_mapping(asked), shape, 2.0, lambda: float(next(now)))


def test_the_command_says_what_would_end_lowest(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "operations_per_second", lambda config, shape: 1e13)
    arguments = ["plan", "--time", "1h", "--set", "model.type=gpt2-small", "--set", "device=cpu"]
    assert command(*arguments) == 0
    out = capsys.readouterr().out
    assert "lowest in 1h00m" in out
    assert "an estimate" in out
    lines = tomllib.loads(out[out.index("max_time =") :])
    assert lines["max_time"] == "1h"
    proposed = from_mapping({f"model.{name}": value for name, value in lines["model"].items()})
    assert proposed.model.layers is not None
    assert command(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["layers"] == proposed.model.layers
    assert found["best"]["loss"] < found["asked"]["loss"] < math.log(50257)
    assert found["estimate"] is True


def test_without_a_gpu_its_speed_is_reckoned_and_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", "--time", "30m", "--set", "model.type=gpt2-small", "--device", "cuda") == 0
    assert "reckoned for one H200" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "words"), [(["2x"], "is not a time"), (["0s"], "no time at all")])
def test_what_cannot_be_planned_is_said(
    arguments: list[str], words: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("plan", "--time", *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_law_that_says_more_than_ignorance_is_not_told(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "operations_per_second", lambda config, shape: 1e9)
    assert command("plan", "--time", "10m", "--set", "device=cpu") == 0
    out = capsys.readouterr().out
    assert "?" in out
    assert "the order of models counts, not their losses" in " ".join(out.split())
    assert advice.H200 > 1e14
