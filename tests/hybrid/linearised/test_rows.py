"""Rows of the Jacobian are those that autograd gives one by one, whatever the residuals are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hybrid.linearised.problems import POINTS, PROBLEMS, network, poisson
from torch import Tensor, nn

from foretrain.engine.objective import Residuals, UnknownForm
from foretrain.hybrid.linearised import finding
from foretrain.hybrid.linearised.finding import find_way
from foretrain.hybrid.linearised.matrix import RowMatrix, spans
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.way import Way


def truth(model: nn.Module, objective: Residuals, batch: Any) -> Tensor:
    parameters = list(model.parameters())
    flat = torch.cat([part.outputs.reshape(-1) for part in objective.parts(model, batch)])
    rows = []
    for output in flat:
        found = torch.autograd.grad(output, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in found]))
    return torch.stack(rows)


def looked_at(name: str) -> tuple[Linearisation, Residuals, Any]:
    make, function, batch = PROBLEMS[name]
    objective = Residuals(function)
    model = make()
    return Linearisation(objective, model, list(model.parameters()), batch), objective, batch


def rows_of(look: Linearisation, way: Way, some: Tensor) -> RowMatrix:
    """Those of outputs that are chosen by their numbers among all."""
    return look.rows(way, [some[(some >= one.start) & (some < one.stop)] - one.start for one in spans(look.outputs)])


@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_are_true(name: str) -> None:
    look, objective, batch = looked_at(name)
    wanted = truth(look.model, objective, batch)
    way = find_way(look)
    torch.testing.assert_close(look.rows(way, None).numbers(), wanted, rtol=1e-4, atol=1e-5)
    for some in (torch.tensor([0, 3, len(wanted) - 1]), torch.tensor([0, 2]), torch.arange(len(wanted))):
        torch.testing.assert_close(rows_of(look, way, some).numbers(), wanted[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_way_holds_at_other_weights(name: str) -> None:
    """A row whose gradient happened to be 0 when the way was found is not lost later."""
    look, objective, batch = looked_at(name)
    way = find_way(look)
    with torch.no_grad():
        for parameter in look.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    later = Linearisation(objective, look.model, look.parameters, batch)
    assert later.form == way.form
    wanted = truth(look.model, objective, batch)
    torch.testing.assert_close(later.rows(way, None).numbers(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("name", PROBLEMS)
def test_factors_stand_for_the_same_rows(name: str, factored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether columns are held as numbers or as factors, all products are those of the true rows."""
    monkeypatch.setattr(finding, "pair_work", lambda *_: (1.0, factored))
    look, objective, batch = looked_at(name)
    wanted, way = truth(look.model, objective, batch).double(), find_way(look)
    assert bool(way.factored) == (factored and not way.one_by_one)
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(wanted.shape[1], generator=draw)
    for some in (torch.arange(len(wanted)), torch.tensor([0, 2, len(wanted) - 1])):
        rows, true = rows_of(look, way, some), wanted[some]
        outputs = torch.randn(len(some), generator=draw)
        near = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(rows.numbers().double(), true, **near)
        torch.testing.assert_close(rows.kernel(torch.float64), true @ true.T, **near)
        torch.testing.assert_close(rows.times(weights).double(), true @ weights.double(), **near)
        torch.testing.assert_close(rows.transposed(outputs).double(), true.T @ outputs.double(), **near)


INDEPENDENT = [
    "an equation and its ends",
    "derivatives of third order",
    "an unknown coefficient",
    "two outputs",
    "complex residuals",
    "two rows in one residual, and all rows in one",
    "inputs with a dimension between",
    "weights beside their layers",
]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_take_few_backward_passes(name: str) -> None:
    look, _, _ = looked_at(name)
    way = find_way(look)
    assert not way.one_by_one
    assert len(way.passes) <= 2


def test_an_equation_and_its_boundary_share_a_pass() -> None:
    look, _, _ = looked_at("an equation and its ends")
    assert find_way(look).passes == [[0, 1]]


@pytest.mark.parametrize("name", ["rows that depend on each other", "layers that are not linear"])
def test_what_cannot_be_taken_by_rows_says_why(name: str) -> None:
    look, _, _ = looked_at(name)
    way = find_way(look)
    assert way.one_by_one
    assert way.reason


def test_the_model_is_as_before() -> None:
    model = network()
    before = model(POINTS)
    find_way(Linearisation(Residuals(poisson), model, list(model.parameters()), POINTS))
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(model(POINTS), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_residual_function_that_fails_leaves_the_model_as_it_was() -> None:
    model = network()

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Linearisation(Residuals(failing), model, list(model.parameters()), POINTS)
    assert all("forward" not in vars(module) for module in model.modules())


def test_frozen_layers_have_no_columns() -> None:
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    objective = Residuals(poisson)
    look = Linearisation(objective, model, trained, POINTS)
    rows = look.rows(find_way(look), None).numbers()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert rows.shape == (26, sum(p.numel() for p in trained))
    torch.testing.assert_close(rows, truth(model, objective, POINTS)[:, 16:], rtol=1e-4, atol=1e-5)


def test_nothing_to_linearise_is_said() -> None:
    model = network()
    with pytest.raises(UnknownForm, match="no block has a row"):
        Linearisation(Residuals(lambda m, x: m(x)[:0]), model, list(model.parameters()), POINTS)


def test_rows_behind_a_bound_that_is_not_active_yet_are_known() -> None:
    """Their gradient is 0 where the way is found, and is not later."""
    model = network()
    objective = Residuals(lambda model, x: {"data": model(x) - x, "bound": torch.relu(model(x) - 0.1)})
    parameters = list(model.parameters())
    look = Linearisation(objective, model, parameters, POINTS)
    way = find_way(look)
    with torch.no_grad():
        model[-1].bias.add_(1.0)
    later = Linearisation(objective, model, parameters, POINTS)
    wanted = truth(model, objective, POINTS)
    assert later.form == way.form
    torch.testing.assert_close(later.rows(way, None).numbers(), wanted, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_no_number_is_not_taken_by_rows() -> None:
    model = network()
    objective = Residuals(lambda model, x: {"data": model(x) - x, "root": (0 * model(x)).square().sqrt()})
    assert find_way(Linearisation(objective, model, list(model.parameters()), POINTS)).one_by_one


def test_a_model_without_linear_layers_is_taken_one_by_one() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv1d(1, 40, 1), nn.Tanh(), nn.Conv1d(40, 1, 1), nn.Flatten())
    look = Linearisation(Residuals(lambda m, x: m(x) - x), model, list(model.parameters()), POINTS)
    assert find_way(look).reason == "there are no linear layers"


def test_a_coefficient_before_a_layer_leaves_the_form_as_it_was() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.network = nn.Parameter(torch.tensor(1.5)), network()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.network(self.scale * x)
            return found

    model, objective = Scaled(), Residuals(lambda m, x: m(x) - x)
    look = Linearisation(objective, model, list(model.parameters()), POINTS)
    uses = [len(call.uses) for call in look.calls]
    way = find_way(look)
    assert [len(call.uses) for call in look.calls] == uses
    wanted = truth(model, objective, POINTS)
    torch.testing.assert_close(look.rows(way, None).numbers(), wanted, rtol=1e-4, atol=1e-5)
