"""A full step from moment to moment: which activations, gradients and buffers exist together."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from foretrain.config import OptimizerConfig
from foretrain.engine.optim.in_backward import waiting_bytes
from foretrain.engine.optim.muon import iteration_type
from foretrain.engine.optim.narrow import AT_ONCE
from foretrain.models.recomputing import recomputed_blocks
from foretrain.planning.activations import Pass
from foretrain.planning.parameters import FP32, Parameters

MUON_BYTES = 12
"""Bytes per element of all matrices of one shape, parts of fused ones among them: gradient, momentum and update in
fp32. The iteration that follows needs no more in bf16, as `engine/optim/muon.py` has them at once."""


class StepMoment(NamedTuple):
    """What exists at one moment of a step, beside all that always exists. Bytes."""

    name: str
    gradients: int
    activations: int
    casts: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.casts + self.logits + self.buffers


@lru_cache(maxsize=8192)
def full_step(
    work: Pass, parameters: Parameters, optimizer: OptimizerConfig, accumulation: int, in_backward: bool
) -> StepMoment:
    """Return the moment of a step that needs the most. in_backward: weights are updated soon after a gradient is
    there."""
    return max(moments(work, parameters, optimizer, accumulation, in_backward), key=lambda moment: moment.total)


def moments(
    work: Pass, parameters: Parameters, optimizer: OptimizerConfig, accumulation: int, in_backward: bool
) -> list[StepMoment]:
    """Return the moments of a step: forward block by block, the loss, backward block by block, the embedding, the
    update."""
    everything, head = parameters.learned, parameters.head_gradient
    rest = everything - head - work.shape.layers * parameters.block_gradients
    layers = work.shape.layers
    again = recomputed_blocks(layers, work.recomputed)
    kept = [work.input_of_block if layer in again else work.kept_per_block for layer in range(layers)]
    # An eager pass adds each gradient to the sum as it comes; a compiled one gives all of them at its end.
    before = everything if accumulation > 1 and not in_backward else 0
    adds_up = accumulation > 1 and not work.compiled and not in_backward
    vanish = adds_up or in_backward
    waiting = waiting_bytes(everything) if in_backward else 0

    found: list[StepMoment] = []
    activations, casts = work.kept_of_embedding, 0
    for layer in range(layers):
        activations += kept[layer]
        casts += 0 if layer in again else work.casts_per_block
        transient = work.in_forward_alone + work.cast_at_once if layer in again else work.in_forward
        found.append(StepMoment("forward", before, activations + transient, casts, 0, 0))
    hidden = activations + work.kept_of_hidden
    found.append(StepMoment("loss", before, hidden + work.hidden_in_forward, casts, work.loss_forward(), 0))
    casts = (layers - len(again)) * work.casts_per_block
    own = FP32 * work.head if work.learns_head or not work.fuses else 0
    found.append(StepMoment("loss backward", before + own, hidden, casts, work.loss_backward, 0))

    gradients = before + head + (0 if vanish else rest)
    for layer in reversed(range(layers)):
        recomputed = layer in again
        working = work.in_backward + (work.kept_per_block if recomputed else 0)
        copies = work.casts_per_block if recomputed else 0
        at_once = parameters.block_gradients if work.by_block else parameters.largest_gradient
        # The narrow form of a gradient exists before the second of the two wide ones of the stream does.
        buffers = at_once + (max(0, at_once // 2 - 4 * work.stream * work.number) if work.half else 0)
        if in_backward:
            buffers += waiting + update_buffers(optimizer, parameters, work.cuda, waiting)
        found.append(StepMoment("backward", gradients, activations + working, casts + copies, 0, buffers))
        activations -= kept[layer]
        casts -= 0 if recomputed else work.casts_per_block
        gradients += 0 if vanish else parameters.block_gradients
    stream = work.stream * FP32 if head else 0
    found.append(StepMoment("embedding", gradients, stream, 0, 0, head + waiting))
    if not in_backward:
        found.append(StepMoment("update", everything, 0, 0, 0, update_buffers(optimizer, parameters, work.cuda)))
    return found


def update_buffers(optimizer: OptimizerConfig, parameters: Parameters, cuda: bool, waiting: int | None = None) -> int:
    """Return what an update needs for a while. waiting: bytes of gradients that are used together with the last to
    come; None: all at once."""
    widened = 0 if optimizer.state_type == "fp32" or cuda else min(AT_ONCE, parameters.largest)  # a GPU has a kernel
    narrow = 5 * FP32 * widened
    if optimizer.type != "muon":
        return narrow  # fused updates work in place; narrow averages are widened, a piece at a time
    found = [narrow]
    for batch in parameters.batches(optimizer.split_fused):
        size = batch.elements if waiting is None else min(batch.elements, batch.largest + waiting // FP32)
        found.append(muon_bytes(batch.shape, cuda) * size)
    return max(found)


def muon_bytes(shape: tuple[int, ...], cuda: bool) -> int:
    """Return the bytes per element of all matrices of this shape. In fp32 an iteration needs more: its input, two
    states, two products of a matrix with its transpose, which are squares of the shorter side."""
    if iteration_type(torch.device("cuda" if cuda else "cpu"), shape) == "bf16":
        return MUON_BYTES
    return MUON_BYTES + math.ceil(2 * FP32 * min(shape) / max(shape))
