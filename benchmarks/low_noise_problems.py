"""Problems of `low_noise.py`: physics-informed networks, an operator network, real tables; one has a little noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:
    device: str = "cpu"
    width: int = 32
    """Of the networks of physics-informed and operator problems."""
    points: int = 512
    """Collocation points of two-dimensional equations and of the noisy one."""


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    """By position in the run."""
    whole: Any = None
    """What the loss is judged on where batches differ; None where they are all the same."""

    @property
    def exact(self) -> bool:
        return self.whole is None

    def judge(self, model: nn.Module) -> float:
        """The loss that is reported."""
        return float(self.loss(model, self.batch(0) if self.exact else self.whole).detach())


def full_batch(build: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], settings: Settings) -> Problem:
    """Everything in every step; the batch itself is of no meaning."""
    batch = torch.zeros(1, device=settings.device)
    return Problem(lambda: build().to(settings.device), lambda model, _: loss(model), lambda _: batch)


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


def ends(u: Tensor) -> Tensor:
    return (u[:1].square().mean() + u[-1:].square().mean()) / 2


def poisson_loss(model: nn.Module, x: Tensor) -> Tensor:
    """-u'' = f on [0, 1], u = sin(pi x) + 0.3 sin(4 pi x)."""
    points = x.clone().requires_grad_()
    force = math.pi**2 * torch.sin(math.pi * x) + 0.3 * 16 * math.pi**2 * torch.sin(4 * math.pi * x)
    u = model(points)
    residual = -derivative(derivative(u, points), points) - force
    return residual.square().mean() / 100 + ends(u)


def poisson(settings: Settings) -> Problem:
    x = torch.linspace(0, 1, 128, device=settings.device).view(-1, 1)
    return full_batch(lambda: mlp(1, settings.width, settings.width, 1), lambda model: poisson_loss(model, x), settings)


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
    return Problem(build, poisson_loss, batch, whole)


def cubic(settings: Settings) -> Problem:
    """-u'' + u^3 = f on [0, 1], u = 2 sin(2 pi x)."""
    x = torch.linspace(0, 1, 128, device=settings.device).view(-1, 1)
    exact = 2 * torch.sin(2 * math.pi * x)
    force = 4 * math.pi**2 * exact + exact**3

    def loss(model: nn.Module) -> Tensor:
        points = x.clone().requires_grad_()
        u = model(points)
        residual = -derivative(derivative(u, points), points) + u**3 - force
        return residual.square().mean() / 100 + ends(u)

    return full_batch(lambda: mlp(1, settings.width, settings.width, settings.width, 1), loss, settings)


def burgers(settings: Settings) -> Problem:
    """u_t + u u_x = 0.05 u_xx, u(x, 0) = -sin(pi x), u(-1, t) = u(1, t) = 0."""
    generator = torch.Generator().manual_seed(99)
    inside = torch.rand(settings.points, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    start, side = torch.linspace(-1, 1, 64), torch.linspace(0, 1, 32)
    edge = torch.cat(
        [torch.stack([start, 0 * start], 1), torch.stack([0 * side + 1, side], 1), torch.stack([0 * side - 1, side], 1)]
    ).to(settings.device)
    wanted = torch.cat([-torch.sin(math.pi * start), 0 * side, 0 * side]).view(-1, 1).to(settings.device)
    inside = inside.to(settings.device)

    def loss(model: nn.Module) -> Tensor:
        points = inside.clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        residual = slopes[:, 1:] + u * slopes[:, :1] - 0.05 * bend
        return residual.square().mean() + (model(edge) - wanted).square().mean()

    return full_batch(lambda: mlp(2, settings.width, settings.width, settings.width, 1), loss, settings)


def helmholtz(settings: Settings) -> Problem:
    """u_xx + u_yy + u = q on [-1, 1] x [-1, 1], u = sin(pi x) sin(2 pi y), zero on the edge."""
    generator = torch.Generator().manual_seed(99)
    inside = torch.rand(settings.points, 2, generator=generator) * 2 - 1
    exact = torch.sin(math.pi * inside[:, :1]) * torch.sin(2 * math.pi * inside[:, 1:])
    force = ((1 - 5 * math.pi**2) * exact).to(settings.device)
    along = torch.linspace(-1, 1, 32)
    one = torch.ones_like(along)
    sides = [torch.stack(pair, 1) for pair in ((along, one), (along, -one), (one, along), (-one, along))]
    edge, inside = torch.cat(sides).to(settings.device), inside.to(settings.device)

    def loss(model: nn.Module) -> Tensor:
        points = inside.clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1] + derivative(slopes[:, 1], points)[:, 1:]
        return (bend + u - force).square().mean() / 100 + model(edge).square().mean()

    return full_batch(lambda: mlp(2, settings.width, settings.width, settings.width, 1), loss, settings)


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
    functions, images, places = (t.to(settings.device) for t in (functions, images, x.view(-1, 1)))
    return full_batch(
        lambda: DeepOperator(64, settings.width), lambda model: F.mse_loss(model(functions, places), images), settings
    )


# --- real tables, all rows in every step (these need scikit-learn) ---------------------------------------------------


def table(name: str, settings: Settings) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    x = torch.tensor(data.data, dtype=torch.float64)
    x = ((x - x.mean(0)) / (x.std(0) + 1e-8)).float()
    return x.to(settings.device), torch.tensor(data.target).to(settings.device)


def standardized(y: Tensor) -> Tensor:
    return ((y - y.mean()) / y.std()).float().view(-1, 1)


def diabetes_mlp(settings: Settings) -> Problem:
    x, y = table("diabetes", settings)
    y = standardized(y)
    return full_batch(lambda: mlp(10, 32, 32, 1), lambda model: F.mse_loss(model(x), y), settings)


def diabetes_least_squares(settings: Settings) -> Problem:
    """Products of all features: condition number of some thousands."""
    x, y = table("diabetes", settings)
    rows, columns = torch.triu_indices(10, 10)
    x = torch.cat([x, x[:, rows] * x[:, columns]], 1)
    x, y = (x - x.mean(0)) / x.std(0), standardized(y)
    return full_batch(lambda: mlp(x.shape[1], 1), lambda model: F.mse_loss(model(x), y), settings)


def cancer_logistic(settings: Settings) -> Problem:
    x, y = table("breast_cancer", settings)
    y = y.float().view(-1, 1)

    def loss(model: nn.Module) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.binary_cross_entropy_with_logits(model(x), y) + 5e-5 * penalty

    return full_batch(lambda: mlp(30, 1), loss, settings)


_TABLES = (diabetes_mlp, diabetes_least_squares, cancer_logistic)
PROBLEMS: dict[str, Callable[[Settings], Problem]] = {
    problem.__name__: problem for problem in (poisson, cubic, burgers, helmholtz, operator, *_TABLES, poisson_fresh)
}
