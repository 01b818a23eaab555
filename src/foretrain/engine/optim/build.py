"""Optimizers from a configuration, and the learning rate of any optimizer, set without a host synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from foretrain.config import OptimizerConfig
from foretrain.engine.optim.muon import Muon
from foretrain.engine.optim.muon_parts import MuonOnParts
from foretrain.engine.optim.narrow import NarrowAdamW
from foretrain.engine.optim.sgd import SGDOnParts
from foretrain.errors import ConfigError
from foretrain.persist.parts import is_spread


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Weight decay on matrices only. Fused where torch has it, so that a step is one kernel per group."""
    return _build(model, {name: p for name, p in model.named_parameters() if p.requires_grad}, config)


def add(optimizer: Optimizer, model: nn.Module, unfrozen: dict[str, nn.Parameter], config: OptimizerConfig) -> None:
    """Train more parameters with an optimizer that `build` made, in groups of their own."""
    other = _build(model, unfrozen, config)
    for group in other.param_groups:
        rate = group["lr"]
        optimizer.add_param_group({**group, "lr": rate.clone() if isinstance(rate, Tensor) else rate})
    optimizer.state.update(other.state)
    if isinstance(optimizer, Muon) and isinstance(other, Muon):
        optimizer.parts.update(other.parts)


def _build(model: nn.Module, trained: dict[str, nn.Parameter], config: OptimizerConfig) -> Optimizer:
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    rate: Any = config.peak_rate
    if any(p.is_cuda for p in trained.values()):
        rate = torch.tensor(rate, device=next(p.device for p in trained.values() if p.is_cuda))
    groups = [
        {"params": matrices, "weight_decay": config.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.second_beta)
    if config.type == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        kind = SGDOnParts if any(is_spread(p) for p in trained.values()) else SGD
        sgd = kind(groups, rate, momentum=momentum, nesterov=config.nesterov and momentum > 0, fused=True)
        if momentum > 0:  # else a skipped first step, as fp16 has it, leaves unwritten memory as momentum
            for p in trained.values():
                sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return sgd
    if config.type == "adamw" and config.state_type != "fp32":
        return NarrowAdamW(groups, rate, betas=betas, eps=config.epsilon, state_type=config.state_type)
    if config.type in ("adam", "adamw"):
        capturable = isinstance(rate, Tensor)
        optimizer_class = Adam if config.type == "adam" else AdamW
        return optimizer_class(groups, rate, betas=betas, eps=config.epsilon, fused=True, capturable=capturable)
    return _build_muon(model, trained, config, rate, betas)


def _build_muon(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    config: OptimizerConfig,
    rate: Any,
    betas: tuple[float, float],
) -> Muon:
    """Hidden matrices by Muon; embeddings, output layers tied to them, vectors and convolutions by AdamW."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    hidden = [p for p in trained.values() if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in trained.values() if p.ndim >= 2 and (p.ndim > 2 or id(p) in embeddings)]
    vectors = [p for p in trained.values() if p.ndim < 2]
    rest: Any = config.rest_rate
    if isinstance(rate, Tensor):
        rest = torch.full_like(rate, config.rest_rate)
    groups = [
        {"params": hidden, "algorithm": "muon", "lr": rate, "weight_decay": config.decay},
        {"params": others, "algorithm": "adamw", "lr": rest, "weight_decay": config.decay},
        {"params": vectors, "algorithm": "adamw", "lr": rest, "weight_decay": 0.0},
    ]
    kind = MuonOnParts if any(is_spread(p) for p in trained.values()) else Muon
    return kind(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=0.9 if config.momentum is None else config.momentum,
        nesterov=config.nesterov,
        scale=config.muon_scale,
        betas=betas,
        eps=config.epsilon,
        state_type=config.state_type,
        parts=_fused_parts(model, hidden) if config.split_fused else None,
        row_beta2=config.row_beta2,
    )


def _fused_parts(model: nn.Module, matrices: list[nn.Parameter]) -> dict[Tensor, int]:
    """Return of how many matrices each fused one is made; linear layers say so by an attribute `fused_parts`."""
    wanted, found = set(matrices), dict[Tensor, int]()
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        parts = getattr(layer, "fused_parts", 1)
        if weight is None or weight not in wanted or parts == 1:
            continue
        if not isinstance(parts, int) or parts < 1 or len(weight) % parts:
            raise ConfigError(
                f"{name}.fused_parts = {parts!r}: the {len(weight)} rows of its weight cannot be split so; give a "
                "number that divides them, or set optimizer.split_fused = false"
            )
        found[weight] = parts
    return found


def supports_device_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer can be told on the device to skip a step (torch's fused ones, and our own)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def can_be_recorded(optimizer: Optimizer) -> bool:
    """Whether a CUDA graph of its step follows the learning rate: a plain number would be recorded as it is now."""
    return all(
        isinstance(group.get("lr"), Tensor) and group["lr"].is_cuda and group.get("capturable", True)
        for group in optimizer.param_groups
    )


_SAVED = (bool, int, float, str, type(None))


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state, if it can be copied and saved."""
    state = optimizer.state_dict()
    for values in (*state["state"].values(), *state["param_groups"]):
        for name, value in values.items():
            if isinstance(value, Tensor) and not is_wrapped(value) and not value.is_sparse:
                continue
            kept = _what_cannot_be_saved(value)
            if kept is None:
                continue
            if is_wrapped(kept):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {name} in {type(kept).__name__}, a tensor of tensors, which "
                    "snapshots and checkpoints cannot copy; use an optimizer whose state is plain tensors, such as "
                    "optimizer.type = 'adamw' with optimizer.state_type = '8bit', or one of bitsandbytes"
                )
            kind = "a sparse tensor" if isinstance(kept, Tensor) else type(kept).__name__
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name} in {kind}, which snapshots and checkpoints cannot copy; keep "
                "its state in tensors, numbers, texts, lists and dicts"
            )
    return state


def _what_cannot_be_saved(value: Any) -> Any:
    """The first thing in a part of a state that is none of what a state may hold; None if there is none."""
    if isinstance(value, (list, tuple)):
        return next((bad for item in value if (bad := _what_cannot_be_saved(item)) is not None), None)
    if isinstance(value, Mapping):
        return _what_cannot_be_saved([*value.keys(), *value.values()])
    if isinstance(value, Tensor):
        return value if is_wrapped(value) or value.is_sparse else None
    return None if isinstance(value, _SAVED) else value


def is_wrapped(value: Any) -> bool:
    """Whether it is a tensor that holds its numbers in other tensors; one spread over devices is not meant."""
    return hasattr(value, "__tensor_flatten__") and not hasattr(value, "device_mesh")


class RateControl:
    """Sets every group's learning rate to its own peak times a factor; a tensor rate is filled in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", float(group["lr"]))
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].clone()  # groups must not share one tensor
        self._current: float | None = None

    @property
    def peak(self) -> float:
        """Peak rate of the first group: the one a schedule speaks of."""
        return float(self.optimizer.param_groups[0]["peak_lr"])

    def set(self, rate: float) -> None:
        """Make `rate` the learning rate of the first group, and scale the others alike."""
        if rate == self._current:
            return
        factor = rate / self.peak if self.peak else 0.0
        for group in self.optimizer.param_groups:
            value = group.setdefault("peak_lr", float(group["lr"])) * factor  # one that was added had its peak so far
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        self._current = rate

    def forget(self) -> None:
        """After the optimizer's state was replaced from outside."""
        self._current = None
