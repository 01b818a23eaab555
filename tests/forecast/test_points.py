"""Losses are cleaned before anything is fitted to them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.forecast.curves import PLAN

from foretrain.forecast.points import cleaned, tail
from foretrain.forecast.records import LossCurve


def test_what_is_not_finite_is_left_out_and_the_later_of_two_losses_counts() -> None:
    steps = np.array([0.0, 20.0, 10.0, 20.0, 30.0, np.nan, 40.0])
    losses = np.array([9.0, 5.0, 6.0, 4.0, np.inf, 3.0, 2.0])
    at, values = cleaned(LossCurve(steps, losses, PLAN))
    assert at.tolist() == [0, 10, 20, 40]
    assert values.tolist() == [9, 6, 4, 2]


def test_the_beginning_is_skipped_and_many_losses_are_averaged() -> None:
    steps = np.arange(1001.0)
    at, values = cleaned(LossCurve(steps, 2 * steps, PLAN), most=10, skipped=0.1)
    assert len(at) == 10
    assert at[0] > 100
    assert values == pytest.approx(2 * at)
    assert cleaned(LossCurve(steps[:3], steps[:3], PLAN), skipped=0.1)[0].tolist() == [1, 2]


def test_the_tail_is_a_line_against_the_logarithm_of_steps() -> None:
    steps = np.arange(10.0, 200.0, 10.0)
    line = tail(steps, 4 - 0.5 * np.log(steps))
    assert line.slope == pytest.approx(-0.5)
    assert line.noise == pytest.approx(0, abs=1e-9)
    assert line.move(100, 200) == pytest.approx(-0.5 * np.log(2))
    noisy = tail(steps, 4 + 0.1 * np.random.default_rng(0).normal(size=len(steps)))
    assert 0.05 < noisy.noise < 0.2
    bent = tail(steps, 4 - (steps / 100) ** 3)
    assert bent.noise < 0.1 * np.ptp((steps / 100) ** 3)
