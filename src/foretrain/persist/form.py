"""Whether a saved state has the form that ours has: a number where a number belongs, and so on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_LARGEST = 2**64
_OTHERS = frozenset({"model", "optimizer", "average", "rates", "predictor"})
"""Parts of a state that are checked where they are put back: of another model, or a user's own."""


def check_form(own: Any, saved: Any, place: str = "") -> None:
    """Raises ValueError that names the first place where `saved` holds another kind of value than `own`, a state that
    was just made. What is None, or empty, in one of them says nothing about the other, and what only one of them has
    is not looked at: settings may have changed since."""
    kind, other = _kind(own), _kind(saved)
    if isinstance(saved, int) and abs(saved) > _LARGEST:
        raise ValueError(f"{place} is a number of {len(hex(saved)) * 4} bits")
    if own is None or saved is None:
        return
    if kind != other:
        raise ValueError(f"{place} is {other}, not {kind}")
    if kind == "a mapping":
        for key in (own.keys() & saved.keys()) - _OTHERS:
            check_form(own[key], saved[key], f"{place}.{key}" if place else str(key))
    elif kind == "a list":
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=False)):
            check_form(mine, theirs, f"{place}.{number}")
        if not own and len({_kind(item) for item in saved if item is not None}) > 1:
            raise ValueError(f"{place} holds values of several kinds")
    elif kind == "a tensor" and own.ndim != saved.ndim:
        raise ValueError(f"{place} has {saved.ndim} dimensions, not {own.ndim}")


def _kind(value: Any) -> str:
    """In words. A tensor of one number is as good as a number."""
    if isinstance(value, Tensor):
        return "a tensor" if value.ndim else "a number"
    return _kind_of(type(value))


def _find_kind(kind: type) -> str:
    kinds: dict[str, Any] = {"a number": (int, float), "a text": str, "a mapping": Mapping, "a list": (list, tuple)}
    return next((name for name, kinds in kinds.items() if issubclass(kind, kinds)), kind.__name__)


_kind_of: Callable[[type], str] = functools.cache(_find_kind)
