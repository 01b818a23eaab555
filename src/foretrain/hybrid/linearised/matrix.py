"""Rows of a Jacobian, held as what is cheapest: numbers, or the products that the rows of a layer are made of.

A row of a linear layer is a sum of outer products, one for each use of its weight. The product of two such rows is a
sum of products of short vectors, so that wide layers need never be written out: their share of the kernel A A^T is made
layer by layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = {"cpu": 2**18}
"""Products of pairs of uses that are made at once; `_LARGE_PIECE` elsewhere. Measured on one CPU core, of 640 and of
1,280 rows: 2**16 is a tenth slower, 2**20 takes twice as long, as memory is asked for anew each time."""
_LARGE_PIECE = 2**26
_PER_PAIR = 60.0
"""Multiplications that take as long as making, multiplying and adding up the product of a pair of uses. Measured on one
CPU core, for layers of 32: 40 to 80."""


@dataclass
class Factor:
    """The columns of one weight matrix: each row is the sum over its uses of `out` times `into`."""

    start: int
    """First column."""
    out: Tensor
    """[uses of all rows, outputs of the layer]."""
    into: Tensor
    """[uses of all rows, inputs of the layer]."""
    shape: tuple[tuple[int, int], ...]
    """(rows, uses of each), one after the other."""

    @property
    def stop(self) -> int:
        return self.start + self.out.shape[1] * self.into.shape[1]

    def add_products(self, total: Tensor, others: Factor) -> None:
        """Add the products of all pairs of a row and one of the others to [rows, others]."""
        out, into = self.out.to(total.dtype), self.into.to(total.dtype)
        out_of_others, into_of_others = others.out.to(total.dtype).T, others.into.to(total.dtype).T
        simple = all(uses == 1 for _, uses in (*self.shape, *others.shape))
        first = 0
        for some, uses in self._pieces(len(others.out)):
            rows = total[first : (first := first + (some.stop - some.start) // uses)]
            one, other = out[some] @ out_of_others, into[some] @ into_of_others
            if simple:
                rows.addcmul_(one, other)
            else:
                pairs = one.mul_(other)
                rows.add_(others._summed(pairs.view(-1, uses, len(others.out)).sum(1) if uses > 1 else pairs))

    def _pieces(self, others: int) -> Iterator[tuple[slice, int]]:
        """Whole rows, so many at once that their products with so many uses fit; and the uses of each."""
        most, at = _PIECE.get(self.out.device.type, _LARGE_PIECE) // max(1, others), 0
        for rows, uses in self.shape:
            together = max(1, most // uses)
            for first in range(0, rows, together):
                count = min(together, rows - first)
                yield slice(at, at := at + count * uses), uses

    def _summed(self, columns: Tensor) -> Tensor:
        """[..., uses] -> [..., rows]."""
        if all(uses == 1 for _, uses in self.shape):
            return columns
        sums, at = [], 0
        for rows, uses in self.shape:
            some = columns[..., at : at + rows * uses]
            sums.append(some.reshape(*some.shape[:-1], rows, uses).sum(-1))
            at += rows * uses
        return torch.cat(sums, -1)

    def times(self, vector: Tensor) -> Tensor:
        weight = vector[self.start : self.stop].view(self.out.shape[1], self.into.shape[1])
        return self._summed(((self.into @ weight.T) * self.out).sum(1))

    def transposed(self, vector: Tensor) -> Tensor:
        each = torch.cat([some.repeat_interleave(uses) for some, uses in self._split(vector)])
        return ((self.out * each.unsqueeze(1)).T @ self.into).reshape(-1)

    def _split(self, vector: Tensor) -> Iterator[tuple[Tensor, int]]:
        at = 0
        for rows, uses in self.shape:
            yield vector[at : at + rows], uses
            at += rows

    def numbers(self) -> Tensor:
        """[rows, columns], written out."""
        written, at = [], 0
        for rows, uses in self.shape:
            out, into = (side[at : at + rows * uses].view(rows, uses, side.shape[1]) for side in (self.out, self.into))
            written.append(torch.bmm(out.mT, into).flatten(1))
            at += rows * uses
        return torch.cat(written)


class RowMatrix:
    """A [rows, weights]: some columns as numbers, others as factors."""

    def __init__(self, numbers: Tensor, columns: Sequence[slice], factors: Sequence[Factor], weights: int) -> None:
        """columns: where the columns of `numbers` belong, one slice after the other."""
        self.held, self.columns, self.factors, self.weights = numbers, columns, factors, weights

    @property
    def count(self) -> int:
        return len(self.held)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def kernel(self, kind: torch.dtype) -> Tensor:
        """A A^T, its products made in this type."""
        return self.products(self, kind)

    def products(self, others: RowMatrix, kind: torch.dtype) -> Tensor:
        """A B^T with rows B of the same form, made in this type."""
        total = self.held.to(kind) @ others.held.to(kind).T
        for factor, other in zip(self.factors, others.factors, strict=True):
            factor.add_products(total, other)
        return total

    def times(self, vector: Tensor) -> Tensor:
        """A v."""
        held = self._of(vector)
        return functools.reduce(torch.add, [self.held @ held, *(factor.times(vector) for factor in self.factors)])

    def _of(self, vector: Tensor) -> Tensor:
        """What of a vector belongs to the numbers."""
        if not self.factors:
            return vector
        return torch.cat([vector[some] for some in self.columns] or [vector[:0]])

    def transposed(self, vector: Tensor) -> Tensor:
        """A^T v."""
        own = self.held.T @ vector
        if not self.factors:
            return own
        result, at = own.new_zeros(self.weights), 0
        for some in self.columns:
            result[some] = own[at : (at := at + some.stop - some.start)]
        for factor in self.factors:
            result[factor.start : factor.stop] = factor.transposed(vector)
        return result

    def numbers(self) -> Tensor:
        """[rows, weights], written out."""
        if not self.factors:
            return self.held
        result, at = self.held.new_zeros(self.count, self.weights), 0
        for some in self.columns:
            result[:, some] = self.held[:, at : (at := at + some.stop - some.start)]
        for factor in self.factors:
            result[:, factor.start : factor.stop] = factor.numbers()
        return result


def as_rows(numbers: Tensor) -> RowMatrix:
    return RowMatrix(numbers, [slice(0, numbers.shape[1])], (), numbers.shape[1])


def pair_work(uses: float, out: int, into: int) -> tuple[float, bool]:
    """Multiplications that the product of two rows of a layer takes, and whether factors are the cheaper way."""
    as_numbers, as_factors = float(out * into), uses * uses * (out + into + _PER_PAIR)
    return min(as_numbers, as_factors), as_factors < as_numbers


def spans(sizes: Sequence[int]) -> list[slice]:
    """Slices of these lengths, one after the other."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [slice(first, last) for first, last in itertools.pairwise(ends)]
