"""The hybrid loop does what its readable reference does: the same phases, moves and weights, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Moved
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation

from .reference_hybrid import hybrid

W, H = 5, 4
"""A move is shorter than a window: what is said of it is never scored, and its length is the only one there is."""
FAR = 1e6
SETTINGS: dict[str, Any] = {
    "correction.limit": 0.0,
    "max_steps": 4000,
    "device": "cpu",
    "hybrid.window_steps": W,
    "hybrid.max_predict_steps": H,
    "hybrid.warmup_steps": 60,
    "hybrid.full_steps": 10,
    "hybrid.correct_steps": 3,
    "hybrid.confidence_threshold": 0.0,
    "hybrid.secant_pairs": 0,
    "hybrid.divergence_threshold": FAR,
    "guard.prediction_error": FAR,
    "audit.steps": 6,
    "schedule.type": "constant",
    "optimizer.type": "sgd",
    "optimizer.momentum": 0.5,
    "optimizer.weight_decay": 0.0,
    "optimizer.gradient_clip_norm": 0.0,
}


class Bowl(nn.Module):
    """A quadratic loss of the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(0)))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("curvature", torch.logspace(-2, 0, 20))

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return 0.5 * (self.curvature * self.w.square()).sum() + 0.025 * self.b.square().sum() + 0 * batch[0].sum()


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return (self.linear(batch[0])[:, 0] - batch[1]).square().mean()


def same(position: int) -> tuple[Tensor, ...]:
    return (torch.zeros(1),)


def noisy(position: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + position)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6) + 3 * torch.randn(16, generator=generator)


class Scripted(Predictor):
    """Says c of the only move that is ever made, and what is usual where it is scored."""

    name = "scripted"

    def __init__(self, c: Sequence[float], usual: Sequence[float]) -> None:
        self.c, self.usual = np.asarray(c, float), np.asarray(usual, float)

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        rows = [self.c, *(self.usual * horizon / W for horizon in horizons)]
        coefficients = np.repeat(np.stack(rows)[:, None], len(situation.gram), axis=1)
        return Forecast((H, *horizons), coefficients, np.full(len(rows), situation.loss), np.zeros(len(rows)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None: ...

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Weights:
    """A plain torch model and its optimizer, as the reference steps them."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.5, nesterov=True)

    @property
    def theta(self) -> Tensor:
        return vector(self.model)

    @theta.setter
    def theta(self, value: Tensor) -> None:
        nn.utils.vector_to_parameters(value.clone(), self.model.parameters())

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def loss(self, batch: Any, theta: Tensor | None = None) -> float:
        """At other weights, if wanted; these come back."""
        now, self.theta = self.theta, self.theta if theta is None else theta
        loss, self.theta = float(self.model.loss(batch)), now
        return loss

    def losses_at_mean(self, path: list[Tensor], batches: list[Any]) -> Any:
        """At the mean of the second half of a path of weights, where noise is less."""
        half = path[len(path) // 2 :]
        return np.asarray([self.loss(batch, sum(half) / len(half)) for batch in batches])

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch_at: Callable[[int], Any]
    rate: float
    budget: float
    c: tuple[float, ...]
    steps: int
    moves: set[tuple[str, bool]]
    """What must have happened: verdict, audited."""
    usual: tuple[float, ...] = (0, 1, 0, 0)
    """What a forecast says that is scored, per window: it is trusted for that."""


MOST_OF_THE_MEAN = (0, 0, 0, 0.8)
ALL = {(verdict, audited) for verdict in ("kept", "rolled back") for audited in (True, False)}
CASES = {
    "exact, kept": Case(Bowl, same, 0.05, 0.0, (0, H / W, 0, 0), 200, {("kept", False)}),
    "exact, shrunk": Case(Bowl, same, 0.05, 0.0, (0, 0, 0, 30), 200, {("shrunk", False), ("refused", False)}),
    "exact, refused": Case(Bowl, same, 0.05, 0.0, (0, -H / W, 0, 0), 300, {("refused", False)}),
    "noisy": Case(Line, noisy, 0.003, 1.0, (0, H / W, 0, 0), 250, ALL, MOST_OF_THE_MEAN),
    "noisy, harmful": Case(
        Line, noisy, 0.003, 1.0, (0, 0, -2 * H / W, 0), 200, {("rolled back", True)}, MOST_OF_THE_MEAN
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_phases_moves_and_weights_are_those_of_the_reference(name: str) -> None:
    case = CASES[name]
    settings = {**SETTINGS, "optimizer.learning_rate": case.rate, "audit.time_budget": case.budget}
    real = HybridTrainer(case.model(), config=from_mapping(settings), predictor=Scripted(case.c, case.usual))
    told: list[Event] = []
    real.bus.subscribe(told.append)
    weights, moves = Weights(case.model(), case.rate), list[Any]()
    reference = hybrid(weights, case.batch_at, torch.tensor(case.c, dtype=torch.float32), settings, moves)
    phase = next(reference)
    for step in range(case.steps):
        assert real.step(case.batch_at(real.position)).phase == phase, step
        phase = next(reference)  # after the step that it announced before
        assert torch.equal(vector(real.model), weights.theta), step
    made = [event for event in told if isinstance(event, Moved)]
    assert 1 < len(made) <= len(moves) <= len(made) + 1  # one may have been refused for the step that comes next
    for event, (verdict, audited, anchor, loss, worth, cost) in zip(made, moves, strict=False):
        assert (event.verdict, event.audited, event.anchor) == (verdict, audited, anchor)
        assert event.loss == pytest.approx(loss, rel=1e-12, nan_ok=True)
        assert event.cost_steps == round(cost, 2)
        if audited or case.batch_at is same:  # else nobody knows
            assert event.worth_steps == pytest.approx(worth, abs=0.0051)
    assert {(event.verdict, event.audited) for event in made} == case.moves
