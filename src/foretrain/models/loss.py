"""Output layer and cross-entropy in one, slice by slice, so that the full table of logits never exists.

Gradients are computed in the forward pass, because the logits are at hand there; the backward pass only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretrain.models.kernels import softmax_gradient_

IGNORED = -100
"""Targets with this value do not count, as in `torch.nn.functional.cross_entropy`."""

SLICE_ROWS = {"cuda": 16384, "cpu": 1024}
SLICE_ROWS_ALONE = {"cuda": 4096, "cpu": 1024}
"""Rows per slice without gradients, where no sum of the output layer's size is read and written for each slice."""
HALF_RANGE = 32768.0


def logits_bytes(hidden: Tensor, vocab_size: int) -> int:
    """Return the memory that the full fp32 logits would take."""
    return hidden.numel() // hidden.shape[-1] * vocab_size * 4


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int | None = None, slice_rows: int | None = None
) -> Tensor:
    """Return the mean of `cross_entropy(hidden @ weight.T, targets)` over targets that are not ignored.

    hidden: [rows, width], weight: [padded vocabulary, width], targets: [rows]. Rows of `weight` from `vocab_size` on
    are padding and never reach the loss.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if slice_rows is None:
        slice_rows = (SLICE_ROWS if learning else SLICE_ROWS_ALONE).get(hidden.device.type, 1024)
    of_weight = learning and weight.requires_grad  # a frozen output layer needs no gradient, which costs a third
    total, _, _ = _linear_cross_entropy(hidden, weight, targets, vocab_size, slice_rows, learning, of_weight)
    mean: Tensor = total / (targets != IGNORED).sum().clamp(min=1)
    return mean


def _boost(dtype: torch.dtype, slice_rows: int) -> float:
    """Return a factor that stays in the middle of fp16's range, which loses small probabilities and overflows in large
    sums."""
    return max(1.0, HALF_RANGE / slice_rows) if dtype is torch.float16 else 1.0


@torch.library.custom_op("foretrain::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    slice_rows: int,
    learning: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum of losses, its gradient for `hidden`, its gradient for `weight`), both gradients times the boost."""
    high = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    total = torch.zeros((), dtype=high, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if learning else hidden.new_empty(0)
    weight_gradient = weight.new_empty(0)
    boost = _boost(hidden.dtype, slice_rows)
    for start in range(0, hidden.shape[0], slice_rows):
        rows = slice(start, start + slice_rows)
        logits = F.linear(hidden[rows], weight)
        total += softmax_gradient_(logits, targets[rows], vocab_size, IGNORED, boost, learning).sum()
        if learning:
            torch.mm(logits, weight, out=hidden_gradient[rows])
        if of_weight:
            product = _wide_product(logits.t(), hidden[rows], high)
            weight_gradient = product if start == 0 else weight_gradient.add_(product)
            del product
        del logits  # before the next slice is made
    return total, hidden_gradient, weight_gradient


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right in the wide format that the products were summed in."""
    if left.is_cuda and left.dtype is not dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    slice_rows: int,
    learning: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    high = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    return (
        hidden.new_empty((), dtype=high),
        torch.empty_like(hidden) if learning else hidden.new_empty(0),
        torch.empty_like(weight, dtype=high) if of_weight else weight.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, _, _, slice_rows, _, ctx.of_weight = inputs
    _, hidden_gradient, weight_gradient = output
    ctx.save_for_backward(hidden_gradient, weight_gradient)
    ctx.set_materialize_grads(False)  # else the two outputs nobody differentiates would get zeros of their size
    ctx.boost = _boost(hidden.dtype, slice_rows)
    ctx.weight_dtype = weight.dtype


def _scale(ctx: Any, upstream: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:  # nothing depends on the loss
        return (None,) * 7
    hidden_gradient, weight_gradient = ctx.saved_tensors
    factor = upstream / ctx.boost
    return (
        (hidden_gradient * factor).to(hidden_gradient.dtype),
        (weight_gradient * factor).to(ctx.weight_dtype) if ctx.of_weight else None,
        None,
        None,
        None,
        None,
        None,
    )


_linear_cross_entropy.register_autograd(_scale, setup_context=_save)
