"""Write and read amounts: memory (`14GB`, `6GiB`, `800MB`), times (`2h`, `1h30m`), losses, rates and large numbers."""

from __future__ import annotations

import math
import re

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""GB is 10^9 bytes, as in trade, and GiB is 2^30."""
_MOST_DIGITS = 30
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B)")

_TIME = re.compile(r"(?:([0-9.]+) ?d)? ?(?:([0-9.]+) ?h)? ?(?:([0-9.]+) ?m(?:in)?)? ?(?:([0-9.]+) ?s)?")
_SECONDS = (86400, 3600, 60, 1)
"""Seconds of a day, an hour, a minute and a second, as the groups of `_TIME` have them."""


def parse_time(text: str) -> float:
    """Return seconds. Raises ValueError, in words for the user, for anything that is no time above 0."""
    match = _TIME.fullmatch(text.strip())
    try:
        amounts = [float(amount or 0) for amount in match.groups()] if match is not None and any(match.groups()) else []
    except ValueError:  # two points
        amounts = []
    seconds = sum(amount * unit for amount, unit in zip(amounts, _SECONDS, strict=False))
    if not amounts or not math.isfinite(seconds):
        raise ValueError(f"{text[:_MOST_DIGITS]!r} is not a time; write a number and a unit, such as 2h, 1h30m or 90s")
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all; write one above 0, such as 2h, 1h30m or 90s")
    return seconds


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


def format_size(size: float, decimals: int = 2) -> str:
    """Write an amount for people: `13.20 GB`, `800 MB`, `12.30 kB`."""
    for unit, name in (("GB", "GB"), ("MB", "MB"), ("KB", "kB")):
        if size >= UNITS[unit]:
            value = size / UNITS[unit]
            return f"{value:.{decimals if value < 100 else 0}f} {name}"
    return f"{size:.0f} bytes"


def short(number: float) -> str:
    """Write 1234567 as 1.23M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_speed(per_second: float, unit: str) -> str:
    """Write 16.8k tok/s, 250 samples/s."""
    return f"{short(per_second)} {'tok' if unit == 'tokens' else unit}/s"


def interval_text(value: float, low: float, high: float) -> str:
    """Write a number with its interval, 3.21 [3.17, 3.26], with as many digits as the interval has a use for."""
    size, width = max(abs(value), abs(low), abs(high)), high - low
    digits = max(2, -math.floor(math.log10(width))) if 0 < width < math.inf else 2
    form = f".{digits}f" if 0.1 <= size < 1e4 and digits <= 6 else ".3g"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def loss_text(value: float) -> str:
    """Write a loss: 2.5341, 0.01235, 2.784e-7. Small ones keep four digits, so that none is shown as 0.0000."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:.4g}"
    if 0.1 <= size < 1e4:
        return f"{value:.4f}"
    if 1e-4 <= size < 0.1:
        return f"{value:#.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def rate_text(value: float) -> str:
    """Write a learning rate as people do: 3e-4, 0.02."""
    if not 0 < abs(value) < 0.01:
        return f"{value:g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Write minutes and seconds, or hours and minutes."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}:{seconds % 60:02d}"


def clock(seconds: float) -> str:
    """Write 8.1 s, 4:43, 2h10m."""
    return f"{seconds:.1f} s" if seconds < 100 else duration(seconds)


def counted(count: int, thing: str) -> str:
    """Write 1 step, 1,200 steps."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def chain_in_words(leaps: int, name: str = "") -> str:
    """Write: chain of 78 linearised leaps."""
    return f"chain of {leaps:,} {f'{name} ' if name else ''}{'leap' if leaps == 1 else 'leaps'}"
