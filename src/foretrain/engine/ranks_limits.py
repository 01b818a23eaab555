"""What several processes cannot do together in this form, each told in one sentence before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretrain.config import Config, given
from foretrain.engine.optim.muon import Muon
from foretrain.engine.world import World
from foretrain.errors import ConfigError
from foretrain.persist.codec import real_view
from foretrain.persist.parts import form_of_spread, local

if TYPE_CHECKING:
    from foretrain.engine.engine import Engine

_SHARED_FROM = 32_000_000
"""Trained parameters from which replicas share their directions by themselves. Chosen: these take 1.5 GB."""
_APART = 0x9E3779B97F4A7C15
"""Seeds of ranks are so far apart."""


def check_ranks(engine: Engine) -> None:
    """Refuse what would part ranks, or would need numbers of all weights in one place."""
    config, several = engine.config, engine.world.size > 1
    found = [*_of_ranks(config)] if several else []
    if several or engine.full_step.spread:
        found += [*_of_steps(config)]
    if engine.full_step.spread:
        found += [*_of_parts(engine)]
    if found:
        where = f"one of {engine.world.size} processes" if several else "a model that FSDP2 shards"
        raise ConfigError(f"this is {where}, where {found[0]}")


def _of_ranks(config: Config) -> Iterator[str]:
    """What is measured or decided by one process alone."""
    memory = config.memory
    if memory.on_out_of_memory == "retry":
        yield (
            "memory.on_out_of_memory = 'retry' is not supported, since the others would wait for the one that tries "
            "again: set 'stop', and let the launcher start it again with smaller settings"
        )


def _of_steps(config: Config) -> Iterator[str]:
    """What stands against the way that steps are made and reduced."""
    if config.engine.compile is True:
        yield (
            "the loss cannot be compiled as a whole: leave engine.compile to 'auto', and call block.compile() on each "
            "block of the model before it is wrapped"
        )
    if config.engine.cuda_graph is True:
        yield "steps are not recorded: leave engine.cuda_graph to 'auto'"
    if config.engine.update_in_backward:
        yield "gradients are reduced before they are used: set engine.update_in_backward = false"
    if config.memory.offload:
        yield "the optimizer's state stays on the device: set memory.offload = false"


def _of_parts(engine: Engine) -> Iterator[str]:
    """What needs whole tensors."""
    config = engine.config
    forms = [form for p in engine.full_step.parameters if (form := form_of_spread(p)) is not None]
    if config.optimizer.state_type == "8bit" and not engine.own_optimizer and not all(form.by_rows for form in forms):
        yield (
            "optimizer.state_type = '8bit' is for weights that are split between rows, as FSDP2 splits them, and some "
            "are split otherwise, as by tensor parallelism: set 'bf16'"
        )
    if isinstance(engine.optimizer, Muon) and any(_is_split_twice(p) for p in engine.full_step.parameters):
        yield (
            "Muon cuts its steps along dimensions, and some weights are split twice along one, as by FSDP2 with tensor "
            "parallelism: set optimizer.type = 'adamw'"
        )
    wanted = "hybrid.linear_rows" in given(config) and config.hybrid.linear_rows and config.hybrid.mode != "off"
    if wanted and engine.objective is not None:  # other losses are not linearised in one process either
        yield "linearised leaps are not supported on shards: set hybrid.linear_rows = 0, or use DistributedDataParallel"
    if config.hybrid.space == "product" and config.hybrid.mode != "off":
        yield "hybrid.space = 'product' is not supported on shards: set 'adapter'"


def _is_split_twice(parameter: Tensor) -> bool:
    """Whether a dimension is split by two dimensions of the mesh, so that parts are not what they are side by side."""
    placements: Any = getattr(parameter, "placements", ())
    return any(type(placement).__name__ == "_StridedShard" for placement in placements)


def shares_directions(engine: Engine) -> bool:
    """Whether replicas share the directions of their weights, each keeping its part. Raises ConfigError where they
    cannot as they are told to."""
    wanted, parameters = engine.config.distributed.basis, engine.full_step.parameters
    if wanted == "replicated" or engine.world.size == 1 or engine.full_step.spread:
        return False
    if wanted == "auto" and sum(p.numel() for p in parameters) < _SHARED_FROM:
        return False
    if engine.config.memory.basis == "pinned":
        obstacle = "memory.basis = 'pinned' keeps them in host memory"
    elif not all(real_view(p.detach()).is_contiguous() for p in parameters):
        obstacle = "some weights do not lie in memory in the order of their numbers (channels_last, for example)"
    else:
        return True
    if wanted == "sharded":
        raise ConfigError(f"distributed.basis = 'sharded' does not go here: {obstacle}; set 'replicated'")
    return False


def linearised_leaps_apply(engine: Engine) -> bool:
    """Whether leaps of a linearised model are tried: each process has to hold all weights."""
    return not engine.full_step.spread


def seed_of_rank(seed: int, rank: int) -> int:
    """Dropout differs between ranks, as it differs between the rows of one batch. Rank 0 draws as one process does."""
    return (seed + rank * _APART) % 2**63 if rank else seed


def device_of_rank(model: nn.Module, device: torch.device, world: World) -> torch.device:
    """Where a rank trains: where its model is, if that is a GPU; all ranks on the first one is never meant."""
    if world.size == 1 or str(device) != "cuda":
        return device
    found = next((local(p).device for p in model.parameters()), device)
    return found if found.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
