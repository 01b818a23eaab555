"""Modules of the user's own for `thousand_faults.py`: small problems that go through every phase, and predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from faults_inject import tell_fired
from foretrain import HybridTrainer, Loader, MappedSamples
from foretrain.config import from_mapping
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation

STEPS = 60
SHORT: dict[str, Any] = {
    "device": "cpu",
    "max_steps": STEPS,
    "hybrid.warmup_steps": 10,
    "hybrid.full_steps": 3,
    "hybrid.window_steps": 3,
    "hybrid.correct_steps": 2,
    "hybrid.max_predict_steps": 8,
    "hybrid.confidence_threshold": 0.0,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "sgd",
    "optimizer.weight_decay": 0.0,
    "schedule.type": "constant",
    "evaluation.interval": 12,
    "checkpoint.interval": 8,
    "log.interval": 4,
    "health.interval": 20,
}
"""All phases several times within some sixty steps."""
UNGUARDED = {"hybrid.search": False, "hybrid.divergence_threshold": 1e6, "guard.prediction_error": 1e6}
"""Harmful moves get through to their validation."""
BOWL = {"optimizer.learning_rate": 0.05, "optimizer.momentum": 0.0, "optimizer.gradient_clip_norm": 0.0}
NOISY = {"optimizer.learning_rate": 0.01, "optimizer.momentum": 0.5, "audit.time_budget": 1.0, "audit.steps": 4}
CHAINED = {
    "hybrid.secant_pairs": 20,
    "hybrid.window_steps": 5,
    "hybrid.warmup_steps": 20,
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 3e-3,
    "audit.time_budget": 0.0,
    "max_steps": 100,
    "checkpoint.interval": 6,
}


# --- what is trained -------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic loss of a vector; the same batch in every step, so that the loss is exact."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(20, generator=generator))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("curvature", torch.logspace(-2, 0, 20))

    def loss(self, batch: Tensor) -> Tensor:
        return 0.5 * (self.curvature * self.w.square()).sum() + 0.025 * self.b.square().sum() + 0 * batch.sum()


class Regression(nn.Module):
    """Linear regression on random batches, with dropout, so that random states count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.dropout = nn.Dropout(0.1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.linear(self.dropout(batch[0]))[:, 0] - batch[1]).square().mean()


class Wide(nn.Module):
    """Learns few and noisy examples by heart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])


class Net(nn.Module):
    """With batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def _few() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 5, generator=generator)
    return inputs, inputs[:, :1] + torch.randn(100, 1, generator=generator)


def _rows(position: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + position)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6) + 0.5 * torch.randn(8, generator=generator)


def _still(position: int) -> Tensor:
    return torch.zeros(1)


class Places:
    """Endless batches by position; the one at `broken` cannot be read, the first time."""

    broken = -1

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch = batch
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            if self.position - 1 == Places.broken:
                Places.broken = -1
                tell_fired()
                raise OSError("the data could not be read")
            yield self.batch(self.position - 1)


class Jittered:
    """A data set that changes its samples at random, as augmentation does."""

    def __init__(self) -> None:
        self.inputs, self.targets = _rows(0)[0].repeat(8, 1), torch.linspace(-1, 1, 64)[:, None]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


# --- predictors ------------------------------------------------------------------------------------------------------

POISONS = (
    *("raises in forecast", "raises in observe", "raises in state_dict", "raises in reset", "gives None", "gives NaN"),
    *("gives wrong shapes", "gives text", "keeps what no file can hold", "draws from all generators"),
    *("writes into what it is given", "turns gradients off", "leaves a raising state"),
)


