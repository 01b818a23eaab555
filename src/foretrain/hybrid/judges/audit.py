"""An audit in action: the same batches from the same snapshot, with the move and without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.memory.host import copy_each
from foretrain.engine.memory.offload import Aside
from foretrain.engine.step import StepOutput
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.ledger import Audit
from foretrain.hybrid.moves.move import Move
from foretrain.hybrid.policy import Pilot
from foretrain.hybrid.snapshot import Safety

Worth = Callable[[float, float], float]
"""(loss before, loss after) -> full steps, where losses are exact."""


class Forks:
    """Runs the fork without a move after the one with it, and compares both at the mean of their last weights."""

    def __init__(self, engine: Engine, pilot: Pilot, safety: Safety, probe: Callable[[Any], float]) -> None:
        self.engine = engine
        self.pilot = pilot
        self.safety = safety
        self.probe = probe
        self.parameters = pilot.observer.trajectory.parameters
        self.cover()

    def cover(self) -> None:
        """Others are trained from now on."""
        self.aside = Aside(self.parameters, self.pilot.config.memory.snapshots == "pinned")

    def add(self, sums: list[Tensor]) -> list[Tensor]:
        """The weights as they are, added to their sum over steps. Both forks use one sum, one after the other."""
        if not sums:
            return self.aside.keep("mean")
        self.aside.add_to(sums)
        return sums

    def remembered(self, sums: list[Tensor]) -> list[Tensor]:
        """The sum of a fork that a checkpoint held."""
        return self.aside.keep("mean", sums) if sums else []

    def compare(self, move: Move, batches: list[Any], full_step: Callable[[Any], StepOutput], worth: Worth) -> Audit:
        """What the move was worth on `batches`. Afterwards the run stands at the better fork."""
        engine = self.engine
        with_move = self._losses(move.mean, move, batches)
        position = engine.position
        end = self.safety.take_other()
        self.safety.rewind()
        mean: list[Tensor] = []
        for index, batch in enumerate(move.batches):
            full_step(batch)
            self.pilot.counts.steps["full"] += 1
            if index + 1 > len(move.batches) // 2:
                mean = self.add(mean)
        without = self._losses(mean, move, batches)
        move.cost += len(move.batches) + FORWARD * 2 * len(batches)
        audit = self._judge(move, np.asarray(with_move), np.asarray(without), worth)
        if audit.gain_steps > 0:
            self.safety.rewind(end)
        engine.position = position
        return audit

    def _judge(self, move: Move, with_move: Any, without: Any, worth: Worth) -> Audit:
        with np.errstate(invalid="ignore"):  # a fork may have ended at infinity
            differences = without - with_move
            gain = float(differences.mean())
            error = float(differences.std(ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else 0.0
        if not math.isfinite(gain):
            steps = -float(move.moved)
        elif move.plan.low_noise:
            steps = worth(float(without.mean()), float(with_move.mean()))
        else:
            steps = self.pilot.worth(gain)
        return Audit(
            self.engine.global_step,
            move.moved,
            float(with_move.mean()),
            float(without.mean()),
            steps,
            abs(self.pilot.worth(error)) if math.isfinite(error) and not move.plan.low_noise else 0.0,
        )

    def _losses(self, sums: list[Tensor], move: Move, batches: list[Any]) -> list[float]:
        """Probe losses at the mean of the weights, of chains at the weights as they are; the weights come back."""
        if move.chained:
            return [self.probe(batch) for batch in batches]
        kept = self.aside.keep("weights")
        count = move.plan.correct_steps - move.plan.correct_steps // 2
        copy_each(self.parameters, sums)
        torch._foreach_div_(self.parameters, float(count))
        losses = [self.probe(batch) for batch in batches]
        copy_each(self.parameters, kept)
        return losses
