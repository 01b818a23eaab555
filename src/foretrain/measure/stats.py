"""Intervals of few, noisy, paired numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where it may lie."""

    mean: float
    low: float | None
    """None when one value cannot tell."""
    high: float | None
    deviation: float | None
    """Sample standard deviation of single values."""
    n: int


def paired_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return Student's interval of the mean of paired differences."""
    numbers = _finite(values)
    n, mean = len(numbers), statistics.fmean(numbers)
    if n == 1:
        return Interval(mean, None, None, None, 1)
    deviation = statistics.stdev(numbers)
    half = student_quantile((1 + level) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, deviation, n)


def smallest_detectable(values: Sequence[float], power: float = 0.8, level: float = 0.95) -> float | None:
    """Return the smallest true difference that so many pairs show with this power; None for fewer than two."""
    numbers = _finite(values)
    if len(numbers) < 2:
        return None
    quantiles = sum(student_quantile(probability, len(numbers) - 1) for probability in ((1 + level) / 2, power))
    return quantiles * statistics.stdev(numbers) / math.sqrt(len(numbers))


def student_quantile(probability: float, freedom: int) -> float:
    """Return what `scipy.stats.t.ppf` returns; `scipy.stats` itself takes half a second to import."""
    from scipy import special

    return float(special.stdtrit(freedom, probability))


def _finite(values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("there is no value to make an interval of")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"an interval needs finite values, got {numbers}")
    return numbers
