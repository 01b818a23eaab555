"""Watches full steps: it closes windows, scores forecasts against what followed and teaches the predictor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.engine.fence import Fence
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.engine.world import ReduceKind
from foretrain.motion.losses import WindowLosses
from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Score, Situation, score
from foretrain.motion.predictors.guarded import GuardedPredictor
from foretrain.motion.quality import Quality
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, ForecastRecord, PhaseRecord, WindowRecord
from foretrain.motion.samples import Sample, Statistics, bias_corrections, statistics_of
from foretrain.motion.state import StateEncoder
from foretrain.motion.trajectory import Motion, Since, Trajectory
from foretrain.persist.stateful import Stateful, entry

_WHOLE: tuple[ReduceKind, ...] = ("same", "same", "same")
_OF_PARTS: tuple[ReduceKind, ...] = ("same", "sharded", "sharded")
"""How the numbers of a window are combined over ranks: those of steps, the sampled ones, and that of the weights."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the run is when a window ends, as the trainer knows it."""

    step: int
    max_steps: int
    full_steps: int
    """Updates of the optimizer so far."""
    learning_rate: float
    peak_rate: float
    phase: PhaseRecord
    acceptance_rate: float
    confidence: float


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forecast that waits for what follows."""

    situation: Situation
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class _Due:
    """A window that is measured and not learned from yet. An order to end may leave the predictor there: the run then
    continues, or is resumed, with learning from it."""

    record: WindowRecord
    situation: Situation | None
    """None where directions are not kept."""


class Observer(StepHook, Stateful):
    """Watches one window at a time. Between windows nothing is read from the device."""

    saved = (
        *("sample", "encoder", "quality", "losses", "predicted_loss", "windows", "situation", "outputs"),
        *("_next", "_frozen", "_due", "unlearned"),
    )
    predicted_loss: float | None
    situation: Situation | None
    scored: list[tuple[Followed, Forecast, Score]]
    _next: _Pending | None
    _frozen: _Pending | None
    _due: _Due | None

    def __init__(
        self,
        trajectory: Trajectory,
        predictor: Predictor,
        parameters: list[nn.Parameter],
        optimizer: Optimizer,
        fence: Fence | None = None,
    ) -> None:
        self.trajectory = trajectory
        self.predictor = predictor
        self.guarded = GuardedPredictor(predictor, fence)
        """The predictor behind a guard against failures of its code."""
        self.optimizer = optimizer
        self.window = trajectory.window
        self.sample = Sample(parameters, optimizer)
        self.losses = WindowLosses()
        self.encoder = StateEncoder(self.window, self.losses)
        self.quality = Quality(self.window)
        self.predicted_loss = None
        """The smoothed loss that was forecast for now a window ago; None where there was no such forecast."""
        self.situation = None
        """The situation at the end of the last window; None after a move or before the first window."""
        self.scored = []
        """Forecasts that met what followed at the end of the last window."""
        self.windows = 0
        """Windows since the last move."""
        self._outputs: list[Tensor] = []
        self._next = self._frozen = None
        self._due = None

    @property
    def smoothed_loss(self) -> float:
        """The moving average of the losses of watched windows."""
        return self.losses.smoothed

    @property
    def unlearned(self) -> list[tuple[Followed, Forecast, Score]]:
        """Scored forecasts that the predictor has not learned from yet: what a state has to hold of them."""
        return self.scored if self.due else []

    @unlearned.setter
    def unlearned(self, saved: list[tuple[Followed, Forecast, Score]]) -> None:
        self.scored = saved

    @property
    def due(self) -> bool:
        """Whether a window is still to be learned from."""
        return self._due is not None

    def restart(self, new_level: bool = False) -> None:
        """The weights were moved by something else than full steps.

        new_level: they moved so far that no loss from before says anything about those that follow.
        """
        self.trajectory.restart()
        self._outputs.clear()
        self._next = self._frozen = self._due = None
        self.situation = None
        self.predicted_loss = None
        self.windows = 0
        if new_level:
            self.losses.new_level()

    def cover(self, parameters: list[nn.Parameter], names: Sequence[str], dtype: torch.dtype) -> None:
        """Watch other weights from now on, and forget all that is known of how weights move."""
        self.trajectory.cover(parameters, names, dtype)
        self.sample.cover(parameters)
        self.guarded.reset()
        self.restart()
        self.scored = []

    @property
    def forecast(self) -> Forecast | None:
        """The forecast that was made at the end of the last window, for the weights as they were then."""
        return self._next.forecast if self._next is not None else None

    def before_step(self) -> None:
        self.trajectory.before_step()

    @property
    def complete(self) -> bool:
        """The window is full: it is to be measured before the next step."""
        return self.trajectory.steps >= self.window

    def after_step(self, output: StepOutput) -> None:
        self._outputs.extend((output.loss, output.gradient_norm, output.skipped))
        if self.trajectory.steps == self.window - 2:
            self.sample.remember()
        self.trajectory.after_step()

    def measure(self, moment: Moment) -> None:
        """End a window: read what it showed, and score forecasts. Only here the observer waits for the device."""
        self.trajectory.world.catch_up()  # losses of replicas are means over ranks from here on
        outputs = torch.stack([value.float() for value in self._outputs])
        if self.trajectory.parted:
            sums = self.sample.sums(self.trajectory.world.share)
            extra, kinds = [outputs, sums, self._weight_norm().double().square()], _OF_PARTS
        else:
            extra, kinds = [outputs, self.sample.statistics(), self._weight_norm()], _WHOLE
        self._outputs.clear()
        if not self.trajectory.held:
            record = self._record(self.trajectory.skip(extra, kinds), None, moment)
            self.losses.add(record.losses)
            self.scored = []
            self._due = _Due(record, None)
            return
        motion = self.trajectory.close(extra, kinds)
        record = self._record(motion.extra, motion, moment)
        self.losses.add(record.losses)
        self._score(motion)
        forecast_record = self._forecast_record(moment)
        state = self.encoder.encode(record, forecast_record, moment.phase)
        self._due = _Due(record, Situation(state, motion.gram, self.window, self.smoothed_loss, moment.step))

    def _weight_norm(self) -> Tensor:
        """The norm of all weights; on several ranks the root of what this one's parts add to its square."""
        norms, roots = (
            torch.stack(torch._foreach_norm(self.trajectory.watched)),
            self.trajectory.layout.roots_of_shares,
        )
        if roots is not None:
            norms = norms * roots.to(norms.dtype)
        norm: Tensor = norms.norm()
        return norm

    def learn(self) -> WindowRecord:
        """Learn from the window that `measure` ended. Raises Ordered where an order to end left the predictor: it
        is still due then."""
        if self._due is None:
            raise RuntimeError("no window is due")  # `measure` comes before
        situation = self._due.situation
        if situation is not None:
            horizons = [windows * self.window for windows in HORIZONS_IN_WINDOWS]
            forecast = self.guarded.learn(situation, [item for item, _, _ in self.scored], horizons)
            self.situation = situation
            self._next = None if forecast is None else _Pending(situation, forecast)
            if self.trajectory.frozen_windows == 0:
                self._frozen = self._next
        self.windows += 1
        record, self._due = self._due.record, None
        return record

    def _record(self, extra: Sequence[Array], motion: Motion | None, moment: Moment) -> WindowRecord:
        outputs, sampled, weight_norm = extra  # as `measure` asked for them
        rows, sums = outputs.reshape(-1, 3), sampled.tolist()
        statistics = statistics_of(sums) if self.trajectory.parted else Statistics(*sums)
        weight_norm = np.sqrt(weight_norm) if self.trajectory.parted else weight_norm
        losses = np.where(rows[:, 2] > 0, math.nan, rows[:, 0])
        return WindowRecord(
            step=moment.step,
            losses=tuple(losses.tolist()),
            gradient_norms=tuple(rows[:, 1].tolist()),
            learning_rate=moment.learning_rate,
            rate_share=moment.learning_rate / moment.peak_rate if moment.peak_rate else 0.0,
            progress=moment.step / max(1, moment.max_steps),
            weight_norm=float(weight_norm[0]),
            displacement_norm=math.sqrt(max(0.0, float(motion.window.square.sum()))) if motion else math.nan,
            cosines=self._cosines(motion.window) if motion else (math.nan,) * len(DIRECTIONS),
            effective_rank=_effective_rank(motion.gram.sum(axis=0)) if motion else math.nan,
            **statistics._asdict(),
            bias_corrections=bias_corrections(self.optimizer, moment.full_steps),
        )

    def _cosines(self, since: Since) -> tuple[float, ...]:
        if self.situation is None:
            return (0.0,) * int(since.dots.shape[1])
        own = np.clip(np.einsum("gii->i", self.situation.gram), 0.0, None)
        lengths = np.sqrt(own * max(0.0, float(since.square.sum())))
        dots = since.dots.sum(axis=0)
        return tuple(float(dot / length) if length > 0 else 0.0 for dot, length in zip(dots, lengths, strict=True))

    def _score(self, motion: Motion) -> None:
        """Score pending forecasts by what followed, before the predictor learns from it."""
        self.scored = []
        if self._next is not None:
            self.predicted_loss = float(self._next.forecast.loss[0])
        one, longer = (self._next, motion.window), (self._frozen, motion.frozen)
        if motion.frozen is not None and motion.frozen.windows == 1:
            longer = (None, None)  # the same as the first
        for pending, since in (one, longer):
            if pending is None or since is None or since.windows not in HORIZONS_IN_WINDOWS:
                continue
            item = Followed(
                pending.situation, since.windows * self.window, since.dots, since.square, self.smoothed_loss
            )
            if np.isfinite(since.square).all():
                self.quality.add(item, pending.forecast)
                self.scored.append((item, pending.forecast, score(item, pending.forecast.at(item.horizon))))

    def _forecast_record(self, moment: Moment) -> ForecastRecord:
        tallies = [self.quality.tallies[windows] for windows in HORIZONS_IN_WINDOWS]
        return ForecastRecord(
            errors=tuple(tally.last_error for tally in tallies),
            cosines=tuple(tally.last_cosine for tally in tallies),
            loss_errors=tuple(tally.last_loss_error for tally in tallies),
            acceptance_rate=moment.acceptance_rate,
            confidence=moment.confidence,
        )

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> Tensor | None:
        """Loss, gradient norm and skipped of the steps since the last window, one after another."""
        return torch.stack([value.float() for value in self._outputs]) if self._outputs else None

    @outputs.setter
    def outputs(self, saved: Tensor | None) -> None:
        self._outputs = [] if saved is None else list(saved.to(self.trajectory.device).unbind())

    def state_dict(self, directions: bool = True) -> dict[str, Any]:
        """The state. Without `directions` some windows must be watched again before anything is forecast."""
        trajectory = self.trajectory.state_dict() if directions or not self.trajectory.held else None
        return super().state_dict() | {"trajectory": trajectory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trajectory = entry(state, "trajectory", "Observer")
        super().load_state_dict({name: value for name, value in state.items() if name != "trajectory"})
        if trajectory is not None:
            self.trajectory.load_state_dict(trajectory)
        else:
            self.trajectory.hold()
            self.restart()
            self.trajectory.forget()


def _effective_rank(gram: Array) -> float:
    """The exponential of the entropy of the spectrum of the directions, each scaled to length 1."""
    lengths = np.sqrt(np.clip(np.diag(gram), 1e-300, None))
    spectrum = np.clip(np.linalg.eigvalsh(np.nan_to_num(gram / np.outer(lengths, lengths))), 1e-12, None)
    share = spectrum / spectrum.sum()
    return float(np.exp(-(share * np.log(share)).sum()))
