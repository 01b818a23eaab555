"""What keeps leaps from being tried where the loss is exact or nearly so, in words, with what to set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretrain.engine.engine import Engine

FEWEST_PAIRS = 5
"""Pairs that leaps must be allowed to keep. Chosen: one more than the first leap needs."""


class Obstacle(NamedTuple):
    """A setting with which no leap is made."""

    setting: str
    remedy: str
    """What allows them."""


@dataclass(frozen=True)
class KeptOff:
    """Leaps of one kind that could be tried, and what keeps them off."""

    leaps: str
    """What they are called."""
    found: tuple[Obstacle, ...]
    exact: bool = True
    """Every step sees all the data; else batches differ a little."""


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


def told(found: Sequence[KeptOff | str | None]) -> list[str]:
    """What kinds of moves say of their obstacles, in sentences. Leaps that the same settings keep off share one."""
    kinds = [one for one in found if isinstance(one, KeptOff)]
    by_settings: dict[frozenset[Obstacle], list[KeptOff]] = {}
    for one in kinds:
        by_settings.setdefault(frozenset(one.found), []).append(one)
    return [*map(_in_words, by_settings.values()), *(one for one in found if isinstance(one, str) and one)]


def _in_words(kinds: list[KeptOff]) -> str:
    """One sentence about leaps that the same settings keep off."""
    settings, remedies = (" and ".join(parts) for parts in zip(*kinds[0].found, strict=True))
    exact, several = any(one.exact for one in kinds), len(kinds[0].found) > 1
    here = "the loss is exact here, since every step sees all the data" if exact else "batches hardly differ here"
    names = " and ".join(sorted((one.leaps for one in kinds), reverse=True))
    return (
        f"{here}: {names} leaps could be tried, but "
        f"{settings} {'keep' if several else 'keeps'} them off; {remedies} {'allow' if several else 'allows'} them"
    )


def not_repeatable() -> str:
    """Where the data is the same, but the loss is not."""
    return (
        "every step sees the same data, but not the same loss, as with dropout, batch norm or random numbers in the "
        "loss: without these, quasi-Newton leaps could be tried here"
    )
