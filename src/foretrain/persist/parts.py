"""The part of a tensor that this process holds, where a tensor is spread over several (a DTensor); else all of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def is_spread(tensor: Any) -> bool:
    """Whether it is a DTensor, as FSDP2 and tensor parallelism make of parameters."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part, in the same memory and without a gradient; of a tensor that is not spread, all."""
    if not is_spread(tensor):
        return tensor.detach()
    spread: Any = tensor
    with torch.no_grad():
        part: Tensor = spread.to_local()
    return part.detach()


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a part as a tensor that is spread as `whole` is; `part` itself where it is no part of such a form."""
    if not is_spread(whole) or is_spread(part) or part.shape != local(whole).shape:
        return part
    from torch.distributed.tensor import DTensor

    form: Any = whole
    made: Tensor = DTensor.from_local(
        part, form.device_mesh, form.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def places_in_whole(tensor: Tensor, width: int = 1) -> Tensor:
    """Return where the numbers of this process's part are in the whole tensor, flattened, counted from 1.

    width: real numbers that one of its numbers is made of.
    """
    part = local(tensor)
    if not is_spread(tensor):
        return torch.arange(1, part.numel() * width + 1, device=part.device, dtype=torch.int64)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread: Any = tensor
    shape, starts = compute_local_shape_and_global_offset(tensor.shape, spread.device_mesh, spread.placements)
    place = torch.zeros((), dtype=torch.int64)
    for dimension, (count, start) in enumerate(zip(shape, starts, strict=True)):
        step = math.prod(tensor.shape[dimension + 1 :])
        place = place.unsqueeze(-1) + (start + torch.arange(count)) * step
    return (place.reshape(-1, 1) * width + torch.arange(width)).flatten() + 1


def total_over_parts(number: Tensor, tensor: Tensor) -> Tensor:
    """Add up what every part of a tensor gives; parts of which several processes hold a copy count once."""
    if not is_spread(tensor):
        return number
    spread: Any = tensor
    for dimension, placement in enumerate(spread.placements):
        if not placement.is_replicate():
            number = number.clone()
            torch.distributed.all_reduce(number, group=spread.device_mesh.get_group(dimension))
    return number
