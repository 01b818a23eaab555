"""Curves that follow the law, with noise, for tests of forecasts."""

from __future__ import annotations

import numpy as np

from foretrain.forecast import law, plans
from foretrain.forecast.law import FittedLaw
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan

PLAN = RatePlan(5000, np.array([0.0, 100.0, 3500.0, 5000.0]), np.array([0.0, 1.0, 1.0, 0.0]))
CONSTANT = RatePlan(5000, np.array([0.0, 5000.0]), np.ones(2))
UNKNOWN = RatePlan(5000, np.empty(0), np.empty(0))
STEPS = np.arange(100.0, 5001.0, 100.0)


def true_law(drop: float = 0.12, floor: float = 2.8) -> FittedLaw:
    return FittedLaw.of(floor, 0.5, float(law._EXPONENTS[16]), drop, 1000.0)


def lawful(
    plan: RatePlan = PLAN, noise: float = 0.0, seed: int = 0, drop: float = 0.12, floor: float = 2.8
) -> LossCurve:
    """Make a finished run of the law."""
    losses = true_law(drop, floor).losses_at(plan, STEPS)
    return LossCurve(STEPS, losses + noise * np.random.default_rng(seed).normal(size=len(STEPS)), plan, kind="lawful")


def seen(curve: LossCurve, share: float) -> LossCurve:
    """Return the beginning of a run."""
    kept = curve.steps <= share * curve.plan.total_steps
    return LossCurve(curve.steps[kept], curve.losses[kept], curve.plan, curve.annealed, curve.kind)


def annealed_copy(drop: float, step: int = 1200, steps: int = 75) -> AnnealedPoint:
    """Return what a copy of such a run comes to: so few steps show a part of what the decay of the run is worth."""
    copy, shown = plans.decaying_from(PLAN, step, steps), law.shown_share(PLAN, steps)
    whole, none = (true_law(one).loss_at(copy, copy.total_steps) for one in (drop, 0.0))
    return AnnealedPoint(step, steps, shown * whole + (1 - shown) * none, true_law(drop).loss_at(PLAN, step))
