"""Forecast the loss at the end of a run from its beginning, with an interval.

The way depends on what is known: a finished run with the same plan of rates (`transfer`); else the law of the loss,
whose drop with a falling rate was measured by an annealed copy, is known from earlier runs of this kind, or was seen in
this run; else the drop of public runs, averaged with the line through the latest losses until the rate falls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.forecast import intervals, law, plans
from foretrain.forecast.history import FinishedRun, History, Residual
from foretrain.forecast.intervals import ForecastSituation
from foretrain.forecast.law import LawPrior
from foretrain.forecast.points import Tail, cleaned, tail
from foretrain.forecast.records import LossCurve, LossForecast, Numbers, RatePlan
from foretrain.forecast.transfer import transferred

FEWEST = 3
"""Losses after the first step that must have been seen before anything is said."""
TRANSFER = "transfer"
"""The way of a forecast that was made from a finished run with the same plan."""
_SKIPPED = 0.1
_LINE_SHARE = 0.25
"""How much the line through the latest losses counts before the rate falls, if the size of its drop is not known."""
_UNKNOWN_LINE_SHARE = 0.4
"""How much it counts where nobody knows what the rate does."""
_LINE_FROM, _LINE_FULL = 0.1, 0.2
"""Shares of the run between which the line comes to count: at the beginning it is too steep."""
_LAW_DOUBT = 0.2
"""How wrong the law is, as a share of how far the loss is still to go, when it is weighed against a finished run."""
_SEEN = 0.2
"""Share of the decay from which on its drop is called seen."""
_MOST_SIBLINGS = 4
"""The last of them count, so that a forecast takes milliseconds."""
_LEAST_KIND_SPREAD = 0.15
"""Drops of runs of one kind differ by this share at least."""
_FLOOR = 1e-3
"""A loss that is forecast to fall below this share of the lowest one seen is at no end that anybody could know."""
_WIDEST = 100.0
"""An interval whose upper end is more than this many times its lower one says nothing."""
_CUTS = (0.1, 0.175, 0.25, 0.375, 0.5, 0.625, 0.75, 0.9)
"""Shares of a finished run at which it is forecast once more, to learn how wrong forecasts are."""


@dataclass(frozen=True)
class PointForecast:
    """A forecast before it gets its interval."""

    loss: float
    situation: ForecastSituation
    method: str
    baselines: dict[str, float]


def forecast(
    curve: LossCurve,
    siblings: Sequence[LossCurve] = (),
    level: float = 0.8,
    history: History | None = None,
    step: int | None = None,
    plan: RatePlan | None = None,
) -> LossForecast | None:
    """Forecast the held-out loss at `step` (the plan's last unless given); None: what was seen allows no forecast.

    `siblings` are finished runs of the same kind, `plan` what the rate will do if not what the curve's own plan says.
    """
    plan = plan or curve.plan
    siblings = siblings[-_MOST_SIBLINGS:]
    step = max(plan.total_steps, 1) if step is None else step
    level = min(max(level, 0.01), 0.99)
    measured = _measured(curve, step, level)
    if measured is not None:
        return measured
    with np.errstate(all="ignore"):
        point = point_forecast(curve, siblings, history, step, plan)
    if point is None:
        return None
    own = history.of_kind(curve.kind) if history is not None else []
    low, high, calibrated = intervals.around(point.loss, point.situation, level, own)
    if point.situation.positive and high > _WIDEST * low:
        return None
    return LossForecast(step, point.loss, low, high, level, point.method, calibrated, point.baselines)


def point_forecast(
    curve: LossCurve, siblings: Sequence[LossCurve], history: History | None, step: int, plan: RatePlan
) -> PointForecast | None:
    """Forecast without an interval; None: too little was seen, the run has diverged, or its law has no end above 0."""
    steps, losses = cleaned(curve, skipped=_SKIPPED)
    latest = np.asarray(curve.losses, dtype=np.float64).ravel()[-1:]
    if len(steps) < FEWEST or not np.all(np.isfinite(latest)) or step <= steps[-1]:
        return None
    now, line = float(steps[-1]), tail(steps, losses)
    last = float(losses[-1])
    power = law.fit(dataclasses.replace(curve, plan=_constant(curve.plan.total_steps), annealed=()))
    baselines = {"last value": last}
    if power is not None:
        baselines["power law"] = power.loss_at(_constant(plan.total_steps), step)
    prior, known = _prior(curve, siblings, history)
    fitted = law.fit(curve, prior)
    if fitted is None:
        return None
    loss, spread = fitted.loss_at(plan, step), fitted.error
    way, method, share = _way(curve, plan, now, now / step, known)
    loss += share * (last + line.move(now, step) - loss)
    moved = transferred(steps, losses, siblings, curve.plan, plan, step)
    if moved is not None:
        doubt = math.hypot(_LAW_DOUBT * (loss - last), fitted.error, line.noise)
        trust = doubt**2 / max(doubt**2 + moved.spread**2, 1e-300)
        loss, spread = trust * moved.loss + (1 - trust) * loss, math.sqrt(trust) * moved.spread
        way, method = TRANSFER, "a finished run with the same rates"
    level = law.loss_level(losses)
    if not math.isfinite(loss) or abs(loss - last) > 100 * level:
        return None
    if np.all(losses > 0) and loss < _FLOOR * float(losses.min()):
        return None
    return PointForecast(loss, _situation(way, curve, plan, steps, losses, line, spread, loss, step), method, baselines)


def finished(
    curve: LossCurve, siblings: Sequence[LossCurve] = (), history: History | None = None
) -> FinishedRun | None:
    """Return what a finished run is worth to later forecasts, for `History.add`; None if it did not come to its end."""
    steps = cleaned(curve)[0]
    total = curve.plan.total_steps
    if len(steps) < 2 * FEWEST or steps[-1] < 0.97 * total:
        return None
    truth = float(np.asarray(curve.losses, dtype=np.float64).ravel()[-1])
    if not math.isfinite(truth):
        return None
    residuals = []
    for progress in _CUTS:
        seen = curve.steps <= progress * total
        annealed = tuple(point for point in curve.annealed if point.step + point.steps <= progress * total)
        part = LossCurve(curve.steps[seen], curve.losses[seen], curve.plan, annealed, curve.kind)
        with np.errstate(all="ignore"):
            point = point_forecast(part, siblings, history, total, curve.plan)
        if point is not None:
            situation = point.situation
            error = intervals.normalised(truth, point.loss, situation)
            residuals.append(Residual(situation.progress, situation.phase == "falling", situation.way, error))
    fitted = law.fit(curve)
    falls = plans.decays(curve.plan)
    drop = fitted.drop_share if fitted is not None and falls else None
    return FinishedRun(curve.kind, tuple(residuals), drop, fitted.exponent if fitted is not None else None)


def _measured(curve: LossCurve, step: int, level: float) -> LossForecast | None:
    """Return the loss at a step that is over already, as it was measured."""
    steps, losses = cleaned(curve, len(curve.steps) + 1)
    if len(steps) == 0 or step > steps[-1]:
        return None
    loss = float(np.interp(step, steps, losses))
    return LossForecast(step, loss, loss, loss, level, "measured", False, {"last value": loss})


def _constant(total: int) -> RatePlan:
    return RatePlan(total, np.array([0.0, float(max(total, 1))]), np.ones(2))


def _prior(curve: LossCurve, siblings: Sequence[LossCurve], history: History | None) -> tuple[LawPrior, bool]:
    """Return what is known of drop and exponent, and whether that is of runs of this kind."""
    drops, exponents = [], []
    for sibling in siblings:
        fitted = law.fit(sibling)
        if fitted is not None and plans.decays(sibling.plan):
            drops.append(fitted.drop_share)
            exponents.append(fitted.exponent)
    for run in history.of_kind(curve.kind) if history is not None else []:
        if run.drop is not None and run.exponent is not None:
            drops.append(run.drop)
            exponents.append(run.exponent)
    if not drops:
        return law.PUBLIC, False
    drop = float(np.median(drops))
    spread = max(_LEAST_KIND_SPREAD * drop, float(np.std(drops)), 0.003)
    return LawPrior(drop, spread, float(np.exp(np.median(np.log(exponents)))), 0.3), True


def _way(curve: LossCurve, plan: RatePlan, now: float, progress: float, known: bool) -> tuple[str, str, float]:
    """Name the way a forecast by the law is made, and how much the line through the latest losses counts in it."""
    grown = min(max((progress - _LINE_FROM) / (_LINE_FULL - _LINE_FROM), 0.0), 1.0)
    if not plan.known:
        return "unknown", "its losses alone: nobody told the learning rate", _UNKNOWN_LINE_SHARE * grown
    if not plans.decays(plan):
        return "law", "the power law of its losses, at a constant rate", 0.0
    if known and not curve.annealed:
        return "drop", "the law of its losses, with the fall of earlier runs of this kind", 0.0
    done = plans.decay_done(plan, now)
    fall = "their fall with the rate so far" if done >= _SEEN else "the usual fall at the end"
    if curve.annealed:
        fall = "the fall of an annealed copy"
    method = f"the law of its losses, with {fall}"
    return "law", method, _LINE_SHARE * grown * (1 - done) * (1 - float(plan.knots[1][-1]))


def _situation(
    way: str,
    curve: LossCurve,
    plan: RatePlan,
    steps: Numbers,
    losses: Numbers,
    line: Tail,
    spread: float,
    loss: float,
    step: int,
) -> ForecastSituation:
    """Say what the interval depends on."""
    now, last = float(steps[-1]), float(losses[-1])
    phase = "constant"
    if plan.known and plans.decays(plan):
        phase = "falling" if plans.decay_done(plan, now) > 0.02 else "before"
    rising = max(line.move(now, step), 0.0)
    noise = math.hypot(line.noise, spread)
    positive = bool(np.all(losses > 0))
    level = law.loss_level(losses)
    fallen = max(float(cleaned(curve)[1].max()) - last, 0.0) / level
    return ForecastSituation(way, phase, now / max(step, 1), abs(loss - last) + rising, noise, fallen, level, positive)
