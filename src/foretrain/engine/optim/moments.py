"""An optimizer's moments in fewer bits: bf16, or 8 bits with one scale for each block of 256.

8 bits hold a root of the number as a share of the largest one in its block: the square root of the first moment, with
its sign, and the fourth root of the second. So small numbers beside large ones keep some digits, and a second moment
that is not zero never becomes zero, which would make a step endless. The second moment is rounded up or down by chance,
in proportion: otherwise its small changes, a thousandth of it per step with beta2 = 0.999, would all be rounded away.
The chance is a hash of the number itself and of the step: it draws from no generator, the order of updates does not
matter, and a resumed run repeats it.

Where processes hold parts of a weight, each row of it (what belongs to one place of its first dimension) begins a new
block: FSDP2 cuts between rows, so the scales of a row are where the row is, on any number of processes. Rows that are a
multiple of 256 long have the blocks of one process. Vectors have no rows, and stay fp32 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretrain.persist.codec import real_view
from foretrain.persist.model_state import SCALE
from foretrain.persist.parts import form_of_spread, is_spread, local, own_of_every, spread_as

BLOCK = 256
"""Numbers that share a scale."""
SMALLEST = 4096
"""Tensors with fewer numbers stay fp32: they take no memory to speak of."""


def is_narrow(parameter: Tensor, state_type: str) -> bool:
    """Whether this parameter's moments are stored in fewer bits. Of several processes all must say the same."""
    if state_type == "fp32" or parameter.numel() < SMALLEST:
        return False
    if not is_spread(parameter):
        return parameter.is_contiguous()
    return local(parameter).is_contiguous() and (parameter.ndim > 1 or state_type == "bf16")


def make_moment(state: dict[str, Any], name: str, parameter: Tensor, state_type: str, signed: bool = True) -> None:
    """Add a moment that is zero to an optimizer's state."""
    if not is_narrow(parameter, state_type):
        state[name] = torch.zeros_like(parameter)
    elif state_type == "bf16":
        state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
    else:
        state[name] = torch.zeros_like(parameter, dtype=torch.int8 if signed else torch.uint8)
        state[name + SCALE] = _no_scales(parameter)


def _no_scales(parameter: Tensor) -> Tensor:
    form, device = form_of_spread(parameter), local(parameter).device
    if form is None:
        return torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=device)
    blocks = -(-math.prod(form.shape[1:]) // BLOCK)
    here = torch.zeros(local(parameter).shape[0], blocks, dtype=torch.float32, device=device)
    return spread_as(here, form.with_columns(blocks))


def read_moment(state: dict[str, Any], name: str) -> Tensor | None:
    """A moment in fp32, however it is stored; None if there is none. Of one that is spread, the part that is here."""
    stored = state.get(name)
    if not isinstance(stored, Tensor):
        return None
    scale = state.get(name + SCALE)
    return real_view(local(stored)).float() if scale is None else decoded(local(stored), local(scale))


def write_moment(state: dict[str, Any], name: str, moment: Tensor) -> None:
    """Store it again, or the part that is here, rounded to the nearest."""
    if name + SCALE in state:
        scales = local(state[name + SCALE])
        moment, found = encoded(moment, by_rows=scales.ndim == 2)
        scales.copy_(found)
    local(state[name]).copy_(moment)


def sample_moment(state: dict[str, Any], name: str, stride: int, count: int) -> Tensor:
    """Every `stride`-th number of a moment, `count` at the most, in fp32; those of them that are here."""
    stored: Tensor = state[name]
    part, where = local(stored), own_of_every(stored, stride, count)
    picked = real_view(part).reshape(-1)[where]
    scale: Tensor | None = state.get(name + SCALE)
    if scale is None:
        return picked.float()
    if isinstance(where, slice):
        where = torch.arange(*where.indices(part.numel()), device=part.device)
    scales = local(scale)
    if scales.ndim == 1:
        return unroot(picked) * scales[where // BLOCK]
    columns = part[0].numel() if len(part) else 1
    return unroot(picked) * scales[where // columns, where % columns // BLOCK]


def read_all(states: Sequence[dict[str, Any]], name: str) -> Tensor:
    """[count, ...] in fp32: the moments of several parameters of one shape."""
    stored = torch.stack([state[name] for state in states])
    if name + SCALE not in states[0]:
        return stored.float()
    return decode(stored.flatten(1), torch.stack([state[name + SCALE] for state in states])).view(stored.shape)


def write_all(states: Sequence[dict[str, Any]], name: str, moments: Tensor) -> None:
    """Store them again, rounded to the nearest: what has not changed stays what it is, bit for bit."""
    if name + SCALE in states[0]:
        codes, scales = encode(moments.flatten(1))
        torch._foreach_copy_([state[name + SCALE] for state in states], list(scales.unbind()))
        moments = codes.view(moments.shape)
    torch._foreach_copy_([state[name] for state in states], list(moments.unbind()))


# --- eight bits ------------------------------------------------------------------------------------------------------


def encode(numbers: Tensor, step: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., n] -> codes [..., n] and scales [..., blocks].

    With `step`: of numbers that are not negative, rounded by chance. Otherwise of any, rounded to the nearest.
    """
    blocks = _in_blocks(numbers)
    scales = blocks.abs().amax(dim=-1)
    shares = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if step is None:
        codes = (shares.abs().sqrt() * 127).round().copysign(shares).to(torch.int8)
    else:
        low = (shares.sqrt().sqrt() * 255).floor().clamp(max=254)
        below, above = _fourth_power(low / 255), _fourth_power((low + 1) / 255)
        up = (shares - below) * 65536 > (above - below) * chance(blocks, step)
        codes = torch.where(shares > 0, (low + up).clamp(min=1), 0).to(torch.uint8)
    return codes.flatten(-2)[..., : numbers.shape[-1]], scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode`, as far as there is one."""
    return (_in_blocks(unroot(codes)) * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]]


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """A moment, or a part of it, in the form of its codes. Of a part each row has scales of its own."""
    return decode(codes.flatten(scales.ndim - 1), scales).view(codes.shape)


def encoded(moment: Tensor, by_rows: bool, step: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The inverse of `decoded`, as far as there is one."""
    codes, scales = encode(moment.flatten(1 if by_rows else 0), step)
    return codes.view(moment.shape), scales


def _in_blocks(numbers: Tensor) -> Tensor:
    """[..., n] -> [..., blocks, BLOCK], filled up with zeros."""
    missing = -numbers.shape[-1] % BLOCK
    filled = F.pad(numbers, (0, missing)) if missing else numbers  # padding copies, also where there is nothing to pad
    return filled.reshape(*numbers.shape[:-1], filled.shape[-1] // BLOCK, BLOCK)


def unroot(codes: Tensor) -> Tensor:
    """A share of the scale from its root."""
    root = codes.float()
    return root * root.abs() / 127**2 if codes.dtype is torch.int8 else _fourth_power(root / 255)


def _fourth_power(numbers: Tensor) -> Tensor:
    square = numbers * numbers
    return square * square


def chance(numbers: Tensor, step: Tensor) -> Tensor:
    """A whole number from 0 to 65535 for each of `numbers`, which it depends on, as well as on the step."""
    bits = numbers.contiguous().view(torch.int32).to(torch.int64) + step.to(torch.int64) * 0x9E3779B1
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> 15)) * factor
    return (bits & 0xFFFFFFFF) >> 16


def round_by_chance(numbers: Tensor, step: Tensor) -> Tensor:
    """fp32 -> bf16, up or down in proportion."""
    bits = numbers.contiguous().view(torch.int32) + chance(numbers, step).to(torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()
