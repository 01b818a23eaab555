"""The learning rate as a pure function of the step, and of the plan of its decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from foretrain.config import ScheduleConfig

Schedule = Callable[[int], float]
LONGEST_WARMUP = 1000
"""Steps of warm-up where they are not set. Chosen: 5 % of a run of 20,000 steps."""
WARMUP_SHARE = 0.05
"""Share of a run that the warm-up takes where it is not set and nothing else is known."""
_ROUNDING = 1e-6
"""0.29 of 100 steps are 29."""
DECAY_SHARE = 0.3
"""Share of a run that the decay of `wsd` takes where it is not set."""


@dataclass(frozen=True)
class DecayPlan:
    """Says when the learning rate falls. A plan that is revised goes on from the progress that was made."""

    warmup: int
    """Steps of warm-up."""
    begin: int
    """Step from which on it falls."""
    progress: float
    """Share of the decay that lies before `begin`: 0, unless the plan was revised in mid-decay."""
    end: int
    """Step from which on it stays at its final value."""

    def at(self, step: int) -> float:
        """Return the share of the decay that is done at a step."""
        share = min(max(step - self.begin, 0) / max(1, self.end - self.begin), 1.0)
        return self.progress + (1.0 - self.progress) * share

    def revised(self, step: int, begin: int, end: int) -> DecayPlan:
        """Return the plan for another end. Once the decay has begun it only goes faster or slower: no rate rises."""
        done = self.at(step)
        return DecayPlan(self.warmup, *((step, done) if done > 0 else (max(step, begin), 0.0)), max(end, step + 1))


def planned_decay(config: ScheduleConfig, max_steps: int) -> DecayPlan:
    """Return the plan that the settings and the length of a run give."""
    warmup = warmup_of(config, max_steps)
    if config.type == "cosine":
        return DecayPlan(warmup, warmup, 0.0, warmup + (config.decay_steps or max(1, max_steps - warmup)))
    stable, decay = _stable_and_decay(config, warmup, max_steps)
    return DecayPlan(warmup, warmup + stable, 0.0, warmup + stable + decay)


def warmup_of(config: ScheduleConfig, max_steps: int) -> int:
    """Return the steps of warm-up in a run of this length."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    share = WARMUP_SHARE if config.warmup_share == "auto" else config.warmup_share
    return min(LONGEST_WARMUP, int(share * max_steps + _ROUNDING))


def height(config: ScheduleConfig, progress: float) -> float:
    """Return what is left of the way from the peak to the final rate, when this share of the decay is done."""
    shape = "cosine" if config.type == "cosine" else config.decay
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress


def build(config: ScheduleConfig, peak: float, max_steps: int, plan: DecayPlan | None = None) -> Schedule:
    """step (from 0) -> learning rate of the update made at that step. plan: of the decay, where it is another than the
    settings give."""
    if config.type == "constant":
        return lambda step: peak
    if config.type == "cyclic":
        return lambda step: _cyclic(config, peak, step)
    decay = plan or planned_decay(config, max_steps)
    start = config.warmup_rate
    if config.type == "warmup":
        return lambda step: _warmup(step, decay.warmup, start, peak)
    final = config.final_rate

    def rate(step: int) -> float:
        if step < decay.warmup:
            return _warmup(step, decay.warmup, start, peak)
        return final + (peak - final) * height(config, decay.at(step))

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
    decay = min(rest, max(1, round(DECAY_SHARE * max_steps)))
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
