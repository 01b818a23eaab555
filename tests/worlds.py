"""Small runs that go through all phases: problems without and with noise, and predictors that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Moved
from foretrain.hybrid.moves.chain import ChainKind
from foretrain.hybrid.moves.quasi_newton import QuasiNewton
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.persist.codec import Snapshot, snapshot, take_apart

QUICK: dict[str, Any] = {
    "device": "cpu",
    "max_steps": 300,
    "hybrid.warmup_steps": 40,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": 5,
    "hybrid.max_predict_steps": 20,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "adamw",
    "optimizer.weight_decay": 0.0,
    "schedule.type": "constant",
}
"""Several cycles within some hundred steps; low-noise runs search along the forecast only."""


# --- problems --------------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic loss. Its batch is a number that is added to the loss: the same one every time, so no noise."""

    def __init__(self, spread: float = 1.0, size: int = 20) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(size, generator=generator))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("curvature", torch.logspace(-spread, 0, size))

    def loss(self, batch: Tensor) -> Tensor:
        return 0.5 * (self.curvature * self.w.square()).sum() + 0.05 * self.b.square().sum() + 0 * batch.sum()


def still(position: int) -> Tensor:
    return torch.zeros(1)


class Net(nn.Module):
    """A small network for regression, with dropout, batch statistics and a frozen layer if wanted."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Linear(12, 12)
        self.last = nn.Linear(12, 1)
        if frozen:
            self.middle.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.norm(self.first(inputs))))
        return self.last(torch.tanh(self.middle(hidden)))[:, 0]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


@dataclass
class Regression:
    """Minibatches of a fixed data set, by position; the last quarter is held out."""

    seed: int = 0
    rows: int = 16
    inputs: Tensor = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.seed)
        scale = torch.logspace(-1, 0, 8)
        self.inputs = torch.randn(1600, 8, generator=generator) * scale
        truth = torch.randn(8, generator=generator) * 2
        self.targets = torch.sin(self.inputs @ truth) + 0.3 * torch.randn(1600, generator=generator)

    def __call__(self, position: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + position)
        chosen = torch.randint(1200, (self.rows,), generator=generator)
        return self.inputs[chosen], self.targets[chosen]

    def held_out(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            value = float((model(self.inputs[1200:]) - self.targets[1200:]).square().mean())
        model.train()
        return value


# --- predictors ------------------------------------------------------------------------------------------------------


class Told(Predictor):
    """Says what `how` names, whatever it sees. It counts what it was told, so that its state can be compared."""

    name = "told"

    def __init__(self, how: str, seed: int = 0) -> None:
        self.how = how
        self.draw = np.random.default_rng(seed)
        self.windows = 0
        self.resets = 0

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        groups, directions = situation.gram.shape[:2]
        windows = np.asarray(horizons)[:, None] / situation.window
        coefficients = np.zeros((len(horizons), groups, directions))
        match self.how:
            case "repeat":
                coefficients[:, :, 1] = windows
            case "mean":
                coefficients[:, :, 3] = windows
            case "useless":
                lengths = np.sqrt(np.einsum("gii->gi", situation.gram)) + 1e-30
                size = lengths[:, 1:2] / lengths  # random directions, each as long as the last window
                coefficients[:] = self.draw.normal(size=coefficients.shape) * size * windows[..., None]
            case "flipped":
                coefficients[:, :, 1] = -windows
            case "exploding":
                coefficients[:, :, 1] = 1e6 * windows
            case "nan":
                coefficients[:] = np.nan
            case "nothing":
                pass
        loss = np.full(len(horizons), situation.loss)
        return Forecast(tuple(horizons), coefficients, loss, np.full(len(horizons), 0.1))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.windows += 1

    def reset(self) -> None:
        self.windows = 0
        self.resets += 1

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows, "tensor": torch.full((3,), float(self.windows))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows = int(state["windows"])


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A trainer, its data, and what it told."""

    trainer: HybridTrainer
    data: Callable[[int], Any]
    events: list[Event]
    position: int = 0
    used: list[int] = field(default_factory=list)
    """Positions of the batches it was given, in order."""

    def step(self) -> Any:
        self.used.append(self.position)
        result = self.trainer.step(self.data(self.position))
        self.position += 1
        return result

    def run(self, until: Callable[[], bool] | None = None) -> World:
        trainer = self.trainer
        until = until or (lambda: trainer.global_step >= trainer.config.max_steps and not trainer.judging)
        while not until():
            self.step()
        return self

    @property
    def moves(self) -> list[Moved]:
        return [event for event in self.events if isinstance(event, Moved)]


def world(
    model: nn.Module,
    data: Callable[[int], Any],
    settings: dict[str, Any] | None = None,
    predictor: Predictor | str | None = None,
    trusted: bool = True,
) -> World:
    """`predictor` may be the name of what a `Told` one says. `trusted`: whatever it says, moves are tried."""
    config = from_mapping({**QUICK, **(settings or {})})
    told = Told(predictor) if isinstance(predictor, str) else predictor
    trainer = HybridTrainer(model, config=config, predictor=told)
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    if trusted and told is not None and trainer.policy is not None:
        trust(trainer)
    return World(trainer, data, events)


def trust(trainer: HybridTrainer) -> None:
    """Whatever the predictor was worth so far: it is believed."""
    assert trainer.policy is not None
    trainer.observer.quality.trusted = lambda windows: True  # type: ignore[method-assign]
    trainer.observer.quality.cosine = lambda windows: 1.0  # type: ignore[method-assign]
    trainer.policy.confidence.estimate = lambda features: 0.9  # type: ignore[method-assign]


def leaps_of(trainer: HybridTrainer) -> QuasiNewton:
    """The quasi-Newton leaps of its chains."""
    assert trainer.policy is not None
    return next(kind for kind in trainer.policy.kinds if isinstance(kind, ChainKind)).leaps


def everything(trainer: HybridTrainer) -> Snapshot:
    """A copy of all that a rollback must bring back."""
    state = trainer.engine.state_dict()
    state["buffers"] = list(trainer.model.buffers())
    state["predictor"] = trainer.observer.predictor.state_dict()
    state["look_ahead"] = trainer.look_ahead.state_dict() if trainer.look_ahead is not None else None
    if trainer.policy is not None:
        state["guard"] = trainer.policy.guard.state_dict()
        state["steps"] = dict(trainer.policy.score.counts.steps)
    del state["seconds"]
    for spent in ("tokens", "backward_passes", "probe_tokens", "rows"):
        del state["progress"][spent]
    for spent in ("skipped", "skipped_in_a_row", "unread"):
        del state["meter"][spent]
    return snapshot(state)


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """Names of what is not equal to the bit."""
    found = sorted(one.tensors.keys() ^ other.tensors.keys())
    found += [
        name for name in one.tensors.keys() & other.tensors.keys() if not _same(one.tensors[name], other.tensors[name])
    ]
    return found + (["tree"] if one.tree != other.tree else [])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = take_apart(one.state_dict()).tensors, take_apart(other.state_dict()).tensors
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
