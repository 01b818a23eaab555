"""Where the loss is exact, how the gradient changed along past steps tells where it will vanish: quasi-Newton leaps.

Pairs s = change of the weights, y = change of the gradient between two full steps. The two loops of L-BFGS run on small
matrices of dot products; the long vectors take part in four matrix-vector products only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.world import ALONE, World
from foretrain.motion.predictors.base import Array
from foretrain.motion.rows import SavedRows
from foretrain.motion.trajectory import Layout
from foretrain.persist.codec import real_view
from foretrain.persist.parts import form_of_spread, local

_LEAST_CURVATURE = 1e-6
"""Cosine of s and y, at the least. Sums in fp32 are some 1e-7 off, so that less is rounding and no curvature; a true
curvature has less only where the steepest direction is 4e12 times as steep as the flattest."""
Point = tuple[Tensor, Tensor]
"""Weights and gradient."""


class Secant:
    """The last `pairs` pairs, and the point of the last gradient."""

    def __init__(self, parameters: Sequence[Tensor], pairs: int, reach: float = np.inf, world: World = ALONE) -> None:
        """reach: a leap goes no further than this many times the longest step that a pair was taken from."""
        self.reach = reach
        self.world = world
        self.parameters = [real_view(local(p)) for p in parameters]
        self.layout = Layout(self.parameters, [str(index) for index in range(len(self.parameters))])
        self._rows_saved = SavedRows(self.layout, [form_of_spread(p) for p in parameters])
        self._parted = world.is_parted(parameters)
        self._shares = [world.share(p) for p in parameters] if self._parted else []
        self._share_row: Tensor | None = None
        """What each number counts in a sum over ranks; None where all count whole."""
        device, size = self.parameters[0].device, self.layout.size
        self.s = torch.zeros(pairs, size, device=device)
        self.y = torch.zeros(pairs, size, device=device)
        self.order: list[int] = []
        """Rows in use, oldest first."""
        self.weights = torch.zeros(size, device=device)
        self.gradient = torch.zeros(size, device=device)
        """At the last full step, before its update."""
        if any(share != 1 for share in self._shares):
            self._share_row = torch.zeros(size, device=device)
            for view, share in zip(self.layout.views(self._share_row), self._shares, strict=True):
                view.fill_(share)
        self.known = False
        self._weights_views = self.layout.views(self.weights)
        self._new = [torch.zeros(size, device=device) for _ in range(2)]
        self._new_views = [self.layout.views(row) for row in self._new]
        self._sy: Array = np.zeros((pairs, pairs))
        """s_i . y_j, by row."""
        self._lengths: Array = np.zeros(pairs)
        """Length of s, by row."""
        self.mark: Point | None = None
        """A point to come back to, over all chains."""
        self.best: Point | None = None
        """Where the held-out loss of the open chain was lowest."""

    @property
    def bytes(self) -> int:
        return 4 * self.layout.size * (2 * len(self.s) + 4 + 2 * (self.mark is not None) + 2 * (self.best is not None))

    def forget(self) -> None:
        """All but the mark, which is a point and knows nothing of pairs."""
        self.order = []
        self.known = False
        self.best = None

    @property
    def longest(self) -> float:
        """Length of the longest s."""
        return float(self._lengths[self.order].max()) if self.order else 0.0

    def point(self) -> Point:
        """That of the last gradient."""
        return self.weights.clone(), self.gradient.clone()

    @torch.no_grad()
    def go_to(self, point: Point) -> None:
        """As if the last gradient had been taken there; the way back makes a pair, too."""
        weights, gradient = point
        self._add(weights - self.weights, gradient - self.gradient)
        self.weights.copy_(weights)
        self.gradient.copy_(gradient)

    @torch.no_grad()
    def at(self) -> None:
        """Before a gradient is taken: the weights it is taken at."""
        torch._foreach_copy_(self._new_views[0], self.parameters)

    @torch.no_grad()
    def gradient_known(self, gradients: Sequence[Tensor | None]) -> None:
        """When the gradient is there, before clipping: it makes a pair with the one before."""
        weights, gradient = self._new
        pairs = zip(self._new_views[1], gradients, strict=True)
        present = [(view, real_view(g.to_dense() if g.is_sparse else local(g))) for view, g in pairs if g is not None]
        gradient.zero_()
        torch._foreach_copy_([view for view, _ in present], [g for _, g in present])
        if self.known:
            self._add(weights - self.weights, gradient - self.gradient)
        self.weights.copy_(weights)
        self.gradient.copy_(gradient)
        self.known = True

    def _add(self, s: Tensor, y: Tensor) -> None:
        row = self.order[0] if len(self.order) == len(self.s) else len(self.order)
        curvature, ss, yy = self.world.to_host(self._dots((s, y), (s, s), (y, y)))
        if not curvature > _LEAST_CURVATURE * np.sqrt(ss * yy):
            return
        if len(self.order) == len(self.s):
            self.order.pop(0)
        self.s[row].copy_(s)
        self.y[row].copy_(y)
        self.order.append(row)
        self._lengths[row] = np.sqrt(ss)
        count = len(self.order)
        dots = self.world.to_host(self._dots((self.y[:count], s), (self.s[:count], y)))
        self._sy[row, :count], self._sy[:count, row] = dots[:count], dots[count:]

    @torch.no_grad()
    def leap(self, scales: Tensor | None) -> tuple[Tensor, float]:
        """The step to where the gradient should vanish, from the point of the last gradient, and its slope there.

        scales: per weight, the inverse root of the optimizer's second moment; None: all alike.
        """
        rows, g = self.order, self.gradient
        s, y = self.s[: len(rows)], self.y[: len(rows)]  # rows in use are the first ones
        place = torch.tensor(rows, device=s.device)
        sy = torch.from_numpy(self._sy[np.ix_(rows, rows)]).to(s.device)  # by age, as everything small here
        upper = sy.triu()
        alpha = _solve(upper, self._dots((s, g)).double()[place], upper_triangle=True)
        q = g - y.T @ torch.zeros_like(s[:, 0]).index_copy_(0, place, alpha.to(s.dtype))
        newest = self.y[rows[-1]]
        bent = newest * scales if scales is not None else newest
        start = (q * scales if scales is not None else q) * (sy[-1, -1] / self._dots((newest, bent)).double()).to(
            s.dtype
        )
        rest = _solve(upper.T, alpha * sy.diagonal() - self._dots((y, start)).double()[place], upper_triangle=False)
        direction = -(start + s.T @ torch.zeros_like(s[:, 0]).index_copy_(0, place, rest.to(s.dtype)))
        slope, square = self.world.to_host(self._dots((direction, g), (direction, direction)))
        share = min(1.0, self.reach * self.longest / max(np.sqrt(square), 1e-30))  # the curvature is not known further
        return direction.mul_(share) if share < 1 else direction, share * slope

    def _dots(self, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Rows times a row of each pair, one after the other, over all ranks."""
        row = self._share_row
        found = [(left @ (right if row is None else right * row)).reshape(-1) for left, right in pairs]
        dots = torch.cat(found) if len(found) > 1 else found[0]
        return self.world.reduce(dots.double(), "sharded") if self._parted else dots

    @torch.no_grad()
    def place(self, direction: Tensor | None = None, share: float = 1.0) -> None:
        """Put the weights at the point of the last gradient + share x direction."""
        if direction is None:
            torch._foreach_copy_(self.parameters, self._weights_views)
            return
        torch.add(self.weights, direction, alpha=share, out=self._new[1])
        torch._foreach_copy_(self.parameters, self._new_views[1])

    def scales(self, second_moments: Sequence[Tensor | None], correction: float, epsilon: float) -> Tensor | None:
        """[size] 1 / (root of the corrected second moment + epsilon); None for an optimizer without one."""
        if any(moment is None for moment in second_moments):
            return None
        row = torch.ones_like(self.weights)
        torch._foreach_copy_(self.layout.views(row), [local(m) for m in second_moments if m is not None])
        return row.div_(correction).clamp_(min=0).sqrt_().add_(epsilon).reciprocal_()

    def state_dict(self) -> dict[str, Any]:
        count = len(self.order)
        rows = {"s": self.s[:count], "y": self.y[:count], "weights": self.weights, "gradient": self.gradient}
        tensors = self._rows_saved.of(rows)
        tensors["sy"] = torch.from_numpy(self._sy[:count, :count].copy())
        tensors["lengths"] = torch.from_numpy(self._lengths[:count].copy())
        points: dict[str, Tensor] = {}
        for name, point in (("mark", self.mark), ("best", self.best)):
            if point is not None:
                points[f"{name}_weights"], points[f"{name}_gradient"] = point
        known = {"order": list(self.order), "known": self.known}
        return known | self._rows_saved.of(points) | (tensors if self.known else {})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        self.mark, self.best = self._point(state, "mark"), self._point(state, "best")
        if not state["known"] or len(state["order"]) > len(self.s):
            return
        self.known, self.order = True, [int(row) for row in state["order"]]
        count = len(self.order)
        rows = {"s": self.s[:count], "y": self.y[:count], "weights": self.weights, "gradient": self.gradient}
        for name, tensor in rows.items():
            self._rows_saved.fill(tensor, state, name, "Secant")
        self._lengths[:count] = state["lengths"].cpu().numpy()
        self._sy[:count, :count] = state["sy"].cpu().numpy()

    def _point(self, state: dict[str, Any], name: str) -> Point | None:
        if not self._rows_saved.held(state, f"{name}_weights"):
            return None
        weights, gradient = torch.zeros_like(self.weights), torch.zeros_like(self.gradient)
        for tensor, of in ((weights, "weights"), (gradient, "gradient")):
            self._rows_saved.fill(tensor, state, f"{name}_{of}", "Secant")
        return weights, gradient


def _solve(triangle: Tensor, right: Tensor, upper_triangle: bool) -> Tensor:
    """The two loops of L-BFGS are triangular systems of s_i . y_j."""
    solution: Tensor = torch.linalg.solve_triangular(triangle, right.unsqueeze(1), upper=upper_triangle)
    return solution.squeeze(1)
