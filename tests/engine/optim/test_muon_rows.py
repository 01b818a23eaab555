"""Rows of Muon's updates are evened out by NorMuon's rule; runs with and without it go on with each other's states."""

from __future__ import annotations

import pytest
import torch
from tests.engine.optim.test_muon import number_format  # noqa: F401
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.optim.muon import Muon


def evened(steps: list[Tensor], beta: float) -> list[Tensor]:
    """Steps of one matrix as NorMuon's rule says it, written again: rows over the root of their mean square, averaged
    over steps, and the size of the whole as before."""
    squares, found = torch.zeros(len(steps[0]), dtype=torch.float64), []
    for step in steps:
        squares = beta * squares + (1 - beta) * step.double().square().mean(1)
        rows = step.double() / squares.sqrt().unsqueeze(1)
        found.append(rows * step.double().norm() / rows.norm())
    return found


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16), (1, 5)])
@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_rows_are_evened_out_as_the_rule_says(shape: tuple[int, int], beta: float) -> None:
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    rates = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
    moved: dict[float, list[Tensor]] = {}
    for row_beta2 in (0.0, beta):
        p = nn.Parameter(torch.zeros(shape))
        optimizer = Muon([{"params": [p]}], row_beta2=row_beta2, **rates)
        moved[row_beta2], before = [], torch.zeros(shape)
        for gradient in gradients:
            p.grad = gradient
            optimizer.step()
            moved[row_beta2].append(p.detach() - before)
            before = p.detach().clone()
    for found, expected in zip(moved[beta], evened(moved[0.0], beta), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


def test_parts_of_a_fused_matrix_keep_their_own_size_when_rows_are_evened_out() -> None:
    """A part whose gradient is of low rank takes a shorter step, and goes on doing so."""
    generator = torch.Generator().manual_seed(0)
    column, row = torch.randn(8, 1, generator=generator), torch.randn(1, 8, generator=generator)
    gradient = torch.cat([torch.zeros(8, 8), column @ row, torch.randn(8, 8, generator=generator)])
    sizes, moved = [], []
    for row_beta2 in (0.0, 0.9):
        p = nn.Parameter(torch.zeros(24, 8))
        p.grad = gradient.clone()
        Muon([{"params": [p]}], lr=0.1, weight_decay=0.0, row_beta2=row_beta2, parts={p: 3}).step()
        moved.append(p.detach().clone())
        sizes.append([float(part.norm()) for part in p.detach().chunk(3)])
    assert sizes[0][0] == sizes[1][0] == 0.0
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-2)
    assert sizes[0][1] < 0.7 * sizes[0][2]
    assert not torch.allclose(*moved, rtol=1e-2, atol=1e-3), "rows were not evened out"


def stepped(row_beta2: float, steps: int = 1) -> HybridTrainer:
    """A run that has made some steps on one matrix."""
    torch.manual_seed(0)
    settings = {"device": "cpu", "max_steps": 10, "hybrid.mode": "off", "optimizer.type": "muon"}
    config = from_mapping(settings | {"optimizer.row_beta2": row_beta2})
    trainer = HybridTrainer(nn.Linear(4, 6, bias=False), loss_fn=nn.MSELoss(), config=config)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        trainer.step((torch.randn(8, 4, generator=generator), torch.randn(8, 6, generator=generator)))
    return trainer


def kept_by(trainer: HybridTrainer) -> dict[str, Tensor]:
    """What the optimizer keeps of the matrix."""
    kept: dict[str, Tensor] = trainer.optimizer.state[trainer.model.weight]
    return kept


def test_a_state_without_mean_squares_of_rows_is_filled_in_place() -> None:
    """A run of before has none; a recorded step writes to the tensors that are there."""
    old, new = stepped(0.0, steps=2), stepped(0.9)
    places = {name: value.data_ptr() for name, value in kept_by(new).items()}
    assert places.keys() == {"momentum_buffer", "row_squares"}
    new.load_state_dict(old.state_dict())
    assert {name: value.data_ptr() for name, value in kept_by(new).items()} == places
    assert torch.equal(kept_by(new)["momentum_buffer"], kept_by(old)["momentum_buffer"])
    assert not kept_by(new)["row_squares"].any()
    new.step((torch.ones(8, 4), torch.ones(8, 6)))
    assert kept_by(new)["row_squares"].all()


def test_mean_squares_of_rows_that_are_not_wanted_are_left_behind() -> None:
    old, new = stepped(0.9, steps=2), stepped(0.0)
    new.load_state_dict(old.state_dict())
    assert kept_by(new).keys() == {"momentum_buffer"}


def test_mean_squares_of_rows_come_back_to_the_bit() -> None:
    old, new = stepped(0.9, steps=3), stepped(0.9)
    new.load_state_dict(old.state_dict())
    assert torch.equal(kept_by(new)["row_squares"], kept_by(old)["row_squares"])
