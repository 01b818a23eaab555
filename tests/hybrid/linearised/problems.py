"""Small least-squares problems of every kind that rows of a Jacobian are taken of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

POINTS = torch.linspace(0, 1, 24).view(-1, 1)
ENDS = torch.tensor([[0.0], [1.0]])
Residual = Callable[[Any, Any], Any]


def network(inputs: int = 1, outputs: int = 1, width: int = 8, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)
    )


def derivative(values: Tensor, points: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def poisson(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """-u'' = pi^2 sin(pi x), u(0) = u(1) = 0."""
    x = x.detach().requires_grad_()
    u = model(x)
    force = torch.pi**2 * torch.sin(torch.pi * x)
    return {"equation": -derivative(derivative(u, x), x) - force, "ends": model(ENDS)}


class Inverse(nn.Module):
    """A network and an unknown coefficient of the equation."""

    def __init__(self) -> None:
        super().__init__()
        self.u = network()
        self.coefficient = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.u(x)
        return found


def inverse(model: Inverse, x: Tensor) -> dict[str, Tensor]:
    """u' = c u with measured values of exp(2 x): the coefficient is 2."""
    x = x.detach().requires_grad_()
    u = model(x)
    return {"equation": derivative(u, x) - model.coefficient * u, "data": u - torch.exp(2 * x.detach()) / 4}


class Operator(nn.Module):
    """Every output depends on a row of two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = network(3, 5), network(1, 5)

    def forward(self, functions: Tensor, places: Tensor) -> Tensor:
        product: Tensor = self.branch(functions) @ self.trunk(places).T
        return product


def shifted(model: nn.Module, x: Tensor) -> Tensor:
    """Rows of one call in another order, some of them in two residuals."""
    u = model(x)
    return torch.cat([u.flip(0)[:10], u[3:5]])


def periodic(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Two rows of one call in one residual, and one residual of all rows."""
    u = model(torch.cat([x, x + 1]))
    return {"periodic": u[: len(x)] - u[len(x) :], "integral": u.mean().reshape(1)}


def complex_valued(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    return torch.complex(u[:, 0], u[:, 1]) - torch.exp(1j * x.squeeze(1))


def penalised(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Weights are used beside their layers, too."""
    return {"data": model(x) - x.square(), "size": torch.cat([p.reshape(-1) for p in model[-1].parameters()])}


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    """Other weights take the place of the model's own inside the call: only a true product shows it."""
    found: Tensor = functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x,))
    return found - x


def third_order(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return derivative(derivative(derivative(model(x), x), x), x) - x


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Residual, Any]] = {
    "an equation and its ends": (network, poisson, POINTS),
    "derivatives of third order": (network, third_order, POINTS),
    "an unknown coefficient": (Inverse, inverse, POINTS),
    "two outputs": (lambda: network(1, 2), lambda m, x: m(x) - torch.cat([x, x.square()], 1), POINTS),
    "complex residuals": (lambda: network(1, 2), complex_valued, POINTS),
    "rows in another order": (network, shifted, POINTS),
    "two rows in one residual, and all rows in one": (network, periodic, POINTS),
    "weights beside their layers": (network, penalised, POINTS),
    "weights that are scaled on their way": (network, scaled, POINTS),
    "inputs with a dimension between": (
        lambda: network(2, 1),
        lambda m, x: m(x.view(-1, 1, 1).expand(-1, 3, 2)).sum(1) - x,
        POINTS,
    ),
    "an operator network": (
        Operator,
        lambda m, b: m(*b) - 1,
        (torch.randn(22, 3, generator=torch.Generator().manual_seed(1)), POINTS[:18]),
    ),
    "layers that are not linear": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv1d(1, 40, 1), nn.Flatten(), nn.Tanh(), nn.Linear(40, 1)),
        lambda m, x: m(x) - x.square(),
        POINTS,
    ),
    "rows that depend on each other": (
        lambda: nn.Sequential(nn.Linear(1, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 1)),
        lambda m, x: m(x) - x,
        POINTS,
    ),
}
