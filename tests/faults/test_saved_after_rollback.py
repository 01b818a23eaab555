"""An emergency goes back past checkpoints: what is saved, measured and resumed from afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_guard_faults import DATA, IDLE, Batch, Tampered, between, healthy, nan
from tests.worlds import QUICK, same_weights

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import DivergenceError
from foretrain.events import CheckpointSaved, Evaluated, Event, Progress, Recovered, Resumed

SETTINGS: dict[str, Any] = {**QUICK, **IDLE, "log.interval": 10, "max_steps": 240, "checkpoint.interval": 50}
HELD_OUT = [healthy(5000, *DATA(5000))]


class Data:
    """Nothing is finite from batch 200 on, until `last`."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __iter__(self) -> Iterator[Batch]:
        for position in range(10_000):
            yield between(200, self.last, nan)(position, *DATA(position))


def train(out: Path, last: int, stop_at: int = 0, resume: bool = False) -> tuple[HybridTrainer, list[Event]]:
    """stop_at: a signal at this step after the rollback."""
    trainer = HybridTrainer(Tampered(), config=from_mapping({**SETTINGS, "evaluation.interval": 20}))
    events: list[Event] = []

    def hear(event: Event) -> None:
        gone_back = any(isinstance(one, Recovered) and one.action == "roll_back" for one in events)
        if isinstance(event, Progress) and gone_back and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        events.append(event)

    trainer.bus.subscribe(hear)
    with contextlib.suppress(SystemExit):  # of the signal
        trainer.fit(Data(last), HELD_OUT, out=out, progress=False, resume=resume)
    return trainer, events


def steps(events: list[Event], kind: type[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, kind)]


def test_a_stop_after_a_rollback_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    whole, told = train(tmp_path / "whole", 206)
    _, first = train(tmp_path / "cut", 206, stop_at=20)
    assert steps(first, CheckpointSaved) == [50, 100, 150, 200, 20]
    resumed, second = train(tmp_path / "cut", 206, resume=True)
    assert steps(second, Resumed) == [20]
    assert steps(told, Evaluated) == steps(first, Evaluated) + steps(second, Evaluated)
    assert steps(told, CheckpointSaved) == [50, 100, 150, 200, 50, 100, 150, 200, 240]
    assert same_weights(whole.model, resumed.model)
    assert whole.engine.progress.evaluations_without_best == resumed.engine.progress.evaluations_without_best


def test_what_is_given_up_after_a_rollback_is_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="given up"):
        train(tmp_path, 10**9)
    assert any("-after-rollback-" in path.name for path in (tmp_path / "checkpoints").iterdir())
