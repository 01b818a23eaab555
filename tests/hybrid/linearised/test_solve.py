"""The damped step solves what it says, in rows and in weights alike, and predicts what a linear problem really does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretrain.hybrid.linearised.matrix import as_rows
from foretrain.hybrid.linearised.solve import Root, System


def system_of(matrix: Tensor, target: Tensor) -> System:
    """Of squares that count a half."""
    return System(as_rows(matrix), Root([torch.ones(len(matrix))]), target)


def random_system(rows: int, weights: int) -> tuple[System, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    matrix, target = torch.randn(rows, weights, generator=draw), torch.randn(rows, generator=draw)
    return system_of(matrix, target), matrix.double(), target.double()


@pytest.mark.parametrize(("rows", "weights"), [(5, 12), (12, 5), (7, 7), (1, 1)])
@pytest.mark.parametrize("damping", [1e-8, 1e-2, 10.0])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_step_is_the_least_of_the_damped_problem(rows: int, weights: int, damping: float, ahead: bool) -> None:
    system, matrix, target = random_system(rows, weights)
    carried_on = torch.full((weights,), 0.3) if ahead else torch.zeros(weights)
    solved = system.step(damping, carried_on if ahead else None)
    assert solved is not None
    step, predicted = solved
    scale = (matrix.square().sum() / min(rows, weights)).item()
    shifted = target + matrix @ carried_on.double()
    hessian = matrix.T @ matrix + damping * scale * torch.eye(weights, dtype=torch.float64)
    wanted = torch.linalg.solve(hessian, -(matrix.T @ shifted)) + carried_on.double()
    torch.testing.assert_close(step.double(), wanted, rtol=1e-3, atol=1e-4)
    fall = (target.square().sum() - (target + matrix @ step.double()).square().sum()) / 2
    assert predicted == pytest.approx(fall.item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("bad", [torch.zeros(3, 4), torch.full((3, 4), torch.nan), torch.full((3, 4), torch.inf)])
def test_what_cannot_be_solved_gives_no_step(bad: Tensor) -> None:
    assert system_of(bad, torch.ones(3)).step(1e-2) is None


def test_a_singular_problem_is_solved_with_damping() -> None:
    system = system_of(torch.ones(4, 6), torch.arange(4.0))
    solved = system.step(1e-3)
    assert solved is not None
    step, predicted = solved
    assert bool(torch.isfinite(step).all())
    assert predicted > 0
