"""Moves of low-rank products: B A goes on as it went, and not each factor by itself.

Both factors moved by s displacements make a product that moves by s and s^2. Here A moves as forecast, and B becomes
what brings the product nearest to (B A) + s [(B + dB)(A + dA) - B A], by least squares. A keeps its coordinates, so
that the optimizer's moments still mean what they meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretrain.engine.memory.host import on_device

_RIDGE = 1e-6
"""Relative to the mean square of A: keeps the least squares solvable when rows of A meet."""


@dataclass(frozen=True)
class Products:
    """Where the pairs are among the trained weights."""

    parameters: list[Tensor]
    pairs: list[tuple[int, int]]
    """Places of A [rank, in] and B [out, rank]."""

    @classmethod
    def of(cls, model: nn.Module, parameters: list[Tensor]) -> Products | None:
        """None if nothing low-rank is trained."""
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        places = {name: index for index, name in enumerate(names)}
        pairs = [
            (index, places[other])
            for name, index in places.items()
            if name.endswith("lora_a") and (other := f"{name.removesuffix('lora_a')}lora_b") in places
        ]
        return cls(parameters, pairs) if pairs else None

    @torch.no_grad()
    def place(self, start: Sequence[Tensor], displacement: Sequence[Tensor], share: float) -> None:
        """Choose every B by its A, which is in its place already."""
        for a, b in self.pairs:
            given = (start[a], start[b], displacement[a], displacement[b])
            first, second, first_moved, second_moved = (on_device(x, self.parameters[a].device) for x in given)
            fitting = _fitting(self.parameters[a], first, second, first_moved, second_moved, share)
            self.parameters[b].copy_(fitting)


def _fitting(placed: Tensor, a: Tensor, b: Tensor, a_moved: Tensor, b_moved: Tensor, share: float) -> Tensor:
    """The B whose product with `placed` is nearest to the target. Everything in fp32, nothing larger than B."""
    placed, a, b = placed.float(), a.float(), b.float()
    after_a, after_b = a + a_moved.float(), b + b_moved.float()
    wanted = (1 - share) * (b @ (a @ placed.T)) + share * (after_b @ (after_a @ placed.T))
    gram = placed @ placed.T
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    solution: Tensor = torch.linalg.solve(gram, wanted.T).T
    return solution
