"""Losses and their gradient in one pass over the logits, in place: a Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def softmax_gradient_(
    logits: Tensor, targets: Tensor, vocab_size: int, ignored: int, boost: float, learning: bool
) -> Tensor:
    """Cross-entropy of each row of `logits`. If `learning`, `logits` become `boost * (softmax - one_hot)`.

    Columns from `vocab_size` on are padding: outside the softmax, zero in the gradient. Ignored rows give zero.
    """
    kernel = _triton_kernel() if logits.is_cuda and logits.dtype is not torch.float64 else None
    if kernel is None:
        return _by_torch(logits, targets, vocab_size, ignored, boost, learning)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        targets,
        losses,
        vocab_size,
        logits.shape[1],
        ignored,
        boost,
        LEARNING=learning,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return losses


def _by_torch(logits: Tensor, targets: Tensor, vocab_size: int, ignored: int, boost: float, learning: bool) -> Tensor:
    counted = targets != ignored
    index = torch.where(counted, targets, 0).unsqueeze(1)
    high = torch.float64 if logits.dtype is torch.float64 else torch.float32
    z = logits[:, :vocab_size].to(high)
    normalizer = torch.logsumexp(z, dim=1, keepdim=True)
    losses = torch.where(counted, (normalizer - z.gather(1, index)).squeeze(1), 0.0)
    if learning:
        gradient = torch.exp(z - normalizer)
        gradient.scatter_add_(1, index, torch.full_like(normalizer, -1.0))
        gradient.mul_((counted * boost).unsqueeze(1))
        logits.zero_()
        logits[:, :vocab_size] = gradient
    return losses


@cache
def _triton_kernel() -> Any:
    """Return the kernel, or None where Triton is not installed."""
    try:
        from foretrain.models.triton_kernels import softmax_gradient
    except ImportError:
        return None
    return softmax_gradient
