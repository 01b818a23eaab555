"""An audit: the same batches from the same snapshot, with the move and without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, same_batch, typed_like
from foretrain.engine.engine import Engine
from foretrain.engine.memory.host import copy_each
from foretrain.engine.memory.offload import Aside
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.judges.judgement import ByProbe, Judge, Judgement
from foretrain.hybrid.judges.worth import MOST_PER_STEP
from foretrain.hybrid.ledger import Audit
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.parts import local, part_for, spread_like
from foretrain.persist.stateful import Stateful

if TYPE_CHECKING:
    from foretrain.hybrid.moves.judged import JudgedMove

_BATCHES = 4
"""Batches on which forks are compared: the last of a window, and the one that the move begins with. Chosen: enough for
a standard error, at a price of 8/3 full steps for both forks."""


class Audited(Judge):
    """Makes the run without the move as well, and keeps the better fork. by: judges losses where they are exact."""

    saved = ("by", "batches", "mean")
    rows_of_rank = ("batches",)
    batches: list[Any]
    mean: list[Tensor]

    def __init__(self, by: ByProbe) -> None:
        self.by = by
        self.exact = by.exact
        self.batches = []
        """Batches of the validating steps, for the fork without the move."""
        self.mean = []
        """The sum of the weights over the second half of the validating steps."""

    def begin(self, move: JudgedMove) -> None:
        self.by.begin(move)

    def credit(self, move: JudgedMove) -> int:
        """Under noise nothing counts before the audit says so."""
        return self.by.credit(move) if self.exact else 0

    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        """An exact fall is worth a few steps per predicted step at the most."""
        return min(self.by.worth(move, before, after), MOST_PER_STEP * max(1, move.moved))

    def validated(self, move: JudgedMove, batch: Any) -> None:
        self.batches.append(map_tensors(batch, lambda tensor: tensor.clone()))
        if move.steps > move.plan.correct_steps // 2:
            self.mean = move.tools.forks.add(self.mean)

    def loaded(self, move: JudgedMove) -> None:
        self.batches = [move.tools.engine.to_device(batch) for batch in self.batches]
        self.mean = move.tools.forks.remembered(self.mean)

    def judge(self, move: JudgedMove) -> Judgement:
        """Roll back, make the fork without the move, and go to the better fork: `stands_at_fork` where that is the one
        without it. A move that held-out data objects to is judged without a fork."""
        overfits = self.by.overfits(move)
        return self.by.judged(move, overfits) if overfits else self.compared(move)

    def compared(self, move: JudgedMove) -> Judgement:
        """Make the other fork. Afterwards the run stands at the better one."""
        audit = self._compare(move)
        kept = audit.gain_steps > 0
        return Judgement(
            kept,
            audit.gain_steps,
            move.cost,
            loss=audit.loss_with,
            audit=audit,
            stands_at_fork=not kept,
        )

    def _compare(self, move: JudgedMove) -> Audit:
        tools = move.tools
        engine, snapshots, batches = tools.engine, tools.snapshots, [*tools.recent.batches, move.batch]
        with_move = self._losses(self.mean, move, batches)
        position = engine.progress.position
        end = snapshots.take_other()
        snapshots.rewind()
        mean: list[Tensor] = []
        for index, batch in enumerate(self.batches):
            engine.full(batch)
            tools.counts.steps["full"] += 1
            if index + 1 > len(self.batches) // 2:
                mean = tools.forks.add(mean)
        without = self._losses(mean, move, batches)
        move.cost += len(self.batches) + FORWARD * 2 * len(batches)
        audit = engine.world.agree(self.weigh(move, with_move, without), "the audit")
        if audit.gain_steps > 0:
            snapshots.rewind(end)
        engine.progress.position = position
        return audit

    def _losses(self, sums: list[Tensor], move: JudgedMove, batches: list[Any]) -> list[float]:
        """Probe losses at the mean of the weights, or of chains at the weights as they are."""
        if move.chained:
            return [move.probe(batch) for batch in batches]
        count = move.plan.correct_steps - move.plan.correct_steps // 2
        return move.tools.forks.at_mean(sums, count, lambda: [move.probe(batch) for batch in batches])

    def weigh(self, move: JudgedMove, with_move: list[float], without: list[float]) -> Audit:
        """What two forks with these losses say about the move."""
        ours, theirs = np.asarray(with_move), np.asarray(without)
        with np.errstate(invalid="ignore"):  # a fork may have ended at infinity
            differences = theirs - ours
            gain = float(differences.mean())
            error = float(differences.std(ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else 0.0
        loss_with, loss_without = float(ours.mean()), float(theirs.mean())
        if not math.isfinite(gain):
            steps = -float(move.moved)
        else:
            steps = self.worth(move, loss_without, loss_with) if self.exact else move.tools.worth.noisy(gain)
        noisy = math.isfinite(error) and not self.exact
        deviation = abs(move.tools.worth.noisy(error)) if noisy else 0.0
        return Audit(move.tools.engine.progress.global_step, move.moved, loss_with, loss_without, steps, deviation)


class Forks:
    """Memory for the weights of two forks, which use it one after the other."""

    def __init__(self, engine: Engine, trajectory: Trajectory) -> None:
        self.engine = engine
        self.trajectory = trajectory
        self.cover()

    def cover(self) -> None:
        """Others are trained from now on."""
        self.aside = Aside(self.trajectory.parameters, self.engine.config.memory.snapshots == "pinned")

    def add(self, sums: list[Tensor]) -> list[Tensor]:
        """The weights as they are, added to their sum over steps."""
        if not sums:
            return self._spread(self.aside.keep("mean"))
        self.aside.add_to([local(one) for one in sums])
        return sums

    def _spread(self, sums: list[Tensor]) -> list[Tensor]:
        return spread_like(sums, self.engine.full_step.parameters)

    def remembered(self, sums: list[Tensor]) -> list[Tensor]:
        """The sum of a fork that a checkpoint held, in the memory for it."""
        if not sums:
            return []
        pairs = zip(sums, self.engine.full_step.parameters, strict=True)
        return self._spread(self.aside.keep("mean", [part_for(one, parameter) for one, parameter in pairs]))

    def at_mean(self, sums: list[Tensor], count: int, measure: Callable[[], list[float]]) -> list[float]:
        """What `measure` says at the mean of the weights; afterwards they are as before."""
        parameters, kept = self.trajectory.parameters, self.aside.keep("weights")
        copy_each(parameters, [local(one) for one in sums])
        torch._foreach_div_(parameters, float(count))
        losses = measure()
        copy_each(parameters, kept)
        return losses


class RecentBatches(Stateful):
    """Copies of the last batches of a window: forks are compared on them. A loop may fill one buffer over and over."""

    saved = ("batches",)
    rows_of_rank = ("batches",)
    batches: list[Any]

    def __init__(self, engine: Engine, trajectory: Trajectory) -> None:
        self.engine = engine
        self.trajectory = trajectory
        self.batches = []

    def remember(self, batch: Any) -> None:
        """Note the batch of a full step, if it is one of the last of its window."""
        if self.trajectory.steps > self.trajectory.window - _BATCHES:
            copied = map_tensors(batch, lambda tensor: tensor.clone())
            self.batches = [*(typed_like(one, batch) for one in self.batches), copied][-(_BATCHES - 1) :]

    def same(self) -> bool:
        """Whether steps see the same batch over and over: then the loss is exact."""
        return len(self.batches) > 1 and all(same_batch(self.batches[-1], other) for other in self.batches[:-1])

    def after_load(self) -> None:
        self.batches = [self.engine.to_device(batch) for batch in self.batches]
