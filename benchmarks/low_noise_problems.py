"""Problems of `low_noise.py`: physics-informed networks, operator and picture networks, real tables; one has a little
noise.

Each says what its residuals are, or names a criterion; from that all arms compute the loss by the same code. A batch
holds all data, so that it can be taken in fp64 as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from foretrain import logistic, supervised
from foretrain.engine.batch import map_tensors
from foretrain.engine.objective import ResidualFunction, Residuals
from foretrain.engine.precision import full_precision

Batch = Any


@dataclass(frozen=True)
class Settings:
    device: str = "cpu"
    width: int = 32
    """Of the networks of physics-informed and operator problems."""
    points: int = 512
    """Collocation points of two-dimensional equations and of the noisy one."""
    clock: str = "wall"
    """Or "cpu": seconds that this process had the processor, which other programs hardly change. Not on a GPU."""


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """By position in the run."""
    residuals: ResidualFunction | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    criterion: nn.Module | None = None
    """Of (output, target), instead of residuals."""
    whole: Batch = None
    """What the loss is judged on where batches differ; None where they are all the same."""

    @property
    def exact(self) -> bool:
        return self.whole is None

    @property
    def handed_in(self) -> dict[str, Any]:
        """What a user hands in to HybridTrainer."""
        if self.criterion is not None:
            return {"loss_fn": self.criterion}
        return {"residuals": self.residuals, "weights": self.weights}

    @cached_property
    def loss(self) -> Callable[[nn.Module, Batch], Tensor]:
        """The same code as in HybridTrainer."""
        if self.criterion is not None:
            return supervised(self.criterion)
        assert self.residuals is not None
        return Residuals(self.residuals, self.weights)

    def judge(self, model: nn.Module) -> float:
        """The loss that is reported, without TF32."""
        with full_precision():
            return float(self.loss(model, self.batch(0) if self.exact else self.whole).detach())

    def doubled(self) -> Problem:
        """The same numbers in fp64."""
        whole = None if self.exact else doubled(self.whole)
        batch, known = self.batch, doubled(self.batch(0)) if self.exact else None
        draw = (lambda position: doubled(batch(position))) if known is None else (lambda _: known)
        return replace(self, build=lambda: self.build().double(), batch=draw, whole=whole)


def doubled(batch: Batch) -> Batch:
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def full_batch(build: Callable[[], nn.Module], batch: Batch, settings: Settings, **objective: Any) -> Problem:
    """Everything in every step."""
    batch = map_tensors(batch, lambda tensor: tensor.to(settings.device))
    return Problem(lambda: build().to(settings.device), lambda _: batch, **objective)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer] if index == len(sizes) - 2 else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


# --- physics-informed networks: an equation instead of data ----------------------------------------------------------


def derivative(values: Tensor, points: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return found


def poisson_residuals(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """-u'' = f on [0, 1], u = sin(pi x) + 0.3 sin(4 pi x). x: from the one end to the other."""
    points = x.clone().requires_grad_()
    force = math.pi**2 * torch.sin(math.pi * x) + 0.3 * 16 * math.pi**2 * torch.sin(4 * math.pi * x)
    u = model(points)
    return {"equation": -derivative(derivative(u, points), points) - force, "ends": u[:: len(u) - 1]}


ONE_DIMENSION = {"equation": 0.01, "ends": 1.0}


def poisson(settings: Settings) -> Problem:
    x = torch.linspace(0, 1, 128).view(-1, 1)
    network = (1, settings.width, settings.width, 1)
    return full_batch(lambda: mlp(*network), x, settings, residuals=poisson_residuals, weights=ONE_DIMENSION)


def poisson_fresh(settings: Settings) -> Problem:
    """The same equation, its points drawn anew in every step, one in each of 512 cells: nearly no noise, but some."""
    count = settings.points
    cells = torch.arange(count, device=settings.device) / count
    edges = torch.tensor([[0.0], [1.0]], device=settings.device)

    def batch(position: int) -> Tensor:
        draw = torch.Generator(settings.device).manual_seed(position)
        inside = cells + torch.rand(count, generator=draw, device=settings.device) / count
        return torch.cat([edges[:1], inside.view(-1, 1), edges[1:]])

    def build() -> nn.Module:
        return mlp(1, settings.width, settings.width, 1).to(settings.device)

    whole = torch.linspace(0, 1, 2 * count, device=settings.device).view(-1, 1)
    return Problem(build, batch, poisson_residuals, ONE_DIMENSION, whole=whole)


def cubic(settings: Settings) -> Problem:
    """-u'' + u^3 = f on [0, 1], u = 2 sin(2 pi x)."""
    x = torch.linspace(0, 1, 128).view(-1, 1)
    exact = 2 * torch.sin(2 * math.pi * x)
    batch = {"x": x, "force": 4 * math.pi**2 * exact + exact**3}

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        points = batch["x"].clone().requires_grad_()
        u = model(points)
        equation = -derivative(derivative(u, points), points) + u**3 - batch["force"]
        return {"equation": equation, "ends": u[:: len(u) - 1]}

    network = (1, settings.width, settings.width, settings.width, 1)
    return full_batch(lambda: mlp(*network), batch, settings, residuals=residuals, weights=ONE_DIMENSION)


def beginning_and_sides() -> tuple[Tensor, Tensor]:
    """Points (x, t) at t = 0, and at x = 1 and x = -1."""
    start, side = torch.linspace(-1, 1, 64), torch.linspace(0, 1, 32)
    beginning = torch.stack([start, 0 * start], 1)
    return beginning, torch.cat([torch.stack([0 * side + 1, side], 1), torch.stack([0 * side - 1, side], 1)])


def space_and_time(settings: Settings, seed: int = 99) -> Tensor:
    """Random points of [-1, 1] x [0, 1]."""
    draw = torch.rand(settings.points, 2, generator=torch.Generator().manual_seed(seed))
    return draw * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])


def burgers(settings: Settings) -> Problem:
    """u_t + u u_x = 0.05 u_xx, u(x, 0) = -sin(pi x), u(-1, t) = u(1, t) = 0."""
    beginning, sides = beginning_and_sides()
    wanted = torch.cat([-torch.sin(math.pi * beginning[:, 0]), 0 * sides[:, 0]]).view(-1, 1)
    batch = {"inside": space_and_time(settings), "edge": torch.cat([beginning, sides]), "wanted": wanted}

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        points = batch["inside"].clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        equation = slopes[:, 1:] + u * slopes[:, :1] - 0.05 * bend
        return {"equation": equation, "edge": model(batch["edge"]) - batch["wanted"]}

    return full_batch(lambda: two_dimensions(settings), batch, settings, residuals=residuals)


def two_dimensions(settings: Settings) -> nn.Module:
    return mlp(2, settings.width, settings.width, settings.width, 1)


def helmholtz(settings: Settings) -> Problem:
    """u_xx + u_yy + u = q on [-1, 1] x [-1, 1], u = sin(pi x) sin(2 pi y), zero on the edge."""
    generator = torch.Generator().manual_seed(99)
    inside = torch.rand(settings.points, 2, generator=generator) * 2 - 1
    exact = torch.sin(math.pi * inside[:, :1]) * torch.sin(2 * math.pi * inside[:, 1:])
    along = torch.linspace(-1, 1, 32)
    one = torch.ones_like(along)
    sides = [torch.stack(pair, 1) for pair in ((along, one), (along, -one), (one, along), (-one, along))]
    batch = {"inside": inside, "force": (1 - 5 * math.pi**2) * exact, "edge": torch.cat(sides)}

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        points = batch["inside"].clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1] + derivative(slopes[:, 1], points)[:, 1:]
        return {"equation": bend + u - batch["force"], "edge": model(batch["edge"])}

    weights = {"equation": 0.01, "edge": 1.0}
    return full_batch(lambda: two_dimensions(settings), batch, settings, residuals=residuals, weights=weights)


# --- operator learning -----------------------------------------------------------------------------------------------


class DeepOperator(nn.Module):
    """DeepONet: one network for the function that goes in, one for where its image is asked for."""

    def __init__(self, sensors: int, width: int) -> None:
        super().__init__()
        self.branch = mlp(sensors, width, width, width)
        self.trunk = mlp(1, width, width, width)

    def forward(self, functions: Tensor, places: Tensor) -> Tensor:
        return self.branch(functions) @ self.trunk(places).T


def operator(settings: Settings) -> Problem:
    """Antiderivatives of 128 random functions (eight waves each, of falling amplitude) at 64 points."""
    generator = torch.Generator().manual_seed(99)
    x = torch.linspace(0, 1, 64)
    waves = (torch.arange(1, 9) * math.pi)[:, None]
    amplitudes = torch.randn(128, 2, 8, generator=generator) / torch.arange(1, 9)
    sines, cosines = amplitudes.unbind(1)
    functions = sines @ torch.sin(waves * x) + cosines @ torch.cos(waves * x)
    images = sines @ ((1 - torch.cos(waves * x)) / waves) + cosines @ (torch.sin(waves * x) / waves)
    batch = {"functions": functions, "places": x.view(-1, 1), "images": images}

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["functions"], batch["places"]) - batch["images"]

    return full_batch(lambda: DeepOperator(64, settings.width), batch, settings, residuals=residuals)


# --- real tables, all rows in every step (these need scikit-learn) ---------------------------------------------------


def table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    x = torch.tensor(data.data, dtype=torch.float64)
    return ((x - x.mean(0)) / (x.std(0) + 1e-8)).float(), torch.tensor(data.target)


def standardized(y: Tensor) -> Tensor:
    return ((y - y.mean()) / y.std()).float().view(-1, 1)


def diabetes_mlp(settings: Settings) -> Problem:
    x, y = table("diabetes")
    return full_batch(lambda: mlp(10, 32, 32, 1), (x, standardized(y)), settings, criterion=nn.MSELoss())


def diabetes_least_squares(settings: Settings) -> Problem:
    """Products of all features: condition number of some thousands."""
    x, y = table("diabetes")
    rows, columns = torch.triu_indices(10, 10)
    x = torch.cat([x, x[:, rows] * x[:, columns]], 1)
    x = (x - x.mean(0)) / x.std(0)
    return full_batch(lambda: mlp(x.shape[1], 1), (x, standardized(y)), settings, criterion=nn.MSELoss())


def cancer_logistic(settings: Settings) -> Problem:
    x, y = table("breast_cancer")
    weights = 30 + 1

    def residuals(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        inputs, targets = batch
        return {
            "cancer": logistic(model(inputs), targets),
            "penalty": torch.cat([p.reshape(-1) for p in model.parameters()]),
        }

    penalty = {"penalty": 5e-5 * weights}  # of their mean square: 5e-5 of the sum
    batch = (x, y.float().view(-1, 1))
    return full_batch(lambda: mlp(30, 1), batch, settings, residuals=residuals, weights=penalty)


_TABLES = (diabetes_mlp, diabetes_least_squares, cancer_logistic)
KNOWN = (poisson, cubic, burgers, helmholtz, operator, *_TABLES, poisson_fresh)
"""On which the leaps were made."""
