"""What keeps quasi-Newton leaps from being tried where the loss is exact, in words, with what to set."""

from __future__ import annotations

import math
from typing import NamedTuple

from foretrain.engine.engine import Engine

FEWEST_PAIRS = 5
"""Pairs that leaps must be allowed to keep. Chosen: one more than the first leap needs."""


class Obstacle(NamedTuple):
    """A setting with which no leap is made."""

    setting: str
    remedy: str
    """What allows them."""


def obstacles(engine: Engine, pairs: int, elements: int) -> list[Obstacle]:
    """pairs: that leaps may keep, and have the memory for; elements: trained weights."""
    config, found = engine.config, []
    if config.hybrid.mode != "leap":
        found.append(Obstacle(f'hybrid.mode = "{config.hybrid.mode}"', 'hybrid.mode = "leap"'))
    elif pairs < FEWEST_PAIRS:
        found.append(_too_few(config.hybrid.secant_pairs, config.hybrid.secant_memory_mb, elements))
    if config.hybrid.search is False:
        found.append(Obstacle("hybrid.search = false", 'hybrid.search = "auto"'))
    # A leap goes to where the gradient of the loss vanishes; weight decay would pull away from there.
    if (decay := decay_of(engine)) is not None:
        found.append(decay)
    if engine.precision.scaled:
        found.append(Obstacle('precision.type = "fp16"', 'precision.type = "fp32"'))
    if config.engine.update_in_backward:  # no gradient is there to be looked at
        found.append(Obstacle("engine.update_in_backward = true", "engine.update_in_backward = false"))
    return found


def decay_of(engine: Engine) -> Obstacle | None:
    """Weight decay as the user wrote it: in the configuration, or in the call that made the optimizer."""
    decay = max((float(group.get("weight_decay") or 0.0) for group in engine.optimizer.param_groups), default=0.0)
    if not decay:
        return None
    if not engine.own_optimizer:
        return Obstacle(f"optimizer.weight_decay = {decay:g}", "optimizer.weight_decay = 0")
    kind = type(engine.optimizer)
    name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
    return Obstacle(f"weight_decay={decay:g} of {name}", f"{name}(..., weight_decay=0)")


def _too_few(pairs: int, memory: float, elements: int) -> Obstacle:
    if pairs < FEWEST_PAIRS:
        return Obstacle(f"hybrid.secant_pairs = {pairs}", "hybrid.secant_pairs = 100")
    needed = math.ceil(8 * elements * FEWEST_PAIRS / 2**20)
    return Obstacle(f"hybrid.secant_memory_mb = {memory:g}", f"hybrid.secant_memory_mb = {needed} or more")


def in_words(found: list[Obstacle], leaps: str = "quasi-Newton") -> str:
    """One sentence. leaps: what those are called that are kept off."""
    settings, remedies = (" and ".join(parts) for parts in zip(*found, strict=True))
    several = len(found) > 1
    return (
        f"the loss is exact here, since every step sees all the data: {leaps} leaps could be tried, but "
        f"{settings} {'keep' if several else 'keeps'} them off; {remedies} {'allow' if several else 'allows'} them"
    )


def not_repeatable() -> str:
    """Where the data is the same, but the loss is not."""
    return (
        "every step sees the same data, but not the same loss, as with dropout, batch norm or random numbers in the "
        "loss: without these, quasi-Newton leaps could be tried here"
    )
