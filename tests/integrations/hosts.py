"""A tiny language model and examples for the tests inside of other trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretrain import Bus
from foretrain.config import Config, from_mapping
from foretrain.events import Event

LONGEST = 16
WORDS = 32


def settings(**more: Any) -> Config:
    quick = {"hybrid.warmup_steps": 10, "hybrid.full_steps": 5, "hybrid.window_steps": 5, "forecast.enabled": False}
    return from_mapping({**quick, **{name.replace("__", "."): value for name, value in more.items()}})


def sentences(count: int, seed: int) -> Tensor:
    """Counting up from a number, with some noise: a tiny model learns it."""
    draw = torch.Generator().manual_seed(seed)
    rows = (torch.randint(WORDS, (count, 1), generator=draw) + torch.arange(LONGEST)) % WORDS
    noise = torch.rand(rows.shape, generator=draw) < 0.1
    return torch.where(noise, torch.randint(WORDS, rows.shape, generator=draw), rows)


def examples(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in sentences(count, seed)]


class Heard:
    """A bus and what was told on it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bus = Bus()
        self.bus.subscribe(self.events.append)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


class RisingLoss:
    """A loss that objects to every move: each look at the probe gives a higher one."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        self.looks += 1
        return torch.tensor(float(self.looks))


def forget_accelerate() -> None:
    """Accelerate holds its settings for the whole process: after TRL, whose default it is, all would run in bf16."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
