"""The part of a tensor that this process holds, where a tensor is spread over several (a DTensor); else all of it."""

from __future__ import annotations

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
