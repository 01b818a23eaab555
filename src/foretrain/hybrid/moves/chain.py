"""A chain of leaps, quasi-Newton or linearised: each is judged by the loss that it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from foretrain.engine.fence import OwnCodeError
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.host import copy_each
from foretrain.engine.step import StepOutput
from foretrain.events import Notice, Phase
from foretrain.hybrid.cycle import View
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.judges.audit import Audited
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.judges.worth import MOST_PER_STEP
from foretrain.hybrid.moves.base import MoveKind, MoveTools
from foretrain.hybrid.moves.chained import ChainedLeaps
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.obstacles import KeptOff, not_repeatable
from foretrain.hybrid.moves.quasi_newton import QuasiNewton, same_loss
from foretrain.hybrid.plan import FORECAST, Decision, Plan
from foretrain.motion.predictability import Predictability
from foretrain.persist.codec import same_random_numbers

_LONGEST = 10
"""Times `max_predict_steps` that a chain may be long. Chosen: its leaps take a gradient each and are judged one by one,
so a long chain risks no more than a short one."""


class Chain(JudgedMove):
    """Leaps to where the gradient should vanish, for as long as they beat the optimizer's own steps. Held-out data may
    end it, and it returns to where the held-out loss was lowest."""

    kind = "chain"
    chained = True
    saved = (*JudgedMove.saved, "_counted", "_began")

    def __init__(self, tools: MoveTools, plan: Plan, leaps: ChainedLeaps) -> None:
        steps = tools.engine.config.hybrid.correct_steps  # without noise there is nothing to average away
        super().__init__(tools, replace(plan, correct_steps=steps))
        self.leaps = leaps
        self._counted = self._began = 0
        """Virtual steps that it counted, and the step that it began at."""

    def look_before(self) -> None:
        """A chain begins at the point of a gradient."""
        self._began = self.tools.engine.progress.global_step
        held_out = self.tools.held_out
        if not held_out.active:
            return
        self.cost += held_out.price(self.batch)
        with self.leaps.at_start():
            held_out.begin(self.leaps.loss)
        self.leaps.note_best()

    @property
    def counted(self) -> int:
        return self._counted

    @property
    def leaps_name(self) -> str:
        return self.leaps.name

    def offload(self) -> None:
        """A chain takes gradients: the optimizer's state stays."""

    def predict(self, batch: Any) -> StepOutput | None:
        engine, checkup, leaps, before = self.tools.engine, self.tools.checkup, self.leaps, self.moved
        checkup.before_step()
        engine.full_step.changing = True
        output = leaps.leap(batch)
        undone = 0
        if output is None and leaps.leaps == 0 and not leaps.returned:
            leaps.end(self.tools.worth.slope, refused=True)
            self.cost += leaps.cost
            self.refuse(leaps.failure or f"no {leaps.name} leap lowers the loss")
        else:
            if output is not None:
                self.went(1)
                self.tools.count(leaps.steps_of_leap)
                self._counted += leaps.steps_of_leap
            undone = self._look_and_end(output is None)
        if output is not None and self.moved > before:
            checkup.after_step(output)
        else:
            checkup.undone(undone)
        return None if self.refused else output

    @property
    def room(self) -> int:
        """Steps that are left for leaps."""
        engine = self.tools.engine
        end = int(min(engine.planned_steps, engine.awaited()))
        return end - engine.progress.global_step - self.plan.correct_steps

    def _look_and_end(self, exhausted: bool) -> int:
        """End the chain if it is over, or if held-out data says so. Returns how many leaps that undid."""
        held_out, leaps = self.tools.held_out, self.leaps
        over = exhausted or leaps.over(self.tools.worth.slope) or not leaps.fits(self.room)
        if held_out.active:
            if held_out.look_due(leaps.leaps, self.batch, over, leaps.steps_of_leap):
                self.cost += held_out.price(self.batch)
                if held_out.look(leaps.leaps, leaps.loss):
                    leaps.note_best()
            over = held_out.over or over
        return self._end(exhausted) if over else 0

    def _end(self, exhausted: bool) -> int:
        """End where the chain is, or back where its held-out loss was lowest; if that is where it began, all of it is
        undone. Returns how many leaps are."""
        tools, held_out, leaps = self.tools, self.tools.held_out, self.leaps
        spent, judged, back, undone = leaps.cost, None, False, 0
        if held_out.active:
            judged, back, self.overfits = held_out.at_end, held_out.risen, held_out.overfits
        if back:
            undone = leaps.leaps - held_out.leaps
            leaps.go_back(held_out.leaps, held_out.training_loss)
        leaps.end(tools.worth.slope, refused=exhausted or self.overfits, held_out=judged)
        self.cost += spent
        if back and held_out.leaps == 0:
            position = tools.engine.progress.position
            self.refuse("the held-out loss only rose")
            tools.engine.progress.position = position  # data goes on: every batch gives the same loss
        else:
            if back:
                tools.snapshots.go_to_best()
                self.moved = held_out.leaps
                self._counted = tools.engine.progress.global_step - self._began
            step = tools.engine.progress.global_step
            self.arrive(leaps.loss, View(step, confidence=1.0, horizon_reached=True, chained=True, overfits=back))
        tools.snapshots.drop_best()
        return undone

    def end_soon(self) -> None:
        self.leaps.stopped = True

    def end_now(self) -> None:
        if self.leaps.leaps and self.phase is Phase.PREDICT:
            self._end(exhausted=True)

    @property
    def stays_if_stopped(self) -> bool:
        """Each of its leaps was judged by itself."""
        return bool(self.leaps.leaps) and self.loss < self.anchor

    # --- its judgement -----------------------------------------------------------------------------------------------

    def judge(self) -> Judgement:
        """The optimizer's own steps after a chain may be too long: then the run goes on from where the chain ended."""
        if self.loss < self.anchor and not self._validated_well():
            self.leaps.return_to_end()
        judge = self.judge_of_move
        if isinstance(judge, Audited) and not self.overfits:
            return judge.compared(self)
        after = self.probe()
        self.cost += 2 * self.tools.probes.price(self.batch)
        kept = after < self.anchor
        worth = self.exact_worth(self.start_loss, self.loss)
        if not kept:
            self.cost += self.steps
        reason = "the held-out loss rose; " if self.overfits else ""
        return Judgement(kept, worth, self.cost, reason, after, overfits=self.overfits)

    @property
    def returned(self) -> bool:
        return self.leaps.returned and not self.loss < self.leaps.start_loss

    @property
    def start_loss(self) -> float:
        return min(self.anchor, self.leaps.start_loss)

    def exact_worth(self, before: float, after: float) -> float:
        """Full steps, as far as the optimizer's own steps would have got there at all."""
        steps, most = self.tools.worth.exact(before, after), MOST_PER_STEP * max(1, self.counted)
        uphill = after < before and not steps > 0
        return most if uphill else min(steps, most)

    def _validated_well(self) -> bool:
        """The optimizer's own steps after the chain lowered what judges it further."""
        if not self.probe() < self.loss:
            return False
        held_out = self.tools.held_out
        if not held_out.active:
            return True
        self.cost += held_out.price(self.batch)
        return not held_out.loss() > held_out.at_end


