"""The linearised problem of several ranks, each of which holds rows of its own.

Where rows are fewer than weights, each rank is sent the rows of all others, once, and multiplies its own by them: so
the products of rows are shared out, and sent once more. Where weights are fewer, what each rank's rows make of the
products of weights is summed. Either way all ranks solve the same problem, and get the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrain.engine.world import World
from foretrain.hybrid.linearised.choice import Choice
from foretrain.hybrid.linearised.matrix import Factor, RowMatrix, spans
from foretrain.hybrid.linearised.solve import Root, System

_ALIGNED = 8
"""Bytes: the largest number begins at such places only."""


@dataclass
class SharedSystem(System):
    """Holds this rank's rows, their root and target."""

    chosen: Choice = field(default_factory=list)
    """Units of each part that this rank holds."""
    totals: Sequence[int] = ()
    """Units of each part that all ranks hold together."""
    outputs: Sequence[Sequence[int]] = ()
    """Outputs of each part, by rank."""

    @property
    def count(self) -> int:
        return sum(self._each)

    @property
    def _each(self) -> list[int]:
        """Rows of each rank."""
        return [sum(parts) for parts in self.outputs]

    # --- products -----------------------------------------------------------------------------------------------------

    def product(self, kind: torch.dtype) -> Tensor:
        if not self.wide:
            return self.summed(super().product(kind))
        rows, root, _ = self._of_all
        own = self.root.of_rows(self.rows.products(rows, kind))
        return self.met(root.of_rows(own.T).T)

    @functools.cached_property
    def _of_all(self) -> tuple[RowMatrix, Root, Tensor]:
        """The rows of all ranks, one rank after the other, their root and target."""
        rows, roots = self.rows, self.root.factors
        sides = [side for factor in rows.factors for side in (factor.out, factor.into)]
        lengths = [self._lengths(parts) for parts in self.outputs]
        heard = exchanged(self.world, [rows.held, self.target, *sides, *roots], lengths)
        of_sides = [torch.cat(side) for side in zip(*(tensors[2 : 2 + len(sides)] for tensors in heard), strict=True)]
        factors = [
            Factor(factor.start, out, into, tuple(shape for parts in self.outputs for shape in _shape(factor, parts)))
            for factor, out, into in zip(rows.factors, of_sides[::2], of_sides[1::2], strict=True)
        ]
        held, target = (torch.cat([tensors[place] for tensors in heard]) for place in (0, 1))
        whole = RowMatrix(held, rows.columns, factors, rows.weights)
        return whole, Root([root for tensors in heard for root in tensors[2 + len(sides) :]]), target

    def _lengths(self, parts: Sequence[int]) -> list[int]:
        """Return how long each part is that a rank with so many outputs sends: numbers, target, factors, root."""
        uses = [sum(rows * uses for rows, uses in _shape(factor, parts)) for factor in self.rows.factors]
        roots = [n if root.ndim == 1 else n // root.shape[1] for n, root in zip(parts, self.root.factors, strict=True)]
        return [sum(parts), sum(parts), *(length for one in uses for length in (one, one)), *roots]

    # --- what several processes do otherwise --------------------------------------------------------------------------

    @property
    def target_met(self) -> Tensor:
        return self._of_all[2] if self.wide else self.target

    def met(self, own: Tensor) -> Tensor:
        if not self.wide:
            return own
        lengths = [[rows] for rows in self._each]
        return torch.cat([tensors[0] for tensors in exchanged(self.world, [own], lengths)])

    def own(self, whole: Tensor) -> Tensor:
        return whole[spans(self._each)[self.world.rank]]

    def summed(self, part: Tensor) -> Tensor:
        return self.world.reduce(part, "sharded")

    def alike(self, vector: Tensor) -> Tensor:
        """Each rank gives a slice of it: machines may round otherwise."""
        each = -(-len(vector) // self.world.size)
        longer = torch.cat([vector, vector.new_zeros(each * self.world.size - len(vector))])
        return self.world.gather(longer.view(self.world.size, each)[self.world.rank]).view(-1)[: len(vector)]

    def part(self, number: Tensor) -> Tensor:
        return number / self.world.size if self.wide else number


def _shape(factor: Factor, parts: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, uses of each) of a rank with so many outputs of each part."""
    return [(rows, uses) for rows, (_, uses) in zip(parts, factor.shape, strict=True)]


def exchanged(world: World, own: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """The tensors of all ranks, which differ in their first dimension only, by one message. lengths: that dimension, by
    rank."""
    widths = [tensor.element_size() * tensor.shape[1:].numel() for tensor in own]
    sizes = [[length * width for length, width in zip(some, widths, strict=True)] for some in lengths]
    places = [spans([-(-size // _ALIGNED) * _ALIGNED for size in some]) for some in sizes]
    sent = torch.zeros(max(some[-1].stop for some in places), dtype=torch.uint8, device=own[0].device)
    for tensor, place, size in zip(own, places[world.rank], sizes[world.rank], strict=True):
        sent[place.start : place.start + size] = tensor.contiguous().view(-1).view(torch.uint8)
    heard = world.gather(sent)
    return [
        [
            heard[rank, place.start : place.start + size].view(tensor.dtype).view(length, *tensor.shape[1:])
            for tensor, place, size, length in zip(own, places[rank], sizes[rank], lengths[rank], strict=True)
        ]
        for rank in range(world.size)
    ]
