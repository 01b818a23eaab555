"""Dense quasi-Newton methods as baselines, in fp64: BFGS, self-scaled BFGS and self-scaled Broyden.

Formulas: Al-Baali (1998), Al-Baali and Khalfan (2005), as Urban, Stefanou and Pons (2025) use them on physics-informed
networks. One product with the matrix and one update of it in place per iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[float, Tensor]]
"""The loss at a point, and its gradient there."""
Variant = Literal["bfgs", "ssbfgs", "ssbroyden"]
Search = Literal["armijo", "wolfe"]

_FALL, _CURVE = 1e-4, 0.9
"""Of the slope: what a step has to lower the loss by, and how much of the slope it may leave. The usual ones."""
_MOST_TRIES = 30


@dataclass
class Point:
    x: Tensor
    loss: float
    gradient: Tensor


class Broyden:
    """Minimises a function of one vector; each `step` is one iteration."""

    def __init__(self, start: Tensor, variant: Variant, scaled: bool, search: Search) -> None:
        """scaled: the first matrix is the identity times what the first step suggests, not the identity itself."""
        self.x, self.variant, self.scaled, self.search = start, variant, scaled, search
        self.point: Point | None = None
        self._begin()

    def _begin(self) -> None:
        self.matrix = torch.eye(len(self.x), dtype=self.x.dtype, device=self.x.device)
        self.fresh = True
        self.turned: Tensor | None = None
        """The matrix times the gradient."""

    def forget_point(self) -> None:
        """The function has changed; the matrix stays."""
        self.point = self.turned = None

    def step(self, evaluate: Evaluate) -> bool:
        """False: no step lowers the loss any more, not even along the gradient."""
        here = self.point or Point(self.x, *evaluate(self.x))
        while True:
            turned = self.matrix @ here.gradient if self.turned is None else self.turned
            slope = -float(here.gradient @ turned)
            first = min(1.0, 1 / float(here.gradient.norm().clamp(min=1e-300))) if self.fresh else 1.0
            found = self._look(evaluate, here, -turned, slope, first) if slope < 0 else None
            if found is not None:
                there, length = found
                self._learn(here, there, turned, length)
                self.x, self.point = there.x, there
                return True
            if self.fresh:
                self.point = here
                return False
            self._begin()

    # --- how far -----------------------------------------------------------------------------------------------------

    def _look(
        self, evaluate: Evaluate, here: Point, direction: Tensor, slope: float, length: float
    ) -> tuple[Point, float] | None:
        """A point that is low enough, and for Wolfe's condition not too steep: by halving and doubling. If none meets
        both, the lowest that meets the first."""
        low, high, best = 0.0, math.inf, None
        for _ in range(_MOST_TRIES):
            x = here.x + length * direction
            there = Point(x, *evaluate(x))
            if not there.loss <= here.loss + _FALL * length * slope:
                bend = there.loss - here.loss - length * slope
                high, guess = length, -slope * length**2 / (2 * bend) if math.isfinite(bend) and bend > 0 else 0.0
                width = high - low
                length = min(max(guess, low + 0.1 * width), low + 0.5 * width)
            elif self.search == "armijo" or float(there.gradient @ direction) >= _CURVE * slope:
                return there, length
            else:
                if best is None or there.loss < best[0].loss:
                    best = there, length
                low, length = length, 2 * length if high == math.inf else (length + high) / 2
        return best

    # --- the matrix --------------------------------------------------------------------------------------------------

    def _learn(self, here: Point, there: Point, turned: Tensor, length: float) -> None:
        """H becomes (H - Hy (Hy)^T / yHy + phi yHy v v^T) / tau + s s^T / ys, with v = s / ys - Hy / yHy."""
        s, y = -length * turned, there.gradient - here.gradient
        ys = float(y @ s)
        product = self.matrix @ there.gradient
        if not ys > 1e-14 * float(y.norm() * s.norm()):
            self.turned = product  # as after a step that Armijo's condition alone let pass
            return
        hy = product - turned
        yhy = float(y @ hy)
        if not yhy > 0:
            self.turned = product
            return
        b, h = -length * float(s @ here.gradient) / ys, yhy / ys
        tau, phi = self._scaling(b, h, float(y @ y) / ys)
        ss, sh, hh = 1 / ys + phi * yhy / ys**2 / tau, -phi / ys / tau, (phi - 1) / yhy / tau
        sides = torch.stack([s, hy], 1)
        weighed = sides @ torch.tensor([[ss, sh], [sh, hh]], dtype=s.dtype, device=s.device)
        self.matrix.addmm_(weighed, sides.T, beta=1 / tau)
        self.turned = product / tau + weighed @ (sides.T @ there.gradient)
        self.fresh = False

    def _scaling(self, b: float, h: float, stiffness: float) -> tuple[float, float]:
        """tau and phi. b: s^T H^-1 s / ys; h: yHy / ys."""
        begins = self.fresh and self.scaled
        if self.variant != "ssbroyden":
            own = 1.0 if self.variant == "bfgs" else min(1.0, 1 / b)
            return stiffness if begins else own, 1.0
        a = max(h * b - 1, 1e-16)
        least = min(1.0, h * (1 - math.sqrt(a / (1 + a))))
        theta = max((least - 1) / a, min(1 / max(least, 1e-300), (1 - b) / b))
        sigma = 1 + theta * a
        phi = (1 - theta) / sigma
        if begins:
            return h / sigma, phi
        share, spread = min(1.0, 1 / b), abs(sigma) ** (1 / (1 - len(self.x)))
        return (min(share * spread, sigma) if theta <= 0 else share * min(spread, 1 / theta)), phi