class ChainedKind(MoveKind):
    """What all chains share: the run ends at the lowest point that they know."""

    saved: ClassVar[tuple[str, ...]] = ("leaps",)
    leaps: ChainedLeaps

    @property
    def comes_back(self) -> bool:
        """Losses are exact, so that the run may come back to an evaluation in the end."""
        return False

    def cover(self) -> None:
        self.leaps.cover()
        self.tools.held_out.forget()

    def evaluated(self, loss: float) -> None:
        """Chains lead far, so the run may come back here in the end."""
        if self.comes_back:
            self.tools.held_out.note(loss)

    @contextmanager
    def at_lower_end(self) -> Iterator[None]:
        """The optimizer's own steps after a chain may lead far up, and the next chain goes back: inside the block the
        weights are those of the lowest end of a chain, where the held-out loss is lower there."""
        held_out, parameters = self.tools.held_out, self.tools.trajectory.parameters
        if not (self.leaps.marked and self.comes_back and held_out.active):
            yield
            return
        now = [p.detach().clone() for p in parameters]
        try:
            self.leaps.finish(None, held_out.loss)
            yield
        finally:
            copy_each(parameters, now)

    def finish(self, batch: Any) -> float | None:
        """Where the loss is exact the run ends at the lowest point that is known, by the held-out loss if there is
        one."""
        if not self.leaps.marked:  # without chains a run ends as the plain loop does
            return None
        parameters = self.tools.trajectory.parameters
        now = [p.detach().clone() for p in parameters]
        try:
            return self._go_to_lowest(batch)
        except OwnCodeError:  # nobody knows which point is the lowest: the run ends where it is
            copy_each(parameters, now)
            raise

    def _go_to_lowest(self, batch: Any) -> float | None:
        held_out = self.tools.held_out
        judged = held_out.loss if held_out.active else None
        to_chain, to_evaluation = self.leaps.finish(batch, judged), held_out.finish()
        went = [losses for losses in (to_chain, to_evaluation) if losses is not None]
        loss = self.tools.engine.probe(batch) if went or self.comes_back else None
        if went and judged is not None:
            where = "at the end of its last chain" if to_evaluation is None else f"at step {held_out.step}"
            text = f"{went[-1][1]:.4g} ({where}) instead of {went[0][0]:.4g}"
            self.tools.emit(Notice(f"the run ends with the weights of its lowest held-out loss, {text}", level="info"))
        return loss


