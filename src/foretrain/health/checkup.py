"""When a run's health is looked at, and what comes of it: events, a part of the summary, and tuning if wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
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

IDEAL_RATIO = 1e-3
"""Gradient/weight ratio of which a layer's worst look is farthest."""
COLUMNS = ("gradient_norm", "gradient_to_weight", "update_to_weight")
Numbers = dict[str, float | None]
"""Of one layer at one look, by the names above."""


class Checkup(StepHook):
    """Looks at a full step now and then; `judge` follows when no move is open. Off with `health.interval = 0`."""

    def __init__(self, engine: Engine, emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.emit = emit
        self.known_of_moves: Callable[[RunStatus], RunStatus] = lambda situation: situation
        """Adds to a situation what is known of moves."""
        self.tuned: Callable[[], None] = lambda: None
        """Called when something was tuned. The learning rate and the clipping are asked for by the engine."""
        self.interval = engine.config.health.interval
        self.look = LayerMeter(engine.model, engine.full_step.parameters, engine.world)
        self.levers = levers_of_own(engine.optimizer) if engine.own_optimizer else levers_of(engine.config)
        if not is_configured(engine.model):
            self.levers = replace(self.levers, dropout="dropout in your model")
        self.health = Health(engine.config, self.look.layers, self.levers)
        self.on = self.interval > 0 and bool(engine.full_step.parameters)
        self.looks = 0
        self.next_look = 0
        self._looked = 0
        """Step of the look that is not judged yet."""
        self._latest: dict[str, Numbers] = {}
        """Layer -> what the last look saw of it."""
        self._worst: dict[str, Numbers] = {}
        if self.on:
            engine.meter.tap = self._note

    def cover(self) -> None:
        """Others are trained from now on. A look that is not judged yet is made again."""
        if self.look.measuring or self.look.on_its_way:
            self.next_look = self._looked
        self.look = LayerMeter(self.engine.model, self.engine.full_step.parameters, self.engine.world)
        self.health.cover(self.look.layers)
        self._latest = {}
        self._worst = {layer: self._worst[layer] for layer in self.look.layers if layer in self._worst}

    def _note(self, rows: list[Row]) -> None:
        """The loss scale of fp16 finds its level by overflowing: such steps are no sign of illness."""
        scaled = self.engine.precision.scaled
        self.health.note([row for row in rows if not (scaled and row[2] and math.isfinite(row[0]))])

    # --- around a step -----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        step = self.engine.global_step
        if self.on and step >= self.next_look and not self.look.on_its_way:
            self._looked = step
            self._close()
            self.look.begin()
            self.next_look = (step // self.interval + 1) * self.interval  # only now: memory may have run out before

    def after_step(self, output: StepOutput) -> None:
        if self.look.measuring:
            self.look.end(self._looked, output)

    def take_back(self) -> None:
        if self.look.measuring:
            self.look.put_back(None)
            self.next_look = self._looked

    def undone(self, leaps: int) -> None:
        """So many leaps were undone, and what a look would have seen: they say nothing of the run."""
        self.take_back()
        if self.on and leaps:
            self.engine.meter.fetch()
            self.health.monitor.forget(leaps)

    @property
    def due(self) -> bool:
        """A look is to be judged. On a GPU one step late: by then its numbers have arrived, and nobody waits."""
        lag = self.engine.device.type == "cuda"
        return self.look.on_its_way and not (lag and self.engine.global_step == self._looked + 1)

    def judge(self) -> None:
        """Say what the last look shows, and tune what it wants tuned."""
        measured = self.look.take()
        step = self._looked if measured is not None else self.engine.global_step
        situation = self._situation(step)
        vitals, news = self.health.examine(situation, measured)
        if measured is not None:
            self.looks += 1
            self._keep(measured.step, self._numbers(measured))
            self.emit(self._event(measured, vitals))
        self._tell(news)

    def finish(self) -> None:
        """The run is over: what the last steps say, which no look follows."""
        if self.on:
            self._close()
            self.judge()

    def _close(self) -> None:
        """All steps before this moment count for this look, and no other. In `fit` they were just read for the log."""
        self.engine.meter.fetch()
        self.health.monitor.close()

    def evaluated(self, held_out: float) -> None:
        """A held-out loss was measured."""
        if not self.on:
            return
        situation = self._situation(self.engine.global_step)
        self._tell(self.health.evaluated(situation, held_out, self.engine.progress.last_train_loss))

    def _tell(self, news: list[HealthFinding]) -> None:
        for finding in self.engine.world.agree(news):
            self._say(finding)
            made = self.health.tune(finding, self._peak)
            if made:
                self.emit(Tuned(finding.step, finding.ailment.value, made))
                self.tuned()

    def _say(self, finding: HealthFinding) -> None:
        record = finding.record()
        self.emit(HealthFound(**{name: record[name] for name in HealthFound.__slots__}))

    def rolled_back(self, factor: float, at: int) -> float:
        """The guard rolled back with this factor of the learning rate; what of it was tuned in for good.

        at: the step at which it did. Losses that were undone are judged here, and the next look is at those after them.
        """
        step, situation = self.engine.global_step, self._situation(at)
        if self.on:
            for finding in self.health.rolled_back(situation):
                self._say(finding)
        made, kept = self.health.keep(factor, self._peak, situation.now.clip)
        if made:
            self.emit(Tuned(step, Ailment.DIVERGENCE.value, made))
        return kept

    @property
    def _peak(self) -> float:
        return self.engine.rate.peak or self.engine.config.optimizer.peak_rate

    def _situation(self, step: int) -> RunStatus:
        engine, config = self.engine, self.engine.config
        now = self.health.effective(self._peak, engine.clip, config.hybrid.full_steps)
        high = engine.schedule(engine.global_step) >= 0.5 * self._peak
        falling = engine.schedule(engine.planned_steps) < 0.5 * self._peak
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
            for layer, row in zip(self.look.layers, rows, strict=True)
        }

    def _keep(self, step: int, numbers: dict[str, Numbers]) -> None:
        """The latest look, and of every layer the look at which its gradient was farthest from ideal."""
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
            layer: {"latest": self._latest.get(layer), "worst": self._worst.get(layer)} for layer in self.look.layers
        }
        findings = [finding.record() for finding in self.health.findings]
        return {"health": {"looks": self.looks, "findings": findings, "layers": layers}}

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self.on:
            return {}
        return {
            "health": self.health.state_dict(),
            "looks": self.looks,
            "next_look": self.next_look,
            "looked": self._looked,
            "pending": self.look.wait(),
            "latest": {layer: dict(numbers) for layer, numbers in self._latest.items()},
            "worst": {layer: dict(numbers) for layer, numbers in self._worst.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was saved without looks, or about other layers, starts anew."""
        self.look.put_back(None)
        if not self.on or not state or not set(state["worst"]) <= set(self.look.layers):
            self.next_look = math.ceil(self.engine.global_step / self.interval) * self.interval if self.on else 0
            return
        self.health.load_state_dict(state["health"])
        self.looks, self.next_look, self._looked = (int(state[name]) for name in ("looks", "next_look", "looked"))
        self.look.put_back(state["pending"])
        self._latest = {layer: dict(numbers) for layer, numbers in state["latest"].items()}
        self._worst = {layer: dict(numbers) for layer, numbers in state["worst"].items()}


def _distance(ratio: float | None) -> float:
    """From the ideal, in powers of ten; a ratio that there is not counts for none."""
    if ratio is None:
        return -1.0
    return abs(math.log10(ratio / IDEAL_RATIO)) if ratio > 0 else math.inf


def _together(norms: Array) -> float:
    return float(np.sqrt(np.nansum(np.square(norms))))


def _number(value: float) -> float | None:
    """Four digits are enough for a chart."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
