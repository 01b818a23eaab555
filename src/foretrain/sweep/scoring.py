"""How does a trial stand at a rung? By what it is expected to end with: not by its loss alone, which under a learning
rate that falls later says little about the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from foretrain.config import Config, with_warmup
from foretrain.engine import schedule
from foretrain.forecast import plans
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.sweep.records import Standing, TrialRecord

_KNOTS = 128
_LATE = 2
"""A copy that ended at most this many steps before the last loss stands for the run as it is now."""
FEWEST_ENDS = 4
"""From so many trials on that came to their end, intervals follow from how far scores were off there."""


def rate_plan(config: Config) -> RatePlan:
    """Return the learning rate of a whole run."""
    if config.preset != "finetune":
        config = with_warmup(config)
    peak = config.optimizer.peak_rate
    rate = schedule.build(config.schedule, peak, config.max_steps)
    steps = np.unique(np.linspace(0, config.max_steps, _KNOTS).round())
    return RatePlan(config.max_steps, steps, np.array([rate(int(step)) / peak for step in steps]))


def curve_of(record: TrialRecord, plan: RatePlan) -> LossCurve:
    """Return the losses of a trial so far."""
    steps, losses = np.array(record.losses, dtype=np.float64).reshape(-1, 2).T
    copies = tuple(AnnealedPoint(*point) for point in record.annealed)
    return LossCurve(steps, losses, plan, copies, "trial")


def standing(
    record: TrialRecord, rung: int, plan: RatePlan, others: Sequence[TrialRecord], *, forecasts: bool = True
) -> Standing:
    """Return how a trial stands at a rung. others: all trials; those that came to their end calibrate the interval.

    forecasts: where they are too few, a forecast gives an interval to look at.
    """
    curve = curve_of(record, plan)
    loss = float(curve.losses[-1]) if len(curve.losses) else math.inf
    if not np.isfinite(curve.losses).all() or not math.isfinite(loss):
        return Standing(math.inf, loss=None, method="diverged")
    ended = [one for one in others if one.final is not None and one.number != record.number]
    score, method = float(np.min(curve.losses)), "lowest held-out loss"
    copy = curve.annealed[-1] if curve.annealed else None
    if copy is not None and math.isfinite(copy.loss) and copy.step + copy.steps + _LATE >= curve.steps[-1]:
        score, method = copy.loss, "annealed copy"
    low, high = _interval(score, rung, ended)
    calibrated = low is not None
    if (
        forecasts
        and low is None
        and (told := forecast(curve, [curve_of(one, plan) for one in _siblings(record, ended)])) is not None
    ):
        low, high = told.low, told.high
    return Standing(score, low, high, calibrated, method, loss)


def _siblings(record: TrialRecord, ended: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that had the same plan of learning rates as this one."""

    def plan(one: TrialRecord) -> tuple[object, ...]:
        return one.total_steps, *(value for name, value in sorted(one.values.items()) if name.startswith("schedule."))

    return [one for one in ended if plan(one) == plan(record)]


def moves_from(rung: int, ended: Iterable[TrialRecord]) -> list[float]:
    """Return how far each of these trials moved from its score at a rung to its end, as logarithms of factors."""
    pairs = [(one.standings[rung].score, one.final) for one in ended if rung in one.standings and one.final is not None]
    return [math.log(final / score) for score, final in pairs if score > 0 and final > 0 and math.isfinite(score)]


def _interval(score: float, rung: int, ended: Iterable[TrialRecord]) -> tuple[float | None, float | None]:
    """Return an interval for the end by how far others moved from this rung to theirs: the widest seen, and the part
    of their spread on top of it that so few of them may not have shown."""
    moves = moves_from(rung, ended)
    if len(moves) < FEWEST_ENDS or score <= 0:
        return None, None
    spread = float(np.std(moves, ddof=1))
    return score * math.exp(min(moves) - spread), score * math.exp(max(moves) + spread)


def decays(plan: RatePlan) -> bool:
    """Say whether the learning rate is lower at the end than at its highest."""
    return plans.decays(plan)
