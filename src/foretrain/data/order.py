"""Sample order as a pure function of (seed, epoch, index): nothing has to be stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
Integers = NDArray[np.uint64]


def _mix(values: Integers, key: np.uint64) -> Integers:
    """Apply SplitMix64's finaliser to whole arrays."""
    with np.errstate(over="ignore"):
        z = values + key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def random_integer(seed: int, stream: int, below: int) -> int:
    """Return one reproducible integer in [0, below)."""
    value = _mix(np.array([stream], dtype=np.uint64), _mix(np.array([seed], dtype=np.uint64), np.uint64(0x5EED))[0])
    return int(value[0]) % below


def keyed(values: Integers, seed: int, epoch: int, purpose: int) -> Integers:
    """Return 64 random bits for each value, by (seed, epoch) and what they are for."""
    # seed and epoch are mixed one after the other: from their sum, seed 2 would repeat seed 1 an epoch later
    stream = np.array([epoch & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    return _mix(values, _mix(stream, _mix(np.array([seed], dtype=np.uint64), np.uint64(purpose))[0])[0])


def shuffled(indices: NDArray[np.int64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return where each of `indices` in [0, count) goes in this epoch's order: a bijection, without a table.

    A balanced Feistel network on the smallest even number of bits that holds `count`; values outside walk on until
    they fall inside (fewer than four times as many values as needed, so the walk is short).
    """
    if count <= 1:
        return np.zeros_like(indices)
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = keyed(np.arange(1, _ROUNDS + 1, dtype=np.uint64), seed, epoch, 0x0DE5)
    values = indices.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)
