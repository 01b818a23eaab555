"""How far to predict: a bandit over a table of horizons, rewarded by the measured gain per cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.persist.stateful import Stateful

Array = NDArray[np.float64]

HORIZONS = (10, 20, 40, 60, 80)
"""Steps. The methodology names them."""
MEMORY = 0.96
"""What a cycle keeps of the evidence before it. Chosen: about 25 cycles count, and a run has tens of them."""
EXPLORATION = 0.6
"""Standard errors of optimism. Chosen: in synthetic worlds the best horizon is found within 30 cycles (its tests)."""
DOUBT = 0.2
"""Observations' worth of "no gain" with which every horizon starts. Chosen: a single reward counts nearly in full."""
LARGEST_REWARD = 20.0
"""Chosen: a gain per cost beyond this is no more telling, and must not drown everything else."""


class HorizonBandit(Stateful):
    """`choose` before each move, `reward` when its worth is known, `shorten` when one did harm.

    Each horizon has its own mean reward. A linear model over the situation did no better (docs/results.md).
    """

    saved = ("allowed", "rewards", "reward_scale", "table")

    def __init__(self, max_predict_steps: int, window: int) -> None:
        self.longest = max_predict_steps
        self.window = window
        self.arms = (*(arm for arm in HORIZONS if arm < max_predict_steps), max_predict_steps)
        self.allowed = float(max_predict_steps)
        """No longer moves than this for now."""
        self.rewards = 0
        self.reward_scale = 0.0
        """Average size of a reward: optimism is measured in it."""
        self.table: Array = np.zeros((2, len(self.arms)))
        """Rewards and observations of each horizon, both fading."""

    def choose(self, confidence: float, limit: int) -> int:
        """Steps to predict, at most `limit`; at least one window where that and the limit allow it."""
        most = min(limit, max(int(self.allowed), self.window), self.longest)
        least = min(self.window, most)
        if most <= 0:
            return 0
        if self.rewards == 0:
            sure = min(max(confidence, 0.0), 1.0) if math.isfinite(confidence) else 0.0
            return max(least, min(most, math.floor(self.longest * sure**2)))
        total, count = self.table
        hoped = (total + EXPLORATION * self.reward_scale * np.sqrt(count + DOUBT)) / (count + DOUBT)
        possible = [index for index, arm in enumerate(self.arms) if least <= arm <= most]
        return self.arms[max(possible, key=lambda index: hoped[index])] if possible else least  # the shortest of equals

    def reward(self, horizon: int, gain_steps: float, cost_steps: float) -> None:
        """A move was worth `gain_steps` and cost `cost_steps`, both in full steps (a forward pass is a third)."""
        if not (math.isfinite(gain_steps) and cost_steps > 0):
            return
        value = min(max(gain_steps / cost_steps, -LARGEST_REWARD), LARGEST_REWARD)
        nearest = min(range(len(self.arms)), key=lambda index: abs(math.log(self.arms[index] / max(horizon, 1))))
        self.table *= MEMORY
        self.table[:, nearest] += (value, 1.0)
        self.rewards += 1
        self.reward_scale += (abs(value) - self.reward_scale) / min(self.rewards, 20)
        # Longer moves are tried again even without success: they can be the more predictable ones.
        self.allowed = min(float(self.longest), self.allowed * (2.0 if value > 0 else 1.25))

    def shorten(self) -> None:
        """Moves of at most half the length for a while."""
        self.allowed = max(float(min(self.window, self.longest)), self.allowed / 2)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was learned about other horizons says nothing about these: then it starts anew."""
        if getattr(state.get("table"), "shape", self.table.shape) == self.table.shape:
            super().load_state_dict(state)
