"""A trial is a run in pieces: up to a rung, paused with an exact checkpoint, later gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.sweep.scoring import decays, rate_plan
from foretrain.sweep.space import Space

COPIES_FROM = 0.2
"""Share of a run from which on copies are made: before, what they show is still decided by the warm-up, and losses
rank better (benchmarks/results)."""
_EVALUATIONS = 2
"""A trial is evaluated this often up to its first rung, and as often ever after, if `evaluation.interval` is unset."""


def rung_steps(config: Config, rungs: list[float]) -> list[int]:
    """Return the steps at which a trial is paused and ranked; each is evaluated, so they are multiples of its
    interval."""
    every = config.evaluation.interval or 1
    steps = [max(1, round(share * config.max_steps / every)) * every for share in rungs]
    return [step for step in dict.fromkeys(steps) if step < config.max_steps]


def trial_config(space: Space, values: Mapping[str, Any]) -> Config:
    """Return the configuration of a trial. What a sweep needs is added where `base` does not say otherwise."""
    config = space.config(values)
    said = configuration.given(space.base)
    shares, total = space.settings.rungs, config.max_steps
    first = max(1, round(shares[0] * total))
    added: dict[str, Any] = {"checkpoint.keep": 2, "checkpoint.keep_best": False, "log.report": False}
    added |= {"evaluation.interval": max(1, first // _EVALUATIONS)}
    config = configuration.changed(config, {name: value for name, value in added.items() if name not in said})
    if "forecast.copies" not in said and decays(rate_plan(config)):
        config = configuration.changed(config, {"forecast.copies": copies_before(config, rung_steps(config, shares))})
    return config


def copies_before(config: Config, rungs: list[int]) -> list[float]:
    """Return the shares of the run at which annealed copies begin that are done when each rung is reached."""
    length = max(1, round(config.forecast.copy_steps * config.max_steps))
    starts = [step - length - 1 for step in rungs if step >= COPIES_FROM * config.max_steps]
    return [(start - 0.5) / config.max_steps for start in starts if start >= 1]
