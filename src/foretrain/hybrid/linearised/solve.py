"""The damped step to where linearised outputs have the least loss, solved in the smaller of rows and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrain.engine.world import ALONE, World
from foretrain.hybrid.linearised.matrix import RowMatrix

_PRECISE_BELOW = 1e-5
"""Relative damping below which the products of rows are made in fp64. Measured on the cubic equation of
benchmarks/low_noise_problems.py, three seeds, after 2.5 s: with 1e-6 the loss is 5 to 20 times as high, with 1e-4 up to
three times as low. Of 640 rows these products take two and a half times as long in fp64."""


_ROUGH_FROM = 1e-3
"""Relative damping from which on the whole problem is solved in the type of its rows. Chosen: the largest eigenvalue is
then some ten thousand times the damping, and fp32 has a thousand times that. Of 640 rows it takes half as long."""


Types = tuple[torch.dtype, torch.dtype]


class Root:
    """R, the root of the curvature of a loss in its outputs: a number for each output, or a triangle for each sample of
    several classes."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        """factors: of one part of the outputs after the other, S [n] or [samples, classes, classes]; R is S^T."""
        self.factors = list(factors)

    def of_rows(self, rows: Tensor) -> Tensor:
        """R times a vector, or times each column of a matrix."""
        found, at = [], 0
        for factor in self.factors:
            if factor.ndim == 1:
                some = rows[at : (at := at + len(factor))]
                found.append(some * factor.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1)))
            else:
                some = rows[at : (at := at + factor.shape[0] * factor.shape[1])]
                by_sample = some.reshape(factor.shape[0], factor.shape[1], -1)
                found.append(torch.bmm(factor.mT.to(rows.dtype), by_sample).reshape(some.shape))
        return torch.cat(found) if len(found) > 1 else found[0]

    def of_both_sides(self, matrix: Tensor) -> Tensor:
        """R M R^T of a symmetric matrix, which may be written over."""
        if any(factor.ndim > 1 for factor in self.factors):
            return self.of_rows(self.of_rows(matrix).T)
        each = torch.cat(self.factors).to(matrix.dtype)
        return matrix.mul_(each.unsqueeze(1)).mul_(each)

    def transposed(self, vector: Tensor) -> Tensor:
        """R^T v."""
        found, at = [], 0
        for factor in self.factors:
            if factor.ndim == 1:
                found.append(vector[at : (at := at + len(factor))] * factor.to(vector.dtype))
            else:
                some = vector[at : (at := at + factor.shape[0] * factor.shape[1])]
                by_sample = some.reshape(factor.shape[0], factor.shape[1], 1)
                found.append(torch.bmm(factor.to(vector.dtype), by_sample).reshape(-1))
        return torch.cat(found) if len(found) > 1 else found[0]

    def undone(self, gradients: Sequence[Tensor]) -> Tensor:
        """R^-T v, for the gradients of the parts."""
        found = []
        for gradient, factor in zip(gradients, self.factors, strict=True):
            if factor.ndim == 1:
                found.append(gradient / factor)
            else:
                solved = torch.linalg.solve_triangular(factor, gradient.unsqueeze(-1), upper=False)
                found.append(solved.reshape(-1))
        return torch.cat(found)


@dataclass
class System:
    """Minimises |R A d + b|^2 / 2 + damping |d|^2 / 2. The loss that it stands for falls by what the step predicts."""

    rows: RowMatrix
    """A [rows, weights]."""
    root: Root
    target: Tensor
    """b: A^T R^T b is the gradient of the loss."""
    world: World = ALONE
    products: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """R A A^T R^T or A^T R^T R A, the smaller, by the type that it was made in."""
    known_gradient: Tensor | None = None
    factor: Tensor | None = None
    """The Cholesky factor of the damped problem that was solved last."""

    @property
    def count(self) -> int:
        """Rows of the problem."""
        return self.rows.count

    @property
    def wide(self) -> bool:
        return self.rows.weights > self.count

    # --- what several processes do otherwise, each of which holds some of the rows ------------------------------------

    @property
    def target_met(self) -> Tensor:
        """What `met` makes of the target."""
        return self.target

    def met(self, own: Tensor) -> Tensor:
        """Numbers of all rows, from those of the rows that are held here; where weights are fewer these are enough."""
        return own

    def own(self, whole: Tensor) -> Tensor:
        """Numbers of the rows that are held here."""
        return whole

    def summed(self, part: Tensor) -> Tensor:
        """The sum of what the rows here make and of what others do."""
        return part

    def alike(self, vector: Tensor) -> Tensor:
        """A vector that every process has computed, with the same bits in all of them."""
        return vector

    def part(self, number: Tensor) -> Tensor:
        """What of a number is counted here, so that their sum over processes is the number of all rows."""
        return number

    # --- its step -----------------------------------------------------------------------------------------------------

    def gradient(self) -> Tensor:
        """The gradient of the loss of the chosen outputs."""
        if self.known_gradient is not None:
            return self.known_gradient
        return self.summed(self.rows.transposed(self.root.transposed(self.target).to(self.rows.dtype)))

    def types(self, damping: float) -> Types:
        """The types that products are made in, and that the problem is solved in, with such a damping."""
        own = self.rows.dtype
        if damping < _PRECISE_BELOW:
            return torch.float64, torch.float64
        return own, own if damping >= _ROUGH_FROM else torch.float64

    def _matrix(self, types: Types) -> Tensor:
        made, solved = types
        if made not in self.products:
            self.products[made] = self.product(made)
        return self.products[made].to(solved)

    def product(self, kind: torch.dtype) -> Tensor:
        if self.wide:
            return self.root.of_both_sides(self.rows.kernel(kind))
        rows = self.root.of_rows(self.rows.numbers().to(kind))
        return rows.T @ rows

    def step(self, damping: float, carried_on: Tensor | None = None) -> tuple[Tensor, float] | None:
        """The step and the fall of the loss that it predicts; None where the damping is too low to solve it, or where a
        number is not finite. The device is waited for once.

        damping: as a share of the mean eigenvalue. carried_on: a step to begin with; what is added to it is damped.
        """
        step, numbers = self.solve(damping, self.types(damping), carried_on)
        fall = predicted_by(self.world.to_host(self.summed(numbers)))
        return None if fall is None else (step, fall)

    def solve(self, damping: float | Tensor, types: Types, carried_on: Tensor | None) -> tuple[Tensor, Tensor]:
        """The step, and what `predicted_by` reads, of which several processes hold parts. The device is not waited
        for."""
        rows, root, matrix = self.rows, self.root, self._matrix(types)
        kind = matrix.dtype
        target = self.target_met.to(kind)
        ahead = None if carried_on is None else self.met(root.of_rows(rows.times(carried_on).to(kind)))
        wanted = target if ahead is None else target + ahead
        scale = matrix.diagonal().mean()
        damped = matrix.clone()
        share_of_scale = damping.to(kind) if isinstance(damping, Tensor) else damping  # the same bits in both cases
        damped.diagonal().add_(share_of_scale * scale)
        factor, failed = torch.linalg.cholesky_ex(damped)
        self.factor = factor
        step, found = self._answer(wanted, factor)
        change = matrix @ found if self.wide else root.of_rows(rows.numbers().to(kind) @ found)
        if carried_on is not None and ahead is not None:
            step, change = step + carried_on, change + ahead
        predicted = -(target @ change + change.square().sum() / 2)
        return step, torch.stack([scale, failed.to(kind), self.part(predicted)])

    def _answer(self, wanted: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The step for such numbers of the rows, and what was solved for: in the smaller of rows and weights."""
        rows, root = self.rows, self.root
        if self.wide:
            share = torch.cholesky_solve(wanted.unsqueeze(1), factor).squeeze(1)
            step = self.summed(rows.transposed(root.transposed(self.own(share)).to(rows.dtype)))
            return -step, -share
        whole = self.summed(rows.numbers().to(factor.dtype).T @ root.transposed(wanted))
        long = self.alike(-torch.cholesky_solve(whole.unsqueeze(1), factor).squeeze(1))
        return long.to(rows.dtype), long

    def again(self, outputs: Tensor) -> Tensor:
        """The step by which the problem that was solved last answers such outputs instead of its own."""
        if self.factor is None:
            raise RuntimeError("nothing was solved yet")
        return self._answer(self.met(self.root.of_rows(outputs.to(self.factor.dtype))), self.factor)[0]


def predicted_by(numbers: Sequence[float]) -> float | None:
    """The fall of the loss that a solved step predicts; None where it could not be solved."""
    mean, fault, fall = numbers
    return fall if not fault and 0 < mean < math.inf and math.isfinite(fall) else None
