"""The predictors `mlp` and `rssm`: the linear forecast plus a correction that an ensemble of small networks learns.

The correction counts only as far as it helped on motions that the networks had not seen.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation
from foretrain.motion.predictors.evidence import (
    HORIZONS,
    between,
    energy,
    in_windows,
    no_motion,
    quadratic,
    usable,
    usable_pairs,
)
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.networks import (
    NARROW,
    STATE,
    Head,
    WorldModel,
    draw_weights,
    group_features,
    single,
    units,
)
from foretrain.motion.records import HORIZONS_IN_WINDOWS
from foretrain.persist.stateful import Stateful

DIVERGENCE_WEIGHT = LOSS_WEIGHT = 0.1
"""Weights of the divergence and of the loss path beside the error of the coefficients. Chosen: the coefficients
come first."""
FREE_NATS = 1.0
"""Divergence per window that costs nothing, as in DreamerV3."""
BALANCE = 0.8
"""Share of the divergence that moves the prior to the posterior, not the other way round; as in DreamerV2."""
ADAM = {"betas": (0.9, 0.99), "eps": 1e-8}
"""Chosen: the usual 0.999 remembers a thousand steps, and a run has hundreds of windows at most."""
SEEN = 0.7
"""Share of the lessons that a member ever learns from. Chosen: it makes members differ, and each still sees most."""
TRUST_KEEP, TRUST_DOUBT = 0.93, 3.0
"""Memory of `Trust` per observation (about 14 count), and its doubt in observations. Chosen: what is of no use stays
below 0.3 (tests/motion/predictors/test_mlp.py)."""
REPLAY, BATCH, MLP_EVERY = 64, 4, 2
"""Lessons that `mlp` keeps, lessons per training step, and windows between two of these. Chosen for cost
(benchmarks/predictor_cost.py): a window of either predictor takes a few milliseconds of one core."""
MEMORY, MOST_LESSONS, RSSM_EVERY = 32, 4, 10
"""Windows that `rssm` keeps, lessons per training step, and windows between two of these. Chosen for cost, too."""
NEWEST = 0.5
"""Share of training steps of `rssm` that end at the newest window; the others end at a random one. Chosen."""
MOST_DISAGREEMENT = 10.0
"""Chosen: beyond it the members agree on nothing, by however much."""
_PLACES = np.array([0.0, *HORIZONS])


class Trust(Stateful):
    """Share of a correction that is used, per horizon: what it was worth out of sample, less its uncertainty."""

    saved = ("sums",)

    def __init__(self) -> None:
        self.sums: Array = np.zeros((4, len(HORIZONS)))  # worth, worth squared, own length squared, observations

    def add(self, index: int, along: float, own: float, square: float) -> None:
        """`along`: correction x what the linear forecast left over; `own`: correction x correction."""
        scale = max(own + square, 1e-300)
        along, own = along / scale, own / scale
        self.sums[:, index] = TRUST_KEEP * self.sums[:, index] + (along, along * along, own, 1.0)

    def value(self) -> Array:
        """[horizons] in 0 to 1. Each horizon for itself: what helps over one window may harm over eight."""
        along, squared, own, count = self.sums
        doubt = TRUST_DOUBT * own / np.maximum(count, 1e-12)
        return np.asarray(((along - np.sqrt(squared)) / (own + doubt + 1e-300)).clip(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Made:
    """A forecast that waits for what follows."""

    situation: Situation
    base: Array
    """[horizons, G, R] of the linear predictor."""
    members: Array
    """[members, horizons, G, R] corrections."""
    groups: Tensor
    """[G, features]"""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a correction would have been worth, as a quadratic form: d'gram d - 2 d'dots, in `units`."""

    index: int
    """Index into HORIZONS_IN_WINDOWS."""
    state: Tensor
    """[64] at the time of the forecast."""
    groups: Tensor
    """[G, features]"""
    gram: Tensor
    """[G, R, R]"""
    dots: Tensor
    """[G, R]"""
    seen: Tensor
    """[members] 1 for those that learn from it, 0 for the others."""
    loss_after: float
    """Smoothed training loss at the end of the horizon."""


