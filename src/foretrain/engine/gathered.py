"""Whole weights on one rank, for writing them as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foretrain.persist.parts import is_spread


@contextmanager
def gathered(model: nn.Module, rank: int) -> Iterator[bool]:
    """Inside of the block the parameters of rank 0 are whole, in host memory, and may only be read; it alone gets True.

    All ranks must enter: the others send their parts, one parameter at a time. Where nothing is spread over ranks
    nothing is done.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not is_spread(parameter):
                    continue
                if parameter not in known:
                    known[parameter] = _whole(parameter, keep=rank == 0)
                if rank == 0:
                    replaced.append((module, name, parameter))
                    module._parameters[name] = known[parameter]
        yield rank == 0
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


@torch.no_grad()
def _whole(parameter: nn.Parameter, keep: bool) -> nn.Parameter:
    """Gather a parameter. keep: on the host; otherwise it is given back at once."""
    spread: Any = parameter
    whole = spread.full_tensor()
    return nn.Parameter(whole.cpu() if keep else whole[:0], requires_grad=parameter.requires_grad)
