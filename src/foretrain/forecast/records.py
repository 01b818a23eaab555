"""What forecasts are made of, and what they say. Plain numbers: nothing here knows of models or of trainers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_SAME_END = 0.03


def is_same_end(made_for: float, end: float) -> bool:
    """Say whether a forecast for one step may be compared with the end at another: by the clock, ends move a little."""
    return abs(made_for - end) <= _SAME_END * end


@dataclass(frozen=True)
class RatePlan:
    """The learning rate over a whole run, as a multiple of its highest, at knots with straight lines between them."""

    total_steps: int
    steps: Numbers
    """Knots, from 0 to `total_steps`, rising. None at all: nobody knows the rate."""
    multipliers: Numbers

    @property
    def known(self) -> bool:
        return len(self.steps) > 0

    @cached_property
    def knots(self) -> tuple[Numbers, Numbers]:
        """The knots from 0 to the last step, with 1 as the highest multiplier; constant if unknown."""
        total = float(max(self.total_steps, 1))
        steps = np.asarray(self.steps, dtype=np.float64).ravel()
        values = np.asarray(self.multipliers, dtype=np.float64).ravel()
        if len(steps) != len(values):
            steps, values = steps[:0], values[:0]
        good = np.isfinite(steps) & np.isfinite(values) & (values >= 0)
        steps, values = steps[good], values[good]
        if len(steps) == 0 or values.max() <= 0:
            return np.array([0.0, total]), np.ones(2)
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order] / values.max()
        inside = (steps > 0) & (steps < total)
        ends = np.interp([0.0, total], steps, values)
        return np.concatenate([[0.0], steps[inside], [total]]), np.concatenate([ends[:1], values[inside], ends[1:]])

    def at(self, steps: Numbers) -> Numbers:
        """Return the multiple of the highest rate at each of these steps; 1 where nobody knows."""
        return np.interp(steps, self.steps, self.multipliers) if self.known else np.ones_like(steps, dtype=np.float64)


@dataclass(frozen=True)
class AnnealedPoint:
    """What a copy of the run had come to when its rate was brought to 0 over a few steps: the run itself went on."""

    step: int
    """Steps of the run before the copy was taken."""
    steps: int
    """Steps of the copy, over which the rate fell to 0 in a straight line."""
    loss: float
    """Held-out loss of the copy at its end."""
    before: float
    """Held-out loss of the run where the copy was taken, on the same data."""


@dataclass(frozen=True)
class LossCurve:
    """Held-out losses of one run so far, and the plan of its learning rate."""

    steps: Numbers
    """Steps done before each loss was measured, rising."""
    losses: Numbers
    plan: RatePlan
    annealed: tuple[AnnealedPoint, ...] = ()
    kind: str = ""
    """Runs of one kind (model, data, optimizer) may be forecast from each other; empty: of no known kind."""


@dataclass(frozen=True)
class LossForecast:
    """A held-out loss that is to come, and an interval that should hold it with probability `level`."""

    step: int
    """When it is to come."""
    loss: float
    low: float
    high: float
    level: float
    method: str
    """Which way it was made, in words a user understands."""
    calibrated: bool
    """The interval is made from enough own finished runs of this kind; else from those of others, and wider."""
    baselines: dict[str, float] = field(default_factory=dict)
    """What simpler rules say: the last value, and a power law."""
