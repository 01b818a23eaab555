"""The held-out loss while there are few evaluations: as the training loss went, lifted to where the evaluations lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.forecast.records import Numbers

Points = Sequence[tuple[float, float]]
ENOUGH = 4
"""From so many evaluations on they are taken alone. Before, the training loss beside them lets something be said at
all; later its noise does harm. Chosen by looking at a few own runs with ten evaluations; no result is stored."""
_STRETCHES = 48
"""The training loss is averaged in so many stretches, so that chance does not hide its course."""


def held_out_equivalent(evaluations: Points, training: Points) -> tuple[Numbers, Numbers]:
    """Return steps and losses to forecast from: of the evaluations, with the training loss while they are few."""
    return with_training(evaluations, training if len(evaluations) < ENOUGH else ())


def with_training(evaluations: Points, training: Points) -> tuple[Numbers, Numbers]:
    """Return steps and losses of all evaluations, and of the training loss as long as they were few.

    The training loss is lifted by its distance to the evaluations: between two of them in a straight line from one
    distance to the other, before the first by the first. So data that is learned by heart does not look like progress.
    Where a positive loss falls so fast that this would bring it below 0, it is left out.
    """
    at, held_out = (np.array([point[place] for point in evaluations], dtype=np.float64) for place in (0, 1))
    steps, losses = _averaged([point for point in training if len(at) and point[0] < at[: ENOUGH - 1][-1]])
    if not len(at) or not len(steps):
        return at, held_out
    gaps = held_out - np.interp(at, steps, losses)
    lifted = losses + np.interp(steps, at, gaps)
    alone = ~np.isin(steps, at)
    if (held_out > 0).all() and (losses > 0).all():
        alone &= lifted > 0
    steps, losses = np.concatenate([at, steps[alone]]), np.concatenate([held_out, lifted[alone]])
    order = np.argsort(steps, kind="stable")
    return steps[order], losses[order]


def _averaged(points: Points) -> tuple[Numbers, Numbers]:
    steps, losses = (np.array([point[place] for point in points], dtype=np.float64) for place in (0, 1))
    if len(steps) <= _STRETCHES:
        return steps, losses
    stretches = np.arange(len(steps)) * _STRETCHES // len(steps)
    counts = np.bincount(stretches)
    return np.bincount(stretches, steps) / counts, np.bincount(stretches, losses) / counts


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return half as many points, each the mean of two neighbours; the last one stays if it is alone."""
    pairs = [points[place : place + 2] for place in range(0, len(points), 2)]
    return [(sum(at for at, _ in pair) / len(pair), sum(loss for _, loss in pair) / len(pair)) for pair in pairs]
