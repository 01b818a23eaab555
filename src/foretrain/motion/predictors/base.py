"""The one interface of all predictors: from a situation to coefficients on the basis, per group and horizon.

Everything here lives on the host and is small: G groups of weights, R basis directions. A predicted displacement is
`basis x coefficients`; what it would have been worth is known exactly from dot products, without the vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a predictor may know when it forecasts."""

    state: Array
    """[64] the normalised training state."""
    gram: Array
    """[G, R, R] dot products of the basis directions with each other, per group."""
    window: int
    """Steps per window. A direction is a displacement per window: coefficient 1 on it moves the weights by as much."""
    loss: float
    """Smoothed training loss."""
    step: int
    """`global_step`."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What really happened within `horizon` steps after a situation, seen from the basis as it stood then."""

    situation: Situation
    horizon: int
    """Steps; a multiple of the window."""
    dots: Array
    """[G, R] dot products of the displacement that followed with the basis directions."""
    square: Array
    """[G] squared length of the displacement that followed."""
    loss: float
    """Smoothed training loss at the end of the horizon."""

    def target(self, ridge: float = 1e-6) -> Array:
        """[G, R] the coefficients closest to what followed, in least squares (nearly parallel directions share)."""
        return solve(self.situation.gram, self.dots, ridge)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Coefficients and loss for several horizons."""

    horizons: tuple[int, ...]
    """Steps, ascending."""
    coefficients: Array
    """[horizons, G, R]"""
    loss: Array
    """[horizons] expected smoothed loss."""
    loss_deviation: Array
    """[horizons] one standard deviation of it."""
    disagreement: float = 0.0
    """How much the members of an ensemble differ, relative to the move itself; 0 with a single member."""

    def at(self, horizon: int) -> Array:
        """[G, R] coefficients at any horizon, linear between the known ones and from zero."""
        known = np.asarray((0, *self.horizons), dtype=float)
        values = np.concatenate([np.zeros_like(self.coefficients[:1]), self.coefficients])
        right = int(np.clip(np.searchsorted(known, horizon), 1, len(known) - 1))
        share = (horizon - known[right - 1]) / (known[right] - known[right - 1])
        return np.asarray(values[right - 1] + share * (values[right] - values[right - 1]))


@dataclass(frozen=True, slots=True)
class Score:
    """How good a predicted displacement was: all exact, from dot products."""

    cosine: float
    norm_ratio: float
    """Predicted length / real length."""
    r2: float
    """1 - squared error / squared length; 0 is as good as predicting no motion."""


class Predictor(ABC):
    """Learns from windows and forecasts. All state that decides anything is in `state_dict`."""

    name: str

    @abstractmethod
    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        """Must not change what later forecasts say (apart from drawing from the predictor's own generator)."""

    @abstractmethod
    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        """Called at the end of every window: the situation now, and what followed on earlier ones."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything learned."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists, dicts and tensors only."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def solve(gram: Array, dots: Array, ridge: float) -> Array:
    """[G, R] least squares per group, with a ridge relative to the mean squared length of the directions."""
    size = gram.shape[-1]
    scale = np.trace(gram, axis1=-2, axis2=-1)[:, None, None] / size
    regular = gram + (ridge * scale + 1e-300) * np.eye(size)
    return np.asarray(np.linalg.solve(regular, dots[..., None])[..., 0])


def score(followed: Followed, coefficients: Array) -> Score:
    """Score over all groups together of a forecast of `followed`."""
    gram, dots = followed.situation.gram, followed.dots
    real = float(followed.square.sum())
    along = float((coefficients * dots).sum())
    own = float(np.einsum("gi,gij,gj->", coefficients, gram, coefficients))
    if real <= 0.0:
        return Score(0.0, 0.0, 0.0)
    length = np.sqrt(max(own, 0.0))
    cosine = along / (length * np.sqrt(real)) if length > 0 else 0.0
    return Score(float(cosine), float(length / np.sqrt(real)), float((2 * along - own) / real))
