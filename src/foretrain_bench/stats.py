"""Statistics of two sides of a benchmark that scipy lacks: a bootstrap in two levels, an exact rank test with ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foretrain.measure.stats import student_quantile

RESAMPLES = 4000
_MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a standard normal number."""
_MOST_EXACT = 120
"""Up to so many values the rank test counts every arrangement; beyond, scipy's normal approximation is as good."""


@dataclass(frozen=True, slots=True)
class LogRatio:
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
) -> LogRatio:
    """Draw processes anew, then the samples within each of them (`scipy.stats.bootstrap` has one level only).

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
    return LogRatio(effect, float(low), float(high))


@cache
def small_sample_widening(a: int, b: int, level: float = 0.95) -> float:
    """Return Student's quantile over the normal one; it is 1 for many processes."""
    probability = (1 + level) / 2
    return student_quantile(probability, max(1, a + b - 2)) / student_quantile(probability, 10**6)


def _resampled(
    processes: Sequence[Sequence[float]], resamples: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return [resamples] medians over processes drawn with replacement, and so are the samples of each."""
    columns = 256
    bank = np.empty((len(processes), columns))
    for row, samples in zip(bank, processes, strict=True):
        values = np.asarray(samples, dtype=float)
        row[:] = np.median(values[random.integers(len(values), size=(columns, len(values)))], axis=1)
    which = random.integers(len(processes), size=(resamples, len(processes)))
    return np.asarray(np.median(bank[which, random.integers(columns, size=which.shape)], axis=1))


def noise_of_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the standard deviation that log(B / A) of the medians has if both sides are the same code: the A/A noise.

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


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the exact one-sided probability, if A and B are alike, that B ranks at least so far above A.

    Every assignment of the ranks to the two sides is counted, with mid-ranks for equal values, so it is exact with ties
    too. (scipy's exact method is the same without ties and wrong with them.)
    """
    from scipy import stats

    if len(a) + len(b) > _MOST_EXACT:
        return float(stats.mannwhitneyu(b, a, alternative="greater", method="asymptotic").pvalue)
    doubled = np.rint(2 * stats.rankdata(np.concatenate([a, b]))).astype(int)
    observed, total = int(doubled[len(a) :].sum()), int(doubled.sum())
    # ways[k, s]: number of subsets of k ranks with the sum s, built up one rank at a time
    ways = np.zeros((len(b) + 1, total + 1))
    ways[0, 0] = 1.0
    for rank in doubled:
        ways[1:, rank:] = ways[1:, rank:] + ways[:-1, : total + 1 - rank]
    counts = ways[len(b)]
    return float(counts[observed:].sum() / counts.sum())


def smallest_probability(a: int, b: int) -> float:
    """Return the least that the rank test can give with so many on each side."""
    return 1 / math.comb(a + b, a)
