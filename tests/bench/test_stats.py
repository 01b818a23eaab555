"""Statistics of two sides against scipy, against hand-made cases, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from foretrain_bench import stats
from foretrain_bench.stats import (
    bootstrap_ratio,
    log_ratio,
    mann_whitney,
    noise_of_ratio,
    small_sample_widening,
    smallest_probability,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False)
times = st.floats(1e-6, 1e3)


def single(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


class TestBootstrap:
    @given(st.lists(times, min_size=2, max_size=8), st.lists(times, min_size=2, max_size=8))
    def test_interval_holds_the_effect(self, a: list[float], b: list[float]) -> None:
        ratio = bootstrap_ratio(single(a), single(b), resamples=200)
        assert ratio.low <= ratio.effect <= ratio.high
        assert ratio.effect == pytest.approx(log_ratio(a, b))

    @given(st.lists(times, min_size=3, max_size=8), st.lists(times, min_size=3, max_size=8), st.floats(0.01, 100))
    def test_the_unit_does_not_matter(self, a: list[float], b: list[float], scale: float) -> None:
        one = bootstrap_ratio(single(a), single(b), resamples=200)
        other = bootstrap_ratio(single([scale * x for x in a]), single([scale * x for x in b]), resamples=200)
        assert (one.effect, one.low, one.high) == pytest.approx((other.effect, other.low, other.high), abs=1e-9)

    def test_same_numbers_same_interval(self) -> None:
        a, b = single([1.0, 1.1, 1.2, 1.3, 1.4]), single([1.5, 1.1, 1.2, 1.0, 1.6])
        assert bootstrap_ratio(a, b) == bootstrap_ratio(a, b)

    def test_samples_within_processes_widen_it(self) -> None:
        medians = [1.0, 1.01, 0.99, 1.02, 0.98]
        spread = [[m * 0.7, m * 0.8, m, m * 1.2, m * 1.3] for m in medians]
        narrow, wide = bootstrap_ratio(single(medians), single(medians)), bootstrap_ratio(spread, spread)
        assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
        assert wide.effect == narrow.effect == 0

    def test_samples_are_drawn_anew_each_time(self) -> None:
        """Not once for all resamples, which would make the interval a matter of luck."""
        spread = [[0.5, 0.6, 1.0, 1.6, 2.0]] * 5
        lows = [bootstrap_ratio(spread, spread, seed=seed).low for seed in range(8)]
        assert max(lows) - min(lows) < 0.1

    def test_few_processes_widen_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = single([1.0, 1.1, 1.2, 1.3, 1.4]), single([1.5, 1.1, 1.2, 1.0, 1.6])
        wide = bootstrap_ratio(a, b)
        monkeypatch.setattr(stats, "small_sample_widening", lambda *_: 1.0)
        narrow = bootstrap_ratio(a, b)
        for one, other in ((wide.low, narrow.low), (wide.high, narrow.high)):
            assert one - wide.effect == pytest.approx(small_sample_widening(5, 5) * (other - wide.effect))
        assert small_sample_widening(5, 5) == pytest.approx(2.306 / 1.96, rel=1e-3)
        assert small_sample_widening(500, 500) == pytest.approx(1.0, abs=0.01)

    def test_one_slow_process_does_not_move_the_effect(self) -> None:
        ratio = bootstrap_ratio(single([3.0, 3.1, 3.05, 3.02, 3.08]), single([3.0, 3.1, 3.05, 3.02, 30.0]))
        assert ratio.effect == pytest.approx(0, abs=0.01)
        assert ratio.high > 1  # but it is not hidden either

    @pytest.mark.parametrize("n", [5, 10, 20])
    def test_covers_no_difference_nineteen_times_in_twenty(self, n: int) -> None:
        random = np.random.default_rng(n)
        hits = 0
        for _ in range(300):
            a, b = np.exp(0.05 * random.normal(size=(2, n)))
            ratio = bootstrap_ratio(single(a.tolist()), single(b.tolist()), resamples=500)
            hits += ratio.low <= 0 <= ratio.high
        assert hits >= 0.93 * 300

    def test_widening_fades(self) -> None:
        assert small_sample_widening(5, 5) > small_sample_widening(20, 20) > small_sample_widening(500, 500)
        assert small_sample_widening(5000, 5000) == pytest.approx(1, abs=1e-3)


class TestNoise:
    @pytest.mark.parametrize("n", [5, 10, 20])
    def test_is_the_deviation_of_the_effect(self, n: int) -> None:
        random = np.random.default_rng(n)
        sides = np.exp(0.03 * random.normal(size=(400, 2, n)))
        real = float(np.std([log_ratio(a, b) for a, b in sides]))
        estimated = float(np.mean([noise_of_ratio(a, b) for a, b in sides]))
        assert estimated == pytest.approx(real, rel=0.2)

    def test_one_slow_process_hardly_counts(self) -> None:
        calm = [1.0, 1.01, 1.02, 0.99, 0.98]
        slow = [1.0, 1.01, 1.02, 0.99, 9.8]
        assert noise_of_ratio(calm, slow) < 3 * noise_of_ratio(calm, calm)

    def test_one_process_says_nothing(self) -> None:
        assert math.isnan(noise_of_ratio([1.0], [1.0, 2.0]))


class TestMannWhitney:
    @given(st.lists(numbers, min_size=4, max_size=24, unique=True), st.integers(1, 3))
    def test_as_scipy_without_ties(self, values: list[float], part: int) -> None:
        cut = part * len(values) // 4
        a, b = values[:cut], values[cut:]
        expected = reference.mannwhitneyu(b, a, alternative="greater", method="exact").pvalue
        assert mann_whitney(a, b) == pytest.approx(expected, rel=1e-9)

    @given(st.lists(st.integers(0, 3), min_size=4, max_size=8))
    def test_ties_as_by_counting_every_arrangement(self, values: list[int]) -> None:
        from itertools import combinations

        cut = len(values) // 2
        ranks = reference.rankdata(values)
        sums = [sum(chosen) for chosen in combinations(ranks.tolist(), len(values) - cut)]
        expected = np.mean([total >= sum(ranks[cut:]) - 1e-9 for total in sums])
        assert mann_whitney(values[:cut], values[cut:]) == pytest.approx(expected)

    def test_all_equal_is_no_evidence(self) -> None:
        assert mann_whitney([1.0] * 5, [1.0] * 5) == 1

    def test_least_probability(self) -> None:
        assert mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(smallest_probability(5, 5))
        assert smallest_probability(5, 5) == 1 / 252

    def test_many_values_go_by_the_normal_curve(self) -> None:
        random = np.random.default_rng(0)
        a, b = random.normal(size=100), random.normal(0.3, 1, size=100)
        expected = reference.mannwhitneyu(b, a, alternative="greater", method="asymptotic").pvalue
        assert mann_whitney(a.tolist(), b.tolist()) == pytest.approx(expected, rel=1e-6)
        assert mann_whitney([1.0] * 100, [1.0] * 100) == 1
