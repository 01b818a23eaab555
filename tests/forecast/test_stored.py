"""What finished runs leave for later ones: read back whole, found quickly, and damage is passed over."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrain.forecast.forecasting import forecast
from foretrain.forecast.history import History
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.forecast.stored import (
    curve_from_json,
    curve_to_json,
    finished_runs,
    history_of,
    siblings_of,
)


def curve(kind: str = "gpt", decay: float = 0.3, total: int = 100) -> LossCurve:
    steps = np.arange(10.0, total + 1, 10)
    plan = RatePlan(total, np.array([0.0, total * (1 - decay), total]), np.array([1.0, 1.0, 0.0]))
    return LossCurve(steps, 2 + 1 / steps, plan, (AnnealedPoint(50, 5, 2.0, 2.1),), kind)


def write(folder: Path, one: LossCurve, reason: str = "finished", way: str = "law") -> Path:
    folder.mkdir(parents=True)
    finished = {"kind": one.kind, "drop": 0.1, "exponent": 0.5, "residuals": [[0.5, False, way, 0.3]]}
    summary = {"reason": reason, "loss_forecast": {"curve": curve_to_json(one), "finished": finished}}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def test_a_curve_is_read_back_as_it_was() -> None:
    one = curve()
    read = curve_from_json(json.loads(json.dumps(curve_to_json(one))))
    for name in ("steps", "losses"):
        assert np.allclose(getattr(read, name), getattr(one, name), rtol=1e-6)
    assert (read.annealed, read.kind, read.plan.total_steps) == (one.annealed, "gpt", 100)


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [1.0]},
        {"steps": [3, 2, 1], "losses": [1, 1, 1]},
        {"losses": "many"},
        {"rates": None},
        {"total_steps": 0},
        {"annealed": [[1, 2]]},
        {"annealed": 7},
        {"steps": [[1]], "losses": [[2]]},
        {"total_steps": 1e400},
    ],
)
def test_a_damaged_curve_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no curve"):
        curve_from_json(curve_to_json(curve()) | change)


def test_finished_runs_are_found_among_all_that_lies_there(tmp_path: Path) -> None:
    own = write(tmp_path / "own", curve())
    for place, name in enumerate(("b", "a")):
        os.utime(write(tmp_path / name, curve()) / "summary.json", (place + 1, place + 1))
    write(tmp_path / "stopped", curve(), "interrupted")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for name, text in (
        ("damaged", "{"),
        ("list", "[]"),
        ("old", '{"reason": "finished"}'),
        ("huge", " " * 2**22 + "{}"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text, encoding="utf-8")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "summary.json").symlink_to(own / "summary.json")
    found = finished_runs(tmp_path, own)
    assert [Path(run.folder).name for run in found] == ["b", "a"]
    assert len(history_of(found, "gpt").runs) == 2
    assert finished_runs(tmp_path / "nowhere") == []


def test_the_newest_are_read_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.forecast.stored._FOLDERS", 3)
    for place in range(30):
        when = (place * 7) % 30 + 1  # not in the order in which they were made
        os.utime(write(tmp_path / f"run-{when:02}", curve()) / "summary.json", (when, when))
    assert [Path(run.folder).name for run in finished_runs(tmp_path)] == ["run-28", "run-29", "run-30"]


def test_siblings_are_of_the_same_kind_and_schedule_and_not_too_many(tmp_path: Path) -> None:
    for place in range(6):
        write(tmp_path / f"same-{place}", curve(total=100 + place))
    write(tmp_path / "other-kind", curve("mlp"))
    write(tmp_path / "other-schedule", curve(decay=1.0))
    runs = finished_runs(tmp_path)
    found = siblings_of(curve(), runs)
    assert len(found) == 4
    assert {(one.kind, round(one.plan.steps[1] / one.plan.total_steps, 6)) for one in found} == {("gpt", 0.7)}
    assert siblings_of(curve(""), runs) == []


def calibrated(folder: Path, kind: str = "gpt") -> bool:
    """Whether the forecast of another run of this kind beside those in a folder is calibrated."""
    runs, whole = finished_runs(folder), curve(kind)
    seen = dataclasses.replace(whole, steps=whole.steps[:5], losses=whole.losses[:5], annealed=())
    made = forecast(seen, siblings_of(seen, runs), history=history_of(runs, kind))
    assert made is not None
    return made.calibrated


@pytest.mark.parametrize("first", ["law", "transfer"])
def test_ten_finished_runs_of_the_kind_calibrate(tmp_path: Path, first: str) -> None:
    """The first one had none beside it when it ran: it counts as it would be forecast now."""
    for place in range(10):
        assert not calibrated(tmp_path)
        write(tmp_path / f"run-{place}", curve(), way=first if place == 0 else "transfer")
    assert calibrated(tmp_path)
    assert not calibrated(tmp_path, kind="mlp")
    assert not calibrated(tmp_path, kind="")
    history = history_of(finished_runs(tmp_path), "gpt")
    assert History.from_json(history.to_json()) == history


def test_a_run_of_another_schedule_is_not_forecast_once_more(tmp_path: Path) -> None:
    write(tmp_path / "run", curve(decay=1.0))
    for place in range(2):
        write(tmp_path / f"other-{place}", curve())
    ways = [[one.method for one in run.residuals] for run in history_of(finished_runs(tmp_path), "gpt").runs]
    assert ways.count(["law"]) == 1
    assert sum(set(found) == {"transfer"} for found in ways) == 2


@pytest.mark.parametrize("odd", [1.0, 1e300, 1e-300, 0.0, -1e29])
def test_odd_numbers_in_the_files_of_others_end_nothing(tmp_path: Path, odd: float) -> None:
    for place in range(3):
        copy = AnnealedPoint(50, 5, 1e300, 2.0)
        write(tmp_path / f"run-{place}", dataclasses.replace(curve(), losses=np.full(10, odd), annealed=(copy,)))
    history = history_of(finished_runs(tmp_path), "gpt")
    assert len(history.runs) == 3
