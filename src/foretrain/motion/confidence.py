"""Estimates a calibrated probability that the next move will be kept.

Logistic regression on a few numbers without a unit, fitted to the last moves that were kept or not and to a prior that
says what such numbers usually mean. How well it is calibrated is measured on answers given before each outcome.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.persist.stateful import Stateful

REMEMBERED = 200
"""Outcomes that are learned from, and over which the calibration error is measured. Chosen: more
than most runs have moves, few enough to fit again after each."""
ENOUGH = 10
"""Outcomes from which a calibration error is given. Chosen: two bins of five."""
FORGETTING = 0.998
"""Factor of the weight of an outcome per later one, so that the answer follows a run that changes. Chosen: the oldest
of 200 still counts two thirds."""
PRIOR = (-1.85, 3.8, 0.4, -0.5, -0.5)
"""Weights of 1, R2, signed square of the cosine, disagreement and spread without any outcome. Chosen: an R2 of 0.9
gives more than 0.85, an R2 of 0 less than 0.2 (tests/motion/test_confidence.py)."""
PRIOR_VARIANCE = (1.0, 4.0, 1.0, 1.0, 1.0)
"""How far outcomes may move those weights. Chosen: the one of R2 has the most to learn."""
MOST_SURE = 0.995
"""No probability is ever nearer to 0 or 1. Chosen: one in 200, the number of outcomes that are remembered."""


@dataclass(frozen=True, slots=True)
class ConfidenceFeatures:
    """What the next move can be judged by. None of it changes when the loss is multiplied by a number."""

    error: float
    """Relative error 1 - R2 of the last forecast at the nearest horizon; 1 where nothing is known."""
    cosine: float
    """Cosine of the predicted and the real displacement, for the same forecast."""
    disagreement: float = 0.0
    """Disagreement of an ensemble of predictors, relative to the move."""
    spread: float = 0.0
    """Standard deviation of the last few errors: how stable the predictor's success is."""

    def vector(self) -> tuple[float, float, float, float, float]:
        """The numbers that are fitted, each within [-1, 1]. What is not finite counts as the worst."""
        r2 = 1.0 - self.error
        r2 = min(max(r2, -1.0), 1.0) if r2 == r2 else -1.0
        cosine = min(max(self.cosine, -1.0), 1.0) if self.cosine == self.cosine else 0.0
        return 1.0, r2, cosine * abs(cosine), _share(self.disagreement), _share(self.spread)


@dataclass(frozen=True, slots=True)
class PastMove:
    """A move as it looked beforehand, and what became of it."""

    features: tuple[float, float, float, float, float]
    kept: bool
    weight: float
    said: float
    """The probability given before the outcome was known."""


class Confidence(Stateful):
    """`estimate` before a move, `learn` when it was kept or undone."""

    saved = ("weights", "outcomes", "history")
    weights: list[float]
    history: deque[PastMove]

    def __init__(self) -> None:
        self.weights = list(PRIOR)
        self.outcomes = 0
        """How many were ever learned from."""
        self.history = deque(maxlen=REMEMBERED)

    def estimate(self, features: ConfidenceFeatures) -> float:
        """Probability that a move in this situation will be kept."""
        x, w = features.vector(), self.weights
        return _probability(w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3] + w[4] * x[4])

    def learn(self, features: ConfidenceFeatures, kept: bool, weight: float = 1.0) -> None:
        """Take in an outcome. A weight below 1 is for weaker evidence, such as a move that was not made."""
        if not 0 < weight < math.inf:
            return
        self.history.append(PastMove(features.vector(), kept, weight, self.estimate(features)))
        self.outcomes += 1
        self._fit()

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the answers before each of the last 200 outcomes. Some 0.05 of it is chance,
        even for a perfect forecaster. NaN before 10 outcomes."""
        if len(self.history) < ENOUGH:
            return math.nan
        return expected_calibration_error([(outcome.said, outcome.kept) for outcome in self.history])

    def reliability(self) -> list[dict[str, float | int]]:
        """Compare what was said beforehand with how often it came true, in the bins of the calibration error."""
        if len(self.history) < ENOUGH:
            return []
        return [
            {
                "said": round(sum(said for said, _ in part) / len(part), 4),
                "kept": round(sum(kept for _, kept in part) / len(part), 4),
                "count": len(part),
            }
            for part in _bins([(outcome.said, outcome.kept) for outcome in self.history])
        ]

    def after_load(self) -> None:
        if len(self.weights) != len(PRIOR):
            raise ValueError(f"{len(self.weights)} weights, not {len(PRIOR)}")

    def _fit(self) -> None:
        """Find the most probable weights given prior and outcomes, by Newton's method from the present ones."""
        features = np.asarray([outcome.features for outcome in self.history])
        kept = np.asarray([float(outcome.kept) for outcome in self.history])
        age = np.arange(len(self.history) - 1, -1, -1)
        worth = np.asarray([outcome.weight for outcome in self.history]) * FORGETTING**age
        prior, precision = np.asarray(PRIOR), 1 / np.asarray(PRIOR_VARIANCE)
        weights = np.asarray(self.weights)
        for _ in range(4):
            said = 1 / (1 + np.exp(-(features @ weights).clip(-30, 30)))
            slope = features.T @ (worth * (kept - said)) - precision * (weights - prior)
            curvature = (features.T * (worth * said * (1 - said))) @ features + np.diag(precision)
            step = np.linalg.solve(curvature, slope)
            weights = weights + step / max(1.0, float(np.abs(step).max()))  # Newton can overshoot from far away
        self.weights = [float(weight) for weight in weights]


def expected_calibration_error(pairs: Sequence[tuple[float, bool]]) -> float:
    """Mean distance of said and seen frequency over two to five bins of equal size, of 50 outcomes where possible."""
    total = sum(abs(sum(probability - kept for probability, kept in part)) for part in _bins(pairs))
    return total / len(pairs)


def _bins(pairs: Sequence[tuple[float, bool]]) -> list[list[tuple[float, bool]]]:
    ordered = sorted(pairs, key=lambda pair: pair[0])
    bins = min(5, max(2, len(ordered) // 50))
    return [ordered[number * len(ordered) // bins : (number + 1) * len(ordered) // bins] for number in range(bins)]


def _probability(odds: float) -> float:
    if odds >= 0:
        value = 1 / (1 + math.exp(-min(odds, 50.0)))
    else:
        power = math.exp(max(odds, -50.0))
        value = power / (1 + power)
    return min(max(value, 1 - MOST_SURE), MOST_SURE)


def _share(value: float) -> float:
    """Map [0, inf) to [0, 1)."""
    return value / (1 + value) if 0 <= value < math.inf else float(not value < 0)
