"""What the losses of windows say: a gain in loss is worth as many steps as the run itself would need for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretrain.hybrid.judges.worth import in_steps
from foretrain.motion.losses import LossHistory, WindowLosses


def falling(per_step: float, windows: int = 10, noise: float = 0.0, seed: int = 0) -> WindowLosses:
    draw = np.random.default_rng(seed)
    slope = WindowLosses()
    for window in range(windows):
        slope.add(tuple(5.0 - per_step * (10 * window + i) + noise * draw.normal() for i in range(10)))
    return slope


@pytest.mark.parametrize("low_noise", [False, True])
@pytest.mark.parametrize("per_step", [0.01, 3.0, 1e-5])
def test_a_straight_fall_is_measured_exactly(per_step: float, low_noise: bool) -> None:
    slope = falling(per_step)
    assert slope.per_step(low_noise) == pytest.approx(per_step)
    assert in_steps(7 * per_step, slope.per_step(low_noise)) == pytest.approx(7.0)
    assert in_steps(-7 * per_step, slope.per_step(low_noise)) == pytest.approx(-7.0)


def test_noise_averages_out_over_windows() -> None:
    found = [falling(0.01, noise=0.1, seed=seed).per_step(low_noise=False) for seed in range(50)]
    assert np.mean(found) == pytest.approx(0.01, rel=0.1)
    assert np.std(found) < 0.003


def test_nothing_is_known_before_three_windows() -> None:
    assert math.isnan(WindowLosses().per_step(low_noise=False))
    assert math.isnan(WindowLosses().per_step(low_noise=True))
    assert math.isnan(falling(0.01, windows=2).per_step(low_noise=False))
    assert falling(0.01, windows=1).per_step(low_noise=True) == pytest.approx(0.01)


@pytest.mark.parametrize("per_step", [0.0, -0.01])
def test_where_the_loss_does_not_fall_a_gain_is_worth_no_steps(per_step: float) -> None:
    for low_noise in (False, True):
        assert in_steps(1.0, falling(per_step).per_step(low_noise)) == 0.0


def test_only_the_last_twelve_windows_count() -> None:
    slope = falling(1.0, windows=30)
    for window in range(12):
        slope.add(tuple(2.0 - 0.01 * (10 * window + i) for i in range(10)))
    assert slope.per_step(low_noise=False) == pytest.approx(0.01)
    assert len(slope.points) == 12


def test_losses_that_are_no_numbers_are_left_out() -> None:
    slope = falling(0.01)
    before = slope.state_dict()["points"]
    slope.add((math.nan,) * 10)
    assert slope.state_dict()["points"] == before
    slope.add((math.nan, *(5.0 - 0.01 * (110 + i) for i in range(1, 9)), math.inf))
    assert slope.per_step(low_noise=False) == pytest.approx(0.01, rel=0.05)
    assert slope.per_step(low_noise=True) == pytest.approx(0.01)


def test_state_survives_a_round_trip() -> None:
    one, other = falling(0.02, noise=0.1), WindowLosses()
    other.load_state_dict(one.state_dict())
    for slope in (one, other):
        slope.add((1.0, 0.9, 0.8))
    assert one.state_dict() == other.state_dict()
    assert len(other.points) == 11


# --- the first and the last losses -----------------------------------------------------------------------------------


def history(first: list[float], last: list[float]) -> LossHistory:
    made = LossHistory()
    for loss in (*first, *last):
        made.add(loss)
    return made


@pytest.mark.parametrize(
    ("first", "limit"),
    [
        ([5.0, 5.2, 4.8], 10.0),
        ([2.0, 3.0, 3.2], 6.0),  # a lucky first loss: the middle one counts
        ([5.0, 700.0, 900.0], 10.0),  # the second step was ruin already: the first one counts
        ([-4.0, -4.0, -4.0], 0.0),
    ],
)
def test_ruin_is_twice_the_loss_of_the_untrained_model(first: list[float], limit: float) -> None:
    for factor, ruined in ((0.98, False), (1.02, True)):
        level = limit * factor if limit else 0.1 * (1 if ruined else -1)
        assert history(first, [level] * 64).ruined is ruined
        assert history(first, [level] * 64).sound is not ruined


def test_the_untrained_model_is_known_by_finite_losses_only() -> None:
    made = LossHistory()
    made.begin([math.nan, 5.0, math.inf])
    made.begin([4.0, 6.0, 7.0])
    assert made.start == [5.0, 4.0, 6.0]
    assert made.start_loss == 5.0


def test_what_was_gained_and_lost_again() -> None:
    made = LossHistory()
    made.first, made.best, made.best_sigma = 6.0, 2.0, 0.01
    assert made.gain == 4.0
    assert made.lost(3.0) == pytest.approx(0.25)
    assert made.far_above(0.5) == 4.0
    made.best_sigma = 1.0  # nothing was gained beyond noise
    assert made.gain == 0.0
    assert made.far_above(0.5) == 16.0
    assert (made.lost(15.0), made.lost(17.0)) == (0.0, 1.0)


def test_a_window_feeds_all_that_is_read_from_windows() -> None:
    made = WindowLosses()
    made.add((4.0, 3.0, math.nan, 2.0))
    assert made.smoothed == pytest.approx((4.0 * 15 + 3.0) / 16 * 15 / 16 + 2.0 / 16)
    assert made.averages[0] == pytest.approx(((3.0 * 3 + 4.0) / 4 * 3 + 3.0) / 4 * 3 / 4 + 2.0 / 4)  # from the mean on
    assert made.last_fall == 1.0
    assert made.steps == 4
    assert math.isnan(made.noise_ratio)  # a gap would look like noise
    made.new_level()
    assert math.isnan(made.smoothed)
    assert made.points
