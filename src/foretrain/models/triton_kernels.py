"""Kernels for CUDA GPUs, in Triton. `kernels.py` holds the same in torch; both are compared by the tests."""

import triton
import triton.language as tl


@triton.jit
def softmax_gradient(
    logits,
    stride,
    targets,
    losses,
    vocab_size,
    columns,
    ignored,
    boost,
    LEARNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row per program: its loss, then `boost * (softmax - one_hot)` over the logits themselves."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if LEARNING:
            for start in range(0, columns, BLOCK):
                place = start + lanes
                tl.store(logits + place, tl.zeros([BLOCK], tl.float32), mask=place < columns)
    else:
        # one running maximum, and a running sum per lane that is joined at the end: one exponential per logit
        highest = float("-inf")
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            place = start + lanes
            z = tl.load(logits + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(z, axis=0))
            total = total * tl.exp(highest - higher) + tl.exp(z - higher)
            highest = higher
        normalizer = highest + tl.log(tl.sum(total, axis=0))
        tl.store(losses + row, normalizer - tl.load(logits + target).to(tl.float32))
        if LEARNING:
            tl.debug_barrier()
            for start in range(0, columns, BLOCK):
                place = start + lanes
                z = tl.load(logits + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(z - normalizer) - tl.where(place == target, 1.0, 0.0)
                tl.store(logits + place, gradient * boost, mask=place < columns)
