"""Kernels for CUDA GPUs, in Triton. `narrow.py`, `moments.py` and `muon.py` hold the same in torch."""

import triton
import triton.language as tl


@triton.jit
def _chance(numbers, step):
    """A whole number from 0 to 65535 for each of `numbers`, which it depends on, as well as on the step."""
    bits = numbers.to(tl.uint32, bitcast=True) + step.to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 15)) * 0xC2B2AE35
    return bits >> 16


@triton.jit
def _fourth_power(numbers):
    square = numbers * numbers
    return square * square


@triton.jit
def _upper_half(bits):
    """The bf16 number whose bits these begin with."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrow_adamw(
    weights,
    gradients,
    firsts,
    seconds,
    first_scales,
    second_scales,
    step,
    rate,
    gradient_scale,
    found_inf,
    count,
    columns,
    beta1,
    beta2,
    epsilon,
    weight_decay,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for ROWS blocks: read, update and store weights and moments in one pass.

    columns: numbers after which a new block begins, though the one before is not full; `count` where none does.
    """
    good = True
    if CHECKED:
        good = tl.load(found_inf) == 0
    if good:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        per_line = (columns + BLOCK - 1) // BLOCK
        line = rows // per_line
        column = (rows - line * per_line)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        place, blocks = line[:, None] * columns + column, line * columns < count
        inside = (column < columns) & blocks[:, None]
        t, lr = tl.load(step), tl.load(rate)
        w = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            g = g / tl.load(gradient_scale)
        first = tl.load(firsts + place, mask=inside, other=0).to(tl.float32)
        second = tl.load(seconds + place, mask=inside, other=0).to(tl.float32)
        if EIGHT_BITS:
            first_scale = tl.load(first_scales + rows, mask=blocks, other=0.0)
            second_scale = tl.load(second_scales + rows, mask=blocks, other=0.0)
            first = first * tl.abs(first) / (127.0 * 127.0) * first_scale[:, None]
            second = _fourth_power(second / 255.0) * second_scale[:, None]
        first = first + (1 - beta1) * (g - first)
        second = second * beta2 + (1 - beta2) * g * g
        first_correction = 1 - tl.exp2(t * tl.log2(beta1 + 0.0))
        second_correction = 1 - tl.exp2(t * tl.log2(beta2 + 0.0))
        w = w * (1 - lr * weight_decay)
        w = w - lr / first_correction * first / (tl.sqrt(second) / tl.sqrt(second_correction) + epsilon)
        tl.store(weights + place, w, mask=inside)
        if EIGHT_BITS:
            first_scale = tl.max(tl.abs(first), axis=1)
            second_scale = tl.max(second, axis=1)
            tl.store(first_scales + rows, first_scale, mask=blocks)
            tl.store(second_scales + rows, second_scale, mask=blocks)
            share = first / tl.where(first_scale > 0, first_scale, 1.0)[:, None]
            root = tl.floor(tl.sqrt(tl.abs(share)) * 127.0 + 0.5)
            tl.store(firsts + place, tl.where(share < 0, -root, root).to(tl.int8), mask=inside)
            share = second / tl.where(second_scale > 0, second_scale, 1.0)[:, None]
            low = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(share)) * 255.0), 254.0)
            below, above = _fourth_power(low / 255.0), _fourth_power((low + 1.0) / 255.0)
            up = (share - below) * 65536.0 > (above - below) * _chance(second, t).to(tl.float32)
            code = tl.maximum(tl.where(up, low + 1.0, low), 1.0)
            tl.store(seconds + place, tl.where(share > 0, code, 0.0).to(tl.uint8), mask=inside)
        else:
            bits = first.to(tl.uint32, bitcast=True)
            tl.store(firsts + place, _upper_half(bits + 0x7FFF + ((bits >> 16) & 1)), mask=inside)
            bits = second.to(tl.uint32, bitcast=True)
            tl.store(seconds + place, _upper_half(bits + _chance(second, t)), mask=inside)


@triton.jit
def muon_momentum(
    gradients,
    momenta,
    updates,
    gradient_scale,
    found_inf,
    count,
    weight,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take BLOCK numbers of a gradient into the momentum, which is updated in place, and write the update that is to be
    orthogonalised. A bad step has no gradient and leaves the momentum."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gradients + place, mask=inside, other=0.0)
    m = tl.load(momenta + place, mask=inside, other=0.0)
    if SCALED:
        g = g / tl.load(gradient_scale)
    kept = m
    if CHECKED:
        good = tl.load(found_inf) <= 0
        g = tl.where(good, g, 0.0)  # what is not finite would spread through the iteration
    m = m * (1 - weight) + g * weight
    if CHECKED:
        m = tl.where(good, m, kept)
    tl.store(momenta + place, m, mask=inside)
    if NESTEROV:
        m = m * (1 - weight) + g * weight
    tl.store(updates + place, m, mask=inside)


@triton.jit
def muon_weights(
    weights,
    steps,
    factors,
    rate,
    found_inf,
    rows,
    columns,
    part_stride,
    row_stride,
    column_stride,
    ratio,
    weight_decay,
    CHECKED: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move ROWS x COLUMNS weights of one part, [rows, columns], of a matrix whose parts lie one above the other.

    Steps have strides of their own: those of tall matrices are transposed. BY_ROW: each row of them is multiplied by
    its number of `factors`, [parts, rows]. A bad step moves nothing.
    """
    good = True
    if CHECKED:
        good = tl.load(found_inf) <= 0
    if good:
        part = tl.program_id(2).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        place = (part * rows + row) * columns + column
        source = part * part_stride + row * row_stride + column * column_stride
        lr = tl.load(rate).to(tl.float32)
        step = tl.load(steps + source, mask=inside, other=0.0).to(tl.float32)
        if BY_ROW:
            step = step * tl.load(factors + part * rows + row, mask=row < rows, other=0.0)
        w = tl.load(weights + place, mask=inside, other=0.0)
        w = w * (1 - lr * weight_decay) - lr * ratio * step
        tl.store(weights + place, w, mask=inside)
