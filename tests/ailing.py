"""Small runs with something wrong with them, one per ailment, that can be run again with a finding's own advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.worlds import QUICK, Bowl, Net, Regression, Told, World, still, world
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, PhaseChanged
from foretrain.health.findings import HealthFinding
from foretrain.motion.predictors.base import Followed, Forecast, Situation


class Deep(nn.Module):
    """Many layers with one activation: sigmoids let gradients vanish, and rectifiers die of long steps."""

    def __init__(self, activation: nn.Module, layers: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8 if place == 0 else width, width) for place in range(layers)])
        self.last = nn.Linear(width, 1)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.activation(layer(hidden))
        return self.last(hidden)[:, 0]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


class Counts(Net):
    """Poisson regression: its rates are exponentials, which overflow where steps are too long."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logarithm = 3 * self(batch[0])
        return (logarithm.exp() - logarithm * batch[1].abs()).mean()


class Bends(nn.Module):
    """As steep right before the bottom as far away from it: long steps go to and fro over it by their own length, each
    weight in its own time. Unlike a network, which long steps make chaotic, it does so however numbers are rounded."""

    def __init__(self, far: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(far, 1.5 * far, 400))

    def loss(self, batch: Tensor) -> Tensor:
        return 400 + self.w.abs().sum() + 0 * batch.sum()


class Valley(nn.Module):
    """A curve that is steep on one side and flat on the other: long steps jump to and fro, and the loss with them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 0.5))

    def loss(self, batch: Tensor) -> Tensor:
        return (self.w.exp() - self.w).mean() + 0 * batch.sum()


@dataclass
class Outliers(Regression):
    """Every tenth batch is measured in a smaller unit by mistake: everything in it is a hundred times larger."""

    times: float = 100.0

    def __call__(self, position: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__call__(position)
        return (self.times * inputs, self.times * targets) if position % 10 == 9 else (inputs, targets)


@dataclass
class FewExamples(Regression):
    """The same noisy examples over and over."""

    def __call__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.inputs[:64], self.targets[:64]


@dataclass
class Patient:
    """A run as it is configured, and what is measured at its end."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    settings: dict[str, Any]
    held_out: bool = False
    events: list[Event] = field(default_factory=list)

    def trainer(self, change: dict[str, Any]) -> HybridTrainer:
        base = {"hybrid.mode": "off", "max_steps": 400, "optimizer.gradient_clip_norm": 0.0}
        trainer = HybridTrainer(self.model(), config=from_mapping({**QUICK, **base, **self.settings, **change}))
        self.events = []
        trainer.bus.subscribe(self.events.append)
        return trainer

    def run(self, **change: Any) -> tuple[float, list[HealthFinding]]:
        """The loss at the end, on held-out examples where there are any, and what was found."""
        trainer = self.trainer(change)
        every = trainer.config.max_steps // 10
        while trainer.global_step < trainer.config.max_steps:
            trainer.step(self.data(trainer.position))
            if self.held_out and trainer.global_step % every == 0:
                trainer.engine.meter.fetch()
                trainer.engine.progress.last_train_loss = trainer.engine.meter.unread[-1][0]
                trainer.evaluated(self.judge(trainer))
        trainer.checkup.finish()
        return self.judge(trainer), trainer.checkup.health.findings

    def judge(self, trainer: HybridTrainer) -> float:
        if isinstance(self.data, Regression) and isinstance(trainer.model, (Net, Deep)):
            batch: Any = (self.data.inputs[1200:], self.data.targets[1200:])
        else:
            batch = self.data(0)
        loss = trainer.evaluate([batch])
        return loss if math.isfinite(loss) else math.inf


SGD = {"optimizer.type": "sgd", "optimizer.momentum": 0.0, "optimizer.nesterov": False}

PATIENTS: dict[str, Patient] = {
    "NaN": Patient(Counts, Regression(), SGD | {"optimizer.learning_rate": 0.3}),
    "explosion": Patient(Net, Outliers(), SGD | {"optimizer.learning_rate": 0.05}),
    "divergence": Patient(
        lambda: Bends(20.0),
        still,
        SGD
        | {"optimizer.learning_rate": 20.0, "optimizer.momentum": 0.9}
        | {"schedule.type": "warmup", "schedule.warmup_steps": 400},
    ),
    "divergence from the first step": Patient(Net, Regression(rows=64), {"optimizer.learning_rate": 30.0}),
    "oscillation": Patient(Valley, still, SGD | {"optimizer.learning_rate": 10.0}),
    "plateau": Patient(Net, Regression(), {"optimizer.learning_rate": 1e-7, "max_steps": 700}),
    "plateau of long steps": Patient(lambda: Bends(1.0), still, {"optimizer.learning_rate": 0.1, "max_steps": 700}),
    "plateau far above what was reached": Patient(
        Net,
        Regression(),
        {"optimizer.learning_rate": 0.5, "max_steps": 1000, "schedule.type": "wsd", "schedule.warmup_steps": 400},
    ),
    "overfitting": Patient(Net, FewExamples(), {"optimizer.learning_rate": 1e-2, "optimizer.weight_decay": 0.1}, True),
    "underfitting": Patient(Net, Regression(rows=64), {"optimizer.learning_rate": 2e-5}, True),
    "vanishing layer": Patient(
        lambda: Deep(nn.Sigmoid(), 5), Regression(seed=2), SGD | {"optimizer.learning_rate": 0.1, "max_steps": 800}
    ),
    "vanishing layer below epsilon": Patient(
        lambda: Deep(nn.Sigmoid(), 6), Regression(seed=2), {"optimizer.epsilon": 0.1, "optimizer.learning_rate": 0.01}
    ),
    "dead layer": Patient(lambda: Deep(nn.ReLU(), 3), Regression(), SGD | {"optimizer.learning_rate": 1.0}),
}


# --- ailments of prediction ------------------------------------------------------------------------------------------


class SlowLearner(Told):
    """Knows nothing before it has seen some windows."""

    def __init__(self, needs: int) -> None:
        super().__init__("nothing")
        self.needs = needs

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        self.how = "repeat" if self.windows >= self.needs else "nothing"
        return super().forecast(situation, horizons)


class Hasty(Told):
    """Goes the wrong way unless it has seen some windows since the last move."""

    def __init__(self, needs: int) -> None:
        super().__init__("repeat")
        self.needs = self.since = needs

    def hear(self, event: Event) -> None:
        if isinstance(event, PhaseChanged) and event.phase == "correct":
            self.since = 0

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.since += 1
        super().observe(situation, followed)

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        self.how = "repeat" if self.since >= self.needs else "flipped"
        return super().forecast(situation, horizons)


def distrustful(**change: Any) -> World:
    """Exact losses, and a predictor that needs more windows than the warm-up has."""
    settings = {"hybrid.warmup_steps": 60, "hybrid.confidence_threshold": 0.8}
    return _finished(world(Bowl(), still, settings | change, SlowLearner(10), trusted=False))


def hasty(**change: Any) -> World:
    """Noise, and a predictor that is believed but needs more full steps between two moves."""
    predictor = Hasty(3)
    settings = {"hybrid.full_steps": 10, "max_steps": 600, "audit.time_budget": 0.5}
    run = world(Net(), Regression(), settings | change, predictor)
    run.trainer.bus.subscribe(predictor.hear)
    return _finished(run)


def _finished(run: World) -> World:
    run.run()
    run.trainer.checkup.finish()
    return run
