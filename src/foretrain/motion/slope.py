"""How fast the loss falls per full step: the rate at which a gain in loss is worth steps."""

from __future__ import annotations

import math

import numpy as np

from foretrain.persist.stateful import Stateful

_WINDOWS = 12


class LossSlope(Stateful):
    """Least squares over the last windows of full steps. A move lies between stretches and is not counted as steps."""

    saved = ("steps", "points", "last_fall", "last_log_fall")
    points: list[list[float]]

    def __init__(self) -> None:
        self.steps = 0
        self.points = []
        """[full steps so far, mean loss of the window]"""
        self.last_fall = math.nan
        """Fall per step within the last window."""
        self.last_log_fall = math.nan
        """The same of the logarithm of the loss; nan where it is not positive."""

    def add(self, losses: tuple[float, ...]) -> None:
        self.steps += len(losses)
        good = [loss for loss in losses if math.isfinite(loss)]
        if not good:
            return
        self.points = [*self.points, [float(self.steps), math.fsum(good) / len(good)]][-_WINDOWS:]
        if len(good) > 1:
            self.last_fall = (good[0] - good[-1]) / (len(good) - 1)
            positive = good[0] > 0 and good[-1] > 0
            self.last_log_fall = math.log(good[0] / good[-1]) / (len(good) - 1) if positive else math.nan

    def per_step(self, low_noise: bool) -> float:
        """Fall of the loss per full step, at present; not positive or nan where none can be told."""
        if low_noise:
            return self.last_fall
        if len(self.points) < 3:
            return math.nan
        steps, losses = np.asarray(self.points).T
        steps = steps - steps.mean()
        return float(-(steps @ losses) / (steps @ steps))

    def steps_for(self, gain: float, low_noise: bool) -> float:
        """Full steps that a gain in loss is worth; nan where the loss does not fall."""
        slope = self.per_step(low_noise)
        return gain / slope if slope > 0 else math.nan
