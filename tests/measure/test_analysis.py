"""What follows from runs: with made-up numbers whose truth is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.config import Config
from foretrain.measure.analysis import Curve, analyse
from foretrain.measure.plan import Options, Plan
from foretrain.measure.runs import Spec


def law(steps: float) -> float:
    return 3.0 - 0.4 * math.log(steps / 100)


@given(st.floats(100, 900))
def test_the_curve_is_interpolated_in_the_logarithm_of_steps(steps: float) -> None:
    curve = Curve([(100, law(100)), (300, law(300)), (900, law(900))])
    found, inside = curve.steps(law(steps))
    assert inside or steps in (100, 900)
    assert found == pytest.approx(steps, rel=1e-6)


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.1, 10))
def test_a_lower_loss_never_needs_fewer_steps(first: float, second: float, loss: float) -> None:
    curve = Curve([(100, 5.0), (200, 5.0 - first), (400, 5.0 - first - second)])
    assert curve.falls
    assert curve.steps(loss)[0] >= curve.steps(loss + 0.1)[0]


def test_a_plain_loop_that_does_not_fall_allows_no_figure(base: Config) -> None:
    assert not Curve([(100, 3.0), (200, 2.0), (400, 2.1)]).falls
    analysis = finished(base, saved=0.2, slope=-0.1)
    assert arm(analysis, "hybrid")["speedup"] is None
    assert analysis["verdict"] == "no gain shown"
    assert "no speed-up can be read off" in analysis["sentence"]


def test_a_run_that_equals_plain_is_neither_faster_nor_slower(base: Config) -> None:
    """Whatever the seeds' luck and however noisy the other budgets."""
    analysis = finished(base, saved=0.0, noise=0.02, noisy=lambda spec: spec.max_steps != base.max_steps)
    for value in arm(analysis, "hybrid")["speedups"]:
        assert value == pytest.approx(1.0, rel=1e-6)


def test_beyond_its_budgets_the_curve_is_prolonged_a_little_and_says_so() -> None:
    curve = Curve([(100, law(100)), (300, law(300)), (900, law(900))])
    found, inside = curve.steps(law(1000))
    assert not inside
    assert found == pytest.approx(1000, rel=1e-6)
    assert curve.steps(-50.0) == (pytest.approx(900 * 1.25), False)
    assert curve.steps(50.0) == (pytest.approx(100 / 1.25), False)


def finished(
    base: Config,
    saved: float,
    overhead: float = 0.0,
    noise: float = 0.0,
    seeds: int = 3,
    slope: float = 0.4,
    noisy: Any = lambda spec: True,
) -> dict[str, Any]:
    """Hybrid is worth (1 + saved) x its steps, each taking (1 + overhead) x the time. Learning rates do not matter."""
    draw = np.random.default_rng(5)
    done: dict[str, dict[str, Any]] = {}

    keys: dict[str, str] = {}

    def key(spec: Spec) -> str:
        if repr(spec) not in keys:
            keys[repr(spec)] = spec.key(base, "data")
        return keys[repr(spec)]

    def find(spec: Spec) -> dict[str, Any] | None:
        return done.get(key(spec))

    plan = Plan(base, Options(seeds=seeds), find)
    while specs := plan.next():
        spec = specs[0]
        hybrid = spec.arm.startswith("hybrid")
        still = spec.control == "still"
        worth = spec.max_steps * (1 + saved if hybrid and not still else 1)
        loss = 3 - slope * math.log(worth / 100) + 0.01 * abs(spec.rate_factor - 1) + 0.05 * spec.seed
        loss += noise * draw.normal() * noisy(spec)
        slow = 1 + (overhead if hybrid else 0)
        done[key(spec)] = {
            "arm": spec.arm,
            "seed": spec.seed,
            "loss": loss,
            "held_out_loss": loss,
            "learning_rate": spec.rate_factor,
            "seconds": 0.1 * spec.max_steps * slow,
            "backward_passes": spec.max_steps,
            "tokens": spec.max_steps,
        }
    return analyse(plan)


def arm(analysis: dict[str, Any], name: str) -> dict[str, Any]:
    return next(arm for arm in analysis["arms"] if arm["arm"] == name)


def test_a_true_gain_is_found_and_is_exact_without_noise(base: Config) -> None:
    analysis = finished(base, saved=0.2, overhead=0.05)
    hybrid = arm(analysis, "hybrid")
    assert hybrid["speedup"]["mean"] == pytest.approx(1.2 / 1.05, rel=1e-3)
    assert analysis["verdict"] == "gain"
    assert hybrid["n"] == 3


def test_overhead_without_gain_is_called_slower_and_the_control_shows_it(base: Config) -> None:
    analysis = finished(base, saved=0.0, overhead=0.05)
    assert analysis["verdict"] == "slower"
    still = arm(analysis, "hybrid, not moving")
    assert still["speedup"]["mean"] == pytest.approx(1 / 1.05, rel=1e-3)


def test_noise_makes_it_no_gain_shown_with_the_effect_that_would_have_been_seen(base: Config) -> None:
    analysis = finished(base, saved=0.01, noise=0.03)
    hybrid = arm(analysis, "hybrid")
    assert analysis["verdict"] == "no gain shown"
    assert analysis["sentence"].startswith("No gain shown")
    assert hybrid["speedup"]["low"] < 1 < hybrid["speedup"]["high"]
    assert hybrid["smallest_detectable"] > 1.01
    assert f"{hybrid['smallest_detectable'] - 1:.1%}" in analysis["sentence"]


def test_fewer_than_three_seeds_are_called_one_run(base: Config) -> None:
    assert finished(base, saved=0.3, seeds=1)["verdict"] == "one run"
    assert finished(base, saved=0.3, seeds=2)["verdict"] == "one run"


def test_an_unfinished_comparison_claims_nothing(base: Config) -> None:
    analysis = analyse(Plan(base, Options(), lambda _: None))
    assert analysis["verdict"] == "incomplete"
    assert analysis["arms"] == []


def test_of_100_comparisons_without_effect_hardly_any_claims_one(base: Config) -> None:
    """A/A: the interval is of 95 %, so some 2.5 in 100 may lie wholly above 1."""
    claims = 0
    draw = np.random.default_rng(11)
    for _ in range(100):
        logs = draw.normal(0, 0.02, 3)
        from foretrain.measure.stats import paired_interval

        claims += bool((paired_interval(list(logs)).low or 0) > 0)
    assert claims <= 7


def test_pairing_removes_what_seeds_share(base: Config) -> None:
    """Seeds differ by 0.05 in loss, which is 12 % in steps; the paired interval does not see that."""
    hybrid = arm(finished(base, saved=0.0), "hybrid")
    assert hybrid["loss_difference"]["high"] - hybrid["loss_difference"]["low"] < 1e-9
    assert hybrid["loss_deviation"] == pytest.approx(0.05)
