"""Steps are bent as outputs bend along them."""

from __future__ import annotations

import pytest
import torch

from foretrain.hybrid.linearised.bend import AHEAD, bend_of
from foretrain.hybrid.linearised.matrix import as_rows
from foretrain.hybrid.linearised.solve import Root, System


@pytest.mark.parametrize("weights", [3, 6])
def test_outputs_that_are_parabolas_are_met_better_by_a_bent_step(weights: int) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(4, weights, generator=draw, dtype=torch.float64)
    curved = 0.1 * torch.randn(4, weights, weights, generator=draw, dtype=torch.float64)
    target = rows @ torch.full((weights,), 0.2, dtype=torch.float64)

    def outputs(moved: torch.Tensor) -> torch.Tensor:
        return target + rows @ moved + torch.einsum("i,nij,j->n", moved, curved, moved)

    system = System(as_rows(rows), Root([torch.ones(4, dtype=torch.float64)]), target)
    solved = system.step(1e-8)
    assert solved is not None
    step = solved[0]
    bend, bends = bend_of(system, step, outputs(torch.zeros_like(step)), outputs(AHEAD * step))
    assert bool(bends)
    assert outputs(step + bend).norm() < 0.3 * outputs(step).norm()


def test_straight_outputs_are_not_bent_and_long_bends_are_left_out() -> None:
    system = System(as_rows(torch.eye(3)), Root([torch.ones(3)]), torch.ones(3))
    solved = system.step(1e-6)
    assert solved is not None
    step = solved[0]
    straight, _ = bend_of(system, step, torch.ones(3), torch.ones(3) + AHEAD * step)
    torch.testing.assert_close(straight, torch.zeros(3), atol=1e-5, rtol=0.0)
    for ahead in (torch.full((3,), 9.0), torch.full((3,), torch.nan)):
        bend, bends = bend_of(system, step, torch.ones(3), ahead)
        assert not bool(bends)
        assert not bool(bend.any())


def test_nothing_is_solved_again_before_anything_was() -> None:
    system = System(as_rows(torch.eye(3)), Root([torch.ones(3)]), torch.ones(3))
    with pytest.raises(RuntimeError, match="nothing was solved"):
        system.again(torch.ones(3))
