"""Intervals hold what they should, of own runs and of public ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from foretrain.forecast import intervals
from foretrain.forecast.history import FinishedRun, Residual
from foretrain.forecast.intervals import ForecastSituation

BEFORE = ForecastSituation("law", "before", 0.5, move=0.3, noise=0.01, fallen=2.0, level=3.0, positive=True)


def runs(errors: list[float], progress: float = 0.5, way: str = "law") -> list[FinishedRun]:
    return [FinishedRun("any", (Residual(progress, False, way, error),)) for error in errors]


def test_own_errors_make_a_conformal_interval() -> None:
    errors = np.random.default_rng(0).normal(size=800)
    own, later = errors[:300].tolist(), errors[300:]
    low, high, calibrated = intervals.around(3.0, BEFORE, 0.8, runs(own))
    assert calibrated
    ends = [3.0 * math.exp(error * BEFORE.unit / 3.0) for error in later]
    assert 0.75 < np.mean([low <= end <= high for end in ends]) < 0.85


@pytest.mark.parametrize(
    "own",
    [
        runs([0.1] * 9),
        runs([0.1] * 20, progress=0.1),
        runs([0.1] * 20, way="transfer"),
        [],
    ],
)
def test_other_situations_and_few_runs_do_not_count(own: list[FinishedRun]) -> None:
    assert intervals.around(3.0, BEFORE, 0.8, own) == intervals.around(3.0, BEFORE, 0.8)
    assert not intervals.around(3.0, BEFORE, 0.8, own)[2]


def test_ten_runs_are_too_few_for_a_high_level() -> None:
    own = runs([-1.0, *[0.0] * 8, 1.0])
    narrow, wide = (intervals.around(3.0, BEFORE, level, own) for level in (0.8, 0.99))
    assert wide[0] < narrow[0] <= 3.0 <= narrow[1] < wide[1]


def test_the_unit_grows_with_what_is_not_known() -> None:
    for change in ({"move": 0.6}, {"noise": 0.1}, {"fallen": 0.0}, {"level": 3000.0}):
        assert dataclasses.replace(BEFORE, **change).unit > BEFORE.unit


def test_errors_and_ends_are_each_others_inverse() -> None:
    for situation in (BEFORE, dataclasses.replace(BEFORE, positive=False)):
        own = runs([-1.5] * 5 + [2.0] * 5)
        low, high, _ = intervals.around(3.0, situation, 0.8, own)
        assert intervals.normalised(low, 3.0, situation) == pytest.approx(-1.5)
        assert intervals.normalised(high, 3.0, situation) == pytest.approx(2.0)


def test_every_situation_has_public_errors_in_order() -> None:
    for way in ("law", "drop", "transfer", "unknown"):
        for phase in ("before", "falling", "constant"):
            for progress in (0.05, 0.3, 0.5, 0.9):
                situation = dataclasses.replace(BEFORE, way=way, phase=phase, progress=progress)
                found = intervals.public_quantiles(situation)
                assert found is not intervals._WIDEST
                assert list(found) == sorted(found)
    assert intervals.public_quantiles(dataclasses.replace(BEFORE, way="other")) is intervals._WIDEST
