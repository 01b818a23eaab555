"""Statistics for few, noisy numbers: paired intervals, bootstrap of a ratio, an exact rank test, many tests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 4000
_MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a standard normal number."""
_MOST_EXACT = 120
"""Values in all up to which the rank test counts every arrangement; beyond it the normal curve is as good."""


# --- paired differences ----------------------------------------------------------------------------------------------


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
    """Student's interval of the mean of paired differences."""
    numbers = _finite(values)
    n, mean = len(numbers), math.fsum(numbers) / len(numbers)
    if n == 1:
        return Interval(mean, None, None, None, 1)
    deviation = _deviation(numbers)
    half = _student((1 + level) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, deviation, n)


def smallest_detectable(
    values: Sequence[float] | float, n: int | None = None, power: float = 0.8, level: float = 0.95
) -> float | None:
    """The smallest true difference that `n` pairs would show with this power; None for fewer than two.

    `values`: the paired differences, or their standard deviation together with `n`.
    """
    if isinstance(values, (int, float)):
        if n is None:
            raise ValueError("a standard deviation alone does not say how many pairs there were; give n")
        deviation, count = float(values), n
    else:
        numbers = _finite(values)
        count = len(numbers) if n is None else n
        deviation = _deviation(numbers) if len(numbers) > 1 else math.nan
    if count < 2 or not math.isfinite(deviation):
        return None
    quantiles = _student((1 + level) / 2, count - 1) + _student(power, count - 1)
    return quantiles * deviation / math.sqrt(count)


def _finite(values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("there is no value to make an interval of")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"an interval needs finite values, got {numbers}")
    return numbers


def _deviation(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def _student(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution."""
    from scipy import special

    return float(special.stdtrit(freedom, probability))


# --- ratio of two sides ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """log(B / A) of the medians over processes, and where it may lie."""

    effect: float
    low: float
    high: float


def log_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return math.log(float(np.median(b)) / float(np.median(a)))


def bootstrap_ratio(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """Two-level bootstrap: processes are drawn anew, then the samples within each of them.

    Each process is a list of samples; where only its median is known, a list of one, and there is one level. The
    centre is the median over processes, so that one slow process does not carry the result away. Percentiles of so few
    values are too narrow; they are widened as Student's quantile widens the normal one.
    """
    random = np.random.default_rng(seed)
    effect = log_ratio([float(np.median(s)) for s in a], [float(np.median(s)) for s in b])
    drawn = np.log(_resampled(b, resamples, random)) - np.log(_resampled(a, resamples, random))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    widening = small_sample_widening(len(a), len(b), level)
    low, high = effect + widening * (min(low, effect) - effect), effect + widening * (max(high, effect) - effect)
    return Ratio(effect, float(low), float(high))


@cache
def small_sample_widening(a: int, b: int, level: float = 0.95) -> float:
    """Student's quantile over the normal one; 1 for many processes."""
    probability = (1 + level) / 2
    return _student(probability, max(1, a + b - 2)) / _student(probability, 10**6)


def _resampled(processes: Sequence[Sequence[float]], resamples: int, random: np.random.Generator) -> Array:
    """[resamples] medians over processes drawn with replacement, each with its samples drawn with replacement."""
    columns = 256
    bank = np.empty((len(processes), columns))
    for row, samples in zip(bank, processes, strict=True):
        values = np.asarray(samples, dtype=float)
        row[:] = np.median(values[random.integers(len(values), size=(columns, len(values)))], axis=1)
    which = random.integers(len(processes), size=(resamples, len(processes)))
    return np.asarray(np.median(bank[which, random.integers(columns, size=which.shape)], axis=1))


def noise_of_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Standard deviation that log(B / A) of the medians would have if both sides were the same code: the A/A noise.

    Any two processes of one side are such a comparison of code with itself. The median of their absolute log ratios
    does not care about a single slow process; it is scaled to a normal deviation and to the real number of processes.
    """
    return math.hypot(_noise_of_median(a), _noise_of_median(b))


def _noise_of_median(values: Sequence[float]) -> float:
    n = len(values)
    if n < 2:
        return math.nan
    logs = np.log(np.asarray(values, dtype=float))
    apart = np.abs(logs[:, None] - logs)[np.triu_indices(n, 1)]
    deviation = float(np.median(apart)) / (_MEDIAN_OF_NORMAL * math.sqrt(2))
    return math.sqrt(math.pi / 2 / n) * deviation


# --- tests -----------------------------------------------------------------------------------------------------------


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact one-sided probability, if A and B were alike, that B ranks at least so far above A.

    Every assignment of the ranks to the two sides is counted, with mid-ranks for equal values, so it is exact with ties
    too. (scipy's exact method is the same without ties and wrong with them.)
    """
    pooled = np.concatenate([np.asarray(a, dtype=float), np.asarray(b, dtype=float)])
    doubled = _doubled_ranks(pooled)
    observed = int(doubled[len(a) :].sum())
    if len(pooled) > _MOST_EXACT:
        return _normal_tail(doubled, len(b), observed)
    total = int(doubled.sum())
    # ways[k, s]: share of subsets of k ranks with the sum s, built up one rank at a time
    ways = np.zeros((len(b) + 1, total + 1))
    ways[0, 0] = 1.0
    for rank in doubled:
        ways[1:, rank:] = ways[1:, rank:] + ways[:-1, : total + 1 - rank]
    counts = ways[len(b)]
    return float(counts[observed:].sum() / counts.sum())


def _doubled_ranks(pooled: Array) -> NDArray[np.int64]:
    """Twice the mid-rank of each value: whole numbers."""
    ordered = np.sort(pooled)
    below, upto = np.searchsorted(ordered, pooled, "left"), np.searchsorted(ordered, pooled, "right")
    return np.asarray(below + upto + 1, dtype=np.int64)


def _normal_tail(doubled: NDArray[np.int64], chosen: int, observed: int) -> float:
    """Normal curve with the exact variance of a rank sum, ties included."""
    ranks, n = doubled / 2, len(doubled)
    variance = chosen * (n - chosen) / (n - 1) * float(np.var(ranks))
    if variance == 0:
        return 1.0
    return 0.5 * math.erfc((observed / 2 - 0.5 - chosen * float(np.mean(ranks))) / math.sqrt(2 * variance))


def smallest_probability(a: int, b: int) -> float:
    """The least that the rank test can give with so many on each side."""
    return 1 / math.comb(a + b, a)


def benjamini_hochberg(probabilities: Sequence[float]) -> list[float]:
    """Probabilities corrected for how many questions were asked at once, in the order given."""
    values = np.asarray(probabilities, dtype=float)
    order, n = np.argsort(values), len(values)
    scaled = values[order] * n / np.arange(1, n + 1)
    corrected = np.empty(n)
    corrected[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return [float(value) for value in corrected]
