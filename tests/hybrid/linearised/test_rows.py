"""Rows of the Jacobian are those that autograd gives one by one, whatever the residuals are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hybrid.linearised.problems import POINTS, PROBLEMS, network, poisson
from torch import Tensor, nn

from foretrain.engine.objective import Residuals, UnknownForm
from foretrain.hybrid.linearised.rows import Linearisation


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


@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_are_true(name: str) -> None:
    look, objective, batch = looked_at(name)
    wanted = truth(look.model, objective, batch)
    way = look.find_way()
    everything = torch.arange(len(wanted))
    torch.testing.assert_close(look.rows(way, everything), wanted, rtol=1e-4, atol=1e-5)
    some = torch.tensor([0, 3, len(wanted) - 1])
    torch.testing.assert_close(look.rows(way, some), wanted[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_way_holds_at_other_weights(name: str) -> None:
    """A row whose gradient happened to be 0 when the way was found is not lost later."""
    look, objective, batch = looked_at(name)
    way = look.find_way()
    with torch.no_grad():
        for parameter in look.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    later = Linearisation(objective, look.model, look.parameters, batch)
    assert later.form == way.form
    wanted = truth(look.model, objective, batch)
    torch.testing.assert_close(later.rows(way, torch.arange(len(wanted))), wanted, rtol=1e-4, atol=1e-5)


INDEPENDENT = [
    "an equation and its ends",
    "derivatives of third order",
    "an unknown coefficient",
    "two outputs",
    "complex residuals",
    "two rows in one residual, and all rows in one",
    "inputs with a dimension between",
]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_take_few_backward_passes(name: str) -> None:
    look, _, _ = looked_at(name)
    passes = look.find_way().passes
    assert passes is not None
    assert len(passes) <= 2


def test_an_equation_and_its_boundary_share_a_pass() -> None:
    look, _, _ = looked_at("an equation and its ends")
    passes = look.find_way().passes
    assert passes is not None
    assert [one.columns for one in passes] == [[0, 1]]


@pytest.mark.parametrize("name", ["rows that depend on each other", "layers that are not linear"])
def test_what_cannot_be_taken_by_rows_says_why(name: str) -> None:
    look, _, _ = looked_at(name)
    way = look.find_way()
    assert way.passes is None
    assert way.reason


def test_the_model_is_as_before() -> None:
    model = network()
    before = model(POINTS)
    Linearisation(Residuals(poisson), model, list(model.parameters()), POINTS).find_way()
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
    rows = look.rows(look.find_way(), torch.arange(26))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert rows.shape == (26, sum(p.numel() for p in trained))
    torch.testing.assert_close(rows, truth(model, objective, POINTS)[:, 16:], rtol=1e-4, atol=1e-5)


def test_nothing_to_linearise_is_said() -> None:
    model = network()
    with pytest.raises(UnknownForm, match="no block has a row"):
        Linearisation(Residuals(lambda m, x: m(x)[:0]), model, list(model.parameters()), POINTS)
