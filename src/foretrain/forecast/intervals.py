"""Intervals around forecasts, from how wrong forecasts in the same situation were: of own runs, or of public ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.forecast.history import CALIBRATED_FROM, FinishedRun
from foretrain.forecast.table import QUANTILES

_MOVE = {"transfer": 0.02}
_OTHER_MOVE = 0.2
_NOISE = 2.0
_LEAST = 2e-4
_FLAT, _FALLEN = 0.1, 0.05
"""A loss that has fallen by much less than the second share may still fall by the first."""
PROBABILITIES = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.65, 0.8, 0.9, 0.95, 0.975, 0.99)
_EDGES = (0.2, 0.4, 0.67)
_WIDEST = (-30.0, -20.0, -15.0, -10.0, -5.0, -2.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0)
_BEYOND = 0.5
_NEAR = 1.6
"""Residuals of own runs count where their progress differs by less than this factor."""


@dataclass(frozen=True)
class ForecastSituation:
    """What the error of a forecast depends on."""

    way: str
    """How the forecast was made: transfer, drop, law, unknown."""
    phase: str
    """before: the rate is still to fall; falling; constant: it does not fall, or nobody knows."""
    progress: float
    """Share of the steps that are done."""
    move: float
    """How far the loss is still to go."""
    noise: float
    """How far single losses lie from what was fitted."""
    fallen: float
    """How far the loss has fallen so far, in shares of `level`."""
    level: float
    """What the loss is measured by."""
    positive: bool
    """All losses are above 0: errors are shares then."""

    @property
    def unit(self) -> float:
        """Return the forecast's own guess of its error, in the unit of the loss."""
        move = _MOVE.get(self.way, _OTHER_MOVE) * self.move
        still = _FLAT * math.exp(-self.fallen / _FALLEN) * (1 - self.progress)
        return math.hypot(move, _NOISE * self.noise, _LEAST * self.level, still * self.level)


def normalised(truth: float, loss: float, situation: ForecastSituation) -> float:
    """Return how wrong a forecast was, in units of its own guess; of the logarithm where losses are above 0."""
    if situation.positive and truth > 0 and loss > 0:
        return math.log(truth / loss) * loss / situation.unit
    return (truth - loss) / situation.unit


def around(
    loss: float, situation: ForecastSituation, level: float, runs: Sequence[FinishedRun] = ()
) -> tuple[float, float, bool]:
    """Return the ends of the interval, and whether it is made from enough own runs. runs: finished ones of the same
    kind; how wrong forecasts of others were says nothing of this one."""
    own = _own_errors(situation, runs)
    if len(own) >= CALIBRATED_FROM:
        return (*_ends(loss, situation, *_conformal(own, level)), True)
    tail = (1 - level) / 2
    quantiles = public_quantiles(situation)
    below, above = (float(value) for value in np.interp([tail, 1 - tail], PROBABILITIES, quantiles))
    return (*_ends(loss, situation, below, above), False)


def public_quantiles(situation: ForecastSituation) -> tuple[float, ...]:
    """Return how wrong forecasts of public runs were in this situation, at `PROBABILITIES`."""
    place = bin_of(situation.progress)
    for key in ((situation.way, situation.phase, place), (situation.way, "any", place)):
        if key in QUANTILES:
            return QUANTILES[key]
    return _WIDEST


def bin_of(progress: float) -> int:
    """Return the bin of progress whose errors are looked at together."""
    return int(np.searchsorted(_EDGES, progress))


def _own_errors(situation: ForecastSituation, runs: Sequence[FinishedRun]) -> list[float]:
    """Return one error of each own run: of the forecast whose progress is nearest to this, if it is near enough."""
    errors = []
    falling = situation.phase == "falling"
    for run in runs:
        alike = [r for r in run.residuals if r.method == situation.way and r.decaying == falling and r.progress > 0]
        near = min(alike, key=lambda r: abs(math.log(r.progress / max(situation.progress, 1e-9))), default=None)
        if near is not None and abs(math.log(near.progress / max(situation.progress, 1e-9))) < math.log(_NEAR):
            errors.append(near.error)
    return errors


def _conformal(errors: list[float], level: float) -> tuple[float, float]:
    """Return the ends between which the next error lies with probability `level`, if runs are exchangeable."""
    ordered = sorted(errors)
    count = len(ordered)
    outside = math.floor((1 - level) / 2 * (count + 1))
    if outside >= 1:
        return ordered[outside - 1], ordered[count - outside]
    wider = _BEYOND  # too few runs for this level: beyond the farthest
    return ordered[0] - wider * abs(ordered[0]), ordered[-1] + wider * abs(ordered[-1])


def _ends(loss: float, situation: ForecastSituation, below: float, above: float) -> tuple[float, float]:
    unit = situation.unit
    below, above = min(below, 0.0), max(above, 0.0)
    if situation.positive and loss > 0:
        return loss * math.exp(max(below * unit / loss, -50.0)), loss * math.exp(min(above * unit / loss, 50.0))
    return loss + below * unit, loss + above * unit
