"""Plans of learning rates are read, stretched and bent."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.forecast import plans
from foretrain.forecast.records import RatePlan

WARM = RatePlan(1000, np.array([0.0, 100.0, 700.0, 1000.0]), np.array([0.0, 2.0, 2.0, 0.0]))
COSINE = RatePlan(1000, np.linspace(0, 1000, 65), 0.5 + 0.5 * np.cos(np.linspace(0, np.pi, 65)))
CONSTANT = RatePlan(1000, np.array([0.0, 1000.0]), np.ones(2))
UNKNOWN = RatePlan(1000, np.empty(0), np.empty(0))


@pytest.mark.parametrize("plan", [WARM, COSINE, CONSTANT, UNKNOWN])
@pytest.mark.parametrize("power", [1.0, 0.6])
def test_areas_are_sums_of_rates(plan: RatePlan, power: float) -> None:
    fine = np.linspace(0, 1000, 20001)
    rates = np.interp(fine, *plan.knots) ** power
    sums = np.concatenate([[0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(fine))])
    assert plans.area(plan, fine[::500], power) == pytest.approx(sums[::500], rel=1e-3, abs=1e-3)


def test_what_the_plan_says() -> None:
    assert (plans.warm_up_end(WARM), plans.decay_start(WARM)) == (100, 700)
    assert plans.decays(WARM)
    assert plans.decays(COSINE)
    assert not plans.decays(CONSTANT)
    assert not plans.decays(UNKNOWN)
    assert [plans.decay_done(WARM, step) for step in (50, 600, 850, 1000)] == [0, 0, 0.5, 1]
    assert plans.falls(WARM)[2].sum() == pytest.approx(1)
    assert len(plans.falls(CONSTANT)[0]) == 0


def test_how_long_the_rate_falls() -> None:
    sudden = RatePlan(1000, np.array([0.0, 500.0, 500.1, 1000.0]), np.array([1.0, 1.0, 0.1, 0.1]))
    assert plans.fall_share(WARM) == pytest.approx(0.3, abs=0.01)
    assert plans.fall_share(sudden) == pytest.approx(0, abs=1e-3)
    assert 0.6 < plans.fall_share(COSINE) < 0.8, "less than the whole run: most of it is in the middle"
    assert plans.fall_share(CONSTANT) == plans.fall_share(UNKNOWN) == 0


def test_a_longer_plan_keeps_its_warm_up_and_its_share_of_decay() -> None:
    longer = plans.resized(WARM, 1900)
    assert longer.total_steps == 1900
    assert plans.warm_up_end(longer) == pytest.approx(100)
    assert (1900 - plans.decay_start(longer)) / 1800 == pytest.approx(300 / 900)
    assert not plans.resized(UNKNOWN, 5).known


def test_a_plan_can_be_brought_to_0_from_any_step() -> None:
    bent = plans.decaying_from(WARM, 400, 60)
    assert bent.total_steps == 460
    assert np.interp([300, 400, 430, 460], *bent.knots) == pytest.approx([1, 1, 0.5, 0])


def test_plans_are_compared_by_shape_and_length() -> None:
    assert plans.same_shape(WARM, RatePlan(1010, WARM.steps * 1.01, WARM.multipliers * 3))
    assert not plans.same_shape(WARM, plans.resized(WARM, 2000))
    assert not plans.same_shape(WARM, COSINE)
    assert not plans.same_shape(UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(
    "plan",
    [
        RatePlan(1, np.array([0.0]), np.array([1.0])),
        RatePlan(0, np.empty(0), np.empty(0)),
        RatePlan(10, np.array([0.0, np.nan, 10.0]), np.array([0.0, np.inf, 0.0])),
        RatePlan(10, np.array([0.0, 10.0]), np.zeros(2)),
        RatePlan(10, np.array([10.0, 0.0]), np.array([0.0, 1.0])),
        RatePlan(10, np.array([0.0]), np.array([1.0, 2.0])),
    ],
)
def test_odd_plans_are_read_as_far_as_they_go(plan: RatePlan) -> None:
    at, values = plan.knots
    assert at[0] == 0
    assert np.all(np.diff(at) > 0)
    assert np.all(np.isfinite(values))
    assert values.max() == 1
    assert np.all(np.isfinite(plans.area(plan, np.array([0.0, 5.0, 20.0]))))
