"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from foretrain.config import ScheduleConfig

Schedule = Callable[[int], float]


def build(config: ScheduleConfig, peak: float, max_steps: int) -> Schedule:
    """step (from 0) -> learning rate of the update made at that step."""
    if config.type == "constant":
        return lambda step: peak
    if config.type == "cyclic":
        return lambda step: _cyclic(config, peak, step)
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(1000, max_steps // 20)
    start = config.warmup_rate
    if config.type == "warmup":
        return lambda step: _warmup(step, warmup, start, peak)
    if config.type == "cosine":
        stable, shape = 0, "cosine"
        decay = config.decay_steps or max(1, max_steps - warmup)
    else:
        stable, decay = _stable_and_decay(config, warmup, max_steps)
        shape = config.decay
    final = config.final_rate

    def rate(step: int) -> float:
        if step < warmup:
            return _warmup(step, warmup, start, peak)
        # clamped: after the end of the decay the rate stays at its final value
        progress = min(max(step - warmup - stable, 0) / decay, 1.0)
        height = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
        return final + (peak - final) * height

    return rate


def _warmup(step: int, warmup: int, start: float, peak: float) -> float:
    """From `start`; from one step above it where that is 0: an update at a rate of 0 would be a wasted one."""
    if step >= warmup:
        return peak
    return start + (peak - start) * step / warmup if start else peak * (step + 1) / (warmup + 1)


def _stable_and_decay(config: ScheduleConfig, warmup: int, max_steps: int) -> tuple[int, int]:
    """Lengths of the stable and the decaying part; what is not set follows from the length of the run."""
    rest = max(1, max_steps - warmup)
    if config.decay_steps is not None:
        stable = max(0, rest - config.decay_steps) if config.stable_steps is None else config.stable_steps
        return stable, config.decay_steps
    if config.stable_steps is not None:
        return config.stable_steps, max(1, rest - config.stable_steps)
    decay = min(rest, max(1, round(0.3 * max_steps)))
    return rest - decay, decay


def _cyclic(config: ScheduleConfig, peak: float, step: int) -> float:
    """Leslie Smith's triangle, with half a cycle up and half a cycle down."""
    half = config.cycle_length / 2
    cycle = math.floor(1 + step / config.cycle_length)
    position = abs(step / half - 2 * cycle + 1)
    height = (peak - config.base_rate) * max(0.0, 1.0 - position)
    if config.mode == "triangular2":
        height /= 2.0 ** (cycle - 1)
    elif config.mode == "exp_range":
        height *= config.gamma**step
    return config.base_rate + height
