"""The damped step to where linearised outputs have the least loss, solved in the smaller of rows and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PRECISE_BELOW = 1e-5
"""Relative damping below which the products of rows are made in fp64. Measured on the equations of
benchmarks/low_noise_problems.py: the largest eigenvalue is some hundred times the mean one, so that rounding in fp32
reaches 1e-5 of the mean."""


@dataclass
class System:
    """Minimises |A d + b|^2 / 2 + damping |d|^2 / 2. The loss that it stands for falls by what `predicted` says."""

    rows: Tensor
    """A [rows, weights]."""
    target: Tensor
    """b: A^T b is the gradient of the loss."""

    def __post_init__(self) -> None:
        self._products: dict[torch.dtype, tuple[Tensor, float]] = {}

    @property
    def wide(self) -> bool:
        return self.rows.shape[1] > self.rows.shape[0]

    def _matrix(self, damping: float) -> tuple[Tensor, float]:
        """A A^T or A^T A, the smaller, in fp64, and the mean of its diagonal."""
        kind = torch.float64 if damping < _PRECISE_BELOW else self.rows.dtype
        if kind not in self._products:
            rows = self.rows.to(kind)
            matrix = (rows @ rows.T if self.wide else rows.T @ rows).double()
            self._products[kind] = matrix, float(matrix.diagonal().mean())
        return self._products[kind]

    def step(self, damping: float, carried_on: Tensor | None = None) -> tuple[Tensor, float] | None:
        """The step and the fall of the loss that it predicts; None where the damping is too low to solve it, or where a
        number is not finite.

        damping: as a share of the mean eigenvalue. carried_on: a step to begin with; what is added to it is damped.
        """
        matrix, scale = self._matrix(damping)
        if not 0 < scale < math.inf:
            return None
        damped = matrix.clone()
        damped.diagonal().add_(damping * scale)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return None
        rows, target = self.rows, self.target.double()
        ahead = 0.0 if carried_on is None else (rows @ carried_on).double()
        target = target + ahead
        if self.wide:
            share = torch.cholesky_solve(target.unsqueeze(1), factor).squeeze(1)
            step = -(rows.T @ share.to(rows.dtype))
            change = -(matrix @ share)
        else:
            whole = (rows.T.double() @ target).unsqueeze(1)
            long = -torch.cholesky_solve(whole, factor).squeeze(1)
            step = long.to(rows.dtype)
            change = rows.double() @ long
        if carried_on is not None:
            target, change, step = target - ahead, change + ahead, step + carried_on
        predicted = -float(target @ change + change.square().sum() / 2)
        return step, predicted
