"""From numbers to places on a chart: ranges, round ticks, their labels, and long curves made short."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
_HUGE = 1e100  # beyond it differences and ratios of two numbers may overflow
_WIDE = 50


def finite(value: object) -> float | None:
    """The value as a number, or None for whatever cannot be drawn: null, NaN, infinity, text."""
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


@dataclass(frozen=True)
class Scale:
    """A range of values laid over a range of pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def clipped(self, value: float) -> float:
        return self(min(max(value, self.low), self.high))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, spacing: float) -> list[float]:
        """Round values about `spacing` pixels apart."""
        count = max(2, int(abs(self.end - self.start) / spacing))
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def fitted(values: Iterable[float], log: bool = False, margin: float = 0.05) -> tuple[float, float]:
    """A range that holds the values with some air around them; never empty."""
    numbers = [value for value in values if not log or value > 1 / _HUGE]
    if not numbers:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(numbers), max(numbers)
    if log:
        air = max((math.log(high) - math.log(low)) * margin, 0.02)
        return math.exp(math.log(low) - air), math.exp(math.log(high) + air)
    spread = high - low
    if spread <= max(1e-9 * max(abs(low), abs(high)), 1 / _HUGE):
        spread = abs(high) if abs(high) > 1 / _HUGE else 1.0
    air = spread * margin
    return low - air, high + air


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, as near to `count` of them as that allows."""
    wanted = (high - low) / max(count, 1)
    exponent = math.floor(math.log10(wanted))
    mantissa = next((m for m in (1, 2, 5) if m * 10.0**exponent >= wanted * (1 - 1e-9)), 10)
    step = mantissa * 10.0**exponent
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Through decimal text: 3 * 0.1 is not 0.3.
    return [float(f"{multiple * mantissa}e{exponent}") for multiple in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """1, 2, 5 of each power of ten; only powers where these are too many; round steps where they are too few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    inside = [
        float(f"{mantissa}e{exponent}")
        for exponent in range(first, last + 1)
        for mantissa in (1, 2, 5)
        if low <= float(f"{mantissa}e{exponent}") <= high
    ]
    if len(inside) < 3:
        finer = ([tick for tick in linear_ticks(low, high, count * times) if tick > 0] for times in (1, 2, 4, 8))
        return next((ticks for ticks in finer if ticks), [])
    if len(inside) <= count:
        return inside
    for stride in range(max(1, math.ceil((last - first) / max(count, 1))), 0, -1):
        powers = [float(f"1e{exponent}") for exponent in range(first, last + 1, stride)]
        powers = [power for power in powers if low <= power <= high]
        if len(powers) >= 2:
            return powers
    return inside


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """One notation for a whole axis: plain decimals where short, else like 5e-4."""
    sizes = [abs(tick) for tick in ticks if tick]
    if sizes and (min(sizes) < 1e-3 or max(sizes) >= 1e6):
        return [_scientific(tick) for tick in ticks]
    even = len({round(second - first, 12) for first, second in itertools.pairwise(ticks)}) == 1
    decimals = [_decimals(tick) for tick in ticks]
    shared = max(decimals, default=0)
    return [f"{tick:,.{shared if even else own}f}" for tick, own in zip(ticks, decimals, strict=True)]


def _decimals(value: float) -> int:
    return next((places for places in range(12) if float(f"{value:.{places}f}") == value), 12)


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def rate(value: float) -> str:
    """A learning rate, as people write it: 3e-4, 0.02."""
    return _scientific(value) if 0 < abs(value) < 0.01 else f"{value:g}"


def thinned(points: Sequence[Point], limit: int = 400) -> list[Point]:
    """At most `limit` points with the first, the last, and the lowest and highest of every stretch: spikes stay."""
    if len(points) <= limit:
        return list(points)
    buckets = max(1, (limit - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for bucket in range(buckets):
        start, end = bucket * len(inner) // buckets, (bucket + 1) * len(inner) // buckets
        if end > start:
            lowest = min(range(start, end), key=lambda place: inner[place][1])
            highest = max(range(start, end), key=lambda place: inner[place][1])
            kept += [inner[place] for place in sorted({lowest, highest})]
    return [*kept, points[-1]]


# --- which part of the values a chart shows ---------------------------------------------------------------------------


def spans_widely(curves: Sequence[Sequence[float]]) -> bool:
    """Whether a logarithmic axis shows more: the values span more than a factor of 50, a few wild ones left aside, and
    none is below 0. One that is exactly 0 does not count: it has no place on such an axis."""
    known = [[value for value in curve if value] for curve in curves]
    begins = [curve[: math.ceil(len(curve) / 50)] for curve in known]
    first = max((value for part in begins for value in part), default=0.0)
    rest = sorted(value for curve in known for value in curve[math.ceil(len(curve) / 50) :])
    high = first
    if rest:
        usual = rest[int(len(rest) * 0.98)]
        high = max(first, usual * 10 if 0 < usual * 100 < rest[-1] else rest[-1])
    low = min((value for curve in known for value in curve), default=0.0)
    return low > 0 and high / low > _WIDE


def frame(curves: Sequence[Sequence[float]]) -> dict[str, Point]:
    """What a chart of what came and what was said of it shows on either axis, by what came: {} for nothing."""
    values = [value for curve in curves for value in curve]
    if not values:
        return {}
    low, high = min(values), max(values)
    air = 0.4 * (high - low) or 0.2 * abs(high) or 1.0
    made = {"linear": (low - air, high + air)}
    if above := [value for value in values if value > 0]:
        factor = max((high / min(above)) ** 0.25, 1.2)
        made["log"] = (min(above) / factor, high * factor)
    return made
