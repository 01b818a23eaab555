"""Intervals against scipy, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from foretrain.measure.stats import Interval, paired_interval, smallest_detectable

numbers = st.floats(-1e6, 1e6, allow_nan=False)


class TestPairedInterval:
    @given(st.lists(numbers, min_size=2, max_size=12), st.sampled_from([0.8, 0.95, 0.99]))
    def test_as_scipy(self, values: list[float], level: float) -> None:
        interval = paired_interval(values, level)
        deviation = float(np.std(values, ddof=1))
        assert interval.n == len(values)
        assert interval.mean == pytest.approx(np.mean(values), abs=1e-6)
        assert interval.deviation == pytest.approx(deviation, abs=1e-6)
        half = reference.t.ppf((1 + level) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
        assert interval.low is not None
        assert interval.high is not None
        assert interval.high - interval.low == pytest.approx(2 * half, rel=1e-6, abs=1e-6)

    def test_one_value_has_no_interval(self) -> None:
        assert paired_interval([3.0]) == Interval(3.0, None, None, None, 1)

    @pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
    def test_what_is_no_number_is_refused(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match="interval"):
            paired_interval(values)

    def test_covers_the_truth_as_often_as_it_says(self) -> None:
        random = np.random.default_rng(0)
        hits = 0
        for _ in range(1000):
            interval = paired_interval(random.normal(1.0, 2.0, size=4).tolist())
            assert interval.low is not None
            assert interval.high is not None
            hits += interval.low <= 1.0 <= interval.high
        assert 930 <= hits <= 970


class TestSmallestDetectable:
    @staticmethod
    def spread(deviation: float, n: int) -> list[float]:
        """Return n values with this standard deviation."""
        values = np.arange(n, dtype=float)
        return (deviation * values / np.std(values, ddof=1)).tolist()  # type: ignore[no-any-return]

    def test_formula(self) -> None:
        expected = (reference.t.ppf(0.975, 4) + reference.t.ppf(0.8, 4)) * 2.0 / math.sqrt(5)
        assert smallest_detectable(self.spread(2.0, 5)) == pytest.approx(expected)

    def test_fewer_than_two_detect_nothing(self) -> None:
        assert smallest_detectable([1.0]) is None

    @given(st.floats(0.01, 100), st.integers(2, 50))
    def test_more_pairs_detect_less(self, deviation: float, n: int) -> None:
        few, more = smallest_detectable(self.spread(deviation, n)), smallest_detectable(self.spread(deviation, n + 1))
        assert few is not None
        assert more is not None
        assert more < few
