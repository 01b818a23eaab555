"""Verdicts: the worked cases, the rules one by one, and how often they are wrong on simulated machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain_bench.verdict import (
    DELTA,
    FEWEST,
    MOST_RUNS,
    BenchmarkVerdict,
    fewest_processes,
    judge,
    runs_needed,
)

TRAINING = ([3.0903, 3.0868, 3.3333, 3.0883, 3.3354], [13.582, 3.0887, 3.2543, 3.0916, 3.3333])
ADAMW = ([1.1533, 1.3587, 1.2731, 1.2132, 1.1289], [1.9212, 4.0189, 1.9528, 1.8273, 0.8924])
TIGHT = [1.0, 1.002, 0.998, 1.001, 0.999]


def verdict_of(a: list[float], b: list[float], delta: float = DELTA) -> BenchmarkVerdict:
    return judge({"x": ([[value] for value in a], [[value] for value in b])}, delta)["x"]


class TestWorkedCases:
    def test_one_slow_process(self) -> None:
        verdict = verdict_of(*TRAINING)
        assert verdict.verdict in ("equivalent", "inconclusive")
        assert verdict.ratio < 1.1

    def test_both_together(self) -> None:
        sides = {
            name: ([[value] for value in a], [[value] for value in b])
            for name, (a, b) in {"training": TRAINING, "adamw": ADAMW}.items()
        }
        verdicts = judge(sides)
        assert verdicts["training"].verdict in ("equivalent", "inconclusive")
        assert verdicts["adamw"].verdict == "inconclusive"

    def test_adamw_is_neither_regressed_nor_normal(self) -> None:
        verdict = verdict_of(*ADAMW)
        assert verdict.verdict == "inconclusive"
        assert verdict.runs_needed is not None
        assert verdict.runs_needed > 5


class TestRules:
    def test_clear_slowdown(self) -> None:
        verdict = verdict_of(TIGHT, [1.3 * value for value in TIGHT])
        assert verdict.verdict == "regressed"
        assert verdict.ratio == pytest.approx(1.3)
        assert verdict.interval[0] > 1.29
        assert verdict.runs_needed is None

    def test_clear_improvement_is_no_regression_and_is_settled(self) -> None:
        verdict = verdict_of([1.3 * value for value in TIGHT], TIGHT)
        assert verdict.verdict == "improved"
        assert verdict.runs_needed is None

    def test_same(self) -> None:
        assert verdict_of(TIGHT, TIGHT[::-1]).verdict == "equivalent"

    def test_constant_numbers(self) -> None:
        assert verdict_of([1.0] * 5, [1.0] * 5).verdict == "equivalent"
        assert verdict_of([1.0] * 5, [1.3] * 5).verdict == "regressed"

    @pytest.mark.parametrize("counts", [(1, 1), (4, 4), (4, 20), (20, 4)])
    def test_fewer_than_five_settle_nothing(self, counts: tuple[int, int]) -> None:
        verdict = verdict_of((TIGHT * 4)[: counts[0]], [1.5 * value for value in (TIGHT * 4)[: counts[1]]])
        assert verdict.verdict == "inconclusive"
        assert verdict.runs_needed is not None
        assert verdict.runs_needed >= FEWEST

    def test_a_change_below_delta_is_equivalent(self) -> None:
        assert verdict_of(TIGHT, [1.01 * value for value in TIGHT]).verdict == "equivalent"
        assert verdict_of(TIGHT, [1.01 * value for value in TIGHT], delta=0.002).verdict == "regressed"
        assert verdict_of(TIGHT, [1.05 * value for value in TIGHT], delta=0.1).verdict == "equivalent"

    def test_the_interval_must_be_wholly_beyond(self) -> None:
        verdict = verdict_of(TIGHT, [0.999, 1.04, 1.05, 1.06, 1.07])
        assert verdict.low < math.log1p(DELTA) < verdict.effect
        assert verdict.verdict == "inconclusive"

    def test_delta_grows_with_the_noise(self) -> None:
        noisy = [1.0, 1.1, 0.9, 1.05, 0.95]
        verdict = verdict_of(noisy, noisy)
        assert verdict.delta == pytest.approx(2 * verdict.noise)
        assert verdict.verdict == "inconclusive"  # too noisy to see 5 % is no proof that there is none

    def test_beyond_two_percent_but_not_beyond_the_noise_is_no_regression(self) -> None:
        noisy = [1.0, 1.03, 0.97, 1.06, 0.94]
        verdict = verdict_of(noisy, [1.18 * value for value in noisy])
        assert math.log1p(DELTA) < verdict.low < verdict.delta
        assert verdict.probability <= 0.05
        assert verdict.verdict == "inconclusive"
        assert verdict_of(noisy, [1.25 * value for value in noisy]).verdict == "regressed"

    def test_many_benchmarks_need_more_processes(self) -> None:
        same, slow = [[value] for value in TIGHT], [[1.3 * value] for value in TIGHT]
        many = {f"same {number}": (same, same) for number in range(40)}
        verdict = judge({**many, "slow": (same, slow)})["slow"]
        assert verdict.verdict == "inconclusive"  # 1 of 252 arrangements is no surprise among 41 benchmarks
        assert judge({**many, "fast": (slow, same)})["fast"].verdict == "inconclusive"
        assert verdict.runs_needed == fewest_processes(41)
        enough = fewest_processes(41)
        same, slow = [[v] for v in (TIGHT * 2)[:enough]], [[1.3 * v] for v in (TIGHT * 2)[:enough]]
        many = {f"same {number}": (same, same) for number in range(40)}
        assert judge({**many, "slow": (same, slow)})["slow"].verdict == "regressed"

    def test_nothing_to_judge(self) -> None:
        assert judge({}) == {}

    def test_least_processes(self) -> None:
        assert fewest_processes(1) == FEWEST
        assert math.comb(2 * fewest_processes(31), fewest_processes(31)) >= 31 / 0.05


class TestProperties:
    sides = st.lists(st.floats(0.1, 10), min_size=5, max_size=9)

    @given(sides, sides)
    def test_every_verdict_follows_from_its_numbers(self, a: list[float], b: list[float]) -> None:
        verdict = verdict_of(a, b)
        floor = math.log1p(DELTA)
        assert verdict.delta >= floor
        match verdict.verdict:
            case "regressed":
                assert verdict.low > verdict.delta
                assert verdict.probability <= 0.05
            case "improved":
                assert verdict.high < -verdict.delta
                assert verdict.probability <= 0.05
            case "equivalent":
                assert -floor < verdict.low <= verdict.high < floor
        assert (verdict.runs_needed is None) == (verdict.verdict != "inconclusive")

    @given(sides, sides)
    def test_never_regressed_both_ways(self, a: list[float], b: list[float]) -> None:
        assert {verdict_of(a, b).verdict, verdict_of(b, a).verdict} != {"regressed"}

    @given(sides)
    def test_code_is_never_slower_than_itself(self, a: list[float]) -> None:
        assert verdict_of(a, a[::-1]).verdict in ("equivalent", "inconclusive")


class TestRunsNeeded:
    def test_less_for_larger_effects(self) -> None:
        needed = [runs_needed(effect, 0.02, (5, 5), 0.02) for effect in (0.04, 0.08, 0.2)]
        assert needed == sorted(needed, reverse=True)
        assert needed[0] > needed[-1]

    def test_more_for_more_noise(self) -> None:
        assert runs_needed(0.1, 0.01, (5, 5), 0.02) < runs_needed(0.1, 0.1, (5, 5), 0.02)

    def test_on_the_border_none_would_do(self) -> None:
        assert runs_needed(0.02, 0.0, (5, 5), 0.02) == MOST_RUNS

    def test_near_the_border_the_uncertainty_of_the_effect_counts(self) -> None:
        assert runs_needed(0.02, 0.02, (5, 5), 0.02) < MOST_RUNS / 10

    def test_is_about_right(self) -> None:
        """With as many processes as it says, the planted slowdown is found more often than not."""
        random = np.random.default_rng(3)
        n = runs_needed(0.05, 0.02 * math.sqrt(math.pi / 2 * 2 / 5), (5, 5), math.log1p(0.02))
        found = 0
        for _ in range(60):
            a, b = np.exp(0.02 * random.normal(size=(2, n)))
            found += verdict_of(a.tolist(), (math.exp(0.05) * b).tolist()).verdict == "regressed"
        assert 5 < n <= 20
        assert found > 30


def normal(random: np.random.Generator, count: int) -> np.ndarray:
    return 0.02 * random.normal(size=count)


def heavy(random: np.random.Generator, count: int) -> np.ndarray:
    return 0.03 * np.abs(random.standard_t(1.5, size=count))


def two_speeds(random: np.random.Generator, count: int) -> np.ndarray:
    return 0.25 * (random.random(count) < 0.3) + 0.01 * random.normal(size=count)


def evenly_two_speeds(random: np.random.Generator, count: int) -> np.ndarray:
    return 0.08 * (random.random(count) < 0.5) + 0.005 * random.normal(size=count)


def drifting(random: np.random.Generator, count: int) -> np.ndarray:
    return np.linspace(0, 0.2, count) + 0.01 * random.normal(size=count)


def wandering(random: np.random.Generator, count: int) -> np.ndarray:
    return np.cumsum(0.02 * random.normal(size=count))


def rarely_slow(random: np.random.Generator, count: int) -> np.ndarray:
    return 0.01 * random.normal(size=count) + (random.random(count) < 0.1) * random.exponential(1.0, size=count)


Cycle = Callable[[np.random.Generator, int], np.ndarray]
MACHINES: list[Cycle] = [normal, heavy, two_speeds, evenly_two_speeds, drifting, wandering, rarely_slow]


def verdicts_on(machine: Cycle, slowdown: float, processes: int, trials: int) -> Counter[str]:
    """Interleaved A B B A on a simulated machine."""
    random = np.random.default_rng(11)
    counts: Counter[str] = Counter()
    for _ in range(trials):
        values = np.exp(machine(random, 2 * processes))
        is_b = np.arange(2 * processes) % 4 % 3 > 0
        counts[verdict_of(values[~is_b].tolist(), ((1 + slowdown) * values[is_b]).tolist()).verdict] += 1
    return counts


class TestSimulatedMachines:
    @pytest.mark.parametrize("processes", [5, 12])
    @pytest.mark.parametrize("machine", MACHINES)
    def test_same_code(self, machine: Cycle, processes: int) -> None:
        counts = verdicts_on(machine, 0.0, processes, 100)
        assert counts["regressed"] <= 5
        assert counts["improved"] <= 5

    def test_five_percent_is_found_with_twenty_processes(self) -> None:
        counts = verdicts_on(normal, 0.05, 20, 60)
        assert counts["regressed"] >= 51
        assert counts["equivalent"] == counts["improved"] == 0

    @pytest.mark.parametrize("machine", MACHINES)
    def test_a_slowdown_of_ten_percent_is_never_called_equivalent(self, machine: Cycle) -> None:
        counts = verdicts_on(machine, 0.1, 10, 60)
        assert counts["equivalent"] == 0
        assert counts["improved"] <= 3
