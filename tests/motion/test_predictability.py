"""Full-batch runs are told from minibatch runs, and the sentence says what can be expected."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretrain.motion.losses import WindowLosses
from foretrain.motion.predictability import Predictability
from foretrain.motion.quality import Quality
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, WindowRecord


def record(losses: list[float], gradient_cosine: float = 0.0, window_cosine: float = 0.0) -> WindowRecord:
    return WindowRecord(
        step=10,
        losses=tuple(losses),
        gradient_norms=(1.0,) * len(losses),
        learning_rate=0.1,
        rate_share=1.0,
        progress=0.1,
        weight_norm=1.0,
        displacement_norm=1.0,
        cosines=(window_cosine,) * len(DIRECTIONS),
        effective_rank=1.0,
        gradient_mean=0.0,
        gradient_std=1.0,
        gradient_cosine=gradient_cosine,
        moment_mean=1.0,
        moment_std=1.0,
        second_moment_mean=1.0,
        bias_corrections=(1.0, 1.0),
    )


def add(made: Predictability, window: WindowRecord, same_batch: bool) -> None:
    """As the observer and then the policy do."""
    made.losses.add(window.losses)
    made.add(window, same_batch)


def watched(
    noise: float, cosine: float, windows: int = 8, same_batch: bool = False, scale: float = 1.0
) -> Predictability:
    draw = np.random.default_rng(0)
    made = Predictability(WindowLosses())
    for window in range(windows):
        losses = [scale * (5 - 0.01 * (10 * window + i) + noise * draw.normal()) for i in range(10)]
        add(made, record(losses, cosine, cosine), same_batch)
    return made


def scored(r2: float, horizon: int = 8, repeat: float | None = None, made: int = 5) -> Quality:
    quality = Quality(10)
    for windows in HORIZONS_IN_WINDOWS:
        if windows <= horizon:
            tally = quality.tallies[windows]
            tally.count, tally.made, tally.recent_square, tally.recent_error = 5, made, 5.0, 5 * (1 - r2)
            tally.recent_repeat = 5 * (1 - (r2 if repeat is None else repeat))
    return quality


def test_full_batches_have_low_noise() -> None:
    assert watched(noise=0.0, cosine=0.99).low_noise


def test_the_same_batch_again_and_again_is_enough() -> None:
    assert watched(noise=1.0, cosine=0.0, same_batch=True).low_noise
    assert not watched(noise=1.0, cosine=0.0, same_batch=False).low_noise


def test_minibatches_have_not() -> None:
    assert not watched(noise=0.3, cosine=0.2).low_noise
    assert not watched(noise=0.3, cosine=0.99).low_noise
    assert not watched(noise=0.0, cosine=0.5).low_noise


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    assert watched(0.0, 0.99, scale=scale).low_noise
    assert not watched(0.3, 0.99, scale=scale).low_noise
    assert watched(0.3, 0.5, scale=scale).losses.noise_ratio == pytest.approx(
        watched(0.3, 0.5).losses.noise_ratio, rel=1e-6
    )


def test_one_window_is_not_enough() -> None:
    assert not watched(0.0, 0.99, windows=1, same_batch=True).low_noise


def test_a_run_whose_batches_begin_to_differ_is_noticed() -> None:
    made = watched(0.0, 0.99, same_batch=True)
    add(made, record([5.0] * 10, 0.99), same_batch=False)
    for _ in range(20):
        losses = np.random.default_rng(made.windows).normal(5, 1, 10).tolist()
        add(made, record(losses, 0.1), same_batch=False)
    assert not made.low_noise


@pytest.mark.parametrize(("cosine", "snr"), [(0.5, 1.0), (0.0, 0.0), (-0.4, 0.0), (0.9, 9.0), (1.0, 999999.0)])
def test_signal_to_noise_of_two_measurements_of_one_signal(cosine: float, snr: float) -> None:
    made = watched(0.1, cosine)
    assert made.gradient_snr == pytest.approx(snr, rel=1e-3)
    assert made.motion_snr == pytest.approx(snr, rel=1e-3)


def test_snr_is_that_of_real_vectors() -> None:
    draw = np.random.default_rng(0)
    signal = draw.normal(size=200_000)
    one, other = (signal + 0.5 * draw.normal(size=signal.size) for _ in range(2))
    cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert watched(0.1, cosine).motion_snr == pytest.approx(4.0, rel=0.05)


def test_numbers_that_are_not_finite_change_nothing() -> None:
    made = watched(0.1, 0.8)
    before = made.summary(Quality(10))
    add(made, record([5.0] * 9 + [math.nan], math.nan, math.nan), same_batch=False)
    assert made.summary(Quality(10)) == before
    fresh = Predictability(WindowLosses())
    add(fresh, record([math.nan] * 10, math.nan), same_batch=False)
    assert not fresh.low_noise
    assert fresh.summary(Quality(10))["gradient_snr"] is None


def test_a_loss_that_stands_still_is_no_error() -> None:
    made = Predictability(WindowLosses())
    for _ in range(3):
        add(made, record([0.0] * 10, 0.99), same_batch=False)
    assert math.isfinite(made.losses.noise_ratio)


@pytest.mark.parametrize(
    ("r2", "text"),
    [
        (
            0.08,
            "8% {}: leaps will not pay here; averaging and look-ahead may",
        ),
        (
            -3.0,
            "0% {}: leaps will not pay here; averaging and look-ahead may",
        ),
        (0.3, "30% {}: leaps may pay a little, audits will tell"),
        (0.9, "90% {}: leaps should pay, audits will tell"),
    ],
)
def test_the_sentence(r2: float, text: str) -> None:
    said = "of the motion over the next 80 steps is predictable"
    assert watched(0.3, 0.2).sentence(scored(r2)) == text.format(said)


def test_the_sentence_of_a_run_without_noise() -> None:
    text = watched(0.0, 0.99, same_batch=True).sentence(scored(0.9))
    assert text.endswith("batches hardly differ: leaps are searched on the exact loss")


def test_the_sentence_names_the_longest_horizon_that_was_scored() -> None:
    assert "over the next 20 steps" in watched(0.3, 0.2).sentence(scored(0.3, horizon=2))
    unknown = watched(0.3, 0.2).sentence(Quality(10))
    assert unknown == "too few forecasts (0) to say what is predictable"


def test_few_forecasts_say_nothing() -> None:
    """A horizon that was forecast once, or never but counted, is no measurement."""
    quality = scored(0.3, horizon=2)
    quality.tallies[4].count = quality.tallies[4].made = 1
    quality.tallies[4].recent_square = quality.tallies[4].recent_error = 1.0
    quality.tallies[8].count, quality.tallies[8].recent_square = 5, 5.0
    assert watched(0.3, 0.2).sentence(quality).startswith("30% of the motion over the next 20 steps")
    few = watched(0.3, 0.2).sentence(scored(0.0, made=1))
    assert few == "too few forecasts (1) to say what is predictable"


def test_motion_that_repeats_is_predictable_whatever_the_predictor_does() -> None:
    said = watched(0.3, 0.2).sentence(scored(0.0, repeat=0.83))
    assert said.startswith("83% of the motion over the next 80 steps is predictable by repeating the last displacement")
    assert said.endswith("0% by the predictor: leaps wait until it does as well")


def test_state_survives_a_round_trip() -> None:
    one, other = watched(0.2, 0.7), Predictability(WindowLosses())
    other.load_state_dict(one.state_dict())
    other.losses.load_state_dict(one.losses.state_dict())
    for made in (one, other):
        add(made, record([3.0, 2.0, 2.5, 1.0], 0.3, 0.1), same_batch=True)
    assert one.state_dict() == other.state_dict()
    assert one.losses.state_dict() == other.losses.state_dict()
    assert other.windows == 9
