"""Amounts of memory in words: `14GB`, `6GiB`, `800MB`."""

from __future__ import annotations

import re

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""GB is 10^9 bytes, as in trade, and GiB is 2^30."""
_MOST_DIGITS = 30
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B)")


def parse_size(text: str) -> int:
    """Return bytes. Raises ValueError, in words for the user, for anything that is not a positive number and a unit."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory; write a number and a unit, such as 14GB, 6GiB or 800MB")
    if len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"{text[:_MOST_DIGITS]!r}... has too many digits for an amount of memory; write 14GB, or 6GiB")
    size = int(float(match[1]) * UNITS[match[2]])
    if size <= 0:
        raise ValueError(f"{text!r} is no memory at all; write a positive amount, such as 14GB")
    return size


def format_size(size: float) -> str:
    """Write an amount for people: `13.2 GB`, `800 MB`, `12 KB`."""
    for unit in ("GB", "MB"):
        if size >= UNITS[unit]:
            value = size / UNITS[unit]
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size / UNITS['KB']:.1f} KB"
