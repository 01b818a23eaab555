"""Measures every layer: norms of gradients, weights and updates, computed in batches on the device and read at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretrain.engine.step import StepOutput, stacked
from foretrain.engine.world import ALONE, World
from foretrain.persist.codec import real_view
from foretrain.persist.parts import local

SAMPLED = 4096
"""Numbers of one parameter whose update is measured; a larger one is estimated from as many, evenly spread. Chosen: the
estimate is within some percent (docs/health.md)."""

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Norms per layer around one step: of the gradient before clipping and of the weights before the update."""

    step: int
    """Steps done before this one."""
    gradient: Array
    """It is NaN where a layer has no gradient."""
    weight: Array
    update: Array

    @property
    def gradient_to_weight(self) -> Array:
        return _ratio(self.gradient, self.weight)

    @property
    def update_to_weight(self) -> Array:
        return _ratio(self.update, self.weight)


class LayerMeter:
    """`begin` before a full step, `end` after it, `take` when the numbers are wanted. Other steps cost nothing.

    Gradient norms come with every step's output, whether it is recorded as a CUDA graph or updates in the backward
    pass. A layer is a module with parameters of its own, such as `blocks.0.attention.qkv`.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], world: World = ALONE) -> None:
        self._world = world
        self.parameters: list[Tensor] = [real_view(local(p)) for p in parameters]
        self._parted = world.is_parted(parameters)
        self._shares = [world.share(p) for p in parameters] if self._parted else []
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        owners = [name.rpartition(".")[0] or name for name in names]
        self.names = list(dict.fromkeys(owners))
        places = {layer: place for place, layer in enumerate(self.names)}
        self._layer_of = np.array([places[owner] for owner in owners], dtype=np.int64)
        self._strides = [max(1, math.ceil(p.numel() / SAMPLED)) for p in self.parameters]
        self._sizes = [math.ceil(p.numel() / stride) for p, stride in zip(self.parameters, self._strides, strict=True)]
        self._scales = np.array([p.numel() / max(1, s) for p, s in zip(self.parameters, self._sizes, strict=True)])
        self._before: tuple[Tensor, Tensor] | None = None
        self._flight: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    @property
    def measuring(self) -> bool:
        """Whether a measurement was begun and not ended."""
        return self._before is not None

    @property
    def on_its_way(self) -> bool:
        """Whether a measurement was ended and not taken yet."""
        return self._flight is not None

    @torch.no_grad()
    def begin(self) -> None:
        weights = stacked(list(torch._foreach_norm(self.parameters)))
        self._before = (weights, self._sample())

    @torch.no_grad()
    def end(self, step: int, output: StepOutput) -> None:
        if self._before is None or output.gradient_norms is None:
            return
        (weights, sample), self._before = self._before, None
        moved = torch.split(self._sample() - sample, self._sizes)
        updates = torch.stack(torch._foreach_norm(list(moved)))
        if self._parted:
            weights, updates = self._over_ranks(weights, updates)
        numbers = torch.cat([output.gradient_norms, weights, updates])
        event = None
        if numbers.is_cuda:
            stream = torch.cuda.current_stream(numbers.device)
            numbers = torch.empty(numbers.shape, pin_memory=True).copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._flight = (step, numbers, event)

    def _over_ranks(self, weights: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """The norms of whole weights and updates, where ranks hold parts of them. updates: of the numbers sampled."""
        scales = torch.tensor(self._scales, dtype=torch.float64, device=weights.device)
        shares = torch.tensor(self._shares, dtype=torch.float64, device=weights.device)
        squares = torch.stack([weights.double().square(), updates.double().square() * scales]) * shares
        weights, updates = self._world.reduce(squares, "sharded").sqrt().float().unbind()
        return weights, updates

    def take(self) -> LayerNorms | None:
        """Return the last measurement, once. It waits for the device if that is still computing it."""
        if self._flight is None:
            return None
        step, values = self.wait() or (0, [])
        self._flight = None
        gradient, weight, update = np.asarray(values, dtype=np.float64).reshape(3, -1)
        scales = 1.0 if self._parted else self._scales  # of parts it is in the sum already
        absent = np.bincount(self._layer_of, np.isfinite(gradient), len(self.names)) == 0
        norms = self._by_layer(np.where(np.isnan(gradient), 0.0, np.square(gradient)))
        norms[absent] = np.nan
        return LayerNorms(step, norms, self._by_layer(np.square(weight)), self._by_layer(np.square(update) * scales))

    def wait(self) -> tuple[int, list[float]] | None:
        """Return the measurement that is not taken yet, as it can be saved. It waits for the device."""
        if self._flight is None:
            return None
        step, numbers, event = self._flight
        if event is not None:
            event.synchronize()
        return step, self._world.to_host(numbers)

    def put_back(self, saved: Sequence[Any] | None) -> None:
        """Restore what `wait` returned."""
        self._before = self._flight = None
        if saved is not None:
            step, values = saved
            self._flight = (int(step), torch.tensor(values), None)

    def _sample(self) -> Tensor:
        picked = [p.reshape(-1)[::stride] for p, stride in zip(self.parameters, self._strides, strict=True)]
        return torch.cat(picked).float()

    def _by_layer(self, squares: Array) -> Array:
        return np.sqrt(np.bincount(self._layer_of, squares, len(self.names)))


def _ratio(one: Array, other: Array) -> Array:
    """The quotient, which is NaN where a layer is still zero, as one half of an adapter is at first."""
    ratio: Array = np.divide(one, other, out=np.full(len(one), np.nan), where=other > 0)
    return ratio
