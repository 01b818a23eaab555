"""Finds where a benchmark stepped over many result files.

The series is the logarithm of each file's median over processes, by date. It is split where the two parts differ most
by Student's test, then each part again (binary segmentation). A step counts when it is larger than 2 %, has at least
two files on either side (one slow day is no step) and its probability, times the number of places it could have been,
is below 5 %. Single files far from both neighbours are set aside first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from foretrain.errors import InputError
from foretrain_bench import formats
from foretrain_bench.formats import Results
from foretrain_bench.verdict import ALPHA, DELTA

_FEWEST_FILES = 2
"""Files that a step needs on either side."""
_SPIKE = 5.0
"""Deviations from both neighbours by which a file is set aside."""
_QUARTILE_OF_NORMAL = 0.3186
"""Lower quartile of the absolute value of a standard normal number."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class LevelStep:
    before: str
    """Last file of the old level."""
    after: str
    """First file of the new level."""
    ratio: float
    probability: float


@dataclass(frozen=True, slots=True)
class BenchmarkSeries:
    """One benchmark over the files that hold it."""

    files: tuple[str, ...]
    dates: tuple[datetime, ...]
    medians: tuple[float, ...]
    steps: tuple[LevelStep, ...]
    seconds: bool


def read_all(paths: Sequence[Path]) -> list[Results]:
    """Read every file, those of folders one by one, sorted by date."""
    files: list[Path] = []
    for path in paths:
        files.extend(sorted(p for p in path.glob("*") if p.is_file() and p.name[0] != ".") if path.is_dir() else [path])
    results = [formats.read(file) for file in files]
    if len(results) < 2:
        raise InputError("a history needs at least two result files; give more, or a folder that holds them")
    return sorted(results, key=lambda one: (formats.date_of(one), one.source))


def series(results: Sequence[Results]) -> dict[str, BenchmarkSeries]:
    names = dict.fromkeys(name for one in results for name in one.benchmarks)
    return {name: _series(name, [one for one in results if name in one.benchmarks]) for name in names}


def _series(name: str, results: Sequence[Results]) -> BenchmarkSeries:
    if len({one.seconds for one in results}) > 1:
        raise InputError(f"{name!r} is in seconds in some files and without a unit in others; keep one kind together")
    medians = [float(np.median([np.median(samples) for samples in one.benchmarks[name]])) for one in results]
    files = [Path(one.source).name for one in results]
    steps = [
        LevelStep(files[place - 1], files[place], math.exp(size), probability)
        for place, size, probability in find_steps(np.log(medians).tolist())
    ]
    dates = tuple(formats.date_of(one) for one in results)
    return BenchmarkSeries(tuple(files), dates, tuple(medians), tuple(steps), results[0].seconds)


def find_steps(values: Sequence[float]) -> list[tuple[int, float, float]]:
    """Return (index of the first value of the new level, size, probability) in the order of time."""
    if len(values) < 2 * _FEWEST_FILES:
        return []
    calm = without_spikes(values)
    places = _split(calm, 0, len(calm), {})
    bounds = [0, *sorted(places), len(values)]
    levels = [float(np.median(calm[low:high])) for low, high in pairwise(bounds)]
    sizes = {place: after - before for place, before, after in zip(bounds[1:], levels, levels[1:], strict=False)}
    return [(place, size, places[place]) for place, size in sizes.items() if abs(size) > math.log1p(DELTA)]


def without_spikes(values: Sequence[float]) -> list[float]:
    """Single values far from both neighbours become the median of the three. A step stays as it is."""
    if len(values) < 3:
        return list(values)
    # The lower quartile of neighbours' differences: half of them may be spikes or steps in a short series.
    noise = float(np.quantile(np.abs(np.diff(values)), 0.25)) / (_QUARTILE_OF_NORMAL * math.sqrt(2))
    calm = list(values)
    for place in range(1, len(values) - 1):
        middle = sorted(values[place - 1 : place + 2])[1]
        if abs(values[place] - middle) > max(_SPIKE * noise, math.log1p(DELTA)):
            calm[place] = middle
    return calm


def _split(values: Sequence[float], low: int, high: int, found: dict[int, float]) -> dict[int, float]:
    places = range(low + _FEWEST_FILES, high - _FEWEST_FILES + 1)
    if not places:
        return found
    scores = {place: _student(values[low:place], values[place:high]) for place in places}
    best = max(scores, key=lambda place: scores[place])
    probability = min(1.0, _two_sided(scores[best], high - low - 2) * len(places))
    if probability < ALPHA:
        found[best] = probability
        _split(values, low, best, found)
        _split(values, best, high, found)
    return found


def _student(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Student's statistic of two levels with one spread."""
    a, b = np.asarray(left), np.asarray(right)
    apart = abs(float(a.mean() - b.mean()))
    square = float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / (len(a) + len(b) - 2)
    error = math.sqrt(square * (1 / len(a) + 1 / len(b)))
    return apart / max(error, 1e-9)  # numbers that repeat exactly have no spread


def _two_sided(score: float, freedom: int) -> float:
    from scipy import special

    return 2 * float(special.stdtr(freedom, -score))


def sparkline(values: Sequence[float]) -> str:
    """Draw bars by the logarithm; a range below 10 % is not blown up."""
    logs = np.log(values)
    low, high = float(logs.min()), float(logs.max())
    missing = max(0.0, math.log(1.1) - (high - low))
    low, high = low - missing / 2, high + missing / 2
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / (high - low) * len(_BARS)))] for value in logs)
