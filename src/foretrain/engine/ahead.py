"""The learning rates of steps that are still to come, as far as anybody knows them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.engine.rates import FollowedRates, Rates
from foretrain.forecast.records import RatePlan

_KNOTS = 512
"""A plan is looked at in so many places: more tell nothing new."""
_MOST_STEPPED = 200_000
"""A scheduler of the user's own is stepped through so many steps: that takes a few seconds, once."""
_SAME = 5e-4
"""A knot that straight lines miss by less than this share of the highest rate is left out."""


def plan_ahead(rate: Rates, max_steps: int, known: RatePlan | None = None) -> RatePlan:
    """Return the plan of a whole run; one without knots where nobody knows it.

    known: what was found at the beginning: a scheduler of the user's own cannot be asked for the past.
    """
    if not isinstance(rate, FollowedRates):
        places = np.unique(np.linspace(0, max_steps, _KNOTS + 1).round())
        return shortened_plan(max_steps, places, np.array([rate.at(int(place)) for place in places]))
    if rate.scheduler is None and rate.changes_by_itself:
        return unknown_plan(max_steps)
    if rate.scheduler is None:  # the rate that stands there is followed; nothing says that it will change
        return RatePlan(max_steps, np.array([0.0, max_steps]), np.ones(2))
    if known is not None and known.total_steps == max_steps:
        return known
    if rate.watches_loss or rate.stepped or max_steps > _MOST_STEPPED:
        return unknown_plan(max_steps)
    rates = _stepped_through(rate.scheduler, rate.optimizer, max_steps)
    if rates is None:
        return unknown_plan(max_steps)
    places = np.unique(np.linspace(0, max_steps, _KNOTS + 1).round())
    return shortened_plan(max_steps, places, rates[places.astype(np.int64)])


def unknown_plan(total: int) -> RatePlan:
    """Return the plan of a run of whose rate nobody knows what it will do."""
    return RatePlan(total, np.empty(0), np.empty(0))


def shortened_plan(total: int, steps: np.ndarray[Any, Any], rates: np.ndarray[Any, Any]) -> RatePlan:
    """Make a plan of rates at many steps: as multiples of the highest, without knots that lie on straight lines."""
    highest = float(rates.max(initial=0.0))
    if not np.isfinite(rates).all() or highest <= 0:
        return unknown_plan(total)
    multipliers = rates / highest
    kept = [0]
    for place in range(2, len(steps)):
        first = kept[-1]
        line = np.interp(steps[first : place + 1], steps[[first, place]], multipliers[[first, place]])
        if np.abs(line - multipliers[first : place + 1]).max() > _SAME:
            kept.append(place - 1)
    kept.append(len(steps) - 1)
    kept = sorted(set(kept))
    return RatePlan(total, steps[kept], multipliers[kept])


def _stepped_through(scheduler: LRScheduler, optimizer: Optimizer, max_steps: int) -> np.ndarray[Any, Any] | None:
    """Step a copy of the scheduler, with an optimizer of one number, and return its rates; None where that fails."""
    try:
        groups = [{"params": [torch.zeros(1)], **_settings(group)} for group in optimizer.param_groups]
        stand_in = torch.optim.SGD(groups)
        setattr(stand_in, "_opt_called", True)  # noqa: B010 - else the scheduler warns that nothing was trained
        twin = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        rates = np.empty(max_steps + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(max_steps + 1):
                rates[step] = float(stand_in.param_groups[0]["lr"])
                if step < max_steps:
                    twin.step()
    except Exception:  # noqa: BLE001 - own code may raise anything; then nothing is known of its rates
        return None
    return rates


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Copy what a group says of rates and momenta; of tensors their numbers."""
    return {
        name: float(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names") and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    }
