"""What all moves have in common that full steps validate and a judge judges: snapshot, anchor, validation."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, typed_like
from foretrain.engine.memory.host import add_each
from foretrain.engine.step import StepOutput
from foretrain.events import Moved, Phase
from foretrain.health.signs import StepReading
from foretrain.hybrid.cycle import View
from foretrain.hybrid.judges.audit import Audited
from foretrain.hybrid.judges.exact import Exact, OnProbes
from foretrain.hybrid.judges.judgement import ByProbe, Judge, Judgement, Trusted
from foretrain.hybrid.moves.base import Move, MoveTools
from foretrain.hybrid.plan import Plan
from foretrain.persist.codec import random_state


class JudgedMove(Move):
    """Begins with a snapshot and a probe. `predict` moves the weights and ends with `arrive`; then full steps follow,
    and the judge decides."""

    chained = False
    """It is made of leaps with a gradient each: every one of them counts as a step by itself."""
    saved: ClassVar[tuple[str, ...]] = (
        *("phase", "batch", "random", "cost", "refused", "reason", "anchor", "moved", "share", "loss", "credit"),
        *("made", "steps", "harmed", "overfits", "_outputs", "judge_of_move"),
    )
    rows_of_rank = ("batch",)
    random: dict[str, Any]
    _outputs: list[Tensor]

    def __init__(self, tools: MoveTools, plan: Plan, judge: Judge | None = None) -> None:
        self.tools = tools
        self.plan = plan
        self.judge_of_move = judge or judge_for(tools, plan)
        self.phase = Phase.PREDICT
        self.cost = 0.0
        self.random = {}
        """Random states of all its probes."""
        self.anchor = math.nan
        """Probe loss where it began."""
        self.moved = 0
        """Steps ahead that the weights are now."""
        self.made = 0
        """Predicted steps made so far, those that were undone included."""
        self.share = 1.0
        """How much of the planned displacement was made."""
        self.loss = math.nan
        """Probe loss after the move, before any full step."""
        self.credit = 0
        """Virtual steps that it counts."""
        self.steps = 0
        """Validating steps done."""
        self.harmed = False
        """The guard saw harm in its validating steps."""
        self.overfits = False
        """It was cut short or refused because the held-out loss rose."""
        self.view: View | None = None
        """Why it left PREDICT, in the step that it did."""
        self.loaded = False
        """Its batch is one of a saved state, and has the types that such a state knows."""
        self._outputs = []

    @property
    def counted(self) -> int:
        """Virtual steps that it counted so far."""
        return self.credit

    @property
    def leaps_name(self) -> str:
        """What the leaps of a chain are called; empty for any other move."""
        return ""

    # --- PREDICT -----------------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        tools = self.tools
        tools.snapshots.take()
        self.random, self.batch = random_state(), map_tensors(batch, lambda tensor: tensor.clone())
        self.cost += tools.probes.price(batch)
        self.offload()
        self.anchor = self.probe()
        if not math.isfinite(self.anchor):
            self.refuse("the probe is not a number")
        elif self.plan.coefficients is not None and not np.isfinite(self.plan.coefficients).all():
            self.refuse("the forecast is not a number")
        else:
            if tools.probes.batches:
                tools.worth.watch_probes(self.anchor)
            tools.snapshots.wait()
            self.look_before()

    def offload(self) -> None:
        """The optimizer's state may leave the device while only forward passes are made."""
        self.tools.probes.offload()

    def look_before(self) -> None:
        """Measure what the judge compares with later."""
        self.judge_of_move.begin(self)

    def advance(self, batch: Any) -> StepOutput | None:
        if self.loaded:
            self.batch, self.loaded = typed_like(self.batch, batch), False
        return self.predict(batch) if self.phase is Phase.PREDICT else self.validate(batch)

    @abstractmethod
    def predict(self, batch: Any) -> StepOutput | None:
        """Move the weights by one step; `arrive` or `refuse` at the end."""

    def went(self, steps: int) -> None:
        """So many predicted steps were made."""
        self.moved += steps
        self.made += steps

    def arrive(self, loss: float, view: View | None = None) -> None:
        """The weights are where the move leads them: full steps validate it from now on. view: why, if not because the
        horizon is reached."""
        self.tools.probes.bring_back(-1)
        self.loss = loss
        self.credit = 0 if self.chained else self.judge_of_move.credit(self)
        self.view = view or View(self.tools.engine.progress.global_step, confidence=1.0, horizon_reached=True)
        self.tools.count(self.credit)
        self.phase = Phase.CORRECT

    def end_soon(self) -> None:
        """Training is to stop: end with the next step, where the move can."""

    def end_now(self) -> None:
        """Something else stops the move: end where it is, where it can."""

    @property
    def stays_if_stopped(self) -> bool:
        """What was made so far is known to be good: it may stay without a judgement."""
        return False

    # --- CORRECT -----------------------------------------------------------------------------------------------------

    def validate(self, batch: Any) -> StepOutput:
        """Make the residual correction before the first full step; then a full step that shows what the move did."""
        if self.steps == 0:
            self._correct()
        output = self.tools.engine.full(batch)
        self._outputs.extend((output.loss, output.gradient_norm))
        self.steps += 1
        self.judge_of_move.validated(self, batch)
        return output

    def _correct(self) -> None:
        """Move on by what forecasts missed in similar states, if that helped lately."""
        tools, planned = self.tools, self.plan.coefficients
        if planned is None:
            return
        coefficients = tools.suggestion(planned * min(1.0, self.share), self.moved)
        if not coefficients.any():
            return
        displacement = tools.trajectory.displacement(coefficients)
        tools.engine.full_step.changing = True
        add_each(tools.trajectory.parameters, displacement)
        if tools.engine.average is not None:
            tools.engine.average.shift(displacement, 1.0)
        tools.counts.corrections += 1

    @property
    def over(self) -> bool:
        return self.steps >= self.plan.correct_steps

    def readings(self) -> list[StepReading]:
        """Loss and gradient norm of the validating steps. Reading them waits for the device."""
        if not self._outputs:
            return []
        self.tools.engine.world.catch_up()
        numbers = self.tools.engine.world.to_host(torch.stack([value.float() for value in self._outputs]))
        self._outputs.clear()
        first = self.tools.engine.progress.global_step - self.steps + 1
        pairs = enumerate(zip(numbers[::2], numbers[1::2], strict=True), start=first)
        return [StepReading(step, Phase.CORRECT, loss, norm) for step, (loss, norm) in pairs]

    def judge(self) -> Judgement:
        return self.judge_of_move.judge(self)

    def exact_worth(self, before: float, after: float) -> float:
        """Full steps between two exact losses."""
        return self.tools.worth.exact(before, after)

    @property
    def start_loss(self) -> float:
        """Exact loss that its fall is counted from."""
        return self.anchor

    def undo(self) -> None:
        self.tools.snapshots.rewind()

    # --- probes and state --------------------------------------------------------------------------------------------

    def probe(self, batch: Any = None) -> float:
        """Loss of the weights as they are, on the move's batch or another one, with the anchor's random numbers."""
        return self.tools.probes.loss(self, batch)

    @property
    def returned(self) -> bool:
        """Whether it found nothing lower than an earlier move had, and went back to there."""
        return False

    @property
    def fall_ratio(self) -> float | None:
        """Real falls of the loss as a share of predicted ones; None where nothing was predicted step by step."""
        return None

    def told(self, verdict: str, reason: str, loss: float = math.nan, worth: float = 0.0) -> Moved:
        """What became of the move, as listeners are told. loss: that it was judged by."""
        return Moved(
            step=self.tools.engine.progress.global_step,
            horizon=self.moved if self.chained else self.plan.horizon,
            chained=self.chained,
            verdict=verdict,
            share=self.share,
            audited=self.plan.audited,
            anchor=self.anchor,
            predicted_loss=self.plan.predicted_loss,
            loss=loss,
            confidence=self.plan.confidence,
            worth_steps=round(worth, 2),
            cost_steps=round(self.cost, 2),
            reason=f"{self.plan.reason}; {reason}",
            leaps=self.leaps_name,
            counted_steps=self.counted,
            fall_ratio=self.fall_ratio,
            returned=self.returned,
        )

    def after_load(self) -> None:
        """Random states stay on the host; all else goes to the device."""
        self.loaded = True
        device = self.tools.engine.device
        self.batch = self.tools.engine.to_device(self.batch)
        self._outputs = [value.to(device) for value in self._outputs]
        self.judge_of_move.loaded(self)


def judge_for(tools: MoveTools, plan: Plan) -> Judge:
    """Probe batches judge where there are any, the exact loss where it is known, audits otherwise."""
    judge: ByProbe = OnProbes() if tools.probes.batches else Exact() if plan.low_noise else Trusted()
    return Audited(judge) if plan.audited else judge
