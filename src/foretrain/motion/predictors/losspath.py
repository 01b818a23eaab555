"""Forecast of the smoothed loss: the recent trend, continued as far as such trends went on so far in this run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foretrain.motion.predictors.base import Array, Situation
from foretrain.motion.predictors.evidence import HORIZONS, Share
from foretrain.motion.records import HORIZONS_IN_WINDOWS
from foretrain.persist.stateful import Stateful

TREND_KEEP = 2 / 3
"""What the trend keeps per window: about the last three windows. Chosen."""
PERSISTENCE = 0.9
"""Per window, of a trend nothing is known about. Chosen: trends of a loss fade over about ten windows."""
ERROR_KEEP = 0.85
"""What the mean squared error keeps per window. Chosen: about the last seven windows."""


class LossPath(Stateful):
    """A trend of the loss per window; per horizon the share of it that came true, and the error that was left."""

    saved = ("shares", "errors", "past", "last_step", "trend", "trend_count")
    past: list[tuple[float, float]]
    last_step: int | None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        continued = (1 - PERSISTENCE**HORIZONS) / (1 - PERSISTENCE)
        self.prior = continued / HORIZONS
        self.shares = Share(HORIZONS.shape, 1.0, 2.0, 0.95, (-0.5, 1.5))
        self.errors = np.zeros((2, len(HORIZONS)))  # squared error, count
        self.past = []  # loss and trend at the end of each of the last windows
        self.last_step = None
        self.trend = 0.0
        self.trend_count = 0.0

    def observe(self, situation: Situation) -> None:
        """At the end of every window. After a gap (a move) the past is no longer comparable and starts anew."""
        if not math.isfinite(situation.loss):
            return
        if self.last_step is not None and situation.step - self.last_step != situation.window:
            self.past.clear()
        self.last_step = situation.step
        if self.past:
            self._learn(situation.loss)
            change = situation.loss - self.past[-1][0]
            self.trend = TREND_KEEP * self.trend + (1 - TREND_KEEP) * change
            self.trend_count = TREND_KEEP * self.trend_count + (1 - TREND_KEEP)
        self.past.append((situation.loss, self._trend()))
        del self.past[: -HORIZONS_IN_WINDOWS[-1] - 1]

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> tuple[Array, Array]:
        """Expected loss and its standard deviation at each horizon."""
        windows = np.asarray(horizons, dtype=float) / situation.window
        known = np.array([0.0, *HORIZONS])
        changes = np.array([0.0, *(self._trend() * HORIZONS * self._value())])
        last = HORIZONS_IN_WINDOWS[-1]
        beyond = np.maximum(windows - last, 0.0)
        # Beyond what was ever scored the slope of the last stretch fades away.
        slope = (changes[-1] - changes[-2]) / (HORIZONS[-1] - HORIZONS[-2])
        change = np.interp(windows, known, changes) + slope * last * (1.0 - np.exp(-beyond / last))
        scored = self.deviations(situation.loss)
        deviation = np.interp(windows, known, np.array([0.0, *scored]))
        deviation = np.maximum(deviation, scored[0] * np.sqrt(np.minimum(windows, 1.0)))
        return situation.loss + change, deviation * np.sqrt(np.maximum(windows / last, 1.0))

    def deviations(self, loss: float) -> Array:
        """Per horizon of HORIZONS_IN_WINDOWS; where a horizon was not scored yet, as a random walk from the others."""
        squared, count = self.errors
        guess = (0.02 * abs(loss) + 1e-12) ** 2
        per_window = (float((squared / HORIZONS).sum()) + 0.3 * guess) / (float(count.sum()) + 0.3)
        return np.asarray(np.sqrt((squared + 0.3 * per_window * HORIZONS) / (count + 0.3)))

    def _trend(self) -> float:
        return self.trend / self.trend_count if self.trend_count > 0 else 0.0

    def _value(self) -> Array:
        return np.asarray(self.prior * self.shares.value())

    def _learn(self, loss: float) -> None:
        count = int(np.searchsorted(HORIZONS, len(self.past), side="right"))
        begun = np.array([self.past[-horizon] for horizon in HORIZONS_IN_WINDOWS[:count]])
        change = loss - begun[:, 0]
        guess = begun[:, 1] * (HORIZONS * self.prior)[:count]
        error = change - guess * self.shares.value()[:count]
        self.shares.add(guess * change, guess * guess, change * change, slice(count))
        self.errors[:, :count] *= ERROR_KEEP
        self.errors[:, :count] += (error * error, np.ones(count))
