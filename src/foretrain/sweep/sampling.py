"""Which settings does a trial get? By lot, from a grid, or as one of Optuna's samplers advises."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.sweep.records import TrialRecord
from foretrain.sweep.space import Range, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

_WORST = 1.0
"""A trial that failed counts as this much worse than the worst one."""


def values_of(space: Space, number: int, earlier: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the settings of trial `number`. Without a sampler that learns they follow from the seed and the number
    alone, whoever asks and in whatever order."""
    points = space.finite
    if points is not None and (space.settings.sampler in ("random", "grid") or number >= len(points)):
        return points[number % len(points)]
    if space.settings.sampler == "random":
        lot = np.random.default_rng([space.settings.seed, number])
        return {one.name: one.draw(lot) for one in space.ranges}
    return _advised(space, number, earlier)


def _advised(space: Space, number: int, earlier: Sequence[TrialRecord]) -> dict[str, Any]:
    """Ask one of Optuna's samplers. It is told the newest score of each trial, also of those that are paused."""
    import optuna

    forms = distributions(space.ranges)
    study = optuna.create_study(sampler=_sampler(space.settings.sampler, space.settings.seed + number))
    guesses = [record.best_guess for record in earlier]
    worst = max((guess for guess in guesses if guess is not None and math.isfinite(guess)), default=0.0) + _WORST
    for record, guess in zip(earlier, guesses, strict=True):
        known = {name: coded(value) for name, value in record.values.items() if name in forms}
        if len(known) < len(forms):
            continue
        ended = record.state == "failed" or guess is not None
        value = worst if guess is None or not math.isfinite(guess) else guess
        state = optuna.trial.TrialState.COMPLETE if ended else optuna.trial.TrialState.RUNNING
        study.add_trial(
            optuna.trial.create_trial(
                state=state, value=value if ended else None, params=known, distributions=dict(forms)
            )
        )
    asked = study.ask(dict(forms)).params
    return {one.name: decoded(one, asked[one.name]) for one in space.ranges}


def _sampler(name: str, seed: int) -> BaseSampler:
    import optuna

    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def distributions(ranges: Sequence[Range]) -> Mapping[str, BaseDistribution]:
    """Return the space in Optuna's words."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    made: dict[str, BaseDistribution] = {}
    for one in ranges:
        if one.choices:
            made[one.name] = CategoricalDistribution([coded(value) for value in one.choices])
        elif one.whole:
            made[one.name] = IntDistribution(int(one.low), int(one.high), one.log, int(one.step or 1))
        else:
            made[one.name] = FloatDistribution(one.low, one.high, one.log, one.step)
    return made


def coded(value: Any) -> Any:
    """Return a value as Optuna can keep it: lists as JSON."""
    return json.dumps(value) if isinstance(value, list | tuple) else value


def decoded(one: Range, value: Any) -> Any:
    return next((choice for choice in one.choices if coded(choice) == value), value)