class Scripted(Predictor):
    """Repeats the last window and is trusted for it; only a move of 8 steps goes `factor` times as far, or back.

    poison: what it does wrong from its window `since` on.
    """

    name = "scripted"

    def __init__(self, factor: float, poison: str = "", since: int = 0) -> None:
        self.factor, self.poison, self.since = factor, poison, since
        self.windows = 0

    def _does(self, what: str) -> bool:
        return self.poison == what and self.windows >= self.since

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        if self._does("raises in forecast"):
            raise ZeroDivisionError("poisoned forecast")
        if self._does("gives None"):
            return None  # type: ignore[return-value]
        if self._does("gives text"):
            return "no forecast"  # type: ignore[return-value]
        if self._does("draws from all generators"):
            torch.rand(3)
            np.random.rand(3)  # noqa: NPY002 - as user code may
        if self._does("writes into what it is given"):
            situation.gram[:] = 1e9
            situation.state[:] = np.nan
        if self._does("turns gradients off"):
            torch.set_grad_enabled(False)
        asked = tuple(sorted({8, *horizons}))
        coefficients = np.zeros((len(asked), *situation.gram.shape[:2]))
        for index, horizon in enumerate(asked):
            coefficients[index, :, 1] = (self.factor if horizon == 8 else 1.0) * horizon / situation.window
        if self._does("gives NaN"):
            coefficients[:] = np.nan
        if self._does("gives wrong shapes"):
            coefficients = coefficients[:, :, :2]
        return Forecast(asked, coefficients, np.full(len(asked), situation.loss), np.zeros(len(asked)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.windows += 1
        if self._does("raises in observe"):
            raise LookupError("poisoned observation")

    def reset(self) -> None:
        self.windows = 0
        if self.poison == "raises in reset":
            raise OSError("poisoned reset")

    def state_dict(self) -> dict[str, Any]:
        if self._does("raises in state_dict"):
            raise AttributeError("poisoned state")
        if self._does("keeps what no file can hold"):
            return {"windows": self.windows, "function": print}
        return {"windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._does("leaves a raising state") or (self.poison == "leaves a raising state" and state["windows"]):
            raise KeyError("poisoned state")
        self.windows = int(state["windows"])


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What `fit` is called with."""

    trainer: HybridTrainer
    loader: Any
    held_out: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def _made(model: nn.Module, settings: dict[str, Any], loader: Any, held_out: list[Any], **more: Any) -> Parts:
    return Parts(HybridTrainer(model, config=from_mapping({**SHORT, **settings}), **more), loader, held_out)


def bowl(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    return _made(Bowl(), {**BOWL, **settings}, Places(_still), [_still(0)], predictor=predictor)


def regression(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    held_out = [_rows(10_000 + number) for number in range(3)]
    return _made(Regression(), {**NOISY, **settings}, Places(_rows), held_out, predictor=predictor)


def full_batch(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    """The same examples held out as trained on: a long chain that is kept."""
    inputs, targets = _few()
    batch = (inputs[:30], targets[:30])
    return _made(Wide(), {**CHAINED, **settings}, [batch], [batch], predictor=predictor)


def by_heart(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    """Other examples held out: chains go too far, and go back."""
    inputs, targets = _few()
    return _made(
        Wide(),
        {**CHAINED, **settings},
        [(inputs[:30], targets[:30])],
        [(inputs[30:], targets[30:])],
        predictor=predictor,
    )


def own_parts(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    """An optimizer, a scheduler, a criterion and a shuffled DataLoader, all torch's own."""
    values = {name: value for name, value in SHORT.items() if not name.startswith(("optimizer.", "schedule."))}
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    trainer = HybridTrainer(
        model,
        optimizer,
        nn.MSELoss(),
        from_mapping({**values, **settings}),
        scheduler=OneCycleLR(optimizer, 1e-2, total_steps=STEPS),
        predictor=predictor,
    )
    metrics = {"error": nn.L1Loss()}
    return Parts(trainer, DataLoader(data, 16, shuffle=True), [data[:16]], {"metrics": metrics, "load_best": True})


def augmented(settings: dict[str, Any], predictor: Predictor | None = None) -> Parts:
    """Random samples through foretrain's own loader, which prepares them ahead."""
    loader = Loader(MappedSamples(Jittered()), 16, seed=3)
    chosen = {"optimizer.type": "adamw", "optimizer.learning_rate": 1e-2, **settings}
    held_out = [(torch.zeros(4, 6), torch.zeros(4, 1))]
    return _made(Net(), chosen, loader, held_out, loss_fn=nn.MSELoss(), predictor=predictor)
