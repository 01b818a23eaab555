"""When chains of linearised leaps are tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worlds import QUICK, World
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Notice
from foretrain.hybrid.moves.linearised import LinearisedKind

INPUTS = torch.linspace(-1, 1, 400).view(-1, 1)
WIDTH = 32
WEIGHTS = 3 * WIDTH + 1


def curve(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found - torch.sin(3 * x)


def world(rows: int, room: float, **settings: Any) -> World:
    """rows: of the batch; room: rows that there is memory for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    memory = {"hybrid.linear_memory_mb": (12 * WEIGHTS * room + 24 * room**2) / 2**20}
    values = {**QUICK, "max_steps": 60, "optimizer.type": "adam", **memory}
    trainer = HybridTrainer(model, residuals=curve, config=from_mapping({**values, **changes}))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return World(trainer, lambda position: INPUTS[:rows], events)


def made(run: World) -> int:
    return next(kind.leaps.made for kind in run.trainer.policy.kinds if isinstance(kind, LinearisedKind))


def notices(run: World) -> str:
    return " ".join(event.message for event in run.events if isinstance(event, Notice))


@pytest.mark.parametrize(
    ("rows", "room", "settings"),
    [(400, 170.5, {}), (100, 110.5, {}), (400, 60.5, {"hybrid__linear_rows": 50})],
    ids=["the usual number", "all of them", "as many as are asked for"],
)
def test_leaps_are_tried_where_there_is_memory_for_enough_rows(rows: int, room: float, settings: Any) -> None:
    assert made(world(rows, room, **settings).run()) > 0


@pytest.mark.parametrize(("rows", "room"), [(400, 150.5), (100, 90.5)])
def test_leaps_by_too_few_rows_are_not_tried_and_the_run_says_so(rows: int, room: float) -> None:
    run = world(rows, room).run()
    assert made(run) == 0
    assert "linearised leaps could be tried, but hybrid.linear_memory_mb = " in notices(run)
