"""Forecast a run from a finished one with the same plan of learning rates: this one will still fall as that one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.forecast import plans
from foretrain.forecast.points import cleaned, tail
from foretrain.forecast.records import LossCurve, Numbers, RatePlan

_FINE = 400
"""Losses that are kept of a finished run."""
_ALIKE = 0.07
"""Falls of the two runs are the same up to this share, before they are compared."""
_NOISE = 0.003
_SCATTER = 3.0
"""Losses of the two runs are told apart no better than this share of the loss, nor than single losses scatter times
this: with few, noisy losses the finished run's own fall is taken as it was. Chosen on 16 own runs and on public ones,
which scatter too little for it to count (docs/forecast.md)."""
_STILL_DOUBT, _APART_DOUBT = 0.03, 0.05
"""How wrong it is, as a share of how far the loss is still to go, and of how far the two runs lie apart."""
_RECENT = 3.0


@dataclass(frozen=True)
class Transferred:
    """A loss as finished runs foretell it."""

    loss: float
    spread: float
    """How wrong that may be, from how well the runs agree so far."""


def transferred(
    steps: Numbers, losses: Numbers, siblings: Sequence[LossCurve], past: RatePlan, plan: RatePlan, step: float
) -> Transferred | None:
    """Foretell the loss at `step` from siblings whose rate did what the plan says; None if there are none."""
    found = [
        one
        for sibling in siblings
        if plans.same_shape(plan, sibling.plan)
        and (past is plan or plans.same_shape(past, sibling.plan, steps[-1] / max(past.total_steps, 1)))
        and (one := _from_one(steps, losses, sibling, step)) is not None
    ]
    if not found:
        return None
    ends = np.array([one.loss for one in found])
    return Transferred(float(np.median(ends)), float(np.hypot(np.std(ends), np.median([one.spread for one in found]))))


def _from_one(steps: Numbers, losses: Numbers, sibling: LossCurve, step: float) -> Transferred | None:
    at, values = cleaned(sibling, _FINE)
    at, values = at[at > 0], values[at > 0]
    if len(at) < 3 or at[-1] < 0.97 * step or at[0] > steps[-1]:
        return None
    reference = np.interp(np.log(np.maximum(steps, 1.0)), np.log(at), values)
    final = float(np.interp(step, at, values))
    weight = (steps / steps[-1]) ** _RECENT * (steps >= at[0])
    theirs, ours = reference - reference[-1], losses - losses[-1]
    noise = float(np.hypot(_NOISE * max(abs(float(losses[-1])), 1e-12), _SCATTER * tail(steps, losses).noise))
    columns = np.stack([np.ones(len(steps)), theirs], axis=1)
    gram = (columns * weight[:, None]).T @ columns / noise**2
    right = (columns * weight[:, None]).T @ ours / noise**2
    gram[1, 1] += 1 / _ALIKE**2
    right[1] += 1 / _ALIKE**2
    offset, share = np.linalg.solve(gram, right)
    left = ours - offset - share * theirs
    missed = float(np.sqrt(np.sum(weight * left**2) / max(float(weight.sum()), 1e-12)))
    still = share * (final - float(reference[-1]))
    apart = float(losses[-1] - reference[-1])
    spread = float(np.linalg.norm([missed, _STILL_DOUBT * still, _APART_DOUBT * apart]))
    return Transferred(float(losses[-1] + offset + still), spread)
