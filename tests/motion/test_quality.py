"""Forecasts are scored exactly, against no change and repeating, and trusted only where they beat both."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretrain.motion.predictors.base import Array, Followed, Forecast, Situation
from foretrain.motion.quality import Quality
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, LAST_WINDOW

WINDOW, G, R = 10, 2, len(DIRECTIONS)
BASIS = np.random.default_rng(0).normal(size=(G, R, 30))
GRAM = np.einsum("gri,gsi->grs", BASIS, BASIS)


def happened(displacement: Array, windows: int = 1, loss: float = 1.0) -> Followed:
    """[G, 30] what really followed."""
    dots = np.einsum("gri,gi->gr", BASIS, displacement)
    situation = Situation(np.ones(64), GRAM, WINDOW, 1.0, 100)
    return Followed(situation, windows * WINDOW, dots, (displacement**2).sum(axis=1), loss)


def forecast(coefficients: Array, windows: int = 1, loss: float = 1.0) -> Forecast:
    """The same coefficients per window at every horizon."""
    horizons = tuple(n * WINDOW for n in HORIZONS_IN_WINDOWS)
    table = np.stack([coefficients * n / windows for n in HORIZONS_IN_WINDOWS])
    return Forecast(horizons, table, np.full(len(horizons), loss), np.full(len(horizons), 0.1))


def along(coefficients: Array) -> Array:
    return np.einsum("gr,gri->gi", coefficients, BASIS)


def repeating(share: float = 1.0) -> Array:
    coefficients = np.zeros((G, R))
    coefficients[:, LAST_WINDOW] = share
    return coefficients


def fed(predicted: Array, actual: Array, count: int = 10, windows: int = 1, noise: float = 0.0) -> Quality:
    draw = np.random.default_rng(1)
    quality = Quality(WINDOW)
    for _ in range(count):
        quality.add(happened(actual + noise * draw.normal(size=actual.shape), windows), forecast(predicted, windows))
    return quality


def test_nothing_is_known_before_the_first_forecast() -> None:
    quality = Quality(WINDOW)
    assert math.isnan(quality.r2(1))
    assert math.isnan(quality.cosine(1))
    assert not quality.trusted(1)
    assert quality.summary() == {}


@pytest.mark.parametrize("windows", HORIZONS_IN_WINDOWS)
def test_scores_are_those_of_the_real_vectors(windows: int) -> None:
    draw = np.random.default_rng(5)
    predicted, actual = draw.normal(size=(G, R)), draw.normal(size=(G, 30))
    quality = fed(predicted, actual, count=3, windows=windows)
    made, error = along(predicted), actual - along(predicted)
    found = quality.summary()[str(windows * WINDOW)]
    assert found["count"] == 3
    assert found["cosine"] == pytest.approx(
        (made * actual).sum() / np.linalg.norm(made) / np.linalg.norm(actual), abs=1e-4
    )
    assert found["norm_ratio"] == pytest.approx(np.linalg.norm(made) / np.linalg.norm(actual), abs=1e-4)
    assert found["r2"] == pytest.approx(1 - (error**2).sum() / (actual**2).sum(), abs=1e-4)
    repeat_error = actual - along(repeating(windows))
    assert found["repeat_r2"] == pytest.approx(1 - (repeat_error**2).sum() / (actual**2).sum(), abs=1e-4)
    assert found["no_change_r2"] == 0.0
    assert quality.r2(windows) == pytest.approx(found["r2"], abs=1e-4)


def test_standing_still_is_counted_but_is_no_forecast() -> None:
    quality = fed(np.zeros((G, R)), along(repeating()), count=4)
    quality.add(happened(along(repeating())), forecast(repeating()))
    found = quality.summary()[str(WINDOW)]
    assert (found["count"], found["made"]) == (5, 1)
    assert quality.repeat_r2(1) == pytest.approx(1.0)


def test_a_perfect_forecast() -> None:
    coefficients = np.random.default_rng(2).normal(size=(G, R))
    quality = fed(coefficients, along(coefficients))
    assert quality.r2(1) == pytest.approx(1.0)
    assert quality.cosine(1) == pytest.approx(1.0)
    assert quality.spread(1) == pytest.approx(0.0, abs=1e-6)
    assert quality.trusted(1)


def test_repeating_itself_is_trusted_where_the_motion_repeats() -> None:
    """A tie with the baseline is no reason for distrust."""
    assert fed(repeating(), along(repeating())).trusted(1)
    assert fed(repeating(), along(repeating()), noise=0.2).trusted(1)


@pytest.mark.parametrize("share", [0.0, -0.5, 2.01, 50.0])
def test_what_does_not_beat_no_change_is_not_trusted(share: float) -> None:
    assert not fed(repeating(share), along(repeating())).trusted(1)


def test_what_repeating_beats_is_not_trusted() -> None:
    quality = fed(repeating(0.3), along(repeating()))
    assert quality.r2(1) > 0
    assert not quality.trusted(1)


def test_trust_follows_the_last_forecasts() -> None:
    draw = np.random.default_rng(3)
    quality = fed(repeating(-1.0), along(repeating()), count=30)
    for _ in range(120):
        quality.add(happened(along(repeating()) + 0.2 * draw.normal(size=(G, 30))), forecast(repeating()))
    assert quality.trusted(1)
    assert quality.r2(1) > 0.9
    assert quality.summary()["10"]["r2"] < 0.5  # the whole run
    for _ in range(8):
        quality.add(happened(along(repeating())), forecast(repeating(-1.0)))
    assert not quality.trusted(1)


def test_an_unknown_horizon_is_judged_by_the_nearest_known_one() -> None:
    quality = fed(repeating(), along(repeating(4)), windows=4)
    assert quality.r2(4) == quality.r2(8) == quality.r2(1)
    quality.add(happened(along(repeating(-1.0))), forecast(repeating()))
    assert quality.r2(1) != quality.r2(4)
    assert quality.r2(2) == quality.r2(1)  # the shorter of equals


@pytest.mark.parametrize("bad", [math.nan, 1e200])
def test_a_forecast_that_is_no_number_is_worse_than_none(bad: float) -> None:
    quality = fed(np.full((G, R), bad), along(repeating()))
    assert not quality.trusted(1)
    assert quality.r2(1) <= -10
    for values in quality.summary().values():
        assert all(math.isfinite(value) for value in values.values())


def test_one_wild_forecast_does_not_drown_all_others() -> None:
    draw = np.random.default_rng(3)
    quality = fed(repeating(), along(repeating()), count=20, noise=0.2)
    quality.add(happened(along(repeating())), forecast(repeating(1e6)))
    for _ in range(120):
        quality.add(happened(along(repeating()) + 0.2 * draw.normal(size=(G, 30))), forecast(repeating()))
    assert quality.trusted(1)


@pytest.mark.parametrize(("loss", "error"), [(1.0, 0.0), (1.1, 0.1), (0.5, 0.5), (math.nan, 10.0), (1e9, 10.0)])
def test_loss_errors_are_relative_and_bounded(loss: float, error: float) -> None:
    quality = Quality(WINDOW)
    quality.add(happened(along(repeating())), forecast(repeating(), loss=loss))
    assert quality.summary()["10"]["loss_error"] == pytest.approx(error, abs=1e-4)


def test_spread_is_what_differs_from_forecast_to_forecast() -> None:
    steady = fed(repeating(0.5), along(repeating()))
    quality = Quality(WINDOW)
    for index in range(20):
        quality.add(happened(along(repeating())), forecast(repeating(1.0 if index % 2 else 0.0)))
    assert steady.spread(1) == pytest.approx(0.0, abs=1e-6)
    assert quality.spread(1) > 0.5


def test_weights_that_stood_still_are_no_error() -> None:
    quality = fed(repeating(), np.zeros((G, 30)))
    assert all(math.isfinite(value) for value in quality.summary()["10"].values())


def test_state_survives_a_round_trip() -> None:
    one = fed(repeating(), along(repeating()), noise=0.3)
    other = Quality(WINDOW)
    other.load_state_dict(one.state_dict())
    for quality in (one, other):
        quality.add(happened(along(repeating(0.7))), forecast(repeating()))
    assert one.state_dict() == other.state_dict()
    assert other.tallies[1].count == 11
