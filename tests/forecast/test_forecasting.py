"""Forecasts come near the end of lawful runs, say how sure they are, and never talk nonsense."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forecast.curves import CONSTANT, PLAN, UNKNOWN, annealed_copy, lawful, seen, true_law

from foretrain.forecast import plans
from foretrain.forecast.forecasting import finished, forecast
from foretrain.forecast.history import FinishedRun, History, Residual
from foretrain.forecast.records import AnnealedPoint, LossCurve, LossForecast, RatePlan


def said(curve: LossCurve, *arguments: object, **named: object) -> LossForecast:
    found = forecast(curve, *arguments, **named)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(("share", "within"), [(0.1, 0.06), (0.25, 0.03), (0.5, 0.02), (0.75, 0.01), (0.9, 0.003)])
def test_the_end_of_a_lawful_run_is_near_the_forecast(share: float, within: float) -> None:
    run = lawful(noise=0.002)
    found = said(seen(run, share))
    assert found.step == 5000
    assert found.loss == pytest.approx(run.losses[-1], rel=within)
    assert found.low <= run.losses[-1] <= found.high
    assert not found.calibrated
    assert set(found.baselines) == {"last value", "power law"}


def test_later_forecasts_are_surer() -> None:
    run = lawful(noise=0.002)
    widths = [said(seen(run, share)).high - said(seen(run, share)).low for share in (0.25, 0.5, 0.75, 0.95)]
    assert widths == sorted(widths, reverse=True)


def test_a_higher_level_is_a_wider_interval() -> None:
    part = seen(lawful(), 0.5)
    assert said(part, level=0.95).low < said(part, level=0.8).low
    assert said(part, level=0.95).high > said(part, level=0.8).high


def test_scaled_losses_have_scaled_forecasts() -> None:
    part = seen(lawful(noise=0.002), 0.5)
    one, seven = said(part), said(dataclasses.replace(part, losses=7 * part.losses))
    assert [seven.loss, seven.low, seven.high] == pytest.approx([7 * one.loss, 7 * one.low, 7 * one.high], rel=1e-6)


def test_a_finished_sibling_with_the_same_rates_is_followed() -> None:
    sibling = lawful(drop=0.4, floor=2.9)
    run = lawful(drop=0.4, floor=2.7)
    cold, followed = said(seen(run, 0.25)), said(seen(run, 0.25), [sibling])
    assert "same rates" in followed.method
    assert followed.loss == pytest.approx(run.losses[-1], rel=0.003)
    assert abs(cold.loss - run.losses[-1]) > 3 * abs(followed.loss - run.losses[-1])
    assert followed.high - followed.low < cold.high - cold.low


def test_siblings_with_other_rates_tell_the_drop_only() -> None:
    other = lawful(RatePlan(5000, np.array([0.0, 2000.0, 5000.0]), np.array([1.0, 1.0, 0.0])), drop=0.4)
    run = lawful(drop=0.4)
    found = said(seen(run, 0.25), [other])
    assert "earlier runs" in found.method
    assert abs(found.loss - run.losses[-1]) < abs(said(seen(run, 0.25)).loss - run.losses[-1]) / 2


def test_an_annealed_copy_is_used() -> None:
    run = lawful(drop=0.4)
    found, without = (
        said(dataclasses.replace(seen(run, 0.25), annealed=copies)) for copies in ((annealed_copy(0.4),), ())
    )
    assert "annealed copy" in found.method
    assert abs(found.loss - run.losses[-1]) < 0.5 * abs(without.loss - run.losses[-1])


def test_another_plan_and_another_step_can_be_asked_for() -> None:
    part = seen(lawful(), 0.5)
    ended = plans.decaying_from(PLAN, 2500, 500)
    sooner = said(part, plan=ended)
    assert sooner.step == 3000
    assert sooner.loss == pytest.approx(true_law().loss_at(ended, 3000), rel=0.02)
    assert said(part, step=3000).loss > sooner.loss  # by then the plan of the run itself has not let its rate fall


def test_without_the_rate_less_is_known() -> None:
    told, untold = said(seen(lawful(), 0.5)), said(seen(lawful(UNKNOWN), 0.5))
    assert "nobody told" in untold.method
    assert untold.high - untold.low > 1.2 * (told.high - told.low)


def test_constant_rates_follow_the_power_law() -> None:
    run = lawful(CONSTANT, noise=0.001)
    found = said(seen(run, 0.5))
    assert "constant rate" in found.method
    assert found.loss == pytest.approx(run.losses[-1], rel=0.003)


def test_what_was_measured_is_not_forecast() -> None:
    run = lawful()
    found = said(run)
    assert found.method == "measured"
    assert found.low == found.loss == found.high == run.losses[-1]
    assert said(seen(run, 0.5), step=1000).loss == run.losses[9]


def test_nothing_is_said_of_too_little_or_of_a_run_that_has_diverged() -> None:
    run = lawful()
    nothing = LossCurve(np.empty(0), np.empty(0), PLAN)
    assert forecast(nothing) is None
    assert forecast(LossCurve(run.steps[:2], run.losses[:2], PLAN)) is None
    assert forecast(LossCurve(run.steps[:3], run.losses[:3], PLAN)) is not None
    assert forecast(LossCurve(run.steps[:9], np.append(run.losses[:8], np.nan), PLAN)) is None


def test_a_rising_loss_is_not_promised_to_fall_much_and_the_interval_holds_its_rise() -> None:
    steps = np.arange(100.0, 2001.0, 100.0)
    found = said(LossCurve(steps, 3 + steps / 2000, CONSTANT))
    assert found.loss == pytest.approx(4.0, rel=0.1)
    assert found.high > 4.1


def test_a_loss_that_has_not_moved_yet_has_a_wide_interval() -> None:
    steps = np.arange(100.0, 1001.0, 100.0)
    found = said(LossCurve(steps, np.full(10, 0.69), CONSTANT))
    assert found.loss == pytest.approx(0.69, rel=0.1)
    assert found.high - found.low > 0.02


def test_ten_own_runs_make_it_calibrated() -> None:
    history = History()
    runs = [lawful(noise=0.002, seed=seed, floor=2.6 + 0.05 * seed) for seed in range(12)]
    for run in runs[:10]:
        assert not said(seen(runs[11], 0.5), history=history).calibrated
        entry = finished(run)
        assert entry is not None
        history.add(dataclasses.replace(entry, drop=None))  # the way of the forecast stays that of theirs
    cold, own = said(seen(runs[11], 0.5)), said(seen(runs[11], 0.5), history=history)
    assert own.calibrated
    assert own.high - own.low < cold.high - cold.low
    assert own.low <= runs[11].losses[-1] <= own.high
    others = History([dataclasses.replace(entry, kind="another") for entry in history.runs])
    assert said(seen(runs[11], 0.5), history=others) == cold, "errors on runs of another kind say nothing of this one"


def test_earlier_runs_of_the_kind_tell_the_drop() -> None:
    entry = finished(lawful(drop=0.4))
    assert entry is not None
    run = lawful(drop=0.4, floor=2.6)
    told = said(seen(run, 0.25), history=History([entry]))
    assert "earlier runs" in told.method
    assert abs(told.loss - run.losses[-1]) < abs(said(seen(run, 0.25)).loss - run.losses[-1]) / 2
    of_others = History([dataclasses.replace(entry, kind="other")])
    assert said(seen(run, 0.25), history=of_others).loss == said(seen(run, 0.25)).loss


def test_only_runs_that_came_to_their_end_are_kept() -> None:
    assert finished(seen(lawful(), 0.9)) is None
    assert finished(LossCurve(np.empty(0), np.empty(0), PLAN)) is None


def test_a_history_is_written_and_read() -> None:
    entry = finished(lawful())
    assert entry is not None
    history = History([entry, FinishedRun("other", (Residual(0.5, True, "law", -0.25),))])
    assert History.from_json(history.to_json()) == history
    odd = {
        "runs": [3, {"residuals": [[1, 2], [0.5, True, "law", "x"], [0.5, False, "law", float("nan")]], "drop": "x"}]
    }
    assert History.from_json(odd).runs == [FinishedRun("", ())]
    assert History.from_json({}).runs == []


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_nothing_is_said_of_a_loss_that_falls_by_orders_of_magnitude(share: float) -> None:
    steps = np.arange(10.0, 401.0, 10.0)
    plan = RatePlan(400, np.array([0.0, 280.0, 400.0]), np.array([1.0, 1.0, 0.0]))
    run = LossCurve(steps, 8 * np.exp(-steps / 25), plan)
    assert forecast(seen(run, share)) is None
    assert finished(run) is not None  # what it measured is of use, forecasts that were none are not
    assert forecast(seen(LossCurve(steps, 8 * np.exp(-steps / 2500), plan), share)) is not None


LOSS = st.one_of(
    st.floats(-10, 10),
    st.floats(1e-9, 1e-3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.just(0.0),
    st.just(5.0),
)
MULTIPLIER = st.one_of(st.floats(0, 2), st.just(0.0), st.just(1.0))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    losses=st.lists(LOSS, max_size=12),
    gaps=st.lists(st.integers(0, 50), min_size=12, max_size=12),
    total=st.integers(0, 400),
    multipliers=st.lists(MULTIPLIER, max_size=5),
    level=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
def test_no_curve_makes_it_raise_or_talk_nonsense(
    losses: list[float], gaps: list[int], total: int, multipliers: list[float], level: float
) -> None:
    steps = np.cumsum(gaps[: len(losses)]).astype(np.float64)
    plan = RatePlan(total, np.linspace(0, total, len(multipliers)), np.array(multipliers))
    annealed = (AnnealedPoint(5, 3, losses[0], losses[-1]),) if len(losses) > 8 else ()
    curve = LossCurve(steps, np.array(losses, dtype=np.float64), plan, annealed)
    for siblings in ([], [curve]):
        found = forecast(curve, siblings, level)
        if found is not None:
            assert math.isfinite(found.loss)
            assert -1e300 < found.low <= found.loss <= found.high < 1e300
            assert found.low <= 0 or found.high <= 100 * found.low or min(losses) <= 0
    finished(curve)
