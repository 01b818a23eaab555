"""Problems of `other_tools.py`: published examples of DeepXDE and PINA, as the tool states them and as residuals.

The tool draws the points and the first weights; the other side gets both. References are formulas and a quadrature,
independent of all tools. Settings are those of the tools' own examples: Burgers and `diffusion_1d_inverse` of DeepXDE,
and the first part (standard PINN) of PINA's tutorial 2.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Errors = Callable[[], dict[str, float]]
"""Relative L2 error on a fixed grid, and that of an unknown coefficient if there is one."""
Residuals = Callable[[nn.Module, Any], dict[str, Tensor]]
VISCOSITY = 0.01 / np.pi


class MissingTool(Exception):
    """A tool that is to be compared with is not installed."""


def deepxde() -> Any:
    os.environ.setdefault("DDE_BACKEND", "pytorch")
    try:
        with quiet():
            import deepxde as dde
    except ImportError as error:
        raise MissingTool("DeepXDE is not installed; it is no part of foretrain: pip install deepxde") from error
    if dde.backend.backend_name != "pytorch":
        raise MissingTool("DeepXDE was loaded with another backend; set DDE_BACKEND=pytorch")
    return dde


def pina() -> Any:
    try:
        import pina as found
    except ImportError as error:
        raise MissingTool("PINA is not installed; it is no part of foretrain: pip install pina-mathlab") from error
    warnings.simplefilter("ignore")  # it wants to hear all of them
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what a tool prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the tools draw from it)
    torch.manual_seed(seed)


@dataclass
class Posed:
    """One problem with one seed, ready to be solved by either side."""

    tool: Any
    """DeepXDE: its Model. PINA: a function of (epochs, callbacks) that gives its Trainer."""
    tool_errors: Errors
    model: nn.Module
    """Of the other side, with the same first weights."""
    residuals: Residuals
    batch: Callable[[], dict[str, Tensor]]
    """The points that the tool drew."""
    errors: Errors
    unknown: Any = None
    """The tool's own unknown coefficient, if there is one."""


@dataclass(frozen=True)
class Problem:
    tool: str
    pose: Callable[[int], Posed]
    adam: int
    """Published iterations of Adam."""
    lbfgs: int
    """Published (the tool's default) most iterations of L-BFGS after it; 0: none."""
    switch: int
    """Iterations of Adam before L-BFGS in an arm that is not published; 0: no such arm."""
    share: float
    """Of the published iterations that are run by default."""


