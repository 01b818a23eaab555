"""Muon's two passes over the weights by Triton kernels: one before the orthogonalisation, one after it.

In torch each of them is a chain of passes over copies in fp32. Here the gradient, the momentum and the weights are read
once, and between the passes there is nothing but the batch that is orthogonalised, in its own number format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_BLOCK, _SIDE, _WARPS = 1024, 64, 4
"""Numbers of one program before the orthogonalisation, the side of its square of weights after it, and its warps."""


def fit(p: Tensor, momentum: Tensor) -> bool:
    """Return whether the kernels can update this matrix: it lies in one piece, and all of it is fp32."""
    if p.grad is None or not _available(p.device):
        return False
    in_one_piece = p.is_contiguous() and momentum.is_contiguous() and p.grad.layout is torch.strided
    return in_one_piece and p.dtype == p.grad.dtype == momentum.dtype == torch.float32


def write_updates(
    updates: Tensor,
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    counts: Sequence[int],
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Take the gradients into the momenta and write what is to be orthogonalised into `updates`: [parts of all, rows,
    columns]. counts: of how many parts each of `params` is made."""
    kernel = _kernels().muon_momentum
    with torch.cuda.device_of(updates):  # type: ignore[no-untyped-call]
        for p, momentum, update in zip(params, momenta, updates.split_with_sizes(list(counts)), strict=True):
            if p.grad is None:
                continue
            kernel[(-(-p.numel() // _BLOCK),)](
                p.grad.contiguous(),
                momentum,
                update,
                momentum if grad_scale is None else grad_scale,
                momentum if found_inf is None else found_inf,
                p.numel(),
                1.0 - group["momentum"],
                SCALED=grad_scale is not None,
                CHECKED=found_inf is not None,
                NESTEROV=bool(group["nesterov"]),
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )


def move_weights(
    params: Sequence[Tensor],
    steps: Tensor,
    factors: Tensor | None,
    counts: Sequence[int],
    group: dict[str, Any],
    ratio: float,
    found_inf: Tensor | None,
) -> None:
    """Let the weights decay and move them by `steps`, [parts of all, rows, columns], of any strides. factors: what each
    row of steps is multiplied by, [parts of all, rows]."""
    kernel = _kernels().muon_weights
    rows, columns = steps.shape[1:]
    rate = _on_device(group["lr"], steps.device)
    with torch.cuda.device_of(steps):  # type: ignore[no-untyped-call]
        of_each = [rate] * len(params) if factors is None else factors.contiguous().split_with_sizes(list(counts))
        for p, step, factor in zip(params, steps.split_with_sizes(list(counts)), of_each, strict=True):
            kernel[(-(-rows // _SIDE), -(-columns // _SIDE), len(step))](
                p.detach(),
                step,
                factor,
                rate,
                rate if found_inf is None else found_inf,
                rows,
                columns,
                *step.stride(),
                ratio,
                float(group["weight_decay"]),
                CHECKED=found_inf is not None,
                BY_ROW=factors is not None,
                ROWS=_SIDE,
                COLUMNS=_SIDE,
                num_warps=_WARPS,
            )


def _on_device(rate: float | Tensor, device: torch.device) -> Tensor:
    """A kernel reads the rate from the device, so that one that was recorded follows the schedule."""
    if isinstance(rate, Tensor) and rate.device == device:
        return rate
    return torch.full((), float(rate), device=device)


def _available(device: torch.device) -> bool:
    return device.type == "cuda" and _kernels() is not None


@cache
def _kernels() -> Any:
    """Return the module of the kernels, or None where Triton is not installed."""
    try:
        from foretrain.engine.optim import kernels
    except ImportError:
        return None
    return kernels
