"""The damped step to where linearised outputs have the least loss, solved in the smaller of rows and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrain.engine.world import ALONE, World

_PRECISE_BELOW = 1e-5
"""Relative damping below which the products of rows are made in fp64. Measured on the cubic equation of
benchmarks/low_noise_problems.py, three seeds, after 2.5 s: with 1e-6 the loss is 5 to 20 times as high, with 1e-4 up to
three times as low. Of 640 rows these products take two and a half times as long in fp64."""


@dataclass
class System:
    """Minimises |A d + b|^2 / 2 + damping |d|^2 / 2. The loss that it stands for falls by what the step predicts."""

    rows: Tensor
    """A [rows, weights]."""
    target: Tensor
    """b: A^T b is the gradient of the loss."""
    world: World = ALONE
    _products: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        return self.rows.shape[1] > self.rows.shape[0]

    def _matrix(self, damping: float) -> Tensor:
        """A A^T or A^T A, the smaller, in fp64."""
        kind = torch.float64 if damping < _PRECISE_BELOW else self.rows.dtype
        if kind not in self._products:
            rows = self.rows.to(kind)
            self._products[kind] = (rows @ rows.T if self.wide else rows.T @ rows).double()
        return self._products[kind]

    def step(self, damping: float, carried_on: Tensor | None = None) -> tuple[Tensor, float] | None:
        """The step and the fall of the loss that it predicts; None where the damping is too low to solve it, or where a
        number is not finite. The device is waited for once.

        damping: as a share of the mean eigenvalue. carried_on: a step to begin with; what is added to it is damped.
        """
        rows, matrix = self.rows, self._matrix(damping)
        target = self.target.double()
        ahead = torch.zeros_like(target) if carried_on is None else (rows @ carried_on).double()
        scale = matrix.diagonal().mean()
        damped = matrix.clone()
        damped.diagonal().add_(damping * scale)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if self.wide:
            share = torch.cholesky_solve((target + ahead).unsqueeze(1), factor).squeeze(1)
            step = -(rows.T @ share.to(rows.dtype))
            change = ahead - matrix @ share
        else:
            whole = (rows.T.double() @ (target + ahead)).unsqueeze(1)
            long = -torch.cholesky_solve(whole, factor).squeeze(1)
            step = long.to(rows.dtype)
            change = ahead + rows.double() @ long
        if carried_on is not None:
            step = step + carried_on
        predicted = -(target @ change + change.square().sum() / 2)
        mean, fault, fall = self.world.to_host(torch.stack([scale, failed.double(), predicted]))
        if fault or not (0 < mean < math.inf and math.isfinite(fall)):
            return None
        return step, fall
