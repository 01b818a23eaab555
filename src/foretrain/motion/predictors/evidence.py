"""What the predictors share: which observations may be used, how the basis ages, and how far to trust a guess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrain.motion.predictors.base import Array, Followed, Forecast, Situation
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, LAST_WINDOW, WINDOWS_OF_MEANS
from foretrain.persist.stateful import Stateful

LONGEST = 64
"""Windows after which a forecast does not grow any more: no evidence reaches that far.
Chosen: eight times the longest horizon that is scored."""
HORIZONS = np.asarray(HORIZONS_IN_WINDOWS)
MEANS = range(LAST_WINDOW + 1, len(DIRECTIONS))


def usable(situation: Situation) -> bool:
    """Whether every number in it is finite (a sum is finite only then, and costs one pass)."""
    return math.isfinite(situation.loss + float(situation.gram.sum()) + float(situation.state.sum()))


def usable_followed(followed: Followed) -> bool:
    """Whether it may be learned from. A displacement of length zero says nothing about coefficients."""
    if not math.isfinite(followed.loss + float(followed.dots.sum())) or not usable(followed.situation):
        return False
    total = float(followed.square.sum())
    return math.isfinite(total) and total > 0.0 and float(followed.square.min()) >= 0.0


def horizon_index(followed: Followed) -> int | None:
    """Its place in HORIZONS_IN_WINDOWS, None for a horizon that is not learned from."""
    windows, rest = divmod(followed.horizon, followed.situation.window)
    return HORIZONS_IN_WINDOWS.index(windows) if rest == 0 and windows in HORIZONS_IN_WINDOWS else None


def usable_pairs(followed: Sequence[Followed]) -> list[tuple[Followed, int]]:
    """Those that may be learned from, each with its place in HORIZONS_IN_WINDOWS."""
    places = ((one, horizon_index(one)) for one in followed)
    return [(one, index) for one, index in places if index is not None and usable_followed(one)]


def check_groups(known: int, situation: Situation) -> None:
    """A predictor belongs to one set of weights."""
    if known and known != len(situation.gram):
        raise ValueError(f"The predictor was built for {known} groups and now saw {len(situation.gram)}. Reset it.")


def in_windows(horizons: Sequence[int], window: int) -> Array:
    """Horizons as fractions of windows, within what a forecast may reach."""
    return np.minimum(np.asarray(horizons, dtype=float) / window, LONGEST)


def between(table: Array, windows: Array) -> Array:
    """Rows of `table` (row n: after n windows) at fractional windows, linear between rows."""
    low = np.minimum(windows.astype(int), len(table) - 2)
    share = (windows - low).reshape(-1, *([1] * (table.ndim - 1)))
    return np.asarray(table[low] + share * (table[low + 1] - table[low]))


def no_motion(situation: Situation, horizons: Sequence[int], loss: float, deviation: float) -> Forecast:
    """The forecast when nothing is known: the weights stay where they are."""
    zeros = np.zeros((len(horizons), *situation.gram.shape[:2]))
    return Forecast(
        tuple(horizons), zeros, np.full(len(horizons), loss, dtype=float), np.full(len(horizons), deviation)
    )


def quadratic(coefficients: Array, gram: Array) -> Array:
    """[..., G] squared length of the displacement of each group."""
    return np.asarray(((coefficients[..., None, :] @ gram)[..., 0, :] * coefficients).sum(-1))


def energy(coefficients: Array, gram: Array) -> float:
    """Squared length of the displacement of all groups together."""
    return float(np.vdot(coefficients[:, None] @ gram, coefficients))


def pack(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def unpack(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().cpu().numpy(), dtype=np.float64)


class Share(Stateful):
    """How much of a guess was borne out: least squares of what happened on what was guessed, out of sample.

    It starts at `prior`, which counts as `strength` observations, and stays within `limits`.
    """

    saved = ("sums",)

    def __init__(
        self, shape: tuple[int, ...], prior: float, strength: float, keep: float, limits: tuple[float, float] = (0, 1)
    ) -> None:
        self.prior, self.strength, self.keep, self.limits = prior, strength, keep, limits
        self.sums = np.zeros((3, *shape))  # guess x happened, guess x guess, observations

    def add(self, along: Any, own: Any, square: Any, index: Any = ..., weight: float = 1.0) -> None:
        """`along`: guess x what happened, `own`: guess x guess, `square`: what happened x what happened.

        Divided by both squares, so that neither a wild guess nor a quiet window outweighs the others.
        """
        chosen = (slice(None), index) if index is not ... else ...
        scale = weight / np.maximum(own + square, 1e-300)
        self.sums[chosen] *= self.keep
        self.sums[chosen] += (along * scale, own * scale, 0.0 * scale + weight)

    def value(self, prior: Array | float | None = None) -> Array:
        """Before there is any evidence (or any guess different from zero) this is the prior."""
        along, own, count = self.sums
        weight = own * (self.strength / (count + 1e-12)) + 1e-30
        blend = (along + weight * (self.prior if prior is None else prior)) / (own + weight)
        return np.asarray(np.minimum(np.maximum(blend, self.limits[0]), self.limits[1]))


def mature(windows: float) -> float:
    """How much a guess counts that was fitted to so many windows: the first ones are no fair test."""
    return (windows / (windows + 4.0)) ** 2


def chained(shares: Share) -> Array:
    """Shares per horizon; the long ones, seldom scored, start from the first."""
    along, own, count = shares.sums[:, 0].tolist()
    weight = shares.strength * own / (count + 1e-12) + 1e-30
    first = (along + weight * shares.prior) / (own + weight)
    return shares.value(min(max(first, shares.limits[0]), shares.limits[1]))


class Ageing(Stateful):
    """How the directions of the basis follow from the last ones and the new displacement, measured on the run.

    A mean becomes `keep x mean + (1 - keep) x displacement`; the last step becomes `step x displacement`. Measured
    rather than assumed, because means that were just begun keep less of their past than old ones.
    """

    saved = ("sums",)

    def __init__(self) -> None:
        start = np.array([1.0, *(1.0 - 1.0 / time for time in WINDOWS_OF_MEANS[1:])])
        self.sums = np.stack([start, np.ones_like(start)]) * 1e-3

    def add(self, situation: Situation, followed: Followed) -> None:
        """From the basis now and the one a window ago. Ignored unless the last window is what followed."""
        square = followed.square
        now = situation.gram[:, LAST_WINDOW]
        total = float(square.sum())
        if abs(float(now[:, LAST_WINDOW].sum()) - total) > 0.02 * total:
            return
        before = followed.dots[:, MEANS.start :] - square[:, None]
        after = now[:, MEANS.start :] - square[:, None]
        self.sums *= 0.8
        self.sums[0, 1:] += (before * after).sum(0) / total**2
        self.sums[1, 1:] += (before * before).sum(0) / total**2
        self.sums[0, 0] += float(now[:, 0].sum()) / total
        self.sums[1, 0] += 1.0

    def step(self) -> float:
        return float(np.clip(self.sums[0, 0] / max(self.sums[1, 0], 1e-300), 0.0, 2.0))

    def keep(self) -> Array:
        """[means]"""
        return np.asarray((self.sums[0, 1:] / np.maximum(self.sums[1, 1:], 1e-300)).clip(0.0, 0.999))

    def roll(self, first: Array, windows: int) -> Array:
        """[windows + 1, ..., R] coefficients of the displacement after 0, 1, 2 ... windows.

        `first` are those after one window. By iterated expectation those of the second window are `first` applied to
        the basis as it is expected to stand then, and so on.
        """
        keep = self.keep()
        turn = np.array([self.step(), 1.0, *(1.0 - keep)])
        ages = turn[:, None] * first[..., None, :]
        ages[..., MEANS, MEANS] += keep
        each = np.empty((windows, *first.shape))
        window = each[0] = first
        for number in range(1, windows):
            window = each[number] = (window[..., None, :] @ ages)[..., 0, :]
        # An unstable fit would grow without bound; a run that accelerates does so for few windows only.
        if np.abs(window).max() > np.abs(first).max():
            length = np.abs(each).sum(-1, keepdims=True)
            each *= np.minimum(1.0, (1.5 * length[0] + 0.15) / np.maximum(length, 1e-30))
        table = np.zeros((windows + 1, *first.shape))
        np.cumsum(each, 0, out=table[1:])
        return table
