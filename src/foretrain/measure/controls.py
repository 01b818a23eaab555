"""The controls of a comparison: the same phases without displacement, and the naive predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation
from foretrain.motion.records import LAST_WINDOW
from foretrain.motion.trajectory import Trajectory
from foretrain.trainer import HybridTrainer


class RepeatLast(Predictor):
    """The next windows will be as the last one was. Every learned predictor must beat it."""

    name = "repeat"

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        groups, directions = situation.gram.shape[:2]
        coefficients = np.zeros((len(horizons), groups, directions))
        coefficients[:, :, LAST_WINDOW] = np.asarray(horizons)[:, None] / situation.window
        loss = np.full(len(horizons), situation.loss)
        return Forecast(tuple(horizons), coefficients, loss, np.full(len(horizons), 0.1))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        """There is nothing to learn."""

    def reset(self) -> None:
        """There is nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


class _Still:
    """A trajectory that is watched like any other and never moves the weights."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trajectory, name)

    def displacement(self, coefficients: Array) -> list[Tensor]:
        return self._trajectory.displacement(np.zeros_like(coefficients))


def hold_still(trainer: HybridTrainer) -> None:
    """All phases, probes and decisions as before, all displacements zero: what is left is the overhead."""
    if trainer.policy is not None:
        still: Any = _Still(trainer.policy.observer.trajectory)
        for kind in trainer.policy.kinds:
            kind.tools = replace(kind.tools, trajectory=still)
