"""A task that trains in milliseconds, and a clock that counts work instead of seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.config import Config
from foretrain.measure.tasks import Job

STEPS = 160
BASE: dict[str, Any] = {
    "max_steps": STEPS,
    "device": "cpu",
    "batch_size": 32,
    "optimizer.type": "adam",
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.0,
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 10,
    "hybrid.max_predict_steps": 20,
    "audit.time_budget": 0.5,
}


class Rows:
    """Endless batches of a noisy regression, in an order that the seed gives."""

    def __init__(self, seed: int, rows: int = 32, noise: float = 0.5) -> None:
        self.seed, self.rows, self.noise, self.position = seed, rows, noise, 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(100_003 * self.seed + self.position)
            self.position += 1
            yield make_rows(self.rows, self.noise, generator)


def make_rows(rows: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 6, generator=generator)
    targets = torch.tanh(inputs @ torch.linspace(-1, 1, 6)) + noise * torch.randn(rows, generator=generator)
    return inputs, targets[:, None]


@dataclass
class Toy:
    """Regression with a small network."""

    noise: float = 0.5
    rows: int = 32
    title: str = "toy"
    fingerprint: str = "toy"

    def job(self, config: Config) -> Job:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        held_out, test = (
            [make_rows(512, self.noise, torch.Generator().manual_seed(number))] for number in (900_001, 900_002)
        )
        return Job(model, Rows(config.seed, self.rows, self.noise), held_out, test, squared_error)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class WorkClock:
    """A backward pass takes 3, a forward pass 1; nothing else takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
