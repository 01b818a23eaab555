"""How long a run must be for its loss to end at a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.forecast import plans
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.history import History
from foretrain.forecast.records import LossCurve, LossForecast, RatePlan

_LONGEST = 64
"""Lengths up to this many times the steps done are looked at unless told otherwise."""


@dataclass(frozen=True)
class TargetForecast:
    """The length of a run whose loss ends at a target: with the same steps of warm-up and the same share of decay."""

    target: float
    steps: int | None
    """The smallest number of steps whose forecast end meets the target; None: none up to `at_most`."""
    earliest: int | None
    """It is this one by the lower end of the interval, and ..."""
    latest: int | None
    """... by its upper end: with that length the target is met at least with probability (1 + level) / 2."""
    at_most: int
    """The greatest length that was looked at."""
    at_longest: LossForecast
    """Where the run would end with that length: what is missing there says what would be needed."""


def steps_to(
    curve: LossCurve,
    target: float,
    siblings: Sequence[LossCurve] = (),
    level: float = 0.8,
    history: History | None = None,
    at_most: int | None = None,
) -> TargetForecast | None:
    """Find the smallest length whose forecast end meets the target; None: too little was seen to say anything."""
    done = max(int(curve.steps[-1]) if len(curve.steps) else 0, 1)
    longest = max(at_most if at_most is not None else _LONGEST * done, done)
    shortest = min(_shortest(curve.plan, done), longest)
    asked: dict[int, LossForecast | None] = {}

    def end(total: int) -> LossForecast | None:
        if total not in asked:
            asked[total] = forecast(curve, siblings, level, history, plan=plans.resized(curve.plan, total))
        return asked[total]

    at_longest = end(longest)
    if at_longest is None:
        return None

    def smallest(bound: str) -> int | None:
        if getattr(at_longest, bound) > target:
            return None
        low, high = shortest, longest
        while low < high:
            middle = (low + high) // 2
            guess = end(middle)
            if guess is not None and getattr(guess, bound) <= target:
                high = middle
            else:
                low = middle + 1
        return high

    return TargetForecast(target, smallest("loss"), smallest("low"), smallest("high"), longest, at_longest)


def _shortest(plan: RatePlan, done: int) -> int:
    """Return the smallest length whose decay has not begun before now; `done` where the rate falls all the time."""
    start = plans.decay_start(plan)
    if not plans.decays(plan) or start <= plans.warm_up_end(plan) or done >= start:
        return done
    low, high = done, max(plan.total_steps, done)
    while low < high:
        middle = (low + high) // 2
        if plans.decay_start(plans.resized(plan, middle)) >= done:
            high = middle
        else:
            low = middle + 1
    return high
