"""A pruner for Optuna that asks where a trial will end, and not how it stands: for training loops of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from foretrain.errors import InputError
from foretrain.forecast import plans
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan

RATES = "foretrain:rates"
"""User attribute of a trial that may tell its own plan: a list of learning rates, spread evenly over the run."""
ANNEALED = "foretrain:annealed"
"""User attribute of a trial that may tell of annealed copies: a list of [step, steps of the copy, loss, before]."""
Rates = Sequence[float] | Callable[[int], float]
_WIDER = 5.0
"""Forecasts without own finished runs are off by more than they say: their intervals are taken so much wider."""


class ForecastPruner(optuna.pruners.BasePruner):
    """Prunes a trial whose forecast last loss is outside of the best at the same step, or that cannot win.

    Report held-out losses to the trial as ever, `trial.report(loss, step)`, with steps up to `total_steps`. At each of
    `rungs` (shares of the run) a trial is compared with the others there: one of `reduction` goes on. In between, and
    before the first rung, nothing is pruned but losses that are no numbers. The first `references` trials are never
    pruned: forecasts of the others are made from them.

    rates: the learning rate over the run, as a function of the step or as numbers spread evenly over it; a trial's own
    can be told with `trial.set_user_attr(RATES, [...])`. With a rate that falls, losses before the fall say little
    about the end: unless annealed copies are told of (`ANNEALED`), nothing is pruned by rank before half of the run.

    The study must minimize. Optuna shows it to a pruner at the first `trial.should_prune()`, which refuses another one.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        rates: Rates | None = None,
        rungs: Sequence[float] = (0.0625, 0.125, 0.25, 0.5),
        reduction: float = 2.0,
        references: int = 2,
    ) -> None:
        if total_steps < 1:
            raise InputError(f"total_steps = {total_steps}: the number of steps of a whole trial, 1 or more")
        if not rungs or any(not 0 < share < 1 for share in rungs) or list(rungs) != sorted(set(rungs)):
            raise InputError(f"rungs = {list(rungs)}: shares of a run between 0 and 1 that rise, as in [0.125, 0.5]")
        if reduction <= 1:
            raise InputError(f"reduction = {reduction}: one trial of so many goes on, so it is above 1")
        self.total_steps = total_steps
        empty = RatePlan(total_steps, np.empty(0), np.empty(0))
        self._shared = empty if rates is None else _plan_of(rates, total_steps, "rates")
        self.rungs = tuple(rungs)
        self.reduction = reduction
        self.references = references

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Say whether Optuna is to prune this trial now."""
        if study.direction == optuna.study.StudyDirection.MAXIMIZE:
            raise InputError("ForecastPruner forecasts losses, which are minimized; report losses to a study that does")
        step = trial.last_step
        if step is None:
            return False
        if not math.isfinite(trial.intermediate_values[step]):
            return True
        if trial.number < self.references:
            return False
        rung = self._rung_at(step, trial)
        if rung is None:
            return False
        others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        at = math.ceil(self.rungs[rung] * self.total_steps)
        curve = self._curve(trial, step)
        if self._cannot_win(curve, others):
            return True
        if plans.decays(curve.plan) and not curve.annealed and self.rungs[rung] < 0.5:
            return False
        mine = self._score(trial, at)
        scores = [score for one in others if (score := self._score(one, at)) is not None]
        if mine is None or not scores:
            return False
        going = max(1, math.ceil((len(scores) + 1) / self.reduction))
        return sum(score < mine for score in scores) >= going

    def _rung_at(self, step: int, trial: FrozenTrial) -> int | None:
        """Return the rung that this report was the first to reach; None between rungs."""
        earlier = max((told for told in trial.intermediate_values if told < step), default=0)
        reached = [
            rung for rung, share in enumerate(self.rungs) if earlier < math.ceil(share * self.total_steps) <= step
        ]
        return reached[-1] if reached else None

    def _plan(self, trial: FrozenTrial) -> RatePlan:
        told = trial.user_attrs.get(RATES)
        if told is None:
            return self._shared
        return _plan_of(told, self.total_steps, f"trial {trial.number}: {RATES}")

    def _curve(self, trial: FrozenTrial, until: int) -> LossCurve:
        told = sorted((step, loss) for step, loss in trial.intermediate_values.items() if step <= until)
        copies = tuple(AnnealedPoint(int(a), int(b), float(c), float(d)) for a, b, c, d in _copies(trial, until))
        steps, losses = np.array([step for step, _ in told], dtype=float), np.array([loss for _, loss in told])
        return LossCurve(steps, losses, self._plan(trial), copies, "trial")

    def _score(self, trial: FrozenTrial, at: int) -> float | None:
        """Return what a trial had come to at a rung: its annealed copy, or its loss; None if it never got there."""
        until = min((step for step in trial.intermediate_values if step >= at), default=None)
        if until is None:
            return None
        copies = _copies(trial, until)
        loss = float(copies[-1][2]) if copies else float(trial.intermediate_values[until])
        return loss if math.isfinite(loss) else math.inf

    def _cannot_win(self, curve: LossCurve, others: Sequence[FrozenTrial]) -> bool:
        """Say whether even the lower end of the forecast, made wide, is above what another trial has ended with. Where
        the rate falls and no copy has shown what that is worth, nobody can say."""
        if plans.decays(curve.plan) and not curve.annealed:
            return False
        ended = [one for one in others if one.state == TrialState.COMPLETE and one.value is not None]
        best = min((one.value for one in ended if one.value is not None and math.isfinite(one.value)), default=None)
        told = forecast(curve, [self._curve(one, self.total_steps) for one in ended])
        return best is not None and told is not None and told.loss - _WIDER * (told.loss - told.low) > best


def _plan_of(told: Any, total_steps: int, name: str) -> RatePlan:
    """Return the learning rates of a whole run as shares of the highest; InputError where they are none."""
    form = "learning rates spread evenly over the run, or a function that gives the rate of a step"
    if not callable(told) and (isinstance(told, str) or not isinstance(told, Sequence | np.ndarray)):
        raise InputError(f"{name} = {told!r}: must be {form}, as in [1e-3, 1e-3, 0.0]")
    count = min(total_steps, 128) + 1 if callable(told) else len(told)
    if not 2 <= count <= total_steps + 1:
        raise InputError(
            f"{name}: {count} numbers for {total_steps} steps: give from 2 to {total_steps + 1}, from the first step "
            "to the last"
        )
    steps = np.linspace(0, total_steps, count)
    given = [told(round(step)) for step in steps] if callable(told) else told
    for step, rate in zip(steps, given, strict=True):
        if not isinstance(rate, Real) or not math.isfinite(rate) or rate < 0:
            raise InputError(f"{name}: {rate!r} at step {step:.0f} is no learning rate; must be {form}")
    rates = np.array(given, dtype=np.float64)
    highest = float(rates.max())
    if not highest > 0:
        raise InputError(f"{name}: all are 0; tell the learning rates as they are")
    return RatePlan(total_steps, steps, rates / highest)


def _copies(trial: FrozenTrial, until: int) -> list[list[float]]:
    return [copy for copy in trial.user_attrs.get(ANNEALED, ()) if copy[0] <= until]
