"""Output layer and cross-entropy in one, slice by slice, so that the full table of logits never exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Targets with this value do not count, as in `torch.nn.functional.cross_entropy`."""

SLICE_ROWS = 8192
HALF_RANGE = 32768.0


def logits_bytes(hidden: Tensor, vocab_size: int) -> int:
    """Memory the full fp32 logits would take."""
    return hidden.numel() // hidden.shape[-1] * vocab_size * 4


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    slice_rows: int | None = None,
) -> Tensor:
    """Mean of `cross_entropy(hidden @ weight.T, targets)` over targets that are not ignored.

    hidden: [rows, width], weight: [padded vocabulary, width], targets: [rows]. Rows of `weight` from `vocab_size` on
    are padding. Gradients are computed in the forward pass, slice by slice, because the logits are at hand there.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    if slice_rows is None:
        slice_rows = SLICE_ROWS if hidden.is_cuda else SLICE_ROWS // 8
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size, slice_rows)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, slice_rows: int) -> Tensor:
        counted = targets != IGNORED
        count = counted.sum().clamp(min=1).float()
        # fp16 loses small probabilities and overflows in large sums: stay in the middle of its range
        boost = max(1.0, HALF_RANGE / slice_rows) if hidden.dtype is torch.float16 else 1.0
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradients: list[Tensor] = []
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], slice_rows):
            h = hidden[start : start + slice_rows]
            target = targets[start : start + slice_rows]
            mask = counted[start : start + slice_rows]
            index = torch.where(mask, target, 0).unsqueeze(1)
            logits = F.linear(h, weight)
            z = logits[:, :vocab_size].float()
            log_normalizer = torch.logsumexp(z, dim=1, keepdim=True)
            losses = (log_normalizer - z.gather(1, index)).squeeze(1)
            total = total + torch.where(mask, losses, 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            # count * d loss / d logits = softmax - one-hot, zero for ignored rows and padding columns
            one_hot = torch.arange(vocab_size, device=z.device).unsqueeze(0) == index
            gradient = torch.exp(z - log_normalizer) - one_hot.float()
            gradient = torch.where(mask.unsqueeze(1), gradient * boost, 0.0)
            gradient = F.pad(gradient.to(logits.dtype), (0, weight.shape[0] - vocab_size))
            if wants_hidden:
                hidden_gradients.append(gradient @ weight)
            if weight_gradient is not None:
                weight_gradient = weight_gradient + (gradient.t() @ h).float()
        ctx.save_for_backward(
            torch.cat(hidden_gradients) if hidden_gradients else None, weight_gradient, 1.0 / (count * boost)
        )
        ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_gradient, weight_gradient, scale = ctx.saved_tensors
        factor = outputs[0] * scale
        return (
            hidden_gradient * factor if hidden_gradient is not None else None,
            (weight_gradient * factor).to(ctx.weight_dtype) if weight_gradient is not None else None,
            None,
            None,
            None,
        )
