"""How the processes of a run share its work: replicas (DDP), or shards of the weights (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foretrain.config import Config, changed
from foretrain.config.units import format_size
from foretrain.engine.compile_cache import keep_compiled
from foretrain.engine.precision import choose_device, choose_precision
from foretrain.errors import ConfigError
from foretrain.launch.group import Group
from foretrain.models.blocks import blocks_of
from foretrain.planning.estimate import PlanTarget, estimate

ROOM = 0.9
"""Share of a GPU's memory that a rank may need. The rest is NCCL's, and that of the CUDA context."""


@dataclass(frozen=True)
class Spreading:
    """What was chosen, and why; `alone` for one process."""

    kind: str
    replicate: int = 1
    shard: int = 1
    why: str = ""

    def __str__(self) -> str:
        ranks = f"{self.replicate * self.shard} ranks"
        if self.kind == "ddp":
            return f"{ranks}, each with all weights (DDP){self.why}"
        halves = f", {self.replicate} times {self.shard}" if self.replicate > 1 else ""
        return f"{ranks}, each with a shard of the weights (FSDP2{halves}){self.why}"


ONE_PROCESS = Spreading("alone")


def check_rows(config: Config, ranks: int) -> None:
    """Refuse a batch that cannot be shared: each rank gets as many rows, and each part of them is as large."""
    parts = ranks * config.accumulation_steps
    if config.batch_size % parts:
        each = f" x accumulation_steps = {config.accumulation_steps}" if config.accumulation_steps > 1 else ""
        rows = -(-config.batch_size // parts) * parts
        raise ConfigError(
            f"batch_size = {config.batch_size} rows cannot be shared by {ranks} ranks{each}: it must be a multiple of "
            f"{parts}, such as {rows}"
        )


def choose(config: Config, target: PlanTarget, group: Group) -> Spreading:
    """Choose as `[distributed]` says; "auto" shards only what does not fit whole."""
    if group.alone:
        return ONE_PROCESS
    _check(config, group)
    check_rows(config, group.size)
    chosen = config.distributed
    if chosen.type == "ddp":
        return Spreading("ddp", group.size)
    if chosen.type == "auto" and not chosen.shard and not chosen.replicate:
        needed, there = _needed(config, target, group.size), _memory(config)
        if there is None or needed <= ROOM * there:
            told = "" if there is None else f": {format_size(needed)} are needed of {format_size(there)}"
            return Spreading("ddp", group.size, why=told)
        why = f": all of it would need {format_size(needed)} of {format_size(there)}"
        return Spreading("fsdp2", shard=group.size, why=why)
    replicate = chosen.replicate or (group.size // chosen.shard if chosen.shard else 1)
    return Spreading("fsdp2", replicate, chosen.shard or group.size // replicate)


def _check(config: Config, group: Group) -> None:
    chosen, size = config.distributed, group.size
    if chosen.type == "off":
        raise ConfigError(
            f"distributed.type = 'off', and {size} processes were started: each would train a model of its own into "
            "the same folder; set distributed.type = 'auto', or start one process"
        )
    if chosen.type == "ddp" and (chosen.shard or chosen.replicate):
        raise ConfigError(
            "distributed.shard and distributed.replicate arrange shards, and distributed.type = 'ddp' has none; set "
            "distributed.type = 'fsdp2', or leave them 0"
        )
    ranks = (chosen.replicate or 1) * (chosen.shard or 1)
    if size % ranks or (chosen.replicate and chosen.shard and ranks != size):
        raise ConfigError(
            f"distributed.replicate = {chosen.replicate} and distributed.shard = {chosen.shard} do not make {size} "
            f"ranks; set one of them to 0 and the other to a divisor of {size}"
        )


def _needed(config: Config, target: PlanTarget, ranks: int) -> int:
    """Return the bytes of a rank that holds all weights and its rows of a batch."""
    rows = config.batch_size // ranks
    return estimate(config.model_copy(update={"batch_size": rows}), target).needed


def _memory(config: Config) -> int | None:
    """Return the bytes of this process's device; None where it shares main memory with all others."""
    device = choose_device(config.device)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


# --- models ----------------------------------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Any], Tensor]


def spread(model: nn.Module, chosen: Spreading, config: Config) -> Loss | None:
    """Share a model among the ranks, in place. Returns the loss to train it by; None: its own.

    With replicas the model keeps its form, and the names of its weights: only its loss goes through DDP.
    """
    if chosen.kind == "alone":
        return None
    device = choose_device(config.device)
    model.to(device)
    if config.engine.compile is True:
        keep_compiled()
        for block in blocks_of(model):
            block.compile(dynamic=False)
    if chosen.kind == "ddp":
        return ReplicatedLoss(DistributedDataParallel(model, gradient_as_bucket_view=True))
    shard(model, chosen, config)
    return None


def for_trainer(config: Config, chosen: Spreading) -> Config:
    """Return the configuration that the trainer of a shared model gets: its blocks are compiled one by one already, and
    its loss as a whole is not. In a run folder `auto` says so, as a run that is resumed compiles for it."""
    if chosen.kind == "alone" or config.engine.compile is not True:
        return config
    return changed(config, {"engine.compile": "auto"})


def shard(model: nn.Module, chosen: Spreading, config: Config) -> None:
    """Shard each block by itself, then what is left: no more than one block is whole at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = choose_device(config.device)
    if chosen.replicate > 1:
        mesh = init_device_mesh(device.type, (chosen.replicate, chosen.shard), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (chosen.shard,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if _all_in_bf16(config, device):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _all_in_bf16(config: Config, device: torch.device) -> bool:
    """Return whether weights may be gathered in bf16. Else they are in fp32, and autocast narrows each product: narrow
    embeddings would make the sum that runs through the blocks narrow, and narrow weights every probe."""
    chosen = config.precision
    all_probes = chosen.predict in ("same", "bf16")
    return choose_precision(chosen.type, device) == "bf16" and chosen.narrow_residual and all_probes


class ReplicatedLoss:
    """A model's own loss of (inputs, targets), computed by its replicas on all ranks, which average their gradients."""

    def __init__(self, replicas: DistributedDataParallel) -> None:
        self.replicas = replicas

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = self.replicas(*batch)
        return loss
