"""Chains of leaps of the linearised run, where the form of the loss is known: residuals, or a convex loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from foretrain.engine.graphs import WARMUP_STEPS
from foretrain.engine.objective import Objective, Residuals
from foretrain.engine.step import StepOutput
from foretrain.events import Notice
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.linearised.leaps import LinearisedLeaps
from foretrain.hybrid.moves.base import MoveTools, Outlook
from foretrain.hybrid.moves.chain import Chain, ChainedKind
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.obstacles import KeptOff, Obstacle, decay_of
from foretrain.hybrid.plan import Decision, Plan
from foretrain.motion.predictability import LOW_NOISE_COSINE, Predictability

_LONGEST_WAIT = 64
"""Windows. Chosen: a try costs a few steps, so one in 640 steps is not felt."""
_TELL_AFTER = 3
"""Windows in which batches differ too much, before that is told. Chosen: batches are called noisy after so
many."""
_IN_VAIN, _OFTEN_IN_VAIN = 0.25, 0.1
"""Share of the run that tries in vain may take, at first and later. Chosen: a try with a large model or slow rows can
cost hundreds of full steps, but what was slow at first may be fast when the optimizer has become slow."""


class LinearisedChain(Chain):
    """Leaps to where the linearised residuals are least, for as long as that lowers the loss."""

    kind = "linearised"
    leaps: LinearisedLeaps

    @property
    def fall_ratio(self) -> float | None:
        return self.leaps.fall_ratio

    def look_before(self) -> None:
        leaps = self.leaps
        finite, leaps.room = leaps.begin(self.batch), self.room
        self.cost += leaps.price(leaps.rows)
        if not finite:
            self.refuse(leaps.failure or "the loss is not a number")
        elif self.room < leaps.steps_of_next:
            self.refuse(f"a leap takes {leaps.steps_of_next} steps, and only {self.room} are left")
        else:
            super().look_before()

    def judge(self) -> Judgement:
        found = super().judge()
        if not (found.kept and self.leaps.holding.noisy):
            return found
        reason = "what was won on one batch did not hold on the next; "
        return replace(found, kept=False, cost_steps=found.cost_steps + self.steps, reason=reason)

    def undo(self) -> None:
        super().undo()
        self.leaps.release()

    def validate(self, batch: Any) -> StepOutput:
        """Look at the loss where the chain led to. A step of the optimizer would lead away from there: it is made for
        the way, not for the end."""
        output = self.leaps.stay(batch)
        if output is None:
            return super().validate(batch)
        self.tools.engine.progress.global_step += 1
        self._outputs.extend((output.loss, output.gradient_norm))
        self.steps += 1
        return output


def left_out_on_shards(tools: MoveTools, predictability: Predictability) -> KeptOff | str:
    """What is said of such leaps where they could be tried in one process, but no process holds all weights."""
    hybrid = tools.engine.config.hybrid
    if tools.probes.batches or not hybrid.linear_rows or hybrid.mode != "leap":
        return ""
    found = [Obstacle("sharding by FSDP2", "DistributedDataParallel")]
    if (decay := decay_of(tools.engine)) is not None:
        found.append(decay)
    return KeptOff(LinearisedLeaps.name, tuple(found), exact=predictability.same_batch)


class LinearisedKind(ChainedKind):
    """Makes such chains from the first window on, where batches hardly differ."""

    name = LinearisedChain.kind
    saved = (*ChainedKind.saved, "wait", "pause", "off", "noisy_windows")
    leaps: LinearisedLeaps

    def __init__(self, tools: MoveTools, predictability: Predictability, objective: Objective) -> None:
        super().__init__(tools)
        self.predictability = predictability
        hybrid = tools.engine.config.hybrid
        self.leaps = LinearisedLeaps(tools.engine, objective, hybrid.linear_rows, hybrid.linear_memory_mb)
        self.wait, self.pause = 0, 1
        """Windows until the next try, and how many follow on a try in vain."""
        self.noisy_windows = 0
        """Windows in which batches differed too much for a try."""
        self.off = ""
        """Why no more are made in this run."""
        if self.possible:  # leaps may begin after a window: few steps are not worth a recording
            tools.engine.execution.eager_steps = max(WARMUP_STEPS, hybrid.window_steps + 2)

    @property
    def possible(self) -> bool:
        return not (self.off or self._obstacles() or self.tools.probes.batches)

    def _obstacles(self) -> list[Obstacle]:
        """Settings that keep such leaps off, each with what to set."""
        engine, hybrid = self.tools.engine, self.tools.engine.config.hybrid
        found = []
        if hybrid.mode != "leap":
            found.append(Obstacle(f'hybrid.mode = "{hybrid.mode}"', 'hybrid.mode = "leap"'))
        if hybrid.search is False:
            found.append(Obstacle("hybrid.search = false", 'hybrid.search = "auto"'))
        if not hybrid.linear_rows:
            found.append(Obstacle("hybrid.linear_rows = 0", "hybrid.linear_rows = 160"))
        elif self.leaps.row_count.most < (fewest := self.leaps.fewest_rows):
            needed = math.ceil(self.leaps.prices.memory_mb(fewest, self.leaps.elements))
            memory = f"hybrid.linear_memory_mb = {hybrid.linear_memory_mb:g}"
            found.append(Obstacle(memory, f"hybrid.linear_memory_mb = {needed} or more"))
        if (decay := decay_of(engine)) is not None:
            found.append(decay)
        if engine.precision.scaled:
            found.append(Obstacle('precision.type = "fp16"', 'precision.type = "fp32"'))
        return found

    @property
    def at_once(self) -> bool:
        return True

    @property
    def comes_back(self) -> bool:
        return self.possible and self.predictability.same_batch

    def propose(self, outlook: Outlook) -> Decision | None:
        if not self.possible:
            return None
        if not self._worth_a_try(outlook):
            self._tell_noise()
            return None
        faster = self.leaps.compare(self.tools.worth.slope)
        if faster:
            self.wait, self.pause = 0, 1
        elif faster is not None:
            self._wait(self.leaps.cost)
        if self.wait:
            self.wait -= 1
            return None
        room = outlook.steps_left - self.tools.engine.config.hybrid.correct_steps
        if room < self.leaps.steps_of_next:
            return None
        return Decision(self.name, horizon=1, audited=False, longest=room, reason="the run is linearised")

    def _worth_a_try(self, outlook: Outlook) -> bool:
        """Batches hardly differ; or their gradients do not, and leaps have not been tried; or it is known that what
        leaps win on one batch holds on the next."""
        known, holds = self.predictability, self.leaps.holding.known
        if known.same_batch or outlook.low_noise:
            return True
        return known.gradient_cosine > LOW_NOISE_COSINE if holds is None else holds

    def _tell_noise(self) -> None:
        """Once, to who hands in residuals: the run is then one of the optimizer's own steps."""
        self.noisy_windows += 1
        if self.noisy_windows != _TELL_AFTER or not isinstance(self.leaps.objective, Residuals):
            return
        cosine = self.predictability.gradient_cosine
        text = f"no linearised leaps are made for now: batches differ too much (cosine of their gradients {cosine:.2f}"
        advice = "give more points per batch, or the same ones for a while"
        self.tools.emit(Notice(f"{text}, {LOW_NOISE_COSINE} and more is needed); {advice}", level="info"))

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        return decision.kind == self.name, 0.0

    def make(self, plan: Plan) -> LinearisedChain:
        """It is judged by the loss of its own batches, as if that were exact: leaps lower it by far more than noise."""
        return LinearisedChain(self.tools, replace(plan, low_noise=True), self.leaps)

    def ended(self, move: JudgedMove, judgement: Judgement | None) -> None:
        """After a try in vain the next one waits, twice as long each time, and longer where it cost much."""
        self.leaps.release()
        if self.leaps.failure and not self.off:
            self.off = self.leaps.failure
            self.tools.emit(Notice(f"no linearised leaps are made: {self.off}", level="info"))
        if judgement is not None and judgement.kept and judgement.worth_steps > judgement.cost_steps:
            self.wait, self.pause = 0, 1
        else:
            kept = judgement is not None and judgement.kept  # what it was worth is uncertain; `compare` finds out
            self._wait(0.0 if kept else move.cost)

    def _wait(self, spent: float) -> None:
        """After a try in vain that cost so many full steps."""
        share = max(_IN_VAIN / self.pause, _OFTEN_IN_VAIN)
        windows = math.ceil(spent / (share * self.tools.engine.config.hybrid.window_steps))
        self.wait, self.pause = max(self.pause, windows), min(2 * self.pause, _LONGEST_WAIT)

    def obstacle(self) -> KeptOff | str | None:
        """Where batches hardly differ and no such leaps will be tried: why, with what to set."""
        found = self._obstacles()
        if self.tools.probes.batches or not found or not self.tools.engine.config.hybrid.linear_rows:
            return ""
        return KeptOff(self.leaps.name, tuple(found), exact=self.predictability.same_batch)
