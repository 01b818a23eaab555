"""Moments of fewer bits as they were saved: by as many processes, or by another number of them.

Numbers and scales come back as they are wherever their blocks are the same. Between one process and several they are
not the same for weights whose rows are no multiple of 256 long: there moments in 8 bits are read, and rounded once
more, as every step rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from foretrain.engine.optim.moments import BLOCK, SMALLEST, decoded, encoded, is_narrow, unroot
from foretrain.persist.model_state import ROW_SQUARES, SCALE
from foretrain.persist.parts import SpreadForm, form_of_spread, is_spread, like, local, part_for, region, spread_as

_CODES = (torch.int8, torch.uint8)


def load_as_stored(optimizer: Optimizer, saved: dict[str, Any], state_type: str) -> None:
    """Load a state whose moments keep their number format; torch's own way makes all of them that of the weights."""
    Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": saved["param_groups"]})
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=True):
        kept = saved["state"].get(number, {})
        for name in kept:
            if not name.endswith(SCALE):
                optimizer.state[p].update(_as_stored_here(name, kept, p, state_type))


def _as_stored_here(name: str, kept: Mapping[str, Any], p: Tensor, state_type: str) -> dict[str, Tensor]:
    """A moment, with its scales if it has any, in the form that it has in this process."""
    if name == ROW_SQUARES:
        return {name: _of_rows(_checked(name, kept[name], torch.float32).to(p.device), p)}
    expected, value = _expected_type(name, p, state_type), kept[name]
    if name == "step":
        return {name: _checked(name, value, expected).to(p.device)}
    part, scales = part_for(value, p).to(p.device), kept.get(name + SCALE)
    if state_type == "8bit" and p.ndim == 1 and p.numel() >= SMALLEST and part.dtype is not expected:
        return _vector(name, part, scales, p, kept.get("step"))
    _checked(name, part, expected)
    if scales is None:
        if expected in _CODES:
            raise ValueError(f"{name}{SCALE} of the optimizer is missing")
        return {name: like(part, p)}
    part, scales = _in_own_blocks(part, _checked(name + SCALE, scales, torch.float32).to(p.device), p, kept.get("step"))
    form = form_of_spread(p)
    return {
        name: like(part, p),
        name + SCALE: scales if form is None else spread_as(scales, form.with_columns(scales.shape[1])),
    }


def _in_own_blocks(part: Tensor, scales: Tensor, p: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales with blocks as this process makes them. scales: one vector for all, as one process saves them;
    or a matrix, with a row for each row of the weight, or of the part that is here."""
    form, columns = form_of_spread(p), math.prod(p.shape[1:])
    same = columns % BLOCK == 0 or p.shape[0] == 1
    if form is None:
        if scales.ndim == 1:
            return part, scales
        if same:
            return part, scales.flatten()
        return encoded(decoded(part, scales), by_rows=False, step=_step_for(part, step))
    if scales.ndim == 2:
        return part, _rows_here(scales, form)
    if same:
        return part, _rows_here(scales.view(p.shape[0], -(-columns // BLOCK)), form)
    return encoded(_with_scales_of_one(part, scales, form), by_rows=True, step=_step_for(part, step))


def _rows_here(scales: Tensor, form: SpreadForm) -> Tensor:
    """The scales of the rows that this process holds, from those of all rows, or these themselves."""
    sizes, begin = form.with_columns(scales.shape[1]).region()
    here = local(scales)
    return here if tuple(here.shape) == sizes else region(here, begin, sizes).clone()


def _of_rows(numbers: Tensor, p: Tensor) -> Tensor:
    """A number for each row of a weight, or those of the rows that this process holds."""
    form = form_of_spread(p)
    if form is None or not form.by_rows:
        spread: Any = numbers
        return local(spread.full_tensor() if is_spread(numbers) else numbers)
    return spread_as(_rows_here(numbers, form), form.with_columns(1))


def _with_scales_of_one(part: Tensor, scales: Tensor, form: SpreadForm) -> Tensor:
    """The numbers of this process's part, by the scales of the whole weight."""
    begin = form.region()[1][0] * math.prod(form.shape[1:])
    blocks = torch.arange(begin, begin + part.numel(), device=part.device) // BLOCK
    return (unroot(part.flatten()) * local(scales)[blocks]).view(part.shape)


def _vector(name: str, part: Tensor, scales: Tensor | None, p: Tensor, step: Tensor | None) -> dict[str, Tensor]:
    """A vector has 8 bits in one process, and 32 where it is spread."""
    form, of_squares = form_of_spread(p), name == "exp_avg_sq"
    if form is not None and scales is not None and part.dtype in _CODES:
        return {name: like(_with_scales_of_one(part, scales.to(p.device), form), p)}
    _checked(name, part, torch.float32)
    codes, found = encoded(part, by_rows=False, step=step.to(p.device) if of_squares and step is not None else None)
    return {name: codes, name + SCALE: found}


def _step_for(part: Tensor, step: Tensor | None) -> Tensor | None:
    """What second moments are rounded by chance with."""
    return step.to(part.device) if part.dtype is torch.uint8 and step is not None else None


def _checked(name: str, value: Tensor, expected: torch.dtype) -> Tensor:
    if value.dtype is not expected:
        raise ValueError(f"{name} of the optimizer is {value.dtype} there, {expected} here")
    return value


def _expected_type(name: str, parameter: Tensor, state_type: str) -> torch.dtype:
    if name == "step":
        return torch.float32
    if not is_narrow(parameter, state_type):
        return parameter.dtype
    if state_type == "bf16":
        return torch.bfloat16
    return torch.uint8 if name == "exp_avg_sq" else torch.int8
