"""Synthetic runs as real vectors: windows of displacements, the basis kept by hand, dot products taken from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from foretrain.motion.predictors.base import Array, Followed, Predictor, Score, Situation, score
from foretrain.motion.records import HORIZONS_IN_WINDOWS, LAST_WINDOW, WINDOWS_OF_MEANS

WINDOW = 10
Motion = Callable[[int, np.random.Generator], list[Array]]
"""From the number of a window to the displacement of each group."""


def geometric(sizes: list[int], rates: list[float], seed: int = 0) -> Motion:
    start = [np.random.default_rng(seed + 1).normal(size=size) for size in sizes]
    return lambda window, _: [vector * rate**window for vector, rate in zip(start, rates, strict=True)]


def modes(sizes: list[int], rates: list[float], seed: int = 0) -> Motion:
    """Every group a sum of several geometric motions."""
    generator = np.random.default_rng(seed + 1)
    parts = [[generator.normal(size=size) for _ in rates] for size in sizes]
    return lambda window, _: [
        np.sum([part * rate**window for part, rate in zip(own, rates, strict=True)], axis=0) for own in parts
    ]


def noisy(sizes: list[int], signal: float, seed: int = 0) -> Motion:
    """A steady drift of relative size `signal` under unit noise that is new in every window."""
    drift = [np.random.default_rng(seed + 1).normal(size=size) for size in sizes]
    return lambda _, generator: [signal * vector + generator.normal(size=len(vector)) for vector in drift]


@dataclass
class Run:
    """Yields what a trainer would hand to a predictor at the end of each window."""

    motion: Motion
    windows: int
    seed: int = 0
    history: list[list[Array]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Situation, list[Followed], list[Followed]]]:
        """The situation, what is told to the predictor, and everything that ended now (for scoring)."""
        generator = np.random.default_rng(self.seed)
        bases: list[tuple[Situation, list[Array]]] = []
        means: list[list[Array]] = []
        loss = 3.0
        for number in range(self.windows):
            displacement = self.motion(number, generator)
            self.history.append(displacement)
            loss = 1.0 + 2.0 * 0.95**number
            told, ended = [], []
            for horizon in HORIZONS_IN_WINDOWS:
                begin = number - horizon
                if begin < 0:
                    continue
                situation, basis = bases[begin]
                moved = [
                    np.sum([w[g] for w in self.history[begin + 1 : number + 1]], axis=0)
                    for g in range(len(displacement))
                ]
                one = Followed(
                    situation,
                    horizon * WINDOW,
                    np.stack([b @ m for b, m in zip(basis, moved, strict=True)]),
                    np.array([m @ m for m in moved]),
                    loss,
                )
                ended.append(one)
                if horizon == 1 or begin % 8 == 0:
                    told.append(one)
            means = means or [[np.zeros_like(d) for _ in WINDOWS_OF_MEANS[1:]] for d in displacement]
            for mean, d in zip(means, displacement, strict=True):
                for index, windows in enumerate(WINDOWS_OF_MEANS[1:]):
                    mean[index] = mean[index] + (d - mean[index]) * max(1 / windows, 1 / (number + 1))
            basis = []
            for mean, d in zip(means, displacement, strict=True):
                last_step = 0.98 * d + 0.1 * generator.normal(size=d.size) * np.linalg.norm(d) / np.sqrt(d.size) * (
                    0 if self.exact else 1
                )
                basis.append(np.stack([last_step, d, *mean]))
            state = np.tanh(np.arange(64) / 64 - 0.02 * number)
            situation = Situation(state, np.stack([b @ b.T for b in basis]), WINDOW, loss, (number + 1) * WINDOW)
            bases.append((situation, basis))
            yield situation, told, ended

    exact: bool = True


def baseline(followed: Followed, repeat: bool) -> Score:
    coefficients = np.zeros_like(followed.dots)
    if repeat:
        coefficients[:, LAST_WINDOW] = followed.horizon / followed.situation.window
    return score(followed, coefficients)


def out_of_sample(predictor: Predictor, run: Run, after: int) -> dict[int, dict[str, float]]:
    """Per horizon in windows: R2 of the forecasts made from window `after` on, and of repeating the last one."""
    forecasts: dict[int, Array] = {}
    sums: dict[int, list[list[float]]] = {}
    horizons = [h * WINDOW for h in HORIZONS_IN_WINDOWS]
    for situation, told, ended in run:
        for one in ended:
            made = one.situation.step // WINDOW
            if made >= after:
                index = horizons.index(one.horizon)
                result = score(one, forecasts[one.situation.step][index])
                sums.setdefault(one.horizon // WINDOW, []).append(
                    [result.r2, baseline(one, repeat=True).r2, result.norm_ratio]
                )
        predictor.observe(situation, told)
        forecasts[situation.step] = predictor.forecast(situation, horizons).coefficients
    return {
        h: dict(zip(("r2", "repeat", "length"), np.mean(rows, axis=0).tolist(), strict=True))
        for h, rows in sums.items()
    }
