"""What processes compare to know that they decide alike: names and short hashes of every number of their decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

_BITS = 20
"""Bits of each half of a signature: sums of their squares over 8,192 processes are exact in a double."""
SIGNATURE = 4
"""Numbers of a signature."""


class DecidedValue(NamedTuple):
    """One number or word of a decision."""

    name: str
    value: str
    hash: int


class Agreement:
    """The decisions since the last comparison, and a hash of all decisions of the run."""

    def __init__(self) -> None:
        self.entries: list[DecidedValue] = []
        self._all = hashlib.blake2b(digest_size=8)

    def add(self, decision: Any, name: str) -> None:
        """Note a decision, number by number."""
        for path, value in named_values(decision, name):
            own = hashlib.blake2b(f"{path}={value}".encode(), digest_size=7).digest()
            self._all.update(own)
            self.entries.append(DecidedValue(path, value, int.from_bytes(own)))

    def signature(self) -> list[float]:
        """Return numbers whose sums over all processes tell whether all of them hold the same ones."""
        digest = int.from_bytes(self._all.digest())
        halves = [digest % 2**_BITS, (digest >> _BITS) % 2**_BITS]
        return [float(number) for half in halves for number in (half, half * half)]

    def forget(self, count: int) -> None:
        """The first so many were compared, and are the same."""
        del self.entries[:count]


def all_the_same(sums: Sequence[float], size: int) -> bool:
    """Say whether signatures with these sums were the same: a mean of squares is the square of the mean only then."""
    pairs = [(int(sums[place]), int(sums[place + 1])) for place in range(0, SIGNATURE, 2)]
    return all(total * total == size * squares for total, squares in pairs)


def named_values(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every number in a decision. Floats are written to the last bit; of tensors and of
    objects that are no data only the form counts."""
    if isinstance(value, Enum):
        yield name, str(value.value)
    elif value is None or isinstance(value, (bool, int, str)):
        yield name, str(value)
    elif isinstance(value, float):
        yield name, float(value).hex()
    elif isinstance(value, np.ndarray):
        yield name, hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
    elif isinstance(value, np.generic):
        yield from named_values(value.item(), name)
    elif isinstance(value, Tensor):
        yield name, f"{list(value.shape)} {value.dtype}"
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_values(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_values(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} items"
        for place, item in enumerate(value):
            yield from named_values(item, f"{name}[{place}]")
    else:
        yield name, type(value).__qualname__
