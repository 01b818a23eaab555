"""The law describes curves that follow it, under any plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.forecast.curves import CONSTANT, PLAN, STEPS, annealed_copy, true_law

from foretrain.forecast import law, plans
from foretrain.forecast.records import LossCurve, RatePlan

TRUE = true_law()


def test_a_curve_that_follows_the_law_is_found_again() -> None:
    fitted = law.fit(LossCurve(STEPS, TRUE.losses_at(PLAN, STEPS), PLAN))
    assert fitted is not None
    assert fitted.drop == pytest.approx(0.12, abs=1e-3)
    assert fitted.exponent == pytest.approx(TRUE.exponent, rel=1e-2)
    for other in (plans.resized(PLAN, 20000), plans.decaying_from(PLAN, 3000, 500)):
        end = other.total_steps
        assert fitted.loss_at(other, end) == pytest.approx(TRUE.loss_at(other, end), abs=1e-3)


@pytest.mark.parametrize("drop", [0.05, 0.23])
def test_an_annealed_copy_measures_the_drop_before_the_decay_begins(drop: float) -> None:
    true = true_law(drop)
    point = annealed_copy(drop)
    seen = STEPS[STEPS <= 1250]
    without = LossCurve(seen, true.losses_at(PLAN, seen), PLAN)
    measured, guessed = law.fit(dataclasses.replace(without, annealed=(point,))), law.fit(without)
    assert measured is not None
    assert guessed is not None
    truth = true.loss_at(PLAN, 5000)
    assert measured.loss_at(PLAN, 5000) == pytest.approx(truth, abs=0.015)
    assert abs(measured.loss_at(PLAN, 5000) - truth) < abs(guessed.loss_at(PLAN, 5000) - truth) / 3


@pytest.mark.parametrize("early", [300, 600])
def test_an_early_copy_that_showed_less_gives_way_to_a_newer_one(early: int) -> None:
    seen = STEPS[STEPS <= 1300]
    curve = LossCurve(seen, true_law(0.23).losses_at(PLAN, seen), PLAN)
    old = dataclasses.replace(annealed_copy(0.0, early), before=true_law(0.0).loss_at(PLAN, early))
    new = annealed_copy(0.23)
    alone, both, older = (
        law.fit(dataclasses.replace(curve, annealed=copies)) for copies in ((new,), (old, new), (old,))
    )
    assert alone is not None
    assert both is not None
    assert older is not None
    assert alone.drop == pytest.approx(0.23, rel=0.1)
    assert both.drop == pytest.approx(alone.drop, rel=0.1)
    assert older.drop < 0.05, "alone it counts, however early it was"


def test_a_copy_whose_fall_is_within_the_scatter_of_losses_says_little() -> None:
    """The short copy began at a loss that happened to be low, so that it shows no fall at all."""
    seen = STEPS[STEPS <= 1300]
    losses = true_law(0.3).losses_at(PLAN, seen)
    scatter = 0.03 * np.random.default_rng(1).normal(size=len(seen))
    long, short = annealed_copy(0.3, 1200, 100), annealed_copy(0.3, 1200, 10)
    short = dataclasses.replace(short, before=short.loss)
    drops = []
    for curve in (LossCurve(seen, losses, PLAN), LossCurve(seen, losses + scatter, PLAN)):
        fitted = law.fit(dataclasses.replace(curve, annealed=(long, short)))
        assert fitted is not None
        drops.append(fitted.drop)
    smooth, scattered = drops
    assert scattered > 0.84 * 0.3 > smooth


def test_a_short_copy_shows_a_part_of_what_the_decay_is_worth() -> None:
    shares = [law.shown_share(PLAN, steps) for steps in (5, 15, 75, 750, 1500, 3000)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-2:] == [1.0, 1.0]  # as long as the decay of the plan, or longer
    assert law.shown_share(CONSTANT, 15) == 1.0


def test_the_unit_of_a_step_does_not_matter() -> None:
    losses = TRUE.losses_at(PLAN, STEPS)
    seen = STEPS <= 4000
    small = RatePlan(50, PLAN.steps / 100, PLAN.multipliers)
    coarse, fine = (
        law.fit(LossCurve(STEPS[seen] / 100, losses[seen], small)),
        law.fit(LossCurve(STEPS[seen], losses[seen], PLAN)),
    )
    assert coarse is not None
    assert fine is not None
    assert coarse.loss_at(small, 50) == pytest.approx(fine.loss_at(PLAN, 5000), rel=1e-6)


def test_what_is_known_before_counts_until_the_rate_falls() -> None:
    def end(prior: law.LawPrior, until: float) -> float:
        seen = STEPS[until >= STEPS]
        fitted = law.fit(LossCurve(seen, TRUE.losses_at(PLAN, seen), PLAN), prior)
        assert fitted is not None
        return fitted.loss_at(PLAN, 5000)

    deep, flat = law.LawPrior(drop=0.1), law.LawPrior(drop=0.01)
    assert end(flat, 1250) - end(deep, 1250) > 0.1
    assert abs(end(flat, 4800) - end(deep, 4800)) < 0.01


def test_three_losses_are_needed() -> None:
    assert law.fit(LossCurve(STEPS[:2], np.array([5.0, 4.0]), PLAN)) is None
    assert law.fit(LossCurve(STEPS[:3], np.array([5.0, 4.0, 3.5]), PLAN)) is not None


def test_annealing_counts_falls_that_came_before() -> None:
    gains = law.annealing(PLAN, np.array([0.0, 3000.0, 4000.0, 5000.0]))
    assert gains[0] == gains[1] == 0
    longer = 1.3  # the rate falls over 0.3 of the run
    assert 0 < gains[2] < longer / 3
    assert 0.8 * longer < gains[3] < longer


def test_a_longer_fall_of_the_rate_is_worth_more() -> None:
    def end(begin: float) -> float:
        plan = RatePlan(5000, np.array([0.0, begin, 5000.0]), np.array([1.0, 1.0, 0.0]))
        return float(law.annealing(plan, np.array([5000.0]))[0])

    gains = [end(begin) for begin in (4900.0, 4000.0, 2000.0, 0.0)]
    assert gains == sorted(gains)
    assert gains[3] > 1.5 * gains[1]


def test_before_the_rate_falls_a_longer_fall_is_expected_to_bring_more() -> None:
    """What is learned until then is the same, and so are all losses that were seen."""
    seen = STEPS[STEPS <= 1250]
    losses = TRUE.losses_at(CONSTANT, seen)
    ends = []
    for begin in (4500.0, 1300.0):
        plan = RatePlan(5000, np.array([0.0, begin, 5000.0]), np.array([1.0, 1.0, 0.0]))
        fitted = law.fit(LossCurve(seen, losses, plan))
        assert fitted is not None
        ends.append(fitted.drop * float(law.annealing(plan, np.array([5000.0]))[0]))
    assert ends[1] > 1.3 * ends[0]
