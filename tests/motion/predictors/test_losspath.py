"""The shared forecast of the smoothed loss."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.motion.predictors.base import Situation
from foretrain.motion.predictors.losspath import LossPath

WINDOW = 10
HORIZONS = [10, 20, 40, 60, 80]


def at(step: int, loss: float) -> Situation:
    return Situation(np.zeros(64), np.ones((1, 4, 4)), WINDOW, loss, step)


def watch(path: LossPath, losses: list[float]) -> Situation:
    for number, loss in enumerate(losses):
        path.observe(at((number + 1) * WINDOW, loss))
    return at(len(losses) * WINDOW, losses[-1])


def test_nothing_known_is_no_change_with_a_width() -> None:
    loss, deviation = LossPath().forecast(at(0, 3.0), HORIZONS)
    assert loss == pytest.approx(3.0)
    assert (deviation > 0).all()
    assert (np.diff(deviation) > 0).all()


@pytest.mark.parametrize("rate", [0.9, 0.97])
def test_exponential_decay_is_followed(rate: float) -> None:
    path = LossPath()
    last = watch(path, [1 + 2 * rate**n for n in range(30)])
    loss, deviation = path.forecast(last, HORIZONS)
    real = np.array([1 + 2 * rate ** (29 + h / WINDOW) for h in HORIZONS])
    change = last.loss - real
    assert np.abs(loss - real) == pytest.approx(0, abs=0.1 * float(change.max()))
    assert (deviation < 2 * change.max()).all()


def test_a_straight_line_is_continued() -> None:
    path = LossPath()
    last = watch(path, [10 - 0.1 * n for n in range(40)])
    loss, _ = path.forecast(last, [5, *HORIZONS])
    assert last.loss - loss == pytest.approx(np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8]), rel=0.1)


def test_noise_around_a_level_is_not_extrapolated() -> None:
    random = np.random.default_rng(0)
    path = LossPath()
    last = watch(path, (3 + 0.1 * random.normal(size=80)).tolist())
    loss, deviation = path.forecast(last, HORIZONS)
    assert np.abs(loss - last.loss).max() < 0.15
    assert 0.05 < deviation[0] < 0.3


def test_the_deviation_covers_what_happens() -> None:
    random = np.random.default_rng(1)
    path = LossPath()
    losses = 2 + np.exp(-np.arange(150) / 40) + 0.02 * random.normal(size=150)
    inside = []
    for number in range(140):
        path.observe(at((number + 1) * WINDOW, float(losses[number])))
        if number > 20:
            loss, deviation = path.forecast(at((number + 1) * WINDOW, float(losses[number])), [40])
            inside.append(abs(loss[0] - losses[number + 4]) < 2 * deviation[0])
    assert 0.85 < np.mean(inside) <= 1.0


def test_a_gap_starts_anew_but_keeps_what_was_learned() -> None:
    path = LossPath()
    watch(path, [10 - 0.1 * n for n in range(20)])
    path.observe(at(1000, 50.0))  # a move of the weights lies between
    loss, _ = path.forecast(at(1000, 50.0), [10])
    assert loss[0] == pytest.approx(49.9, abs=0.03)


def test_a_loss_that_is_not_finite_is_ignored() -> None:
    path, other = LossPath(), LossPath()
    last = watch(path, [3.0, 2.9, 2.8])
    watch(other, [3.0, 2.9, 2.8])
    path.observe(at(40, float("nan")))
    assert np.array_equal(path.forecast(last, HORIZONS), other.forecast(last, HORIZONS))


def test_far_horizons_stay_finite_and_flatten() -> None:
    path = LossPath()
    last = watch(path, [1 + 2 * 0.95**n for n in range(30)])
    loss, deviation = path.forecast(last, [80, 200, 2000, 20000])
    assert np.isfinite(loss).all()
    assert (np.diff(deviation) > 0).all()
    assert loss[-1] > 0.5


def test_state() -> None:
    path, other = LossPath(), LossPath()
    last = watch(path, [1 + 2 * 0.95**n for n in range(12)])
    other.load_state_dict(path.state_dict())
    assert np.array_equal(path.forecast(last, HORIZONS), other.forecast(last, HORIZONS))
    path.observe(at(130, 2.0))
    other.observe(at(130, 2.0))
    assert np.array_equal(path.forecast(last, HORIZONS), other.forecast(last, HORIZONS))
