"""`memory.budget` in a run: the plan's settings are applied, and the allocator gets no more than that."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.units import format_size, parse_size
from foretrain.engine.precision import choose_device
from foretrain.planning.estimate import PlanTarget
from foretrain.planning.plan import changed_values, plan, without_prediction

CHANGE_RESULTS = {"optimizer.state_type", "optimizer.gradient_clip_norm"}
"""Settings of a plan that change results: narrow moments are rounded, updates in the backward pass are not clipped."""


def within_budget(
    config: Config, target: PlanTarget, given: frozenset[str], say: Callable[[str], None] = lambda _: None
) -> Config:
    """Return the configuration with the plan's settings and cap the allocator; without a budget nothing changes.

    given: the settings that were named by the user. They stay as they are.
    """
    if not config.memory.budget:
        _lift_cap(config)
        return config
    budget = parse_size(config.memory.budget)
    found = plan(config, target, budget, given)
    changes = changed_values(config, found.choice.settings)
    for name, (before, after) in changes.items():
        say(f"memory.budget = {config.memory.budget}: {name} is {after} instead of {before}")
    if "hybrid.mode" in changes:
        say('note: prediction has not paid for language models at full weights; hybrid.mode = "leap" keeps it')
    if changes.keys() & CHANGE_RESULTS:
        say("note: what is computed changes a little, by " + " and ".join(sorted(changes.keys() & CHANGE_RESULTS)))
    say(f"memory.budget = {config.memory.budget}: {format_size(found.estimate.needed)} will be needed at the peak")
    if cheaper := without_prediction(config, target, budget, given, found.choice.cost):
        say(f"note: {cheaper}")
    cap_allocator(config, budget, say)
    return configuration.changed(config, found.choice.settings, "the memory plan")


def cap_allocator(config: Config, budget: int, say: Callable[[str], None]) -> None:
    """A GPU's allocator fails from here on, rather than taking more than the budget."""
    device = choose_device(config.device)
    if device.type != "cuda":
        say(f"note: on {device.type} the settings of the memory plan are used, but nothing can hold the run to them")
        return
    total = torch.cuda.get_device_properties(device).total_memory
    _cap(device, min(1.0, budget / total))


_capped: set[int] = set()
"""Devices whose allocator an earlier run of this process was held to a budget on."""


def _cap(device: torch.device, share: float) -> None:
    index = device.index if device.index is not None else torch.cuda.current_device()
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        # Memory comes in pages that are put together at will. In segments of fixed size a third of 2 GB was lost.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(share, index)
    _capped.add(index)


def _lift_cap(config: Config) -> None:
    """A run without a budget may take everything, whatever ran before it."""
    if _capped and choose_device(config.device).type == "cuda":
        for index in _capped:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        _capped.clear()
