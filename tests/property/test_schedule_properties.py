"""Properties of schedules: within their limits, and without jumps."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foretrain.config import ScheduleConfig
from foretrain.engine import schedule

SLACK = 1 + 1e-9
steps = st.integers(0, 400)


@st.composite
def decaying(draw: Any) -> tuple[ScheduleConfig, float, int]:
    peak = draw(st.floats(1e-6, 10.0))
    max_steps = draw(st.integers(2, 300))
    config = ScheduleConfig(
        type=draw(st.sampled_from(["wsd", "cosine", "warmup", "constant"])),
        warmup_steps=draw(st.none() | st.integers(0, max_steps - 1)),
        warmup_rate=draw(st.floats(0, 1)) * peak,
        stable_steps=draw(st.none() | st.integers(0, 300)),
        decay_steps=draw(st.none() | st.integers(1, 300)),
        decay=draw(st.sampled_from(["linear", "cosine"])),
        final_rate=draw(st.floats(0, 1)) * peak,
    )
    return config, peak, max_steps


@given(decaying())
def test_the_rate_stays_between_its_ends_and_has_no_jumps(case: tuple[ScheduleConfig, float, int]) -> None:
    config, peak, max_steps = case
    rate = schedule.build(config, peak, max_steps)
    values = [rate(step) for step in range(max_steps + 310)]
    lowest = 0.0 if config.type == "constant" else min(config.warmup_rate, config.final_rate)
    assert all(lowest / SLACK <= value <= peak * SLACK for value in values)
    assert max(values) >= peak / SLACK

    warmup = config.warmup_steps if config.warmup_steps is not None else min(1000, max_steps // 20)
    climbing = (peak - config.warmup_rate) / warmup if warmup else 0.0
    top = values.index(max(values))
    rises = [later - earlier for earlier, later in pairwise(values)]
    assert all(rise <= climbing * SLACK + peak * 1e-9 for rise in rises)
    assert all(rise <= peak * 1e-9 for rise in rises[max(top, warmup) :])  # never up again

    decay = max((1, *(step for step in (config.decay_steps,) if step)))
    falls = [-rise for rise in rises]
    if config.decay_steps is not None:
        assert all(fall <= (math.pi / 2) * (peak - config.final_rate) / decay * SLACK + peak * 1e-9 for fall in falls)
    if config.type in ("wsd", "cosine"):
        assert math.isclose(rate(10**7), config.final_rate, rel_tol=1e-6, abs_tol=peak * 1e-9)


@given(
    st.floats(1e-6, 1.0),
    st.floats(1.0, 100.0),
    st.integers(2, 50),
    st.sampled_from(["triangular", "triangular2", "exp_range"]),
    st.floats(0.9, 1.0),
)
def test_cycles_stay_between_base_and_peak_and_have_no_jumps(
    base: float, factor: float, length: int, mode: str, gamma: float
) -> None:
    peak = base * factor
    config = ScheduleConfig(type="cyclic", base_rate=base, cycle_length=length, mode=mode, gamma=gamma)
    rate = schedule.build(config, peak, 100)
    values = [rate(step) for step in range(200)]
    assert all(base / SLACK <= value <= peak * SLACK for value in values)
    slope = (peak - base) / (length / 2) + (peak - base) * (1 - gamma)
    assert all(abs(b - a) <= slope * SLACK + peak * 1e-9 for a, b in pairwise(values))


@given(decaying(), steps)
def test_the_rate_is_a_pure_function_of_the_step(case: tuple[ScheduleConfig, float, int], step: int) -> None:
    config, peak, max_steps = case
    one, other = (schedule.build(config, peak, max_steps) for _ in range(2))
    for earlier in range(0, step, 7):
        one(earlier)
    assert one(step) == other(step)
