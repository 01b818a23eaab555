"""Decides when the health of a run is measured, tells what was found, and tunes the run where that is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foretrain.engine.described import is_configured
from foretrain.engine.engine import Engine
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.events import Event, HealthFound, HealthMeasured, Tuned
from foretrain.health.advise import Health, RunStatus
from foretrain.health.findings import Ailment, HealthFinding, levers_of, levers_of_own
from foretrain.health.layers import Array, LayerMeter, LayerNorms
from foretrain.health.vitals import Row, Vitals
from foretrain.persist.stateful import Stateful, entry

IDEAL_RATIO = 1e-3
"""Ideal gradient/weight ratio; a layer's worst measurement is the one farthest from it. The middle of the range of 1e-4
to 1e-2 that common advice names."""
HIGH_RATE = 0.5
"""Share of its peak from which a scheduled learning rate counts as high. Chosen."""
COLUMNS = ("gradient_norm", "gradient_to_weight", "update_to_weight")
Numbers = dict[str, float | None]
"""What one measurement says of one layer, by the names above."""


class Checkup(StepHook, Stateful):
    """Measures a full step now and then; `judge` follows when no move is open. Off with `health.interval = 0`."""

    saved = ("health", "measurements", "next_measurement", "_measured_at", "pending", "_latest", "_worst")
    _latest: dict[str, Numbers]
    _worst: dict[str, Numbers]

    def __init__(self, engine: Engine, emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.emit = emit
        self.known_of_moves: Callable[[RunStatus], RunStatus] = lambda status: status
        """Adds to the status of the run what is known of moves. Set by `Hybrid`, which is made later."""
        self.tuned: Callable[[], None] = lambda: None
        """Called when something was tuned. The engine asks for the learning rate and the clipping by itself. Set
        by `Hybrid`."""
        self.interval = engine.config.health.interval
        self.layers = LayerMeter(engine.named, engine.full_step.parameters, engine.world)
        self.levers = levers_of_own(engine.optimizer) if engine.own_optimizer else levers_of(engine.config)
        if not is_configured(engine.model):
            self.levers = replace(self.levers, dropout="dropout in your model")
        self.health = Health(engine.config, self.layers.names, self.levers)
        self.on = self.interval > 0 and bool(engine.full_step.parameters)
        self.measurements = 0
        self.next_measurement = 0
        self._measured_at = 0
        """Step of the measurement that is not judged yet."""
        self._latest = {}
        """The last measurement of every layer."""
        self._worst = {}
        """The measurement of every layer that was farthest from the ideal."""
        if self.on:
            engine.meter.tap = self._note
            engine.add_hook(self)
        engine.on_cover.append(self.cover)

    def cover(self) -> None:
        """Other weights are trained from now on. A measurement that is not judged yet is made again."""
        if self.layers.measuring or self.layers.on_its_way:
            self.next_measurement = self._measured_at
        self.layers = LayerMeter(self.engine.named, self.engine.full_step.parameters, self.engine.world)
        self.health.cover(self.layers.names)
        self._latest = {}
        self._worst = {layer: self._worst[layer] for layer in self.layers.names if layer in self._worst}

    def _note(self, rows: list[Row]) -> None:
        """Take in the numbers of steps, except where the loss scale of fp16 overflowed, which is no illness."""
        scaled = self.engine.precision.scaled
        self.health.note([row for row in rows if not (scaled and row[2] and math.isfinite(row[0]))])

    # --- around a step -----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        step = self.engine.progress.global_step
        if self.on and step >= self.next_measurement and not self.layers.on_its_way:
            self._measured_at = step
            self._close()
            self.layers.begin()
            self.next_measurement = (
                step // self.interval + 1
            ) * self.interval  # only now: memory may have run out before

    def after_step(self, output: StepOutput) -> None:
        if self.layers.measuring:
            self.layers.end(self._measured_at, output)

    def take_back(self) -> None:
        if self.layers.measuring:
            self.layers.put_back(None)
            self.next_measurement = self._measured_at

    def undone(self, leaps: int) -> None:
        """So many leaps were undone, and perhaps a step that was being measured: they say nothing about the run."""
        self.take_back()
        if self.on and leaps:
            self.engine.meter.fetch()
            self.health.monitor.forget(leaps)

    @property
    def due(self) -> bool:
        """Whether a measurement is to be judged. On a GPU it is one step late, so that nobody waits for its numbers."""
        lag = self.engine.device.type == "cuda"
        return self.layers.on_its_way and not (lag and self.engine.progress.global_step == self._measured_at + 1)

    def judge(self) -> None:
        """Judge the last measurement, and tune what it wants tuned."""
        measured = self.layers.take()
        step = self._measured_at if measured is not None else self.engine.progress.global_step
        status = self._status(step)
        vitals, news = self.health.examine(status, measured)
        if measured is not None:
            self.measurements += 1
            self._keep(measured.step, self._numbers(measured))
            self.emit(self._event(measured, vitals))
        self._tell(news)

    def finish(self) -> None:
        """The run is over: judge the last steps, which no measurement follows."""
        if self.on:
            self._close()
            self.judge()

    def _close(self) -> None:
        """Assign all steps so far to this measurement. In `fit` their numbers were just read for the log."""
        self.engine.meter.fetch()
        self.health.monitor.close()

    def evaluated(self, held_out: float) -> None:
        """A held-out loss was measured."""
        if not self.on:
            return
        status = self._status(self.engine.progress.global_step)
        self._tell(self.health.evaluated(status, held_out, self.engine.progress.last_train_loss))

    def _tell(self, news: list[HealthFinding]) -> None:
        for finding in self.engine.world.agree(news, "findings about the run"):
            self._say(finding)
            made = self.health.tune(finding, self._peak)
            if made:
                self.emit(Tuned(finding.step, finding.ailment.value, made))
                self.tuned()

    def _say(self, finding: HealthFinding) -> None:
        record = finding.record()
        self.emit(HealthFound(**{name: record[name] for name in HealthFound.__slots__}))

    def rolled_back(self, factor: float, at: int) -> float:
        """The run was rolled back with this factor of the learning rate. Return the part of it that stays by tuning.

        at: the step at which that happened. The undone losses are judged here, and no measurement judges them again.
        """
        step, status = self.engine.progress.global_step, self._status(at)
        if self.on:
            for finding in self.health.rolled_back(status):
                self._say(finding)
        made, kept = self.health.keep(factor, self._peak, status.now.clip)
        if made:
            self.emit(Tuned(step, Ailment.DIVERGENCE.value, made))
        return kept

    @property
    def _peak(self) -> float:
        return self.engine.rate.peak or self.engine.config.optimizer.peak_rate

    def _status(self, step: int) -> RunStatus:
        engine, config = self.engine, self.engine.config
        now = self.health.effective(self._peak, engine.clip, config.hybrid.full_steps)
        high = engine.schedule(engine.progress.global_step) >= HIGH_RATE * self._peak
        falling = engine.schedule(engine.planned_steps) < HIGH_RATE * self._peak
        return self.known_of_moves(RunStatus(step, now, high, falling))

    # --- what is said ------------------------------------------------------------------------------------------------

    def _event(self, measured: LayerNorms, vitals: Vitals | None) -> HealthMeasured:
        gradient, weight = _together(measured.gradient), max(_together(measured.weight), 1e-300)
        numbers: dict[str, float | None] = {}
        if vitals is not None:
            numbers = {
                "loss_deviation": _number(vitals.deviation),
                "gradient_variance": _number(vitals.gradient_variance),
                "sign_changes": _number(vitals.sign_changes),
            }
        return HealthMeasured(
            step=measured.step,
            gradient_norm=_number(gradient),
            gradient_to_weight=_number(gradient / weight),
            update_to_weight=_number(_together(measured.update) / weight),
            layers=self._latest,
            **numbers,
        )

    def _numbers(self, measured: LayerNorms) -> dict[str, Numbers]:
        columns = (measured.gradient, measured.gradient_to_weight, measured.update_to_weight)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {
            layer: {name: _number(value) for name, value in zip(COLUMNS, row, strict=True)}
            for layer, row in zip(self.layers.names, rows, strict=True)
        }

    def _keep(self, step: int, numbers: dict[str, Numbers]) -> None:
        """Keep the latest measurement, and the one of every layer whose gradient was farthest from the ideal."""
        self._latest = numbers
        for layer, now in numbers.items():
            before = self._worst.get(layer)
            if before is None or _distance(now["gradient_to_weight"]) > _distance(before["gradient_to_weight"]):
                self._worst[layer] = now | {"step": step}

    def summary(self) -> dict[str, Any]:
        """The `health` part of `summary.json`."""
        if not self.on:
            return {}
        layers = {
            layer: {"latest": self._latest.get(layer), "worst": self._worst.get(layer)} for layer in self.layers.names
        }
        findings = [finding.record() for finding in self.health.findings]
        return {"health": {"looks": self.measurements, "findings": findings, "layers": layers}}

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[int, list[float]] | None:
        """The measurement that is not judged yet."""
        return self.layers.wait()

    @pending.setter
    def pending(self, saved: tuple[int, list[float]] | None) -> None:
        self.layers.put_back(saved)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.on else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. A state without measurements, or of other layers, is not used: health starts anew."""
        self.layers.put_back(None)
        if self.on and state and set(entry(state, "worst", "Checkup")) <= set(self.layers.names):
            super().load_state_dict(state)
        else:
            self.next_measurement = (
                math.ceil(self.engine.progress.global_step / self.interval) * self.interval if self.on else 0
            )


def _distance(ratio: float | None) -> float:
    """The distance from the ideal in powers of ten. A ratio that could not be measured counts as nearest."""
    if ratio is None:
        return -1.0
    return abs(math.log10(ratio / IDEAL_RATIO)) if ratio > 0 else math.inf


def _together(norms: Array) -> float:
    """The norm of all layers together."""
    return float(np.sqrt(np.nansum(np.square(norms))))


def _number(value: float) -> float | None:
    """Round to four digits, which are enough for a chart. What is no number becomes None."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
