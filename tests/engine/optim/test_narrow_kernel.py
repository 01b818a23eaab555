"""The kernel for narrow moments, run program by program without a GPU, equals the same in torch: also by rows, as
shards have them."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engine.optim.test_muon_kernels import LANGUAGE, kernels
from torch import Tensor

from foretrain.engine.optim import narrow
from foretrain.engine.optim.moments import BLOCK, chance, decoded
from foretrain.persist.model_state import SCALE

__all__ = ["kernels"]

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPERATIONS = {
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "floor": torch.floor,
    "exp2": torch.exp2,
    "log2": math.log2,
    "max": lambda numbers, axis: numbers.amax(axis),
    "minimum": lambda numbers, most: numbers.clamp(max=most),
    "maximum": lambda numbers, least: numbers.clamp(min=least),
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""What this kernel uses of `triton.language` beside Muon's."""


@pytest.fixture
def kernel(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(LANGUAGE, name, operation, raising=False)
    monkeypatch.setattr(kernels, "_chance", chance)  # its own takes bits apart as torch cannot
    monkeypatch.setattr(kernels, "_fourth_power", kernels._fourth_power.function)
    return kernels.narrow_adamw


def part_of(rows: int, columns: int, by_rows: bool) -> narrow._Part:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(rows, columns, generator=generator)
    count = (rows, -(-columns // BLOCK)) if by_rows else (-(-rows * columns // BLOCK),)
    state: dict[str, Tensor] = {"step": torch.zeros(())}
    for name, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state |= {name: torch.zeros(rows, columns, dtype=kind), name + SCALE: torch.zeros(count)}
    return narrow._Part(weights, torch.zeros_like(weights), state)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (3, 256), (2, 700), (1, 300), (300, 3)])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_the_kernel_equals_torch(shape: tuple[int, int], by_rows: bool, found_inf: float | None, kernel: Any) -> None:
    ours, theirs = part_of(*shape, by_rows), part_of(*shape, by_rows)
    bad = None if found_inf is None else torch.tensor(found_inf)
    for step in range(1, 4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for part in (ours, theirs):
            part.gradient.copy_(gradient)
            part.state["step"].fill_(step)
        narrow._by_triton(kernel, GROUP, ours, torch.tensor(2.0), bad)
        narrow._by_torch(GROUP, theirs, torch.tensor(2.0), bad)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-5)
    for name, most in (("exp_avg", 1 / 127), ("exp_avg_sq", 4 / 255)):
        one, other = (decoded(part.state[name], part.state[name + SCALE]) for part in (ours, theirs))
        largest = theirs.state[name + SCALE].max()
        torch.testing.assert_close(one, other, rtol=0, atol=2 * float(most * largest))
        torch.testing.assert_close(ours.state[name + SCALE], theirs.state[name + SCALE])
        assert (float(largest) > 0) == (found_inf != 1.0)
        assert float((ours.state[name] != theirs.state[name]).float().mean()) < 0.02
