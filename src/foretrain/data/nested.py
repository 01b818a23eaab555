"""Batches of any form: tensors in tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.errors import DataError


def _like(batch: Any, parts: list[Any]) -> Any:
    """Return a tuple, named tuple or list of `parts`, as `batch` is one."""
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def pin(batch: Any) -> Any:
    """Copy a batch into pinned memory."""
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return _like(batch, [pin(value) for value in batch])
    return batch


def rows_of_rank(batch: Any, rank: int, world: int) -> Any:
    """Return the rows of a batch that one of several processes gets, as many as each of the others."""
    if world == 1 or not isinstance(batch, (Tensor, dict, tuple, list)):
        return batch
    if isinstance(batch, Tensor):
        rows = len(batch) // world
        return batch[rank * rows : (rank + 1) * rows]
    if isinstance(batch, dict):
        return {key: rows_of_rank(value, rank, world) for key, value in batch.items()}
    return _like(batch, [rows_of_rank(value, rank, world) for value in batch])


def join(pieces: Sequence[Any]) -> Any:
    """Concatenate batches along their first dimension."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(pieces))
    if isinstance(first, dict):
        return {key: join([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, (tuple, list)):
        return _like(first, [join([piece[place] for piece in pieces]) for place in range(len(first))])
    raise DataError(f"a batch of {type(first).__name__} cannot span two epochs; return tensors, tuples or dicts")
