"""The linear forecast plus a learned correction, trusted only as far as it helped on motions it had not seen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation
from foretrain.motion.predictors.evidence import (
    HORIZONS,
    between,
    energy,
    in_windows,
    no_motion,
    pack,
    quadratic,
    unpack,
    usable,
    usable_pairs,
)
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.networks import Single, group_features, units
from foretrain.motion.records import HORIZONS_IN_WINDOWS

PLACES = np.array([0.0, *HORIZONS])
GATE_KEEP = 0.93
GATE_STRENGTH = 3.0
"""Observations' worth of doubt."""
MOST_DISAGREEMENT = 10.0


class Gate:
    """Share of the correction that is used, per horizon: what it was worth out of sample, less its uncertainty."""

    def __init__(self) -> None:
        self.sums = np.zeros((4, len(HORIZONS)))  # worth, worth squared, own length squared, observations

    def add(self, index: int, along: float, own: float, square: float) -> None:
        """`along`: correction x what the linear forecast left over; `own`: correction x correction."""
        scale = max(own + square, 1e-300)
        along, own = along / scale, own / scale
        self.sums[:, index] = GATE_KEEP * self.sums[:, index] + (along, along * along, own, 1.0)

    def value(self) -> Array:
        """[horizons] in 0 to 1. Each horizon for itself: what helps over one window may harm over eight."""
        along, squared, own, count = self.sums
        doubt = GATE_STRENGTH * own / np.maximum(count, 1e-12)
        return np.asarray(((along - np.sqrt(squared)) / (own + doubt + 1e-300)).clip(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Made:
    """A forecast that waits for what follows."""

    step: int
    base: Array
    """[horizons, G, R] of the linear predictor."""
    correction: Array
    """[horizons, G, R] mean of the members."""
    groups: Single
    """[G, features]"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a correction would have been worth, as a quadratic form: d'gram d - 2 d'dots, in `units`."""

    index: int
    """Of HORIZONS_IN_WINDOWS."""
    groups: Single
    """[G, features]"""
    gram: Single
    """[G, R, R]"""
    dots: Single
    """[G, R]"""
    loss_after: float
    """Smoothed training loss at the end of the horizon."""

    def state(self) -> dict[str, Any]:
        arrays = {"groups": pack(self.groups), "gram": pack(self.gram), "dots": pack(self.dots)}
        return {"index": self.index, "loss_after": self.loss_after, **arrays}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Sample:
        groups, gram, dots = (single(state[name]) for name in ("groups", "gram", "dots"))
        return cls(int(state["index"]), groups, gram, dots, float(state["loss_after"]))


def single(tensor: torch.Tensor) -> Single:
    return np.array(tensor.numpy(), dtype=np.float32)


class CorrectedPredictor(Predictor):
    """Base of the learned predictors. A subclass learns from samples and says what to add to the linear forecast."""

    def __init__(self, l2: float, forgetting: float, ensemble_size: int, learning_rate: float, seed: int) -> None:
        self.ensemble_size, self.learning_rate, self.seed = ensemble_size, learning_rate, seed
        self.linear = LinearPredictor(l2, forgetting)
        self.reset()

    def reset(self) -> None:
        self.linear.reset()
        self.gate = Gate()
        self._made: list[Made] = []
        self._members: Array | None = None  # [members, horizons, G, R] corrections at the last situation
        self._situation: Situation | None = None
        self._gates = np.zeros(len(HORIZONS))
        self.generator = torch.Generator().manual_seed(self.seed)
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Fresh networks, drawn from `self.generator`."""

    @abstractmethod
    def _advance(self, situation: Situation) -> None:
        """Take in the situation; called once per window."""

    @abstractmethod
    def _correct(self, situation: Situation, groups: Single) -> Single:
        """[members, horizons, G, R] corrections in `units` per window. Changes nothing."""

    @abstractmethod
    def _train(self, samples: Sequence[tuple[int, Sample]]) -> None:
        """Learn from samples, each with the step of its situation; called once per window, with new ones or none."""

    @abstractmethod
    def _own_state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load_own_state(self, state: dict[str, Any]) -> None: ...

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        if not usable(situation):
            return no_motion(situation, horizons, situation.loss, 0.0)
        coefficients = self.linear.coefficients(situation, horizons)
        loss, deviation = self._loss_path(situation, horizons)
        members = self._corrections(situation) if self._gates.any() else None
        if members is None:
            return Forecast(tuple(horizons), coefficients, loss, deviation)
        places = np.interp(in_windows(horizons, situation.window), PLACES, np.arange(len(PLACES)))
        table = np.zeros((len(PLACES), *members.shape[2:]))
        table[1:] = self._gates[:, None, None] * members.mean(0)
        coefficients = coefficients + between(table, places)
        return Forecast(tuple(horizons), coefficients, loss, deviation, self._disagreement(situation, members))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        if not usable(situation):
            return
        known = {made.step: made for made in self._made}
        pairs = usable_pairs(followed)
        samples = []
        for one, index in pairs:
            made = known.get(one.situation.step)
            if made is not None and made.base.shape[1:] == one.dots.shape:
                samples.append((one.situation.step, self._judged(one, index, made)))
        self.linear.learn(situation, pairs)
        self._train(samples)
        self._gates = self.gate.value()
        base = self.linear.coefficients(situation, [h * situation.window for h in HORIZONS_IN_WINDOWS])
        self._advance(situation)
        groups = group_features(situation.gram, base[0])
        self._situation, self._members = situation, self._computed(situation, groups)
        made = Made(situation.step, base, self._members.mean(0), groups)
        self._made = [*self._made[-HORIZONS_IN_WINDOWS[-1] :], made]

    def _corrections(self, situation: Situation) -> Array | None:
        """[members, horizons, G, R]; those of the window that just ended are known already."""
        last = self._situation
        if last is None:
            return None
        same = situation is last or (
            situation.step == last.step
            and np.array_equal(situation.gram, last.gram)
            and np.array_equal(situation.state, last.state)
        )
        if same:
            return self._members
        first = self.linear.coefficients(situation, [situation.window])[0]
        return self._computed(situation, group_features(situation.gram, first))

    def _computed(self, situation: Situation, groups: Single) -> Array:
        raw = self._correct(situation, groups).clip(-2, 2)
        size = units(situation.gram) * HORIZONS[:, None, None]
        return raw * size if np.isfinite(raw.sum()) else np.zeros_like(raw, dtype=np.float64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "linear": self.linear.state_dict(),
            "gate": pack(self.gate.sums),
            "generator": self.generator.get_state(),
            "members": pack(self._members) if self._members is not None else [],
            "situation": _situation_state(self._situation),
            "made": [
                {
                    "step": made.step,
                    "base": pack(made.base),
                    "correction": pack(made.correction),
                    "groups": pack(made.groups),
                }
                for made in self._made
            ],
            "own": self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        self.linear.load_state_dict(state["linear"])
        self.gate.sums = unpack(state["gate"])
        self._gates = self.gate.value()
        self._members = unpack(state["members"]) if len(state["members"]) else None
        self._situation = _load_situation(state["situation"])
        self._made = [
            Made(int(one["step"]), unpack(one["base"]), unpack(one["correction"]), single(one["groups"]))
            for one in state["made"]
        ]
        self._load_own_state(state["own"])
        self.generator.set_state(state["generator"])

    def _loss_path(self, situation: Situation, horizons: Sequence[int]) -> tuple[Array, Array]:
        return self.linear.losses.forecast(situation, horizons)

    def _judged(self, followed: Followed, index: int, made: Made) -> Sample:
        """Score the correction that was made, out of sample; then it is something to learn from."""
        gram, correction, base = followed.situation.gram, made.correction[index], made.base[index]
        left = followed.dots - (gram @ base[..., None])[..., 0]
        total = float(followed.square.sum())
        error = total - float(np.vdot(base, followed.dots + left))  # squared, of the linear forecast
        own = energy(correction, gram)
        self.gate.add(index, float(np.vdot(correction, left)), own, max(error, 0.0))
        size = units(gram) * HORIZONS_IN_WINDOWS[index]
        gram = size[:, :, None] * gram * size[:, None, :]
        # Half of a group's weight is its share in the whole motion, half is the same for all; a direction far longer
        # than what followed must not drown the others.
        weight = 0.5 / np.where(followed.square > 0, followed.square, np.inf) + 0.5 * len(left) / total
        weight /= 1.0 + np.einsum("gii->g", gram) * weight / 16.0
        gram = gram * weight[:, None, None]
        dots = size * left * weight[:, None]
        return Sample(index, made.groups, gram.astype(np.float32), dots.astype(np.float32), float(followed.loss))

    def _disagreement(self, situation: Situation, members: Array) -> float:
        """Spread of the members' displacements over the longest horizon, relative to its length."""
        if len(members) < 2 or not self._made:
            return 0.0
        last = self._gates[-1] * members[:, -1]
        mean = last.mean(0)
        whole = self._made[-1].base[-1] + mean
        length = energy(whole, situation.gram)
        spread = float(quadratic(last - mean, situation.gram).sum()) / (len(last) - 1)
        return float(min(np.sqrt(max(spread, 0.0) / max(length, 1e-300)), MOST_DISAGREEMENT))


def _situation_state(situation: Situation | None) -> dict[str, Any]:
    if situation is None:
        return {}
    numbers = {"window": situation.window, "loss": float(situation.loss), "step": situation.step}
    return {"state": pack(situation.state), "gram": pack(situation.gram), **numbers}


def _load_situation(state: dict[str, Any]) -> Situation | None:
    if not state:
        return None
    numbers = (int(state["window"]), float(state["loss"]), int(state["step"]))
    return Situation(unpack(state["state"]), unpack(state["gram"]), *numbers)
