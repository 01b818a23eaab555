"""The 64 numbers: none constant, all normalised, finite whatever comes in, and cheap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretrain.motion.losses import WindowLosses
from foretrain.motion.records import ForecastRecord, PhaseRecord, WindowRecord
from foretrain.motion.state import FEATURES, KNOWN_SPREADS, StateEncoder, describe
from foretrain.persist.codec import put_together, take_apart

Records = tuple[WindowRecord, ForecastRecord, PhaseRecord]


def hybrid_run(seed: int = 0, steps: int = 1000, optimizer: str = "adam", window: int = 10) -> Iterator[Records]:
    """Records as of a run with constant learning rate, leaps of 20 steps every 40, the first after 100 full steps."""
    random = np.random.default_rng(seed)
    step, since_move, cycle, in_phase = 0, 0, 0, 0
    moments = {"adam": (1e-4, 3e-4, 1e-3), "sgd": (1e-3, 2e-3, 0.0), "plain sgd": (0.0, 0.0, 0.0)}[optimizer]
    while step < steps:
        if step >= 100 and since_move >= 40:
            step, since_move, cycle, in_phase = step + 20, 0, cycle + 1, 0
        step, since_move, in_phase = step + window, since_move + window, in_phase + window
        if step == 110:
            cycle, in_phase = 1, window
        noise = random.normal(size=40)
        losses = 2 + 3 * np.exp(-step / 200) + 0.1 * random.normal(size=window)
        first, deviation, second = (value * math.exp(0.2 * noise[0]) for value in moments)
        adam = optimizer == "adam"
        known = step > 100
        yield (
            WindowRecord(
                step=step,
                losses=tuple(losses.tolist()),
                gradient_norms=tuple(np.exp(0.3 * random.normal(size=window)).tolist()),
                learning_rate=1e-3,
                rate_share=1.0,
                progress=step / steps,
                weight_norm=50 + 0.01 * step + 0.01 * noise[1],
                displacement_norm=0.5 * math.exp(0.1 * noise[2]),
                cosines=tuple((0.2 + 0.1 * noise[3:7]).tolist()),
                effective_rank=3 + 0.2 * noise[7],
                gradient_mean=1e-6 * noise[8],
                gradient_std=1e-3 * math.exp(0.2 * noise[9]),
                gradient_cosine=0.1 * noise[10],
                moment_mean=first,
                moment_std=deviation,
                second_moment_mean=second,
                bias_corrections=(1 - 0.9**step, 1 - 0.95**step) if adam else (1.0, 1.0),
            ),
            ForecastRecord(
                errors=tuple((1 + 0.1 * noise[11:16] * known).tolist()),
                cosines=tuple((0.3 * known + 0.1 * noise[16:21] * known).tolist()),
                loss_errors=tuple((0.05 * np.abs(noise[21:26])).tolist()),
                acceptance_rate=0.5 * known + 0.1 * noise[26] * known,
                confidence=0.5 + 0.1 * noise[27] * known,
            ),
            PhaseRecord("full" if step > 100 else "warmup", in_phase - 5 * (cycle > 1), cycle, since_move),
        )


def encoder_alone() -> StateEncoder:
    return StateEncoder(10, WindowLosses())


def encode(encoder: StateEncoder, *records: Any) -> np.ndarray:
    """As the observer does."""
    encoder.losses.add(records[0].losses)
    return encoder.encode(*records)


def encode_all(encoder: StateEncoder, run: list[Records]) -> np.ndarray:
    return np.stack([encode(encoder, *records) for records in run])


def index(group: str, name: str) -> int:
    return next(item.index for item in FEATURES if (item.group, item.name) == (group, name))


def test_there_are_64_named_features_in_six_groups() -> None:
    assert [item.index for item in FEATURES] == list(range(64))
    assert list(Counter(item.group for item in FEATURES)) == [
        "loss",
        "gradient",
        "optimizer",
        "weights",
        "predictor",
        "phase",
    ]
    assert len({(item.group, item.name) for item in FEATURES}) == 64
    assert all(item.meaning for item in FEATURES)
    assert len(describe()) == 64


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "plain sgd"])
def test_no_feature_is_constant_in_a_hybrid_run(optimizer: str) -> None:
    states = encode_all(encoder_alone(), list(hybrid_run(optimizer=optimizer)))
    quiet = [f"{FEATURES[i].group} {FEATURES[i].name}" for i in range(64) if np.ptp(states[5:, i]) < 0.1]
    assert quiet == []
    assert np.isfinite(states).all()
    assert np.abs(states).max() <= 10


def test_with_moments_of_their_own_no_two_features_are_the_same() -> None:
    states = encode_all(encoder_alone(), list(hybrid_run(steps=4000)))[100:]
    correlation = np.abs(np.corrcoef(states.T)) - np.eye(64)
    pairs = [(FEATURES[i].name, FEATURES[j].name) for i, j in np.argwhere(correlation > 1 - 1e-9) if i < j]
    allowed = {"first moment", "first moment deviation", "second moment"}  # one noise drives them in this toy
    pairs = [pair for pair in pairs if not set(pair) <= allowed and pair != ("warmup", "full")]
    assert pairs == []


def test_values_mean_what_their_names_say() -> None:
    encoder = encoder_alone()
    records = next(hybrid_run())
    window = replace(records[0], losses=(4.0, 3.0, 2.0, 1.0), gradient_norms=(1.0, 3.0), learning_rate=0.5)
    encode(encoder, window, *records[1:])
    value = {(item.group, item.name): encoder.last[item.index] for item in FEATURES}
    assert value["loss", "value"] == 1.0
    assert value["loss", "mean"] == 2.5
    assert (value["loss", "minimum"], value["loss", "maximum"]) == (1.0, 4.0)
    assert value["loss", "slope"] == pytest.approx(-1.0)
    assert value["loss", "curvature"] == pytest.approx(0.0, abs=1e-12)
    assert value["loss", "oscillation"] == 0.0
    average = 2.5
    for loss in window.losses:
        average += (loss - average) / 16
    assert value["loss", "average 1/16"] == pytest.approx(average)
    assert value["gradient", "mean norm"] == 2.0
    assert value["gradient", "deviation"] == 1.0
    assert value["optimizer", "rate x gradient"] == pytest.approx(math.log(1.5))
    assert value["phase", "warmup"] == 1.0
    assert value["weights", "cosine last window"] == window.cosines[1]


def test_a_loss_that_goes_up_and_down_shows() -> None:
    records = next(hybrid_run())
    for losses, turns in (((1.0, 2.0, 1.0, 2.0, 1.0), 1.0), ((1.0, 2.0, 3.0, 4.0, 5.0), 0.0)):
        encoder = encoder_alone()
        encode(encoder, replace(records[0], losses=losses), *records[1:])
        assert encoder.last[index("loss", "oscillation")] == turns


def test_curvature_is_the_second_derivative() -> None:
    records = next(hybrid_run())
    encoder = encoder_alone()
    encode(encoder, replace(records[0], losses=tuple(3.0 * t * t for t in range(10))), *records[1:])
    assert encoder.last[index("loss", "curvature")] == pytest.approx(6.0)


def test_a_leap_between_two_windows_shows() -> None:
    run = list(hybrid_run(steps=300))
    encoder = encoder_alone()
    seen = []
    for records in run:
        encode(encoder, *records)
        seen.append(encoder.last[index("phase", "predict")])
    assert set(np.round(seen, 6)) == {0.0, round(20 / 30, 6)}


def test_it_is_a_running_z_score() -> None:
    run = list(hybrid_run(steps=3000))
    encoder, raw, states = encoder_alone(), [], []
    for records in run:
        states.append(encode(encoder, *records))
        raw.append(encoder.last.copy())
    table = np.stack(raw)
    expected = (table[-1] - table.mean(axis=0)) / table.std(axis=0)
    for (group, name), (mean, deviation) in KNOWN_SPREADS.items():
        number = index(group, name)
        expected[number] = (table[-1, number] - mean) / deviation
    np.testing.assert_allclose(states[-1], expected.clip(-10, 10), rtol=1e-6, atol=1e-8)


def test_what_is_not_finite_counts_as_it_last_was() -> None:
    run = list(hybrid_run(steps=300))
    encoder = encoder_alone()
    for records in run:
        encode(encoder, *records)
    before = encoder.last.copy()
    window, forecast, phase = run[-1]
    nan = math.nan
    broken = replace(
        window,
        losses=(nan,) * 10,
        gradient_norms=(nan,) * 10,
        weight_norm=nan,
        displacement_norm=nan,
        cosines=(nan,) * 4,
        gradient_std=nan,
        learning_rate=nan,
        moment_mean=math.inf,
    )
    state = encode(encoder, broken, replace(forecast, loss_errors=(nan,) * 5, errors=(math.inf,) * 5), phase)
    assert np.isfinite(state).all()
    assert encoder.last[index("loss", "value")] == before[index("loss", "value")]
    assert encoder.last[index("weights", "norm")] == before[index("weights", "norm")]
    after = encode(encoder, *run[-1])
    assert np.isfinite(after).all()
    assert encoder.last[index("loss", "average 1/16")] == pytest.approx(before[index("loss", "average 1/16")], rel=0.2)


def test_one_skipped_step_does_not_hide_the_window() -> None:
    run = list(hybrid_run(steps=200))
    encoder = encoder_alone()
    for records in run:
        encode(encoder, *records)
    window = replace(run[-1][0], losses=(math.nan, *run[-1][0].losses[1:-1], 7.5))
    encode(encoder, window, *run[-1][1:])
    assert encoder.last[index("loss", "maximum")] == 7.5


def test_state_survives_a_round_trip() -> None:
    run = list(hybrid_run(steps=600))
    first, second = encoder_alone(), encoder_alone()
    encode_all(first, run[:20])
    second.load_state_dict(put_together(take_apart(first.state_dict())))
    second.losses.load_state_dict(put_together(take_apart(first.losses.state_dict())))
    np.testing.assert_array_equal(encode_all(first, run[20:]), encode_all(second, run[20:]))
    fresh = encoder_alone()
    fresh.load_state_dict(put_together(take_apart(encoder_alone().state_dict())))
    np.testing.assert_array_equal(encode_all(fresh, run), encode_all(encoder_alone(), run))
