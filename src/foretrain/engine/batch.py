"""Batches are any nesting of tuples, lists and dicts of tensors: how to walk, split and count them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foretrain.models.loss import IGNORED


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch, or of any other nesting, in a fixed order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, (tuple, list)):
        return [tensor for value in batch for tensor in tensors_of(value)]
    return []


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with `function` applied to every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [map_tensors(value, function) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def same_batch(one: Any, other: Any) -> bool:
    """Whether two batches hold the same numbers and texts. One without tensors is not known to."""
    return bool(tensors_of(one)) and _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and (one is other or _equal(one, other))
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)):
        alike = isinstance(other, (tuple, list)) and len(one) == len(other)
        return alike and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return one is other or (isinstance(one, (bool, int, float, complex, str, bytes)) and bool(one == other))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def typed_like(batch: Any, given: Any) -> Any:
    """The batch with the types of another one: a saved state knows tuples only, where a loader gives named ones."""
    if isinstance(batch, dict) and isinstance(given, Mapping):
        return {key: typed_like(value, given.get(key)) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and isinstance(given, (tuple, list)) and len(batch) == len(given):
        parts = [typed_like(*pair) for pair in zip(batch, given, strict=True)]
        return type(given)(*parts) if hasattr(given, "_fields") else type(batch)(parts)
    return batch


def split(batch: Any, parts: int, index: int) -> Any:
    """Part `index` of `parts` along the first dimension; sizes differ by one at the most."""

    def part(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0]
        return tensor[rows * index // parts : rows * (index + 1) // parts]

    return map_tensors(batch, part)


def rows_of(part: Any) -> int:
    """The rows of the first tensor that has any; the items of a batch without tensors, such as a list of texts."""
    tensors = tensors_of(part)
    rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)
    if rows is None:
        rows = len(part) if not tensors and isinstance(part, (list, tuple)) else 1
    return rows


def count(batch: Any) -> int:
    """Tokens of a batch of token numbers, samples of any other batch."""
    tensors = tensors_of(batch)
    if not tensors:
        return 1
    first = tensors[0]
    return first.numel() if first.ndim == 2 and not first.is_floating_point() else first.shape[0] if first.ndim else 1


def part_weights(parts: list[Any], device: torch.device) -> Tensor:
    """Each part's share of the whole batch: by targets that count where there are targets, by rows otherwise."""
    counts = part_counts(parts, device)
    return counts / counts.sum().clamp(min=1.0)


def part_counts(parts: list[Any], device: torch.device) -> Tensor:
    """How much each part counts: its targets that count where there are targets, its rows otherwise."""
    return torch.stack([_count(part, device) for part in parts])


def _count(part: Any, device: torch.device) -> Tensor:
    """How much a part counts, computed where its tensors are: the host never waits for it."""
    numbers = [t for t in reversed(tensors_of(part)) if t.ndim and not t.is_floating_point()]
    if not numbers:
        return torch.full((), float(rows_of(part)), device=device)
    # It is not known which tensor holds the targets: take the one with the largest ignored share, else the last.
    counted = torch.stack([(t != IGNORED).sum().float() for t in numbers])
    shares = torch.stack([count / max(1, t.numel()) for count, t in zip(counted.unbind(), numbers, strict=True)])
    return counted.gather(0, shares.argmin(0, keepdim=True)).squeeze(0)
