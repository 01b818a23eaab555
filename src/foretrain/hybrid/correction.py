"""Residuals of past forecasts, and the correction they suggest for a move made in a similar state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrain.config import CorrectionConfig
from foretrain.motion.predictors.base import Array, Followed, score
from foretrain.persist.stateful import Stateful

_AGE = 200.0
"""Steps after which a residual counts 1/e. Chosen: twenty windows of the default length."""
_KEPT = 0.95
"""Share of the past that errors keep per forecast. Chosen: about the last twenty forecasts count."""
_FEWEST = 5
"""Corrections that were tried on forecasts before one is made. Chosen: fewer are chance alone."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A correction of coefficients, per group."""

    coefficients: Array
    used: int
    """Residuals it is made of."""


class Correction(Stateful):
    """A bounded ring of residuals in basis coordinates. Used only while it lowers the error out of sample."""

    saved = ("stored", "plain_error", "corrected_error", "tried", "ring")

    def __init__(self, config: CorrectionConfig) -> None:
        self.config = config
        self.states: Array | None = None
        """[capacity, 64] normalised to length 1."""
        self.residuals: Array | None = None
        """[capacity, G, R] per window of horizon."""
        self.steps = np.zeros(config.residuals)
        self.stored = 0
        self.plain_error = 0.0
        self.corrected_error = 0.0
        self.tried = 0

    @property
    def active(self) -> bool:
        """Whether corrections made forecasts better lately, on windows they had not seen."""
        return self.tried >= _FEWEST and self.corrected_error < self.plain_error

    @property
    def error_ratio(self) -> float | None:
        """Error with corrections / without, out of sample; below 1 they help."""
        return self.corrected_error / self.plain_error if self.plain_error > 0 else None

    def observe(self, followed: Followed, forecast: Array) -> None:
        """Test the correction that would have been made on this forecast [G, R], then store its residual."""
        situation = followed.situation
        suggestion = self.suggest(
            situation.state, situation.step, followed.horizon / situation.window, forecast, situation.gram
        )
        if suggestion is not None:
            plain, corrected = score(followed, forecast), score(followed, forecast + suggestion.coefficients)
            if np.isfinite([plain.r2, corrected.r2]).all():
                self.tried += 1
                self.plain_error = _KEPT * self.plain_error + (1 - plain.r2)
                self.corrected_error = _KEPT * self.corrected_error + (1 - corrected.r2)
        residual = (followed.target(ridge=0.1) - forecast) * situation.window / followed.horizon
        length = float(np.linalg.norm(situation.state))
        if not np.isfinite(residual).all() or not length > 0:
            return
        capacity = self.config.residuals
        if self.states is None or self.residuals is None or self.residuals.shape[1:] != residual.shape:
            self.states = np.zeros((capacity, len(situation.state)))
            self.residuals = np.zeros((capacity, *residual.shape))
            self.stored = 0
        place = self.stored % capacity
        self.states[place] = situation.state / length
        self.residuals[place] = residual
        self.steps[place] = situation.step
        self.stored += 1

    def suggest(self, state: Array, step: int, windows: float, move: Array, gram: Array) -> Suggestion | None:
        """The similarity-weighted mean residual, at most `limit` of the move per group; None if nothing is similar."""
        length = float(np.linalg.norm(state))
        if self.states is None or self.residuals is None or not length > 0:
            return None
        count = min(self.stored, len(self.states))
        similarity = self.states[:count] @ (state / length)
        near = np.flatnonzero(similarity > self.config.similarity)
        if not len(near):
            return None
        near = near[np.argsort(-similarity[near], kind="stable")][: self.config.neighbors]
        weights = similarity[near] * np.exp(-np.maximum(0.0, step - self.steps[near]) / _AGE)
        weights = weights / max(weights.sum(), 1e-12)
        correction = np.tensordot(weights, self.residuals[near], axes=1) * windows
        own = _lengths(correction, gram)
        allowed = self.config.limit * _lengths(move, gram)
        factor = np.where(own > allowed, allowed / np.maximum(own, 1e-300), 1.0)
        return Suggestion(correction * factor[:, None], len(near))

    def forget(self) -> None:
        """Other weights are trained: no residual says anything about them."""
        self.states = self.residuals = None
        self.stored = self.tried = 0
        self.plain_error = self.corrected_error = 0.0

    @property
    def ring(self) -> tuple[Array, Array, Array] | None:
        """States, residuals and steps, as far as there are any."""
        if self.states is None or self.residuals is None:
            return None
        count = min(self.stored, len(self.states))
        return self.states[:count], self.residuals[:count], self.steps[:count]

    @ring.setter
    def ring(self, saved: tuple[Array, Array, Array] | None) -> None:
        self.states = self.residuals = None
        if saved is not None:
            states, residuals, steps = (part[: self.config.residuals] for part in saved)
            self.states = np.zeros((self.config.residuals, states.shape[1]))
            self.residuals = np.zeros((self.config.residuals, *residuals.shape[1:]))
            self.states[: len(states)], self.residuals[: len(states)] = states, residuals
            self.steps[: len(states)] = steps


def _lengths(coefficients: Array, gram: Array) -> Array:
    squares = np.einsum("gi,gij,gj->g", coefficients, gram, coefficients)
    return np.asarray(np.sqrt(np.clip(squares, 0.0, None)))
