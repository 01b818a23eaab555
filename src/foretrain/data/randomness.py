"""Random numbers of a sample's own: drawn from the global generators, as data sets do, but without a trace in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from foretrain.data.order import keyed

BATCH = 1
"""Stream of what is drawn for a batch as a whole, such as by a collate function."""
_SAMPLE = 0


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the global generators go on afterwards where they were. For one thread at a time."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - data sets use it
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def start_generators(key: int) -> None:
    """Start the generators of torch (CPU), numpy and Python from a key of 64 bits.

    Each gets other bits of it: torch and numpy make the same numbers of the same seed.
    """
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)
    np.random.seed(key >> 32)  # noqa: NPY002
    random.seed(key)


def sample_keys(seed: int, epoch: int, indices: NDArray[np.int64], stream: int = _SAMPLE) -> list[int]:
    """Return a key for each sample of an epoch."""
    keys: list[int] = keyed(indices.astype(np.uint64), seed, epoch, 0xA06 + stream).tolist()
    return keys
