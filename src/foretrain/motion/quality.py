"""Scores forecasts per horizon, against 'no change' and 'repeat the last displacement'."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from foretrain.motion.predictors.base import Followed, Forecast, score
from foretrain.motion.records import HORIZONS_IN_WINDOWS, LAST_WINDOW
from foretrain.persist.stateful import Stateful

_KEPT = 0.9
"""Share of the past that recent figures keep per forecast. Chosen: about the last ten count."""
_TIE = 1.05
"""Factor by which a predictor may be worse than repeating the last displacement. Chosen: nearly perfect ones tie."""


@dataclass
class _Tally:
    """Sums over forecasts of one horizon: over the whole run, and fading ones for decisions."""

    count: int = 0
    made: int = 0
    """Those of them that forecast a motion. Before it knows something, a predictor says "no change"."""
    cosine: float = 0.0
    norm_ratio: float = 0.0
    loss_error: float = 0.0
    error: float = 0.0
    repeat_error: float = 0.0
    square: float = 0.0
    recent_error: float = 0.0
    recent_repeat: float = 0.0
    recent_square: float = 0.0
    recent_variance: float = 0.0
    """Fading sum of squared differences of the error to the one before."""
    last_error: float = 1.0
    last_cosine: float = 0.0
    last_loss_error: float = 1.0


@dataclass
class Quality(Stateful):
    """Scores of forecasts, all of which were made before what they forecast."""

    saved = ("tallies",)

    window: int
    tallies: dict[int, _Tally] = field(default_factory=lambda: {n: _Tally() for n in HORIZONS_IN_WINDOWS})

    def add(self, followed: Followed, forecast: Forecast) -> None:
        """Score one forecast. All windows count alike, however far the weights moved in them."""
        tally = self.tallies[followed.horizon // self.window]
        coefficients = forecast.at(followed.horizon)
        mine = score(followed, coefficients)
        repeat = np.zeros_like(coefficients)
        repeat[:, LAST_WINDOW] = followed.horizon / self.window
        repeated = score(followed, repeat)
        expected = float(np.interp(followed.horizon, forecast.horizons, forecast.loss))
        values = (mine.cosine, mine.norm_ratio, mine.r2, repeated.r2)
        if not np.isfinite(values).all():
            values = (0.0, 0.0, -10.0, 0.0)  # a forecast that is no number is worse than none
        cosine, norm_ratio, r2, repeat_r2 = values
        loss_error = abs(expected - followed.loss) / max(abs(followed.loss), 1e-12)
        loss_error = min(loss_error, 10.0) if np.isfinite(loss_error) else 10.0
        tally.count += 1
        tally.made += bool(np.any(coefficients))
        tally.cosine += cosine
        tally.norm_ratio += min(norm_ratio, 1e6)
        tally.loss_error += loss_error
        error, repeat_error = (min(1 - value, 100.0) for value in (r2, repeat_r2))
        tally.error += error
        tally.repeat_error += repeat_error
        tally.square += 1.0
        change = (error - tally.last_error) ** 2 / 2 if tally.count > 1 else 0.0
        fading = {"recent_error": error, "recent_repeat": repeat_error, "recent_square": 1.0, "recent_variance": change}
        for name, value in fading.items():
            setattr(tally, name, _KEPT * getattr(tally, name) + value)
        tally.last_error, tally.last_cosine, tally.last_loss_error = error, cosine, loss_error

    def r2(self, windows: int) -> float:
        """The recent share of the motion that was forecast at this horizon, or the nearest scored one; nan before."""
        tally = self._nearest(windows)
        return 1 - tally.recent_error / tally.recent_square if tally else float("nan")

    def repeat_r2(self, windows: int) -> float:
        """The recent share of the motion that repeating the last displacement would have forecast."""
        tally = self._nearest(windows)
        return 1 - tally.recent_repeat / tally.recent_square if tally else float("nan")

    def cosine(self, windows: int) -> float:
        tally = self._nearest(windows)
        return tally.last_cosine if tally else float("nan")

    def spread(self, windows: int) -> float:
        """How much the error differs from one forecast to the next."""
        tally = self._nearest(windows)
        return math.sqrt(tally.recent_variance / tally.recent_square) if tally else 1.0

    def trusted(self, windows: int) -> bool:
        """Whether forecasts of this horizon were lately better than no change and no worse than repeating."""
        tally = self._nearest(windows)
        if tally is None:
            return False
        return tally.recent_error < tally.recent_square and tally.recent_error <= _TIE * tally.recent_repeat + 1e-9

    def _nearest(self, windows: int) -> _Tally | None:
        known = [n for n, tally in self.tallies.items() if tally.count]
        return self.tallies[min(known, key=lambda n: (abs(n - windows), n))] if known else None

    def summary(self) -> dict[str, dict[str, float | int]]:
        """Means over the whole run, per horizon in steps."""
        return {
            str(windows * self.window): {
                "count": tally.count,
                "made": tally.made,
                "cosine": round(tally.cosine / tally.count, 4),
                "norm_ratio": round(tally.norm_ratio / tally.count, 4),
                "r2": round(1 - tally.error / tally.count, 4),
                "repeat_r2": round(1 - tally.repeat_error / tally.count, 4),
                "no_change_r2": 0.0,
                "loss_error": round(tally.loss_error / tally.count, 4),
            }
            for windows, tally in self.tallies.items()
            if tally.count
        }
