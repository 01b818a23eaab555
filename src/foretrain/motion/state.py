"""Computes the training state once per window: 64 normalised numbers, from what was read from the device anyway."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foretrain.motion.features import FEATURES, KNOWN_SPREADS, Feature, describe
from foretrain.motion.losses import WindowLosses
from foretrain.motion.records import ForecastRecord, PhaseRecord, WindowRecord
from foretrain.persist.stateful import Stateful

__all__ = ["FEATURES", "KNOWN_SPREADS", "Feature", "StateEncoder", "describe"]

Array = NDArray[np.float64]

LARGEST = 10.0
"""Normalised values are clipped to this. Chosen: so far out a value only says "far out"."""


class StateEncoder(Stateful):
    """Turns records into the normalised state. Every call counts for the running mean and deviation."""

    saved = (
        *("log_gradient", "log_displacement", "previous_displacement", "previous_weights", "path"),
        *("last_step", "count", "mean", "square", "last"),
    )

    def __init__(self, window: int, losses: WindowLosses) -> None:
        """losses: the observer adds every window to them before it is encoded."""
        self.window = window
        self.losses = losses
        self.log_gradient = math.nan
        """Long average of the logarithm of the gradient norm: the baseline."""
        self.log_displacement = math.nan
        """Moving average of the logarithm of the displacement norm."""
        self.previous_displacement = math.nan
        self.previous_weights = math.nan
        self.path = 0.0
        self.last_step = 0
        self.count = 0
        self.mean: Array = np.zeros(len(FEATURES))
        self.square: Array = np.zeros(len(FEATURES))
        """Sum of squared deviations from the mean (Welford)."""
        self.last: Array = np.zeros(len(FEATURES))
        """The last finite values."""
        spreads = [KNOWN_SPREADS.get((item.group, item.name), (math.nan, math.nan)) for item in FEATURES]
        self._known_mean, self._known_deviation = np.asarray(spreads).T
        self._known = np.isfinite(self._known_mean)

    def encode(self, window: WindowRecord, forecast: ForecastRecord, phase: PhaseRecord) -> Array:
        """Return [64] normalised numbers. What is not finite keeps its last value."""
        skipped = window.step - self.last_step - len(window.losses)
        values = np.array(
            [
                *self._loss(),
                *self._gradient(window),
                *self._optimizer(window),
                *self._weights(window),
                *_predictor(forecast),
                *self._phase(window, phase, max(0, skipped)),
            ]
        )
        self.last_step = window.step
        finite = np.isfinite(values)
        self.last = values if finite.all() else np.where(finite, values, self.last)
        return self._normalised(self.last)

    def _normalised(self, values: Array) -> Array:
        self.count += 1
        before = values - self.mean
        self.mean = self.mean + before / self.count
        self.square = self.square + before * (values - self.mean)
        deviation = np.sqrt(self.square / self.count)
        deviation[deviation <= 1e-9 * np.abs(self.mean)] = math.inf  # rounding, not news
        centre = np.where(self._known, self._known_mean, self.mean)
        scale = np.where(self._known, self._known_deviation, deviation)
        return np.asarray(np.minimum(np.maximum((values - centre) / scale, -LARGEST), LARGEST))

    def _loss(self) -> list[float]:
        fit = self.losses.fit
        if fit is None:
            return [math.nan] * 13
        losses, rest = fit.losses, fit.rest
        spread = float(rest @ rest)
        changes = losses[1:] - losses[:-1]
        turns = float(np.count_nonzero(changes[1:] * changes[:-1] < 0)) / (len(losses) - 2)
        neighbours = float(rest[1:] @ rest[:-1]) / spread if spread > 0 else 0.0
        deviation = math.log(max(fit.scatter, 1e-12 * abs(fit.mean), 1e-30))
        short, _, long = averages = self.losses.averages
        levels = (float(losses[-1]), fit.mean, *averages, deviation, float(losses.min()), float(losses.max()))
        return [*levels, fit.slope, fit.curvature, turns, neighbours, short - long]

    def _gradient(self, window: WindowRecord) -> list[float]:
        norms = [norm for norm in window.gradient_norms if math.isfinite(norm)]
        if not norms:
            return [math.nan] * 9
        mean = sum(norms) / len(norms)
        log_norm = sum(_log(norm) for norm in norms) / len(norms)
        self.log_gradient = _blend(self.log_gradient, log_norm, 0.1)
        return [
            norms[-1],
            log_norm,
            mean,
            math.sqrt(sum((norm - mean) ** 2 for norm in norms) / len(norms)),
            log_norm - self.log_gradient,
            log_norm - _log(window.weight_norm),
            window.gradient_mean / max(window.gradient_std, 1e-30),
            _log(window.gradient_std),
            window.gradient_cosine,
        ]

    def _optimizer(self, window: WindowRecord) -> list[float]:
        first_filled, second_filled = (max(value, 1e-12) for value in window.bias_corrections)
        # Optimizers without moments have the gradient itself for the first, and its usual size for the second.
        first = _log((window.moment_mean or window.gradient_std) / first_filled)
        second = _log(window.second_moment_mean / math.sqrt(second_filled))
        second = second if window.second_moment_mean else self.log_gradient
        rate = _log(window.learning_rate)
        steps = max(window.step - self.last_step, 0)
        self.path += window.learning_rate * steps if math.isfinite(window.learning_rate) else 0.0
        ahead = window.learning_rate * window.step * (1 / max(window.progress, 1e-9) - 1)
        norm = window.gradient_norms[-1] if window.gradient_norms else math.nan
        filled = 1 - 1 / (1 + window.step / self.window)
        return [
            rate + _log(norm),
            math.sqrt(self.path / (self.path + ahead)) if self.path + ahead > 0 else 0.0,
            math.sqrt(max(window.rate_share * (1 - window.progress), 0.0)),
            first,
            _log(window.moment_std or window.gradient_std),
            second,
            rate + first - second,
            first_filled * filled,
            second_filled * filled,
        ]

    def _weights(self, window: WindowRecord) -> list[float]:
        weights, displacement = _log(window.weight_norm), _log(window.displacement_norm)
        growth, acceleration = weights - self.previous_weights, displacement - self.previous_displacement
        pace = displacement - self.log_displacement
        if math.isfinite(weights) and math.isfinite(displacement):
            self.previous_weights, self.previous_displacement = weights, displacement
            self.log_displacement = _blend(self.log_displacement, displacement, 0.1)
        return [
            window.weight_norm,
            growth,
            displacement,
            displacement - weights,
            acceleration,
            *window.cosines,
            window.effective_rank,
            pace,
        ]

    def _phase(self, window: WindowRecord, phase: PhaseRecord, skipped: int) -> list[float]:
        predicted = skipped / max(skipped + len(window.losses), 1)
        fading = math.exp(-phase.steps_since_move / self.window) if phase.cycle > 0 else 0.0
        return [
            float(phase.phase == "warmup"),
            float(phase.phase == "full"),
            1.0 if phase.phase == "predict" else predicted,
            1.0 if phase.phase == "correct" else fading,
            math.log1p(phase.steps_in_phase),
            math.log1p(phase.cycle),
            window.progress,
            math.log1p(phase.steps_since_move),
        ]


def _predictor(forecast: ForecastRecord) -> list[float]:
    return [
        *(error / (1 + abs(error)) for error in forecast.errors),  # an error of 30 says no more than one of 10
        *forecast.cosines,
        forecast.loss_errors[0],
        forecast.loss_errors[-1],
        forecast.acceptance_rate,
        forecast.confidence,
    ]


def _blend(average: float, value: float, share: float) -> float:
    if not math.isfinite(value):
        return average
    return average + share * (value - average) if math.isfinite(average) else value


def _log(value: float) -> float:
    return math.log(max(value, 1e-30)) if math.isfinite(value) else math.nan
