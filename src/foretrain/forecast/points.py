"""The losses of a curve that a law can be fitted to: finite, in order of steps, and not more than are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrain.forecast.records import LossCurve, Numbers

MOST = 48
"""More losses than this are averaged in bins of neighbours."""


def cleaned(curve: LossCurve, most: int = MOST, skipped: float = 0.0) -> tuple[Numbers, Numbers]:
    """Return steps and finite losses in order, without the first share, averaged to at most `most` of them."""
    steps = np.asarray(curve.steps, dtype=np.float64).ravel()
    losses = np.asarray(curve.losses, dtype=np.float64).ravel()
    count = min(len(steps), len(losses))
    steps, losses = steps[:count], losses[:count]
    good = np.isfinite(steps) & np.isfinite(losses) & (steps >= 0) & (np.abs(losses) < 1e30)
    steps, losses = steps[good], losses[good]
    steps, first = np.unique(steps[::-1], return_index=True)  # of two losses at one step the later counts
    losses = losses[::-1][first]
    if len(steps) == 0:
        return steps, losses
    late = steps >= skipped * steps[-1]
    if late.sum() >= 4:
        steps, losses = steps[late], losses[late]
    elif len(steps) > 1 and steps[0] == 0:
        steps, losses = steps[1:], losses[1:]
    if len(steps) <= most:
        return steps, losses
    bins = np.arange(len(steps)) * most // len(steps)
    counts = np.bincount(bins)
    return np.bincount(bins, steps) / counts, np.bincount(bins, losses) / counts


@dataclass(frozen=True)
class Tail:
    """A straight line through the latest losses against the logarithm of the steps."""

    slope: float
    noise: float
    """How far losses lie from it, one by one, or from their neighbours where the curve bends."""

    def move(self, now: float, then: float) -> float:
        """Return how far the line goes from one step to a later one."""
        return self.slope * float(np.log(max(then, 1e-9) / max(now, 1e-9)))


def tail(steps: Numbers, losses: Numbers) -> Tail:
    """Draw a line through the losses of the last half of the steps, three of them at least."""
    late = steps >= steps[-1] / 2
    late[-3:] = True
    places, values = np.log(np.maximum(steps[late], 1e-9)), losses[late]
    centred = places - places.mean()
    slope = float(centred @ values) / max(float(centred @ centred), 1e-12)
    left = values - values.mean() - slope * centred
    noise = float(np.sqrt(left @ left / max(len(values) - 2, 1)))
    return Tail(slope, min(noise, _noise_between(places, values)) if len(values) > 4 else noise)


def _noise_between(places: Numbers, values: Numbers) -> float:
    """Return how far losses lie from the line between their two neighbours, as noise of single losses."""
    share = (places[2:] - places[1:-1]) / (places[2:] - places[:-2])
    left = values[1:-1] - share * values[:-2] - (1 - share) * values[2:]
    return float(np.sqrt(np.mean(left**2 / (1 + share**2 + (1 - share) ** 2))))
