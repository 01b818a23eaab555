"""A small network on the training state and the shape of each group's basis, as a correction of the linear forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foretrain.motion.predictors.base import Situation
from foretrain.motion.predictors.corrected import CorrectedPredictor, Sample, single
from foretrain.motion.predictors.evidence import pack
from foretrain.motion.predictors.networks import HeadPass, Single, Weights, head, head_shapes
from foretrain.motion.predictors.worldmodel import joined, quadratic_error

STATE = 64
REPLAY = 64
"""Samples kept."""
BATCH = 3
"""Samples a member is trained on per window."""
SEEN = 0.7
"""Share of the samples that a member ever sees: what makes members differ."""


class MlpPredictor(CorrectedPredictor):
    """An ensemble, trained a little in every window; one member after the other."""

    name = "mlp"

    def __init__(
        self,
        l2: float = 1.0,
        forgetting: float = 0.97,
        hidden_dims: Sequence[int] = (64, 64),
        ensemble_size: int = 3,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.hidden_dims = tuple(hidden_dims)
        super().__init__(l2, forgetting, ensemble_size, learning_rate, seed)

    def _begin(self) -> None:
        self.weights = Weights(head_shapes(STATE, self.hidden_dims), self.ensemble_size, self.generator)
        self._states: dict[int, Single] = {}  # by step, of situations whose motion may still be reported
        self._replay: list[tuple[Single, Sample, list[bool]]] = []
        self._turn = 0

    def _advance(self, situation: Situation) -> None:
        self._states[situation.step] = situation.state.astype(np.float32)
        for step in sorted(self._states)[:-9]:
            del self._states[step]

    def _correct(self, situation: Situation, groups: Single) -> Single:
        return head(self.weights.all, situation.state.astype(np.float32)[None, None], groups)

    def _train(self, samples: Sequence[tuple[int, Sample]]) -> None:
        for step, sample in samples:
            seen = (torch.rand(self.ensemble_size, generator=self.generator) < SEEN).tolist()
            self._replay.append((self._states[step], sample, seen))
        del self._replay[:-REPLAY]
        if not self._replay:
            return
        self._turn = (self._turn + 1) % self.ensemble_size
        chosen = torch.randint(len(self._replay), (BATCH,), generator=self.generator).tolist()
        chosen = [len(self._replay) - 1, *chosen]
        mine = [self._replay[number] for number in chosen if self._replay[number][2][self._turn]]
        if not mine:
            return
        states = np.stack([state for state, _, _ in mine])
        groups, gram, dots = joined([(sample.groups, sample.gram, sample.dots) for _, sample, _ in mine])
        run = HeadPass(self.weights.single[self._turn], states, groups, [sample.index for _, sample, _ in mine])
        _, error = quadratic_error(gram, dots, run.result)
        run.backward(error, self.weights.gradients)
        self.weights.step(self._turn, self.learning_rate)

    def _own_state(self) -> dict[str, Any]:
        return {
            "weights": self.weights.state_dict(),
            "turn": self._turn,
            "states": [{"step": step, "state": pack(state)} for step, state in self._states.items()],
            "replay": [
                {"state": pack(state), "seen": [int(s) for s in seen], **sample.state()}
                for state, sample, seen in self._replay
            ],
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.weights.load_state_dict(state["weights"])
        self._turn = int(state["turn"])
        self._states = {int(one["step"]): single(one["state"]) for one in state["states"]}
        self._replay = [
            (single(one["state"]), Sample.load(one), [bool(seen) for seen in one["seen"]]) for one in state["replay"]
        ]
