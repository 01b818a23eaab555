"""Ridge regression of the displacement that followed on the basis, per group, with forgetting, in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation
from foretrain.motion.predictors.evidence import (
    HORIZONS,
    LONGEST,
    Ageing,
    Share,
    between,
    chained,
    check_groups,
    energy,
    in_windows,
    mature,
    no_motion,
    quadratic,
    usable,
    usable_pairs,
)
from foretrain.motion.predictors.losspath import LossPath
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS
from foretrain.persist.stateful import ArrayBuffer, Stateful, entry

SIZE = len(DIRECTIONS)
LAST = HORIZONS_IN_WINDOWS[-1]
SURE = 1e-6
"""Least pull towards the prior, relative to its full strength: directions may be exactly parallel.
Chosen: far above rounding in double precision."""

LONG_PULL = 3.0
"""How much more than `l2` it takes to correct the longer horizons: the motions seen so far overlap and are few.
Chosen."""
YOUNG = 8.0
"""Windows' worth of evidence below which the share left unexplained is refined twice per window, not once.
Chosen: five windows are to be enough in exact motion (its tests)."""
_PLACES = np.interp(np.arange(LONGEST + 1), np.array([0, *HORIZONS]), np.arange(len(HORIZONS) + 1.0))
"""The place of each number of windows between the horizons."""


class LinearPredictor(Stateful, Predictor):
    """Coefficients that fitted the past windows best, each level of detail pulled towards the coarser one.

    One window ahead: zero <- all groups together <- each group. Further ahead: the one-window fit applied again and
    again to the basis as it will stand, corrected by the longer motions that were seen. What is pulled is pulled in
    proportion to what the fit leaves unexplained: hard in noise, not at all where motion repeats exactly. Last, the
    whole is scaled by how far such forecasts came true.
    """

    name = "linear"
    saved = ("losses", "_ageing", "_scale", "_own", "_own_together", "_sums", "_found", "_left", "_change")
    _sums: ArrayBuffer

    def __init__(self, l2: float = 1.0, forgetting: float = 0.97) -> None:
        self.l2, self.forgetting = l2, forgetting
        self.reset()

    def reset(self) -> None:
        self.losses = LossPath()
        self._ageing = Ageing()
        self._scale = Share(HORIZONS.shape, 1.0, 1.0, 0.9)
        self._own_together = Share((), 0.0, 1.0, 0.9)
        self._built(0)

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        if not usable(situation):
            return no_motion(situation, horizons, situation.loss, 0.0)
        loss, deviation = self.losses.forecast(situation, horizons)
        return Forecast(tuple(horizons), self.coefficients(situation, horizons), loss, deviation)

    def coefficients(self, situation: Situation, horizons: Sequence[int]) -> Array:
        """[horizons, G, R]"""
        if self._table is None:
            return np.zeros((len(horizons), *situation.gram.shape[:2]))
        check_groups(len(self._found) - 1, situation)
        windows = in_windows(horizons, situation.window)
        furthest = float(windows.max())
        table = self._table if furthest <= LAST else self._corrected(self._roll(int(np.ceil(furthest))))
        scale = np.interp(windows, HORIZONS, self._scales)
        return between(table, windows) * scale[:, None, None]

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        if usable(situation):
            self.learn(situation, usable_pairs(followed))

    def learn(self, situation: Situation, followed: Sequence[tuple[Followed, int]]) -> None:
        """`observe`, for whoever has checked already."""
        check_groups(len(self._found) - 1, situation)
        self.losses.observe(situation)
        self._sums *= self.forgetting
        for one, index in followed:
            self._learn(situation, one, index)
        if len(self._found) > 1 and self._weight[0] > 0:
            self._fit()
            self._derive()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._built(len(entry(state, "found", type(self).__name__)) - 1)
        super().load_state_dict(state)
        if len(self._found) > 1 and self._weight[0] > 0:
            self._derive()

    def _built(self, groups: int) -> None:
        """The number of groups is known from the first observation on. Row 0 of the sums is all groups together."""
        rows, longer = groups + 1, len(HORIZONS)
        shapes = ((rows, SIZE, SIZE), (rows, SIZE), (1,), (longer, SIZE, SIZE), (longer, SIZE), (longer,))
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        # Over past windows, each relative to the square of what followed. One buffer, because all of it fades at once.
        self._sums = np.zeros(ends[-1])
        parts = (part.reshape(shape) for part, shape in zip(np.split(self._sums, ends[:-1]), shapes, strict=True))
        self._gram, self._dots, self._weight, self._left_gram, self._left_dots, self._left_weight = parts
        self._found = np.zeros((rows, SIZE))
        self._left = np.ones((rows, 1))
        self._change = np.zeros((longer + 1, SIZE))
        self._own = Share((groups,), 0.0, 2.0, 0.9)
        self._table: Array | None = None
        self._scales = np.ones(longer)

    def _learn(self, situation: Situation, followed: Followed, index: int) -> None:
        gram, dots, square = followed.situation.gram, followed.dots, followed.square
        check_groups(len(self._found) - 1, followed.situation)
        if len(self._found) == 1:
            self._built(len(dots))
        total = float(square.sum())
        maturity = mature(float(self._weight[0]))
        if self._table is not None:
            guess = self._table[HORIZONS_IN_WINDOWS[index]]
            self._scale.add(float(np.vdot(guess, dots)), energy(guess, gram), total, index, maturity)
        if index == 0:
            self._learn_one_window(gram, dots, square, maturity)
            if followed.situation.step + followed.horizon == situation.step:
                self._ageing.add(situation, followed)
        elif self._table is not None:
            self._learn_longer(gram, dots, total, index, maturity)

    def _learn_one_window(self, gram: Array, dots: Array, square: Array, maturity: float) -> None:
        total = square.sum()
        if self._table is not None:
            detail = self._found[1:] - self._found[0]
            along = (detail * (dots - gram @ self._found[0])).sum(-1)
            own = quadratic(detail, gram)
            self._own.add(along, own, square, weight=maturity)
            self._own_together.add(along.sum(), own.sum(), total, weight=maturity)
        each = 1.0 / np.where(square > 0, square, np.inf)
        self._gram[0] += np.add.reduce(gram, 0) / total
        self._dots[0] += np.add.reduce(dots, 0) / total
        self._gram[1:] += gram * each[:, None, None]
        self._dots[1:] += dots * each[:, None]
        self._weight += 1.0

    def _learn_longer(self, gram: Array, dots: Array, total: float, index: int, maturity: float) -> None:
        """What the continuation of the one-window fit leaves over."""
        rolled = self._rolled[HORIZONS_IN_WINDOWS[index]]
        self._left_gram[index] += maturity / total * gram.sum(0)
        self._left_dots[index] += maturity / total * (dots - (gram @ rolled[..., None])[..., 0]).sum(0)
        self._left_weight[index] += maturity
        regular = self._left_gram[index].copy()
        size = np.einsum("ii->i", regular)
        pull = LONG_PULL * self.l2 / max(float(self._left_weight[index]), 1e-3)
        size += (pull + 1e-9) * size + 1e-12 * size.max() + 1e-300
        self._change[index + 1] = np.linalg.solve(regular, self._left_dots[index])

    def _fit(self) -> None:
        """Least squares, pulled to the prior by `l2` windows' worth times the share that is left unexplained.

        That share is only known after the fit: each window goes on from what the last one found.
        """
        weight = float(self._weight[0])
        gram, dots = self._gram, self._dots
        regular = gram.copy()
        diagonal = np.einsum("gii->gi", regular)
        plain = diagonal.copy()
        size = plain + 1e-12 * plain.max(-1, keepdims=True) + 1e-300
        for _ in range(2 if weight < YOUNG else 1):
            pull = (self.l2 / weight * self._left + 1e-9) * size
            diagonal[...] = plain + pull
            aim = dots + pull * self._found[0]
            aim[0] = dots[0]
            self._found[...] = np.linalg.solve(regular, aim[..., None])[..., 0]
            fitted = (gram @ self._found[..., None])[..., 0]
            unexplained = 1.0 + (self._found * (fitted - 2.0 * dots)).sum(-1, keepdims=True) / weight
            self._left[...] = unexplained.clip(SURE, 1.0)

    def _derive(self) -> None:
        together = self._found[0]
        share = self._own.value(self._own_together.value())[:, None]
        self._first = together + share * (self._found[1:] - together)
        self._rolled = self._roll(LAST)
        self._table = self._corrected(self._rolled)
        self._scales = chained(self._scale)

    def _roll(self, windows: int) -> Array:
        """[windows + 1, G, R] from one window to many."""
        return self._ageing.roll(self._first, min(windows, LONGEST))

    def _corrected(self, rolled: Array) -> Array:
        """With what the longer motions said about it so far."""
        return np.asarray(rolled + between(self._change, _PLACES[: len(rolled)])[:, None, :])
