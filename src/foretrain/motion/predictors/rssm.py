"""A recurrent state-space model of the run: it imagines the next window, and corrects the linear forecast by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from foretrain.motion.predictors.base import Array, Situation
from foretrain.motion.predictors.corrected import PLACES, CorrectedPredictor, Gate, Sample, single
from foretrain.motion.predictors.evidence import in_windows, pack, unpack
from foretrain.motion.predictors.networks import Single, Weights, head
from foretrain.motion.predictors.worldmodel import Result, Segment, Shape, Step, Target, advance, joined
from foretrain.motion.records import HORIZONS_IN_WINDOWS

MEMORY = 32
"""Windows kept to train on."""
MOST_SAMPLES = 4
"""Motions per training step."""
TRAIN_EVERY = 5
"""Windows between two training steps (of one member each): what keeps the mean cost of a window low."""
NEWEST = 0.5
"""Share of training steps that end at the newest window; the others at a random one."""


@dataclass(slots=True)
class Remembered:
    """A window to train on."""

    step: int
    state: Single
    """[64]"""
    recurrent: Single
    """[members, deterministic] before this window was seen."""
    loss: Array
    """[2, horizons] expected loss and deviation before any correction."""
    samples: list[tuple[Sample, float]] = field(default_factory=list)
    """What followed on it, each with the loss then, in deviations from the expected one."""


class RssmPredictor(CorrectedPredictor):
    """GRU, categorical latents with prior and posterior, heads for coefficients, state and loss.

    In each window every member takes in the state through its posterior and steps on; the forecast comes from a sample
    of the *prior* of the next window. Members are trained in turn, through `bptt_steps` windows.
    """

    name = "rssm"

    def __init__(
        self,
        l2: float = 1.0,
        forgetting: float = 0.97,
        deterministic_dim: int = 256,
        stochastic_dim: int = 32,
        num_categoricals: int = 32,
        ensemble_size: int = 3,
        bptt_steps: int = 4,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.shape = Shape(deterministic_dim, stochastic_dim, num_categoricals)
        self.bptt_steps = bptt_steps
        super().__init__(l2, forgetting, ensemble_size, learning_rate, seed)

    def _begin(self) -> None:
        self.weights = Weights(self.shape.matrices(), self.ensemble_size, self.generator)
        # A latent is a sum of one row per variable, not of all classes.
        self.weights.all["latent"] *= np.float32(self.shape.classes**0.5)
        self._recurrent: Single = np.zeros((self.ensemble_size, self.shape.deterministic), dtype=np.float32)
        self._now: Step | None = None
        self._memory: list[Remembered] = []
        self._turn = 0
        self._windows = 0
        self.loss_gate = Gate()
        self._sharper = np.zeros(2)  # log-likelihood gained by the deviations, observations
        self.trained = Result(0.0, 0.0, 0.0)

    def _advance(self, situation: Situation) -> None:
        state = situation.state.astype(np.float32)
        loss = self.linear.losses.forecast(situation, [h * situation.window for h in HORIZONS_IN_WINDOWS])
        self._memory = [
            *self._memory[-MEMORY + 1 :],
            Remembered(situation.step, state, self._recurrent, np.stack(loss)),
        ]
        uniform = self._draws(2, self.ensemble_size)
        self._now = advance(self.shape, self.weights.all, state, self._recurrent, uniform)
        self._recurrent = self._now.recurrent

    def _correct(self, situation: Situation, groups: Single) -> Single:
        if self._now is None:
            raise RuntimeError("Nothing was observed yet.")
        return head(self.weights.all, self._now.context, groups)

    def _draws(self, *rows: int) -> Single:
        """Uniform numbers for sampling, from the predictor's own generator."""
        return np.asarray(torch.rand((*rows, self.shape.variables), generator=self.generator).numpy())

    def _train(self, samples: Sequence[tuple[int, Sample]]) -> None:
        known = {one.step: one for one in self._memory}
        for step, sample in samples:
            if step in known:
                surprise = _surprise(known[step].loss, sample)
                known[step].samples.append((sample, surprise))
                self._judge_loss(step, sample.index, surprise)
        self._windows += 1
        if not self._memory or self._windows % TRAIN_EVERY:
            return
        self._turn = (self._turn + 1) % self.ensemble_size
        where = torch.rand(2, generator=self.generator).tolist()
        end = len(self._memory) if where[0] < NEWEST else int(where[1] * len(self._memory)) + 1
        windows = self._memory[max(end - self.bptt_steps, 0) : end]
        states = np.stack([one.state for one in windows])
        segment = Segment(
            self.shape,
            self.weights.single[self._turn],
            states,
            windows[0].recurrent[self._turn],
            self._draws(2 * len(windows)),
        )
        self.trained = segment.backward(_target(windows), self.weights.gradients)
        self.weights.step(self._turn, self.learning_rate)

    # --- the loss path -----------------------------------------------------------------------------------------------

    def _loss_path(self, situation: Situation, horizons: Sequence[int]) -> tuple[Array, Array]:
        loss, deviation = self.linear.losses.forecast(situation, horizons)
        if self._now is None:
            return loss, deviation
        windows = in_windows(horizons, situation.window)
        shift, width = self._now.losses.mean(0, dtype=np.float64)
        shift = self.loss_gate.value() * shift.clip(-2.0, 2.0)
        loss = loss + deviation * np.interp(windows, PLACES, np.array([0.0, *shift]))
        if self._sharper[0] > 0 and self._sharper[1] > 4:
            deviation = deviation * np.exp(np.interp(windows, PLACES, np.array([0.0, *width.clip(-1.0, 1.0)])))
        return loss, deviation

    def _judge_loss(self, step: int, index: int, surprise: float) -> None:
        """Before the members learn from it: would their corrections have helped? Only the last window's are kept."""
        if self._now is None or self._memory[-1].step != step:
            return
        shift, width = self._now.losses[:, :, index].mean(0, dtype=np.float64).clip(-1.0, 1.0).tolist()
        self.loss_gate.add(index, shift * surprise, shift * shift, surprise * surprise)
        gained = 0.5 * surprise**2 * (1.0 - np.exp(-2.0 * width)) - width
        self._sharper = 0.95 * self._sharper + (gained, 1.0)

    # --- state -------------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        now = self._now
        return {
            "weights": self.weights.state_dict(),
            "recurrent": pack(self._recurrent),
            "context": pack(now.context) if now is not None else [],
            "losses": pack(now.losses) if now is not None else [],
            "turn": self._turn,
            "windows": self._windows,
            "loss_gate": pack(self.loss_gate.sums),
            "sharper": pack(self._sharper),
            "memory": [
                {
                    "step": one.step,
                    "state": pack(one.state),
                    "recurrent": pack(one.recurrent),
                    "loss": pack(one.loss),
                    "samples": [{**sample.state(), "surprise": surprise} for sample, surprise in one.samples],
                }
                for one in self._memory
            ],
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.weights.load_state_dict(state["weights"])
        self._recurrent = single(state["recurrent"])
        if len(state["context"]):
            self._now = Step(self._recurrent, single(state["context"]), single(state["losses"]))
        self._turn, self._windows = int(state["turn"]), int(state["windows"])
        self.loss_gate.sums = unpack(state["loss_gate"])
        self._sharper = unpack(state["sharper"])
        self._memory = [
            Remembered(
                int(one["step"]),
                single(one["state"]),
                single(one["recurrent"]),
                unpack(one["loss"]),
                [(Sample.load(sample), float(sample["surprise"])) for sample in one["samples"]],
            )
            for one in state["memory"]
        ]


def _target(windows: Sequence[Remembered]) -> Target | None:
    known = [(place, *pair) for place, one in enumerate(windows) for pair in one.samples][-MOST_SAMPLES:]
    if not known:
        return None
    groups, gram, dots = joined([(sample.groups, sample.gram, sample.dots) for _, sample, _ in known])
    surprises = np.array([surprise for _, _, surprise in known], dtype=np.float32)
    return Target([place for place, _, _ in known], [one.index for _, one, _ in known], groups, gram, dots, surprises)


def _surprise(expected: Array, sample: Sample) -> float:
    """The loss that followed, in deviations from what the plain path expected."""
    loss, deviation = expected[:, sample.index].tolist()
    return float(min(max((sample.loss_after - loss) / max(deviation, 1e-12), -5.0), 5.0))
