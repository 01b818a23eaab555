"""Problems that nothing in foretrain was chosen by: they were fixed before the first run on them, and are reported as
they come."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from low_noise_problems import (
    KNOWN,
    Problem,
    Settings,
    beginning_and_sides,
    derivative,
    full_batch,
    mlp,
    space_and_time,
    two_dimensions,
)


def allen_cahn(settings: Settings) -> Problem:
    """u_t = 0.01 u_xx + 2 (u - u^3), u(x, 0) = x^2 cos(pi x), u(-1, t) = u(1, t) = -1."""
    beginning, sides = beginning_and_sides()
    x = beginning[:, :1]
    batch = {
        "inside": space_and_time(settings, seed=7),
        "beginning": beginning,
        "wanted": x.square() * torch.cos(math.pi * x),
        "sides": sides,
    }

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        points = batch["inside"].clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        return {
            "equation": slopes[:, 1:] - 0.01 * bend - 2 * (u - u**3),
            "beginning": model(batch["beginning"]) - batch["wanted"],
            "sides": model(batch["sides"]) + 1,
        }

    return full_batch(lambda: two_dimensions(settings), batch, settings, residuals=residuals)


class WithCoefficient(nn.Module):
    """A network and a number that is looked for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.coefficient = nn.Parameter(torch.tensor(1.0))

    def forward(self, points: Tensor) -> Tensor:
        return self.network(points)


def inverse_heat(settings: Settings) -> Problem:
    """u_t = k u_xx on [-1, 1] x [0, 1] with an unknown k (0.2), from 200 measurements of u with an error of 0.01."""
    generator = torch.Generator().manual_seed(7)
    places = space_and_time(settings, seed=8)[:200]
    x, t = places[:, :1], places[:, 1:]
    decay = -0.2 * math.pi**2 * t
    u = torch.exp(decay) * torch.sin(math.pi * x) + 0.5 * torch.exp(4 * decay) * torch.sin(2 * math.pi * x)
    measured = u + 0.01 * torch.randn(u.shape, generator=generator)
    batch = {"inside": space_and_time(settings, seed=7), "places": places, "measured": measured}

    def residuals(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        points = batch["inside"].clone().requires_grad_()
        slopes = derivative(model(points), points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        equation = slopes[:, 1:] - model.coefficient * bend
        return {"equation": equation, "data": model(batch["places"]) - batch["measured"]}

    def build() -> nn.Module:
        return WithCoefficient(two_dimensions(settings))

    return full_batch(build, batch, settings, residuals=residuals)


class Sine(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs)


def sine_network(width: int, frequency: float = 10.0) -> nn.Module:
    """As Sitzmann and others (2020) start theirs; the frequency is a factor of the first layer only."""
    network = mlp(2, width, width, width, 1)
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(layers):
        bound = frequency / 2 if index == 0 else math.sqrt(6 / layer.in_features)
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.uniform_(layer.bias, -bound, bound)
    return nn.Sequential(*(Sine() if isinstance(part, nn.Tanh) else part for part in network))


def picture(settings: Settings) -> Problem:
    """A picture of 40 x 40 points (waves, a spot and an edge) as a function of the place, by a network of sines."""
    along = torch.linspace(-1, 1, 40)
    x, y = torch.meshgrid(along, along, indexing="ij")
    spot = torch.exp(-20 * ((x - 0.3).square() + (y + 0.2).square()))
    values = torch.sin(3 * math.pi * x) * torch.cos(2 * math.pi * y) / 2 + spot + torch.tanh(10 * (x + y / 2)) / 2
    batch = (torch.stack([x, y], -1).view(-1, 2), values.view(-1, 1))
    return full_batch(lambda: sine_network(settings.width), batch, settings, criterion=nn.MSELoss())


NEW = (allen_cahn, inverse_heat, picture)
PROBLEMS: dict[str, Callable[[Settings], Problem]] = {problem.__name__: problem for problem in (*KNOWN, *NEW)}
