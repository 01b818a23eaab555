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
from foretrain.measure.plan import PLAIN_SETTINGS, Arm, ComparisonPlan, Options
from foretrain.measure.runs import Spec

KEYS: dict[str, str] = {}
"""Of specs; all tests here have one configuration."""


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


def test_a_loss_above_the_curve_is_charged_however_high_it_is() -> None:
    curve = Curve([(100, law(100)), (300, law(300)), (900, law(900))])
    assert curve.steps(law(20)) == (pytest.approx(20), False)
    assert curve.steps(50.0) == (1.0, False)


def test_a_run_that_ends_far_above_plain_is_no_gain_however_fast_it_was(base: Config) -> None:
    analysis = finished(base, saved=-0.9, overhead=-0.5)
    assert analysis["verdict"] == "slower"
    assert arm(analysis, "hybrid")["speedup"]["mean"] == pytest.approx(0.2, rel=1e-3)


def finished(
    base: Config,
    saved: float,
    overhead: float = 0.0,
    noise: float = 0.0,
    seeds: int = 3,
    slope: float = 0.4,
    noisy: Any = lambda spec: True,
    fails: Any = lambda spec: False,
    best: float = 1.0,
    load: Any = lambda spec: 1.0,
    options: Options | None = None,
    draw_seed: int = 5,
) -> dict[str, Any]:
    """Hybrid is worth (1 + saved) x its steps, each taking (1 + overhead) x the time; `best` is the best rate factor.

    fails: runs that diverge; load: how much slower the machine is during a run.
    """
    draw = np.random.default_rng(draw_seed)
    done: dict[str, dict[str, Any]] = {}

    def key(spec: Spec) -> str:
        if repr(spec) not in KEYS:
            KEYS[repr(spec)] = spec.key(base, "data")
        return KEYS[repr(spec)]

    def find(spec: Spec) -> dict[str, Any] | None:
        return done.get(key(spec))

    plan = ComparisonPlan(base, options or Options(seeds=seeds), find)
    queue: list[Spec] = []
    while queue := queue or [spec for spec in plan.next() if find(spec) is None]:
        spec = queue.pop(0)
        hybrid = spec.arm.startswith("hybrid")
        still = spec.control == "still"
        worth = spec.max_steps * (1 + saved if hybrid and not still else 1)
        loss = 3 - slope * math.log(worth / 100) + 0.01 * abs(spec.rate_factor - best) + 0.05 * spec.seed
        loss += noise * draw.normal() * noisy(spec)
        slow = 1 + (overhead if hybrid else 0)
        done[key(spec)] = {
            "arm": spec.arm,
            "seed": spec.seed,
            "loss": None if fails(spec) else loss,
            "held_out_loss": None if fails(spec) else loss,
            "learning_rate": spec.rate_factor,
            "seconds": 0.1 * spec.max_steps * slow * load(spec),
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


def test_identical_runs_are_called_so_however_much_their_times_scatter(base: Config) -> None:
    def load(spec: Spec) -> float:
        return 1 + spec.arm.startswith("hybrid") * (spec.seed - 1.7)

    analysis = finished(base, saved=0.0, load=load)
    assert analysis["verdict"] == "identical"
    assert analysis["sentence"].startswith("Identical runs: hybrid made no move and ended at the plain loop's loss, ")
    assert "would most likely have been seen" not in analysis["sentence"]
    assert arm(analysis, "hybrid")["identical"]
    assert finished(base, saved=0.0, overhead=0.05)["verdict"] == "slower", "what watching costs beyond noise is said"


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


def test_an_arm_that_needs_one_seed_is_judged_by_one_also_where_others_are_known(base: Config) -> None:
    """It has the settings of the plain loop, whose runs serve it, too."""
    eager = Arm("fp32 eager", "PyTorch as it comes", PLAIN_SETTINGS, rates_of="plain", once=True)
    analysis = finished(base, saved=0.2, options=Options(seeds=3, arms=(eager,)))
    assert arm(analysis, "plain")["n"] == 3
    assert arm(analysis, "fp32 eager")["n"] == 1
    assert arm(analysis, "fp32 eager")["seeds"] == arm(analysis, "plain")["seeds"][:1]


def test_an_unfinished_comparison_claims_nothing(base: Config) -> None:
    analysis = analyse(ComparisonPlan(base, Options(), lambda _: None))
    assert analysis["verdict"] == "incomplete"
    assert analysis["arms"] == []


def test_of_60_comparisons_without_effect_hardly_any_claims_one(base: Config) -> None:
    """A/A through sweep, curve, luck and interval: of 95 %, so some 1.5 of 60 may lie wholly above 1, as many below."""
    options = Options(controls=False)
    verdicts = [finished(base, 0.0, noise=0.01, options=options, draw_seed=seed)["verdict"] for seed in range(60)]
    assert verdicts.count("gain") <= 5
    assert verdicts.count("slower") <= 5
    assert verdicts.count("no gain shown") >= 50


def test_pairing_removes_what_seeds_share(base: Config) -> None:
    """Seeds differ by 0.05 in loss, which is 12 % in steps; the paired interval does not see that."""
    hybrid = arm(finished(base, saved=0.0), "hybrid")
    assert hybrid["loss_difference"]["high"] - hybrid["loss_difference"]["low"] < 1e-9
    assert hybrid["loss_deviation"] == pytest.approx(0.05)


# --- runs that failed ------------------------------------------------------------------------------------------------


def test_seeds_that_failed_are_counted_and_forbid_a_gain(base: Config) -> None:
    """The three that went well would be a gain by themselves."""
    analysis = finished(base, saved=0.2, seeds=5, fails=lambda spec: spec.arm == "hybrid" and spec.seed in (2, 4))
    hybrid = arm(analysis, "hybrid")
    assert hybrid["speedup"]["low"] > 1
    assert (hybrid["n"], hybrid["failed"]) == (3, 2)
    assert "failed in 2 of 5 seeds" in hybrid["note"]
    assert analysis["verdict"] == "no gain shown"
    assert "failed in 2 seeds" in analysis["sentence"]


@pytest.mark.parametrize("broken", [(2,), (2, 3)])
def test_where_plain_failed_there_is_no_pair(base: Config, broken: tuple[int, ...]) -> None:
    """Three hybrid runs, but not three comparisons."""
    fails = lambda spec: spec.arm == "plain" and spec.seed in broken and spec.max_steps == base.max_steps  # noqa: E731
    analysis = finished(base, saved=0.2, fails=fails)
    pairs = 3 - len(broken)
    assert len(arm(analysis, "hybrid")["speedups"]) == pairs
    assert f"compared in {pairs} of 3 seeds" in arm(analysis, "hybrid")["note"]
    assert analysis["verdict"] == "one run"
    assert f"with {pairs} seed" in analysis["sentence"]


def test_an_arm_that_always_failed_is_named(base: Config) -> None:
    analysis = finished(base, saved=0.2, fails=lambda spec: spec.control == "repeat")
    assert not [found for found in analysis["arms"] if found["arm"] == "hybrid, repeating"]
    assert "hybrid, repeating failed in all 3 seeds" in analysis["sentence"]


# --- the ladder ------------------------------------------------------------------------------------------------------

LOWER = Arm("lower", "", {"predictor.beta": 0.1}, rates_of="plain", rung="predictor.beta")
UPPER = Arm("upper", "", {"predictor.beta": 0.2}, rates_of="plain", rung="predictor.beta")


def test_a_rung_is_compared_with_the_rung_below_seed_by_seed(base: Config) -> None:
    """The seeds' speeds differ much; both rungs see the same. One failed seed must not shift the pairs."""

    def load(spec: Spec) -> float:
        own = {"lower": 1.0, "upper": 0.8}.get(spec.arm)
        return 1.0 if own is None else own * spec.seed

    options = Options(arms=(LOWER, UPPER))
    for fails in (lambda spec: False, lambda spec: spec.arm == "upper" and spec.seed == 2):
        lower, upper = finished(base, saved=0.0, load=load, options=options, fails=fails)["ladder"]
        assert (lower["speedup"], lower["cumulative"]) == (None, 1.0)
        assert upper["speedup"]["mean"] == pytest.approx(1.25)
        assert upper["speedup"]["deviation"] == pytest.approx(0.0, abs=1e-9)
        assert upper["over_plain"] == pytest.approx(lower["over_plain"] * upper["cumulative"])


# --- doubts ----------------------------------------------------------------------------------------------------------


def test_a_gain_says_what_speaks_against_it(base: Config) -> None:
    assert arm(finished(base, saved=0.2), "hybrid")["doubts"] == []
    edge = finished(base, saved=0.2, best=100.0)
    assert "the last that was tried" in edge["sentence"]
    assert "the last that was tried" in arm(edge, "plain")["note"]
    unswept = finished(base, saved=0.2, options=Options(rates=(1.0,)))
    assert unswept["verdict"] == "gain"
    assert "fewer than 3 learning rates" in unswept["sentence"]
    beyond = finished(base, saved=0.9)
    assert "prolonged" in beyond["sentence"]
    slow_hour = finished(base, saved=0.2, load=lambda spec: 1.3 if spec.max_steps == 224 else 1.0)
    assert "not steady" in slow_hour["sentence"]


def test_each_seed_is_timed_against_its_own_round(base: Config) -> None:
    """A machine that is twice as slow for a whole round changes nothing, nor does one slow run of the plain loop."""
    rounds = finished(base, saved=0.2, load=lambda spec: float(spec.seed))
    assert arm(rounds, "hybrid")["speedups"] == pytest.approx([1.2, 1.2, 1.2], rel=1e-3)
    hiccup = finished(base, saved=0.2, load=lambda spec: 1.3 if spec.max_steps == 224 else 1.0)
    assert arm(hiccup, "hybrid")["speedups"] == pytest.approx([1.2, 1.2, 1.2], rel=1e-3)
