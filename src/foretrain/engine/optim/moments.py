"""An optimizer's moments in fewer bits: bf16, or 8 bits with one scale for each block of 256.

8 bits hold a root of the number as a share of the largest one in its block: the square root of the first moment, with
its sign, and the fourth root of the second. So small numbers beside large ones keep some digits, and a second moment
that is not zero never becomes zero, which would make a step endless. The second moment is rounded up or down by chance,
in proportion: otherwise its small changes, a thousandth of it per step with beta2 = 0.999, would all be rounded away.
The chance is a hash of the number itself and of the step: it draws from no generator, the order of updates does not
matter, and a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from foretrain.persist.codec import real_view
from foretrain.persist.model_state import SCALE
from foretrain.persist.parts import local

BLOCK = 256
"""Numbers that share a scale."""
SMALLEST = 4096
"""Tensors with fewer numbers stay fp32: they take no memory to speak of."""


def is_narrow(parameter: Tensor, state_type: str) -> bool:
    """Whether this parameter's moments are stored in fewer bits."""
    return state_type != "fp32" and parameter.numel() >= SMALLEST and parameter.is_contiguous()


def make_moment(state: dict[str, Any], name: str, parameter: Tensor, state_type: str, signed: bool = True) -> None:
    """Add a moment that is zero to an optimizer's state."""
    if not is_narrow(parameter, state_type):
        state[name] = torch.zeros_like(parameter)
    elif state_type == "bf16":
        state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
    else:
        state[name] = torch.zeros_like(parameter, dtype=torch.int8 if signed else torch.uint8)
        blocks = -(-parameter.numel() // BLOCK)
        state[name + SCALE] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)


def read_moment(state: dict[str, Any], name: str) -> Tensor | None:
    """A moment in fp32, however it is stored; None if there is none."""
    stored = state.get(name)
    if not isinstance(stored, Tensor):
        return None
    scale = state.get(name + SCALE)
    return real_view(local(stored)).float() if scale is None else decode(stored.flatten(), scale).view(stored.shape)


def sample_moment(state: dict[str, Any], name: str, stride: int, count: int) -> Tensor:
    """Every `stride`-th number of a moment, `count` at the most, in fp32."""
    stored: Tensor = state[name]
    picked = real_view(local(stored)).reshape(-1)[::stride][:count]
    scale: Tensor | None = state.get(name + SCALE)
    if scale is None:
        return picked.float()
    places = torch.arange(len(picked), device=stored.device) * stride // BLOCK
    return _unroot(picked) * scale[places]


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


# --- loading ------------------------------------------------------------------------------------------------------


def load_as_stored(optimizer: Optimizer, saved: dict[str, Any], state_type: str) -> None:
    """Load a state whose moments keep their number format; torch's own way makes all of them that of the weights."""
    Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": saved["param_groups"]})
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            expected = _expected_type(name, p, state_type)
            if value.dtype is not expected:
                raise ValueError(f"{name} of the optimizer is {value.dtype} there, {expected} here")
            optimizer.state[p][name] = value.to(p.device)


def _expected_type(name: str, parameter: Tensor, state_type: str) -> torch.dtype:
    if name == "step" or name.endswith(SCALE):
        return torch.float32
    if not is_narrow(parameter, state_type):
        return parameter.dtype
    if state_type == "bf16":
        return torch.bfloat16
    return torch.uint8 if name == "exp_avg_sq" else torch.int8


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
    return (_in_blocks(_unroot(codes)) * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]]


def _in_blocks(numbers: Tensor) -> Tensor:
    """[..., n] -> [..., blocks, BLOCK], filled up with zeros."""
    missing = -numbers.shape[-1] % BLOCK
    filled = F.pad(numbers, (0, missing)) if missing else numbers  # padding copies, also where there is nothing to pad
    return filled.reshape(*numbers.shape[:-1], -1, BLOCK)


def _unroot(codes: Tensor) -> Tensor:
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
