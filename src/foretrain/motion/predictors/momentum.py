"""Geometric continuation: the weights go on along an average of their past displacements, each window a bit less."""

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
    usable,
    usable_pairs,
)
from foretrain.motion.predictors.losspath import LossPath
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, LAST_WINDOW
from foretrain.persist.stateful import Stateful

FORGETTING = 0.95
"""What a window keeps of the evidence before it. Chosen: about 20 windows count."""
GROUP_STRENGTH = 4.0
"""Windows' worth of evidence with which a group is pulled to what holds for all. Chosen."""
SHARPNESS = 6.0
"""How strongly the direction that explained most is preferred to the others. Chosen: nearly a choice
of one, but without a jump where two are alike."""
SURE = 1e-6
"""Least share that is taken to be unexplained. Chosen: far above rounding in double precision."""
WIDEST = len(DIRECTIONS) - 1


class MomentumPredictor(Stateful, Predictor):
    """Displacement over n windows = direction x first x (1 - rho^n) / (1 - rho), in closed form.

    `first` is the least-squares share of a direction in the window that followed; `rho`, the persistence, compares two
    windows in a row along a mean that knows neither of them, so that noise does not bias it.
    """

    name = "momentum"
    saved = ("losses", "_ageing", "_pooled", "_persistence", "_scale", "_groups")
    _groups: Array | None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.losses = LossPath()
        self._ageing = Ageing()
        self._pooled = np.zeros((3, len(DIRECTIONS)))  # dots, own squares, weight: relative to the square that followed
        self._persistence = np.zeros(2)
        self._scale = Share(HORIZONS.shape, 1.0, 1.0, 0.9)
        self._groups = None  # [2, G, R] the first two rows of `_pooled`, per group
        self._table: Array | None = None

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        if not usable(situation):
            return no_motion(situation, horizons, situation.loss, 0.0)
        loss, deviation = self.losses.forecast(situation, horizons)
        if self._table is None:
            return Forecast(tuple(horizons), no_motion(situation, horizons, 0, 0).coefficients, loss, deviation)
        check_groups(self._table.shape[1], situation)
        windows = in_windows(horizons, situation.window)
        coefficients = between(self._table, windows)
        scale = np.interp(windows, HORIZONS, chained(self._scale))
        return Forecast(tuple(horizons), coefficients * scale[:, None, None], loss, deviation)

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        if not usable(situation):
            return
        check_groups(0 if self._groups is None else self._groups.shape[1], situation)
        self.losses.observe(situation)
        self._pooled *= FORGETTING
        self._persistence *= FORGETTING
        if self._groups is not None:
            self._groups *= FORGETTING
        for one, index in usable_pairs(followed):
            self._learn(situation, one, index)
        self._table = self._continue()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        super().load_state_dict(state)
        self._table = self._continue()

    def _learn(self, situation: Situation, followed: Followed, index: int) -> None:
        gram, dots, square = followed.situation.gram, followed.dots, followed.square
        total = float(square.sum())
        if self._table is not None:
            guess = self._table[HORIZONS_IN_WINDOWS[index]]
            self._scale.add(float(np.vdot(guess, dots)), energy(guess, gram), total, index, self._maturity())
        if index != 0:
            return
        squares = np.diagonal(gram, axis1=1, axis2=2)
        self._pooled += np.stack([dots.sum(0) / total, squares.sum(0) / total, np.ones(len(DIRECTIONS))])
        each = 1.0 / np.where(square > 0, square, np.inf)[:, None]
        if self._groups is None:
            self._groups = np.zeros((2, *dots.shape))
        self._groups += np.stack([dots * each, squares * each])
        if followed.situation.step + followed.horizon == situation.step:
            self._ageing.add(situation, followed)
        # The widest mean without the last window in it: a witness whose noise is in neither of the two windows.
        new = 1.0 - float(self._ageing.keep()[-1])
        second = float((dots[:, WIDEST] - new * dots[:, LAST_WINDOW]).sum()) / total
        first = float((gram[:, WIDEST, LAST_WINDOW] - new * gram[:, LAST_WINDOW, LAST_WINDOW]).sum()) / total
        self._persistence += (np.copysign(second, second * first), abs(first))

    def _maturity(self) -> float:
        return mature(float(self._pooled[2, 0]))

    def _continue(self) -> Array | None:
        """[windows + 1, G, R] coefficients after 0, 1, 2 ... windows."""
        if self._groups is None or self._pooled[2, 0] <= 0:
            return None
        dots, own, weight = self._pooled
        explained = (dots * dots / np.maximum(own * weight, 1e-30)).clip(0.0, 1.0)
        best = float(explained.max())
        if best <= 0:
            return None
        # In noise the shares explained tell the directions apart, in exact motion only the errors do.
        preference = (explained / best) ** SHARPNESS * ((1.0 + SURE - best) / (1.0 + SURE - explained)) ** 2
        preference /= preference.sum()
        # What is left unexplained pulls towards zero; an exact continuation is not pulled at all.
        left = max(1.0 - best, SURE)
        first = dots / np.maximum(own * (1.0 + left / weight), 1e-30)
        pull = GROUP_STRENGTH * left * self._groups[1] / weight
        groups = (self._groups[0] + pull * first) / np.maximum(self._groups[1] + pull, 1e-30)
        groups = groups.clip(-2.0, 2.0)
        rho = self._rho(float(first[LAST_WINDOW]), left)
        windows = np.arange(LONGEST + 1)
        geometric = windows.astype(float) if abs(1.0 - rho) < 1e-9 else (1.0 - rho**windows) / (1.0 - rho)
        return np.asarray(geometric[:, None, None] * (preference * groups))

    def _rho(self, repeat: float, left: float) -> float:
        """Persistence; where the witness saw little motion in common, that of the last window (never too long)."""
        along, own = self._persistence
        doubt = left * 0.02 * float(self._pooled[2, 0])
        return float(np.clip((along + doubt * repeat) / (own + doubt + 1e-30), -1.0, 1.0))