# --- networks and grids ----------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A perceptron, and an unknown coefficient if there is one."""

    def __init__(self, sizes: list[int], activation: type[nn.Module], unknown: float | None = None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), activation()]
        self.layers = nn.Sequential(*layers[:-1])
        if unknown is not None:
            self.unknown = nn.Parameter(torch.tensor(unknown))

    def forward(self, points: Tensor) -> Tensor:
        found: Tensor = self.layers(points)
        return found

    def start_as(self, other: nn.Module) -> Network:
        with torch.no_grad():
            for mine, theirs in zip(self.layers.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        return self


def derivative(values: Tensor, points: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def grid(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Points [n, 2]; the first coordinate runs fastest."""
    return np.stack([one.ravel() for one in np.meshgrid(x, y)], 1)


def errors_of(network: nn.Module, points: np.ndarray, truth: np.ndarray, unknown: Callable[[], float] | None) -> Errors:
    """unknown: the relative error of a coefficient."""
    inputs, wanted = torch.tensor(points, dtype=torch.float32), torch.tensor(truth, dtype=torch.float64).ravel()

    def judge() -> dict[str, float]:
        with torch.no_grad():
            found = network(inputs).double().ravel()
        error = {"l2": float((found - wanted).norm() / wanted.norm())}
        return error if unknown is None else error | {"coefficient": unknown()}

    return judge


# --- Burgers (DeepXDE) -----------------------------------------------------------------------------------------------


def burgers_truth(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """[t, x]: u_t + u u_x = nu u_xx, u(x, 0) = -sin(pi x): Cole and Hopf's formula by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    found = np.empty((len(t), len(x)))
    for row, time in enumerate(t):
        if time == 0:
            found[row] = -np.sin(np.pi * x)
            continue
        places = x[:, None] - np.sqrt(4 * VISCOSITY * time) * nodes
        exponent = -np.cos(np.pi * places) / (2 * np.pi * VISCOSITY)
        shares = weights * np.exp(exponent - exponent.max(1, keepdims=True))
        found[row] = -(shares * np.sin(np.pi * places)).sum(1) / shares.sum(1)
    return found


def burgers(seed: int) -> Posed:
    dde = deepxde()
    seed_all(seed)

    def equation(x: Tensor, u: Tensor) -> Tensor:
        slope, speed = dde.grad.jacobian(u, x, i=0, j=0), dde.grad.jacobian(u, x, i=0, j=1)
        return speed + u * slope - VISCOSITY * dde.grad.hessian(u, x, i=0, j=0)

    def start(x: np.ndarray) -> np.ndarray:
        return -np.sin(np.pi * x[:, 0:1])

    domain = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 0.99))
    edge = dde.icbc.DirichletBC(domain, lambda _: 0, lambda _, there: there)
    first = dde.icbc.IC(domain, start, lambda _, there: there)
    data = dde.data.TimePDE(domain, equation, [edge, first], num_domain=2540, num_boundary=80, num_initial=160)
    sizes = [2, 20, 20, 20, 1]
    network = dde.nn.FNN(sizes, "tanh", "Glorot normal")
    model = Network(sizes, nn.Tanh).start_as(network)

    def residuals(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        points = batch["inside"].detach().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        return {
            "equation": slopes[:, 1:] + u * slopes[:, :1] - VISCOSITY * bend,
            "boundary": model(batch["boundary"]),
            "initial": model(batch["initial"]) - batch["wanted"],
        }

    boundary, initial = np.split(data.train_x_bc, [data.num_bcs[0]])
    batch = tensors(inside=data.train_x_all, boundary=boundary, initial=initial, wanted=start(initial))
    x, t = np.linspace(-1, 1, 256), np.linspace(0, 0.99, 100)
    judge = (grid(x, t), burgers_truth(x, t), None)
    tool = dde.Model(data, network)
    return Posed(tool, errors_of(network, *judge), model, residuals, lambda: batch, errors_of(model, *judge))


# --- diffusion with an unknown coefficient (DeepXDE) -----------------------------------------------------------------


def diffusion_truth(points: np.ndarray) -> np.ndarray:
    return np.sin(np.pi * points[:, 0:1]) * np.exp(-points[:, 1:2])


def diffusion_inverse(seed: int) -> Posed:
    """u_t = C u_xx + a source; C is found from ten values at the end. It is 1, and the search begins at 2."""
    dde = deepxde()
    seed_all(seed)
    unknown = dde.Variable(2.0)

    def source(x: Tensor) -> Tensor:
        return (1 - np.pi**2) * torch.exp(-x[:, 1:2]) * torch.sin(np.pi * x[:, 0:1])

    def equation(x: Tensor, u: Tensor) -> Tensor:
        bend = dde.grad.hessian(u, x, i=0, j=0)
        return dde.grad.jacobian(u, x, i=0, j=1) - unknown * bend + source(x)

    domain = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 1))
    edge = dde.icbc.DirichletBC(domain, diffusion_truth, lambda _, there: there)
    first = dde.icbc.IC(domain, diffusion_truth, lambda _, there: there)
    seen = np.stack([np.linspace(-1, 1, 10), np.ones(10)], 1)
    known = dde.icbc.PointSetBC(seen, diffusion_truth(seen), component=0)
    points = {"num_domain": 40, "num_boundary": 20, "num_initial": 10, "anchors": seen, "num_test": 10000}
    with quiet():
        data = dde.data.TimePDE(domain, equation, [edge, first, known], **points)
    sizes = [2, 32, 32, 32, 1]
    network = dde.nn.FNN(sizes, "tanh", "Glorot uniform")
    model = Network(sizes, nn.Tanh, unknown=2.0).start_as(network)

    def residuals(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        points = batch["inside"].detach().requires_grad_()
        slopes = derivative(model(points), points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        found = {"equation": slopes[:, 1:] - model.unknown * bend + source(points.detach())}
        for name in ("boundary", "initial", "seen"):
            found[name] = model(batch[name]) - batch[f"{name} values"]
        return found

    parts = np.split(data.train_x_bc, np.cumsum(data.num_bcs)[:-1])
    named = dict(zip(("boundary", "initial", "seen"), parts, strict=True))
    values = {f"{name} values": diffusion_truth(points) for name, points in named.items()}
    batch = tensors(inside=data.train_x_all, **named, **values)
    places = grid(np.linspace(-1, 1, 101), np.linspace(0, 1, 101))
    judge = (places, diffusion_truth(places))
    theirs = errors_of(network, *judge, lambda: abs(float(unknown.detach()) - 1))
    mine = errors_of(model, *judge, lambda: abs(float(model.unknown.detach()) - 1))
    return Posed(dde.Model(data, network), theirs, model, residuals, lambda: batch, mine, unknown)


# --- Poisson in a square (PINA) --------------------------------------------------------------------------------------


def poisson(seed: int) -> Posed:
    """u_xx + u_yy = 2 pi^2 sin(pi x) sin(pi y), zero on the edge. A grid of 30 x 30 points and 100 on each side; four
    fifths of each are trained on."""
    pina()
    from pina import Condition, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation, FixedValue
    from pina.model import FeedForward
    from pina.operator import laplacian
    from pina.optim import TorchOptimizer
    from pina.problem import SpatialProblem
    from pina.solver import PhysicsInformedSingleModelSolver

    seed_all(seed)

    def force(points: Tensor) -> Tensor:
        x, y = points[:, 0:1], points[:, 1:2]
        return 2 * torch.pi**2 * torch.sin(torch.pi * x) * torch.sin(torch.pi * y)

    def equation(points: Any, u: Any) -> Any:
        return laplacian(u, points, components=["u"], d=["x", "y"]) - force(points.tensor)

    square = {"x": [0, 1], "y": [0, 1]}
    sides = {"g1": square | {"y": 1}, "g2": square | {"y": 0}, "g3": square | {"x": 1}, "g4": square | {"x": 0}}

    class Square(SpatialProblem):
        output_variables = ["u"]  # noqa: RUF012
        spatial_domain = CartesianDomain(square)
        domains = {name: CartesianDomain(side) for name, side in (sides | {"D": square}).items()}  # noqa: RUF012
        conditions = {  # noqa: RUF012
            **{name: Condition(domain=name, equation=FixedValue(0.0)) for name in ("g1", "g2", "g3", "g4")},
            "D": Condition(domain="D", equation=Equation(equation)),
        }

    problem = Square()
    problem.discretise_domain(30, "grid", domains=["D"])
    problem.discretise_domain(100, "grid", domains=list(sides))
    sizes = [2, 10, 10, 1]
    network = FeedForward(2, 1, layers=sizes[1:-1], func=nn.Softplus)
    model = Network(sizes, nn.Softplus).start_as(network)
    optimizer = TorchOptimizer(torch.optim.Adam, lr=0.006, weight_decay=1e-8)
    solver = PhysicsInformedSingleModelSolver(problem, network, optimizer=optimizer)

    def trainer_of(epochs: int, callbacks: list[Any]) -> Any:
        """It splits the points; what it would print and save is off."""
        seed_all(seed)
        silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        split = {"train_size": 0.8, "val_size": 0.0, "test_size": 0.2, "shuffle": True}
        more = {"accelerator": "cpu", "enable_model_summary": False, "callbacks": callbacks}
        return Trainer(solver=solver, max_epochs=epochs, **split, **more, **silent)

    def batch() -> dict[str, Tensor]:
        split = trainer_of(1, []).data_module.split_idxs
        return {name: problem.discretised_domains[name].tensor[split[name]["train"]] for name in problem.domains}

    def residuals(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        points = batch["D"].detach().requires_grad_()
        slopes = derivative(model(points), points)
        bend = derivative(slopes[:, 0], points)[:, :1] + derivative(slopes[:, 1], points)[:, 1:]
        return {"equation": bend - force(points.detach()), **{name: model(batch[name]) for name in sides}}

    along = np.linspace(0, 1, 101)
    places = grid(along, along)
    truth = -np.sin(np.pi * places[:, 0]) * np.sin(np.pi * places[:, 1])
    judge = (places, truth, None)
    return Posed(trainer_of, errors_of(network, *judge), model, residuals, batch, errors_of(model, *judge))


def tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.tensor(np.asarray(array), dtype=torch.float32) for name, array in arrays.items()}


PROBLEMS = {
    "burgers": Problem("deepxde", burgers, adam=15000, lbfgs=15000, switch=0, share=0.3),
    "diffusion, unknown coefficient": Problem(
        "deepxde", diffusion_inverse, adam=50000, lbfgs=0, switch=10000, share=0.3
    ),
    "poisson in a square": Problem("pina", poisson, adam=1000, lbfgs=0, switch=500, share=1.0),
}
