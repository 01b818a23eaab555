"""Did it get slower? Regressed, equivalent or inconclusive; and improved, the mirror image of regressed.

The effect is log(B / A) of the medians over processes. With delta = max(2 %, twice the measured A/A noise), where the
noise is that of the effect itself with as many processes as there were, not of a single process:

regressed     the whole interval is beyond +delta and the rank test, corrected for all benchmarks, agrees
improved      the whole interval is beyond -delta and the test agrees
equivalent    the interval lies inside -2 % .. +2 %, the part of delta that does not grow with the noise: a machine too
              noisy to see a difference of 30 % has not shown that there is none
inconclusive  anything else, also fewer than five processes on a side; with the number that would settle it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foretrain_bench.stats import (
    bootstrap_ratio,
    mann_whitney,
    noise_of_ratio,
    small_sample_widening,
    smallest_probability,
)

FEWEST = 5
"""Processes per side below which nothing is settled."""
DELTA = 0.02
"""Changes smaller than this are of no interest."""
ALPHA = 0.05
MOST_RUNS = 10_000
"""The largest number that is named: an effect that lies on the border itself is settled by no number."""
_NORMAL = 1.96
_PLAUSIBLE = (-1.645, -1.036, -0.674, -0.385, -0.126, 0.126, 0.385, 0.674, 1.036, 1.645)
"""The middles of ten equal parts of the normal curve."""

Side = Sequence[Sequence[float]]
"""Samples of each process, in seconds; a process of which only the median is known has one."""
Word = Literal["regressed", "improved", "equivalent", "inconclusive"]


@dataclass(frozen=True, slots=True)
class BenchmarkVerdict:
    """What two sides of one benchmark say. Effect, interval and delta are logarithms of ratios."""

    verdict: Word
    effect: float
    low: float
    high: float
    delta: float
    noise: float
    """Standard deviation that the effect would have if both sides were the same code."""
    probability: float
    """What the rank test says in the direction of the effect, corrected for the number of benchmarks."""
    processes: tuple[int, int]
    medians: tuple[float, float]
    """Medians over processes, of A and of B."""
    runs_needed: int | None
    """Processes per side that would settle it; None where it is settled."""

    @property
    def ratio(self) -> float:
        return math.exp(self.effect)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval of the ratio."""
        return math.exp(self.low), math.exp(self.high)


def judge(sides: Mapping[str, tuple[Side, Side]], delta: float = DELTA) -> dict[str, BenchmarkVerdict]:
    """One verdict per benchmark, A against B. The tests are corrected for all of them together."""
    if not sides:
        return {}
    from scipy.stats import false_discovery_control

    medians = {name: (_medians(a), _medians(b)) for name, (a, b) in sides.items()}
    # Two one-sided questions, each asked of every benchmark: is B slower, is it faster?
    slower = false_discovery_control([mann_whitney(a, b) for a, b in medians.values()]).tolist()
    faster = false_discovery_control([mann_whitney(b, a) for a, b in medians.values()]).tolist()
    return {
        name: _judge(sides[name], medians[name], probabilities, delta, len(sides))
        for name, *probabilities in zip(sides, slower, faster, strict=True)
    }


def _judge(
    sides: tuple[Side, Side],
    medians: tuple[list[float], list[float]],
    probabilities: Sequence[float],
    delta: float,
    benchmarks: int,
) -> BenchmarkVerdict:
    (a, b), counts = medians, (len(medians[0]), len(medians[1]))
    ratio = bootstrap_ratio(*sides)
    noise = noise_of_ratio(a, b)
    floor = math.log1p(delta)
    border = max(floor, 2 * noise) if math.isfinite(noise) else floor
    probability = probabilities[0] if ratio.effect >= 0 else probabilities[1]
    word: Word = "inconclusive"
    if min(counts) >= FEWEST:
        if ratio.low > border and probabilities[0] <= ALPHA:
            word = "regressed"
        elif ratio.high < -border and probabilities[1] <= ALPHA:
            word = "improved"
        elif -floor < ratio.low and ratio.high < floor:
            word = "equivalent"
    needed = None
    if word == "inconclusive":
        needed = runs_needed(ratio.effect, noise, counts, floor, benchmarks)
    return BenchmarkVerdict(
        word,
        ratio.effect,
        ratio.low,
        ratio.high,
        border,
        noise,
        probability,
        counts,
        (float(np.median(a)), float(np.median(b))),
        needed,
    )


def _medians(side: Side) -> list[float]:
    return [float(np.median(samples)) for samples in side]


def runs_needed(effect: float, noise: float, counts: tuple[int, int], floor: float, benchmarks: int = 1) -> int:
    """Return the processes per side that would settle it, if the noise stays what it is.

    The effect is known only up to the noise, and one that happens to lie at the border would never be settled; so this
    is the median over the effects that are plausible. Noise and interval shrink with the root of the number of
    processes. The slow outliers that make a bootstrap interval wide are no measure for that: the robust noise is used.
    """
    fewest = max(FEWEST, min(counts) + 1)
    if not math.isfinite(noise):
        return fewest
    noise_of_one = noise / math.sqrt(1 / counts[0] + 1 / counts[1])
    needed = []
    for quantile in _PLAUSIBLE:
        n, plausible = fewest, abs(effect + quantile * noise)
        while n < MOST_RUNS and not _settles(plausible, noise_of_one * math.sqrt(2 / n), n, floor, benchmarks):
            n += max(1, n // 20)
        needed.append(min(n, MOST_RUNS))
    return sorted(needed)[len(needed) // 2]


def _settles(effect: float, noise: float, n: int, floor: float, benchmarks: int) -> bool:
    half = _NORMAL * small_sample_widening(n, n) * noise
    border = max(floor, 2 * noise)
    if effect + half < floor:
        return True
    return effect - half > border and smallest_probability(n, n) * benchmarks <= ALPHA


def fewest_processes(benchmarks: int) -> int:
    """Return the processes per side with which a regression of one of so many benchmarks can be shown at all."""
    n = FEWEST
    while smallest_probability(n, n) * benchmarks > ALPHA:
        n += 1
    return n
