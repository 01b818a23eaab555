"""A chain of real runs in one folder: from ten finished ones of its kind on, a run calls its interval calibrated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain.events import Event, LossForecasted
from foretrain.recipes import train as run
from foretrain.recipes.forecast import forecast_runs
from foretrain.recipes.seen import ForecastRequest

Make = Callable[..., Any]
STEPS = 40


@pytest.fixture
def train(make_config: Make, text_file: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train a tiny model in the folder of runs; return its summary, with what it told of its end while it went on."""

    def one(name: str, seed: int, **changes: Any) -> dict[str, Any]:
        values = {"data.path": str(text_file), "max_steps": STEPS, "evaluation.interval": 4, "hybrid.mode": "off"}
        config = make_config({**values, "seed": seed, "checkpoint.interval": 0, **changes})
        told: list[Event] = []
        summary = run.train(config, tmp_path / "runs" / name, progress=False, listeners=[told.append])
        return summary | {"told": [event for event in told if isinstance(event, LossForecasted)]}

    return one


def test_ten_finished_runs_of_its_kind_make_an_interval_calibrated_and_nine_do_not(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    train("another-kind", 99, batch_size=3)
    for place in range(10):
        summary = train(f"run-{place}", place)
        found = summary["loss_forecast"]
        assert (found["own_finished_runs"], found["calibrated"]) == (place, False)
        assert not any(event.calibrated for event in summary["told"])
    last = train("run-10", 10)
    assert (last["loss_forecast"]["own_finished_runs"], last["loss_forecast"]["calibrated"]) == (10, True)
    assert last["told"][-1].calibrated
    other = train("another-kind-again", 100, batch_size=3)
    assert (other["loss_forecast"]["own_finished_runs"], other["loss_forecast"]["calibrated"]) == (1, False)
    folder = tmp_path / "runs" / "run-10"
    (made,) = forecast_runs([folder], ForecastRequest(at=0.75))
    assert made.made.calibrated
    assert not any("not calibrated" in note for note in made.notes)
    told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert told["loss_forecast"]["calibrated"]