class LearnedPredictor(Stateful, Predictor):
    """Base of both. A subclass builds the network, learns from lessons and says what to add to the linear forecast."""

    saved: ClassVar[tuple[str, ...]] = ("name", "linear", "trust", "_made")
    name: str
    _made: deque[Made]

    def __init__(self, l2: float, forgetting: float, ensemble_size: int, learning_rate: float, seed: int) -> None:
        self.ensemble_size, self.learning_rate, self.seed = ensemble_size, learning_rate, seed
        self.linear = LinearPredictor(l2, forgetting)
        self.reset()

    def reset(self) -> None:
        self.linear.reset()
        self.trust = Trust()
        self._made = deque(maxlen=HORIZONS_IN_WINDOWS[-1] + 1)
        self._shares = np.zeros(len(HORIZONS))
        self.generator = torch.Generator("cpu").manual_seed(self.seed)
        self.network = self._built()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.learning_rate, fused=True, **ADAM)  # type: ignore[arg-type]

    @abstractmethod
    def _built(self) -> nn.Module:
        """A fresh network, drawn from `self.generator`; and what else belongs to a start."""

    @abstractmethod
    def _advance(self, situation: Situation) -> None:
        """Take in the situation; called once per window."""

    @abstractmethod
    def _correct(self, situation: Situation, groups: Tensor) -> Tensor:
        """[members, horizons, G, R] corrections in `units` per window. Changes nothing."""

    @abstractmethod
    def _loss_of(self, lessons: Sequence[tuple[int, Lesson]]) -> Tensor | None:
        """Take in lessons, each with the step of its situation. Returns what to minimise; None: nothing this time."""

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        if not usable(situation):
            return no_motion(situation, horizons, situation.loss, 0.0)
        coefficients = self.linear.coefficients(situation, horizons)
        loss, deviation = self._loss_path(situation, horizons)
        if not self._made or not self._shares.any():
            return Forecast(tuple(horizons), coefficients, loss, deviation)
        members = self._corrections(situation)
        places = np.interp(in_windows(horizons, situation.window), _PLACES, np.arange(len(_PLACES)))
        table = np.zeros((len(_PLACES), *members.shape[2:]))
        table[1:] = self._shares[:, None, None] * members.mean(0)
        coefficients = coefficients + between(table, places)
        return Forecast(tuple(horizons), coefficients, loss, deviation, self._disagreement(situation, members))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        if not usable(situation):
            return
        known = {made.situation.step: made for made in self._made}
        pairs = usable_pairs(followed)
        lessons = []
        for one, index in pairs:
            made = known.get(one.situation.step)
            if made is not None and made.base.shape[1:] == one.dots.shape:
                lessons.append((one.situation.step, self._judged(one, index, made)))
        self.linear.learn(situation, pairs)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):  # whatever the trainer's step is about
            self._train(lessons)
        self._shares = self.trust.value()
        base = self.linear.coefficients(situation, [h * situation.window for h in HORIZONS_IN_WINDOWS])
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self._advance(situation)
        groups = group_features(situation.gram, base[0])
        self._made.append(Made(situation, base, self._computed(situation, groups), groups))

    def _train(self, lessons: Sequence[tuple[int, Lesson]]) -> None:
        loss = self._loss_of(lessons)
        if loss is not None:
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._step()

    def _step(self) -> None:
        """A gradient that is not finite changes nothing."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        if math.isfinite(float(torch.stack(torch._foreach_norm(gradients)).sum())):
            self.optimizer.step()

    def _corrections(self, situation: Situation) -> Array:
        """[members, horizons, G, R]; those of the window that just ended are known already."""
        last = self._made[-1].situation
        same = situation is last or (
            situation.step == last.step
            and np.array_equal(situation.gram, last.gram)
            and np.array_equal(situation.state, last.state)
        )
        if same:
            return self._made[-1].members
        first = self.linear.coefficients(situation, [situation.window])[0]
        return self._computed(situation, group_features(situation.gram, first))

    def _computed(self, situation: Situation, groups: Tensor) -> Array:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            raw = self._correct(situation, groups).clamp(-2, 2).numpy()
        size = units(situation.gram) * HORIZONS[:, None, None]
        return raw * size if np.isfinite(raw.sum()) else np.zeros_like(raw, dtype=np.float64)

    def _loss_path(self, situation: Situation, horizons: Sequence[int]) -> tuple[Array, Array]:
        return self.linear.losses.forecast(situation, horizons)

    def _judged(self, followed: Followed, index: int, made: Made) -> Lesson:
        """Score the correction that was made, out of sample; then it is something to learn from."""
        gram, correction, base = followed.situation.gram, made.members[:, index].mean(0), made.base[index]
        left = followed.dots - (gram @ base[..., None])[..., 0]
        total = float(followed.square.sum())
        error = total - float(np.vdot(base, followed.dots + left))  # squared, of the linear forecast
        self.trust.add(index, float(np.vdot(correction, left)), energy(correction, gram), max(error, 0.0))
        size = units(gram) * HORIZONS_IN_WINDOWS[index]
        gram = size[:, :, None] * gram * size[:, None, :]
        # Half of a group's weight is its share in the whole motion, half is the same for all; a direction far longer
        # than what followed must not drown the others.
        weight = 0.5 / np.where(followed.square > 0, followed.square, np.inf) + 0.5 * len(left) / total
        weight /= 1.0 + np.einsum("gii->g", gram) * weight / 16.0
        seen = torch.rand(self.ensemble_size, generator=self.generator, device="cpu", dtype=torch.float32) < SEEN
        return Lesson(
            index,
            single(made.situation.state),
            made.groups,
            single(gram * weight[:, None, None]),
            single(size * left * weight[:, None]),
            seen.float(),
            float(followed.loss),
        )

    def _disagreement(self, situation: Situation, members: Array) -> float:
        """Spread of the members' displacements over the longest horizon, relative to its length."""
        if len(members) < 2:
            return 0.0
        last = self._shares[-1] * members[:, -1]
        mean = last.mean(0)
        length = energy(self._made[-1].base[-1] + mean, situation.gram)
        spread = float(quadratic(last - mean, situation.gram).sum()) / (len(last) - 1)
        return float(min(np.sqrt(max(spread, 0.0) / max(length, 1e-300)), MOST_DISAGREEMENT))

    def state_dict(self) -> dict[str, Any]:
        weights = {name: weight.detach().clone() for name, weight in self.network.named_parameters()}
        moments = {
            name: {key: moment.clone() for key, moment in self.optimizer.state[weight].items()}
            for name, weight in self.network.named_parameters()
            if weight in self.optimizer.state
        }
        drawn = self.generator.get_state()
        return {**super().state_dict(), "weights": weights, "moments": moments, "generator": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        parts = ("weights", "moments", "generator")
        super().load_state_dict({name: value for name, value in state.items() if name not in parts})
        self.network.load_state_dict(state["weights"])
        for name, weight in self.network.named_parameters():
            if name in state["moments"]:
                self.optimizer.state[weight] = {key: value.clone() for key, value in state["moments"][name].items()}
        self.generator.set_state(state["generator"])
        self._shares = self.trust.value()


class MlpPredictor(LearnedPredictor):
    """A small network on the training state and the shape of each group's basis, trained a little in every window."""

    name = "mlp"
    saved = (*LearnedPredictor.saved, "_replay", "_windows")
    _replay: list[Lesson]

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

    def _built(self) -> nn.Module:
        self._replay = []
        self._windows = 0
        self.head = Head(self.ensemble_size, STATE, self.hidden_dims)
        draw_weights(self.head, self.generator, but=(self.head.last,))
        return self.head

    def _advance(self, situation: Situation) -> None:
        """All that counts is in the situation itself."""

    def _correct(self, situation: Situation, groups: Tensor) -> Tensor:
        found: Tensor = self.head(single(situation.state)[None], groups[None], range(len(HORIZONS)))
        return found

    def _loss_of(self, lessons: Sequence[tuple[int, Lesson]]) -> Tensor | None:
        self._replay = [*self._replay, *(lesson for _, lesson in lessons)][-REPLAY:]
        self._windows += 1
        if not self._replay or self._windows % MLP_EVERY:
            return None
        drawn = torch.randint(len(self._replay), (BATCH - 1,), generator=self.generator, device="cpu").tolist()
        chosen = [self._replay[number] for number in (-1, *drawn)]
        return _error(chosen, self.head(torch.stack([one.state for one in chosen]), *_inputs(chosen)))


@dataclass(slots=True)
class Remembered:
    """A window to train on."""

    step: int
    state: Tensor
    """[64]"""
    recurrent: Tensor
    """[members, deterministic] before this window was seen."""
    loss: Array
    """[2, horizons] expected loss and deviation before any correction."""
    lessons: list[Lesson] = field(default_factory=list)
    """What followed on it."""

    def surprise(self, lesson: Lesson) -> float:
        """The loss that followed, in deviations from what the plain path expected."""
        loss, deviation = self.loss[:, lesson.index].tolist()
        return float(min(max((lesson.loss_after - loss) / max(deviation, 1e-12), -5.0), 5.0))


class RssmPredictor(LearnedPredictor):
    """A WorldModel takes in every window, and the forecast comes from a sample of the *prior* of the next one."""

    name = "rssm"
    saved = (
        *LearnedPredictor.saved,
        "_recurrent",
        "_context",
        "_losses",
        "_memory",
        "_windows",
        "loss_trust",
        "_sharper",
    )
    _memory: list[Remembered]

    def __init__(
        self,
        l2: float = 1.0,
        forgetting: float = 0.97,
        deterministic_dim: int = 256,
        stochastic_dim: int = 32,
        num_categoricals: int = 32,
        bptt_steps: int = 4,
        ensemble_size: int = 3,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.sizes = (deterministic_dim, stochastic_dim, num_categoricals)
        self.bptt_steps = bptt_steps
        super().__init__(l2, forgetting, ensemble_size, learning_rate, seed)

    def _built(self) -> nn.Module:
        self.model = WorldModel(self.ensemble_size, *self.sizes)
        draw_weights(self.model, self.generator, but=(self.model.head.last, self.model.losses))
        # A latent is a sum of one row per variable, not of all classes.
        self.model.latent.weight.data *= self.model.classes**0.5
        self._recurrent = torch.zeros(self.ensemble_size, self.model.deterministic, device="cpu", dtype=torch.float32)
        self._context = self._recurrent.new_zeros(self.ensemble_size, 1, NARROW)
        self._losses: Array = np.zeros((2, len(HORIZONS)))  # corrections of the loss path at the last window
        self._memory = []
        self._windows = 0
        self.loss_trust = Trust()
        self._sharper: Array = np.zeros(2)  # log-likelihood gained by the deviations, observations
        self.nats = self.reconstruction = 0.0  # of the last training step
        return self.model

    def _advance(self, situation: Situation) -> None:
        state = single(situation.state)
        loss = self.linear.losses.forecast(situation, [h * situation.window for h in HORIZONS_IN_WINDOWS])
        window = Remembered(situation.step, state, self._recurrent, np.stack(loss))
        self._memory = [*self._memory[-MEMORY + 1 :], window]
        seen = self.model(state[None], self._recurrent, self.generator)
        self._recurrent, self._context = seen.path[:, -1].clone(), seen.imagined
        self._losses = self.model.loss_path(self._context)[:, 0].double().mean(0).numpy()

    def _correct(self, situation: Situation, groups: Tensor) -> Tensor:
        found: Tensor = self.model.head(self._context, groups[None], range(len(HORIZONS)))
        return found

    def _loss_of(self, lessons: Sequence[tuple[int, Lesson]]) -> Tensor | None:
        known = {one.step: one for one in self._memory}
        for step, lesson in lessons:
            if step in known:
                known[step].lessons.append(lesson)
                self._judge_loss(known[step], lesson)
        self._windows += 1
        if not self._memory or self._windows % RSSM_EVERY:
            return None
        newest, where = torch.rand(2, generator=self.generator, device="cpu").tolist()
        end = len(self._memory) if newest < NEWEST else int(where * len(self._memory)) + 1
        windows = self._memory[max(end - self.bptt_steps, 0) : end]
        return self._segment_loss(windows)

    def _segment_loss(self, windows: Sequence[Remembered]) -> Tensor:
        """Summed over members: rebuilding the states, the divergence, and both forecasts."""
        states = torch.stack([one.state for one in windows])
        seen = self.model(states, windows[0].recurrent, self.generator)
        again = self.model.rebuilt(seen)
        rebuilt = functional.smooth_l1_loss(again, states.expand_as(again), reduction="none").mean((1, 2))
        forward = seen.nats(seen.posterior.detach(), seen.prior)
        divergence = BALANCE * forward + (1 - BALANCE) * seen.nats(seen.posterior, seen.prior.detach())
        self.nats, self.reconstruction = float(forward.detach().mean()), float(rebuilt.detach().mean())
        total: Tensor = (rebuilt + DIVERGENCE_WEIGHT * divergence.clamp_min(FREE_NATS)).sum()
        known = [(place, one, lesson) for place, one in enumerate(windows) for lesson in one.lessons][-MOST_LESSONS:]
        if not known:
            return total
        chosen = [lesson for _, _, lesson in known]
        context = seen.imagined[:, [place for place, _, _ in known]]
        total = total + _error(chosen, self.model.head(context, *_inputs(chosen)))
        surprises = torch.tensor([one.surprise(lesson) for _, one, lesson in known], device="cpu", dtype=torch.float32)
        samples, places = range(len(chosen)), [one.index for one in chosen]
        shift, width = self.model.loss_path(context)[:, samples, :, places].permute(2, 1, 0)
        width = width.clamp(-1, 1)
        likelihood = 0.5 * ((surprises - shift) * torch.exp(-width)) ** 2 + width
        total += LOSS_WEIGHT * (_masks(chosen) * likelihood).sum() / len(chosen)
        return total

    # --- the loss path -----------------------------------------------------------------------------------------------

    def _loss_path(self, situation: Situation, horizons: Sequence[int]) -> tuple[Array, Array]:
        loss, deviation = self.linear.losses.forecast(situation, horizons)
        windows = in_windows(horizons, situation.window)
        shift, width = self._losses
        shift = self.loss_trust.value() * shift.clip(-2.0, 2.0)
        loss = loss + deviation * np.interp(windows, _PLACES, np.array([0.0, *shift]))
        if self._sharper[0] > 0 and self._sharper[1] > 4:
            deviation = deviation * np.exp(np.interp(windows, _PLACES, np.array([0.0, *width.clip(-1.0, 1.0)])))
        return loss, deviation

    def _judge_loss(self, window: Remembered, lesson: Lesson) -> None:
        """Before the members learn from it: would their corrections have helped? Only the last window's are kept."""
        if self._memory[-1].step != window.step:
            return
        surprise = window.surprise(lesson)
        shift, width = self._losses[:, lesson.index].clip(-1.0, 1.0).tolist()
        self.loss_trust.add(lesson.index, shift * surprise, shift * shift, surprise * surprise)
        gained = 0.5 * surprise**2 * (1.0 - np.exp(-2.0 * width)) - width
        self._sharper = 0.95 * self._sharper + (gained, 1.0)


def _inputs(lessons: Sequence[Lesson]) -> tuple[Tensor, list[int]]:
    return torch.stack([one.groups for one in lessons]), [one.index for one in lessons]


def _masks(lessons: Sequence[Lesson]) -> Tensor:
    """[members, samples]"""
    return torch.stack([one.seen for one in lessons], 1)


def _error(lessons: Sequence[Lesson], corrections: Tensor) -> Tensor:
    """Change of the relative squared error by corrections [members, samples, G, R]: mean of samples, sum of members."""
    gram, dots = torch.stack([one.gram for one in lessons]), torch.stack([one.dots for one in lessons])
    bent = (gram @ corrections[..., None])[..., 0]
    each = ((bent - 2 * dots) * corrections).sum(-1).mean(-1)
    return (_masks(lessons) * each).sum() / len(lessons)
