"""How far to predict: a contextual bandit over horizons, rewarded by the measured gain per cost.

Discounted LinUCB with one model for all horizons. A run has tens of cycles, not thousands: too few to learn each
horizon by itself in every situation, but enough for a parabola over log(horizon) whose shape depends on the
situation, plus what each horizon has of its own. A plain table of horizons does worse (docs/results.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.persist.stateful import Stateful

Array = NDArray[np.float64]

HORIZONS = (10, 20, 40, 60, 80)
"""Steps. The methodology names them."""
MEMORY = 0.96
"""What a cycle keeps of the evidence before it: about 25 cycles count. Chosen: a run has tens of them."""
EXPLORATION = 0.6
"""Standard errors of optimism. Chosen: in the synthetic worlds of its tests the best horizon is found in 30 cycles."""
RIDGE = 0.2
"""Observations' worth of "no gain" in every direction of the model. Chosen: a single reward counts nearly in full."""
LARGEST_REWARD = 20.0
"""A gain per cost beyond this is no more telling, and must not drown everything else. Chosen."""


@dataclass(frozen=True, slots=True)
class HorizonContext:
    """What the best horizon may depend on; all of it free of the loss's scale."""

    confidence: float
    r2: float
    """Last held-out R2 of the displacement."""
    progress: float
    """`global_step` / `max_steps`."""
    log_noise: float
    """Natural logarithm of noise / signal of the window displacements."""

    def vector(self) -> Array:
        """[5] with numbers of about one, whatever comes in."""
        values = (1.0, 2 * self.confidence - 1, self.r2, 2 * self.progress - 1, self.log_noise / 3)
        known = [0.0 if math.isnan(value) else min(max(value, -1.5), 1.5) for value in values]
        return np.asarray(known)


class HorizonBandit(Stateful):
    """`choose` before each move, `reward` when its worth is known, `shorten` when one did harm."""

    saved = ("allowed", "rewards", "reward_scale", "moments", "targets")

    def __init__(self, max_predict_steps: int, window: int) -> None:
        self.longest = max_predict_steps
        self.window = window
        self.arms = (*(arm for arm in HORIZONS if arm < max_predict_steps), max_predict_steps)
        self.allowed = float(max_predict_steps)
        """No longer moves than this for now."""
        self.rewards = 0
        self.reward_scale = 0.0
        """Average size of a reward: optimism is measured in it."""
        size = 5 * 3 + len(self.arms)
        self.moments: Array = np.zeros((size, size))
        self.targets: Array = np.zeros(size)

    def choose(self, context: HorizonContext, confidence: float, limit: int) -> int:
        """Steps to predict, at most `limit`; at least one window where that and the limit allow it."""
        most = min(limit, max(int(self.allowed), self.window), self.longest)
        least = min(self.window, most)
        if most <= 0:
            return 0
        if self.rewards == 0:
            sure = min(max(confidence, 0.0), 1.0) if math.isfinite(confidence) else 0.0
            return max(least, min(most, math.floor(self.longest * sure**2)))
        arms = [arm for arm in self.arms if least <= arm <= most] or [least]
        features = np.stack([self._features(context, arm) for arm in arms])
        inverse = np.linalg.inv(self.moments + RIDGE * np.eye(len(self.targets)))
        expected = features @ (inverse @ self.targets)
        width = np.sqrt(np.einsum("ai,ij,aj->a", features, inverse, features).clip(min=0.0))
        return arms[int(np.argmax(expected + EXPLORATION * self.reward_scale * width))]  # the shortest of equals

    def reward(self, horizon: int, context: HorizonContext, gain_steps: float, cost_steps: float) -> None:
        """A move was worth `gain_steps` and cost `cost_steps`, both in full steps (a forward pass is a third)."""
        if not (math.isfinite(gain_steps) and cost_steps > 0):
            return
        value = min(max(gain_steps / cost_steps, -LARGEST_REWARD), LARGEST_REWARD)
        features = self._features(context, horizon)
        self.moments = MEMORY * self.moments + np.outer(features, features)
        self.targets = MEMORY * self.targets + value * features
        self.rewards += 1
        self.reward_scale += (abs(value) - self.reward_scale) / min(self.rewards, 20)
        # Longer moves are tried again even without success: they can be the more predictable ones.
        self.allowed = min(float(self.longest), self.allowed * (2.0 if value > 0 else 1.25))

    def shorten(self) -> None:
        """Moves of at most half the length for a while."""
        self.allowed = max(float(min(self.window, self.longest)), self.allowed / 2)

    def _features(self, context: HorizonContext, horizon: int) -> Array:
        length = math.log(max(horizon, 1) / self.longest) / math.log(4)  # a quarter of the longest: -1
        length = max(length, -2.0) + 0.5
        shape = np.outer(context.vector(), (1.0, length, length * length)).ravel()
        nearest = min(range(len(self.arms)), key=lambda arm: abs(math.log(self.arms[arm] / max(horizon, 1))))
        own = np.zeros(len(self.arms))
        own[nearest] = 1.0
        return np.concatenate([shape, own])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was learned about other horizons says nothing about these: then it starts anew."""
        if getattr(state.get("targets"), "shape", self.targets.shape) == self.targets.shape:
            super().load_state_dict(state)
