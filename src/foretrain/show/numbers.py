"""Read numbers from files, which may hold anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_HUGE = 1e100
"""Beyond it differences and ratios of two numbers may overflow."""


def finite(value: object) -> float | None:
    """Return the value as a number, or None for whatever cannot be drawn: null, NaN, infinity, text."""
    if type(value) is float:  # most are
        number = value
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    else:
        try:
            number = float(value)
        except OverflowError:
            return None
    if not abs(number) < _HUGE:  # NaN too
        return None
    return number if abs(number) > 1 / _HUGE else 0.0


def rounded(value: object, digits: int = 6) -> float | int | None:
    """Round a number so that its JSON is short: six digits are more than a screen shows."""
    number = finite(value)
    if number is None:
        return None
    if isinstance(value, int):
        return value
    short = float(f"{number:.{digits}g}")
    return int(short) if short == math.floor(short) and abs(short) < 1e15 else short


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