class ChainKind(ChainedKind):
    """Makes chains where every batch gives the same loss, and remembers gradients for them."""

    name = Chain.kind
    leaps: QuasiNewton

    def __init__(self, tools: MoveTools, predictability: Predictability) -> None:
        super().__init__(tools)
        self.predictability = predictability
        hybrid = tools.engine.config.hybrid
        pairs = hybrid.secant_pairs if hybrid.mode == "leap" else 0
        self.leaps = QuasiNewton(tools.engine, pairs, hybrid.secant_memory_mb, _LONGEST * hybrid.max_predict_steps)

    # --- when it applies ---------------------------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Gradients are worth remembering."""
        exact = self.predictability.low_noise or self.predictability.same_batch
        return exact and self.tools.engine.config.hybrid.search is not False and not self.tools.probes.batches

    @property
    def ready(self) -> bool:
        """There are enough pairs for a leap."""
        return self.leaps.ready and self.predictability.low_noise

    @property
    def exact(self) -> bool:
        """A chain could begin now, and each of its leaps would be judged by an exact loss."""
        known = self.leaps.exact
        return self.ready and (self.predictability.same_batch if known is None else known)

    def watching(self) -> tuple[StepHook, ...]:
        """What watches the next full step: where noise is low its gradient is remembered for later leaps."""
        if self.possible:
            return (self.leaps,) if self.leaps.possible else ()
        self.leaps.forget()
        return ()

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        """One probe tells whether this batch gives the same loss as the last one did at the same weights."""
        if decision.kind not in (self.name, FORECAST) or not (self.possible and self.ready):
            return False, 0.0
        return self.leaps.begin(batch), FORWARD

    def make(self, plan: Plan) -> Chain:
        return Chain(self.tools, plan, self.leaps)

    def prepare(self) -> float:
        """Batches may hold the same samples in another order: one probe tells, and chains need no warm-up there."""
        batches, known = self.tools.recent.batches, self.predictability
        untold = self.leaps.exact is None and known.low_noise and not known.same_batch and len(batches) > 1
        if not (untold and self.possible and self.leaps.ready):
            return 0.0
        self.leaps.compare(batches[-2])  # the last gradient is of the one after it
        return FORWARD

    def obstacle(self) -> KeptOff | str | None:
        """Where the loss is exact and no leaps will be tried: why, with what to set."""
        known, found = self.predictability, self.leaps.obstacles
        if self.tools.probes.batches or not known.low_noise:
            return None
        if found:
            return KeptOff(self.leaps.name, tuple(found)) if known.same_batch or self._same_loss() else ""
        return not_repeatable() if known.same_batch and self.leaps.exact is False else None

    def _same_loss(self) -> bool:
        """Whether the last two batches give the same loss at the same weights, as if only their order differed."""
        batches = self.tools.recent.batches
        if len(batches) < 2:
            return False
        with same_random_numbers():
            one, other = (self.tools.engine.probe(batch) for batch in batches[-2:])
        return same_loss(one, other)

    @property
    def comes_back(self) -> bool:
        exact = self.predictability.same_batch if self.leaps.exact is None else self.leaps.exact
        return self.leaps.possible and exact
