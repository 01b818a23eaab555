"""Runs to a loss and runs in a time, as several ranks and one process make them; ranks have clocks of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranked import Found, own_rows, ranks, wrapped
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Evaluated, Event, Planned, Progress
from foretrain.loop import goal
from foretrain.loop.saver import Saver

PLAIN: dict[str, Any] = {
    "device": "cpu",
    "hybrid.mode": "off",
    "health.interval": 0,
    "optimizer.type": "adamw",
    "log.interval": 1,
    "forecast.enabled": False,
}
TO_A_LOSS = {"until_loss": 0.6, "max_steps": 300, "optimizer.learning_rate": 0.02}
IN_TIME = {"max_time": 150, "optimizer.learning_rate": 0.05}
PAUSE = 50
GOAL = torch.tensor([[1.0], [-2.0], [0.5], [1.5]])


@dataclass
class Clock:
    """Seconds that pass only where the loss is computed."""

    now: float = 0.0
    pace: float = 1.0


class Rows:
    """A rank's rows of every batch."""

    def __iter__(self) -> Iterator[Tensor]:
        drawn = torch.Generator().manual_seed(3)
        while True:
            yield own_rows((torch.randn(8, 4, generator=drawn),))[0]


def held_out() -> list[Tensor]:
    return [*own_rows((torch.randn(8, 4, generator=torch.Generator().manual_seed(5)),))]


def made(kind: str, clock: Clock, **settings: Any) -> HybridTrainer:
    """A linear model; every loss of a batch takes its time on the clock."""
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(4, 1)), kind)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        clock.now += clock.pace
        return ((model(batch) - batch @ GOAL) ** 2).mean() + 0.5

    return HybridTrainer(model, None, loss, from_mapping(PLAIN | settings))


def to_a_loss(kind: str) -> Found:
    """What was decided, and when, and where the run ended."""
    events: list[Event] = []
    trainer = made(kind, Clock(), **TO_A_LOSS)
    with pytest.MonkeyPatch.context() as patch:
        if ranks()[0]:  # forecasts are rounded differently on other machines: this one must not make any
            patch.delattr(goal, "fit")
        summary = trainer.fit(Rows(), held_out(), progress=False, callbacks=[events.append])
    return {
        "planned": [[event.step, event.what, event.end] for event in events if isinstance(event, Planned)],
        "evaluated": [event.step for event in events if isinstance(event, Evaluated)],
        "copies": [[point.step, point.steps] for point in trainer.copies.points],
        "global_step": trainer.global_step,
        "target": summary["target"],
        "loss": summary["final_val_loss"],
    }


def in_time(kind: str) -> Found:
    """A run whose clock is far ahead and fast on rank 1, left in its middle; and what goes on with it."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(os.environ.get("RANKS_FOLDER", own), f"in-time-{kind}")
        first = in_folder(kind, folder, pause_at=PAUSE)
        if ranks()[0] == 0:
            shutil.copytree(folder, f"{folder}-paused")
        return {"first": first, "rest": in_folder(kind, folder, resume=True), "paused": f"{folder}-paused"}


def in_folder(kind: str, folder: Path, **options: Any) -> Found:
    """One part of the run. Its clock begins anew, as that of a process does; the checkpoint knows of the others."""
    rank = ranks()[0]
    clock, rates = Clock(now=1000.0 * rank, pace=1.0 + 2.0 * rank), list[float]()
    trainer = made(kind, clock, **IN_TIME)
    if not rank:
        trainer.bus.subscribe(lambda event: rates.append(event.learning_rate) if isinstance(event, Progress) else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "total_seconds", property(lambda saver: saver.earlier_seconds + clock.now))
        summary = trainer.fit(Rows(), held_out(), out=folder, progress=False, **options)
    targets = trainer.targets
    assert targets is not None
    return {
        "reason": summary["reason"],
        "global_step": trainer.global_step,
        "planned": [targets.end, targets.plan.begin, targets.plan.warmup],
        "rates": rates,
        "last_rate": float(trainer.engine.rate.used),
        "spent": summary["target"]["spent"],
    }
