"""One move from its snapshot to its judgement: leap or rollout, validation, audit, rollback."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, tensors_of
from foretrain.engine.engine import Engine
from foretrain.engine.fence import Failure, OwnCodeError
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.host import add_each, copy_each
from foretrain.engine.step import StepOutput
from foretrain.events import Event, Moved, Notice, Phase, Recovered
from foretrain.health.act import Action, Kind
from foretrain.health.signs import StepReading
from foretrain.hybrid.cycle import View
from foretrain.hybrid.exact_gain import Point
from foretrain.hybrid.failures import heed
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.judges.audit import Forks
from foretrain.hybrid.judges.held_out import Unseen
from foretrain.hybrid.judges.probes import Probes
from foretrain.hybrid.ledger import Audit
from foretrain.hybrid.moves import leap
from foretrain.hybrid.moves.chain import EXACT, Chain
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.moves.move import Move, unpack_move
from foretrain.hybrid.moves.obstacles import in_words, not_repeatable
from foretrain.hybrid.moves.products import Products
from foretrain.hybrid.policy import Pilot
from foretrain.hybrid.snapshot import Safety
from foretrain.motion.trajectory import basis_type
from foretrain.persist.codec import random_state, restore_random_state
from foretrain.persist.stateful import plain

_BATCHES_OF_AUDIT = 4
"""On which the forks of an audit are compared: the last of a window, and the one that the move begins with."""
_MOST_WORTH = 10.0
"""Full steps that one quasi-Newton leap is taken to be worth at the most, whatever the slope says."""
_FIRST_HELD_OUT = 0.25
"""Share with which a search on held-out examples begins: where not even that helps the rate is good, and two probes
are all that is lost."""
_LONGEST_CHAIN = 10
"""Times `max_predict_steps`: leaps of a chain take a gradient each and are judged one by one."""


class Mover:
    """Acts in PREDICT and CORRECT."""

    def __init__(
        self, engine: Engine, pilot: Pilot, emit: Callable[[Event], None], look_ahead: LookAhead | None = None
    ) -> None:
        self.engine = engine
        self.pilot = pilot
        self.emit = emit
        self.trajectory = pilot.observer.trajectory
        self.safety = Safety(engine, pilot, look_ahead)
        self.probes = Probes(engine, pilot, self.safety)
        self.unseen = Unseen(engine, pilot, self.safety)
        self.forks = Forks(engine, pilot, self.safety, lambda batch: self._probe(batch))  # noqa: PLW0108 - looked up anew, as benchmarks replace it
        self.move: Move | None = None
        hybrid = pilot.config.hybrid
        self.products = Products.of(engine.model, self.trajectory.parameters) if hybrid.space == "product" else None
        pairs = hybrid.secant_pairs if hybrid.mode == "leap" else 0
        self.chain = Chain(engine, pairs, hybrid.secant_memory_mb, _LONGEST_CHAIN * hybrid.max_predict_steps)
        self.end_loss: float | None = None
        """Of the training batch, where the run went back to a lower point at its end."""
        self.undone_leaps = 0
        """By the last step of a chain."""
        self._recent: list[Any] = []
        self._outputs: list[Tensor] = []

    @property
    def open_move(self) -> Move:
        if self.move is None:
            raise RuntimeError("no move is open")  # there is one in PREDICT and CORRECT
        return self.move

    # --- while full steps go on --------------------------------------------------------------------------------------

    def remember(self, batch: Any) -> None:
        """The last batches of a window, to compare the forks of an audit on. A loop may fill one buffer over and over,
        so they are copied."""
        if self.trajectory.steps > self.trajectory.window - _BATCHES_OF_AUDIT:
            copied = map_tensors(batch, lambda tensor: tensor.clone())
            self._recent = [*self._recent, copied][-(_BATCHES_OF_AUDIT - 1) :]

    def watching(self) -> tuple[StepHook, ...]:
        """What watches the next full step: where noise is low its gradient is remembered for later leaps."""
        if self.pilot.may_chain:
            return (self.chain,) if self.chain.possible else ()
        self.chain.forget()
        return ()

    def same_batch(self) -> bool:
        """Whether steps see the same batch over and over: then the loss is exact."""
        if len(self._recent) < 2:
            return False
        return all(_equal(self._recent[-1], other) for other in self._recent[:-1])

    def compare_batches(self) -> None:
        """Batches may hold the same samples in another order: one probe tells, and chains need no warm-up there."""
        chain, known = self.chain, self.pilot.predictability
        untold = chain.exact is None and known.low_noise and not known.same_batch and len(self._recent) > 1
        if untold and self.pilot.may_chain and chain.ready:
            chain.compare(self._recent[-2])  # the last gradient is of the one after it
            self.pilot.ledger.cost += FORWARD

    def why_no_chain(self) -> str:
        """Where the loss is exact and no leaps will be tried: why, in words, with what to set."""
        known = self.pilot.predictability
        if self.probes.held_out or not known.low_noise:
            return ""
        if self.chain.obstacles:
            return in_words(self.chain.obstacles) if known.same_batch or self._same_loss() else ""
        return not_repeatable() if known.same_batch and self.chain.exact is False else ""

    def _same_loss(self) -> bool:
        """Whether the last two batches give the same loss at the same weights, as if only their order differed."""
        if len(self._recent) < 2:
            return False
        random = random_state()
        try:
            one, other = (self.engine.probe(batch) for batch in self._recent[-2:])
        finally:
            restore_random_state(random)
        return abs(one - other) <= EXACT * abs(other)

    def keep_safe(self) -> None:
        """A snapshot of a healthy run now and then, for emergencies. The first is of the beginning."""
        guard = self.pilot.guard
        calm = self.move is None and guard.since_warning > self.trajectory.window
        if calm and self.safety.due and guard.losses.sound:
            self.safety.take(for_move=False)

    def finish(self, batch: Any) -> None:
        """The run is over. Where the loss is exact it ends at the lowest point that is known, by the held-out loss if
        there is one."""
        if self.move is not None or not self.chain.marked:  # without chains a run ends as the plain loop does
            return
        now = [p.detach().clone() for p in self.trajectory.parameters]
        try:
            self._go_to_lowest(batch)
        except OwnCodeError as error:  # nobody knows which point is the lowest: the run ends where it is
            copy_each(self.trajectory.parameters, now)
            self.fail(error.failure)

    def fail(self, failure: Failure) -> None:
        """A loss that trains does not probe."""
        self.pilot.observer.guarded.strike(failure)
        heed(self.pilot, self.engine.global_step, self.emit)

    def _go_to_lowest(self, batch: Any) -> None:
        judged = self.unseen.loss if self.unseen.active else None
        to_chain, to_evaluation = self.chain.finish(batch, judged), self.unseen.finish()
        went = [losses for losses in (to_chain, to_evaluation) if losses is not None]
        self.end_loss = self.engine.probe(batch) if went else None
        if went and judged is not None:
            where = "at the end of its last chain" if to_evaluation is None else f"at step {self.unseen.step}"
            text = f"{went[-1][1]:.4g} ({where}) instead of {went[0][0]:.4g}"
            self.emit(Notice(f"the run ends with the weights of its lowest held-out loss, {text}", level="info"))

    def evaluated(self, loss: float) -> None:
        """A held-out loss was measured: chains lead far, so the run may come back here in the end."""
        known = self.pilot.predictability
        exact = known.same_batch if self.chain.exact is None else self.chain.exact
        if self.move is None and self.chain.possible and exact:
            self.unseen.note(loss)

    # --- PREDICT -----------------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> Move:
        """The snapshot, the plan and the anchor; refused at once if there is nothing sane to do."""
        if self.move is not None:
            return self.move
        plan = self.pilot.plan()
        chains = self.pilot.may_chain and plan.low_noise and self.pilot.searches and self.chain.ready
        self.safety.take()
        if not chains:  # a chain takes gradients
            self.probes.offload()
        random = random_state()
        move = Move(plan, map_tensors(batch, lambda tensor: tensor.clone()), random, math.nan, self.probes.price(batch))
        self.move = move
        move.anchor = self._probe()
        finite = math.isfinite(move.anchor) and bool(np.isfinite(plan.coefficients).all())
        if not finite:
            self._refuse("the forecast is not a number" if math.isfinite(move.anchor) else "the probe is not a number")
            return move
        self.probes.watch(move.anchor)
        drift = self.pilot.guard.anchor(self.engine.global_step, move.anchor)
        for action in self.pilot.recovery.decide(drift, self.pilot.context()) if drift.symptoms else []:
            self.pilot.apply(action, self.engine.global_step)
        self.safety.wait()
        if chains:
            move.chained = self.chain.begin(batch)
            move.cost += FORWARD
        if plan.low_noise and self.unseen.active:
            self._look_before(move)
        if move.chained:  # without noise there is nothing to average away
            move.plan = replace(plan, correct_steps=self.pilot.config.hybrid.correct_steps)
        elif chains:
            self.probes.offload()
        return move

    def _look_before(self, move: Move) -> None:
        """The held-out loss where the move begins; a chain begins at the point of a gradient."""
        move.cost += self.unseen.price(move.batch)
        if not move.chained:
            move.unseen = self.unseen.loss()
            return
        with self.chain.at_start():
            self.unseen.begin(self.chain.loss)
        move.unseen = self.unseen.lowest
        if self.chain.secant is not None:
            self.chain.secant.best = self.chain.secant.point()

    def leap_on(self, batch: Any) -> StepOutput | None:
        """One leap of a chain; None when no leap lowers the loss any more, or all of them are taken back."""
        move, pilot = self.open_move, self.pilot
        self.undone_leaps = 0
        self.engine.full_step.changing = True
        output = self.chain.leap(batch)
        if output is None and self.chain.leaps == 0 and not self.chain.returned:
            self.chain.end(pilot.slope, refused=True)
            move.cost += self.chain.cost
            self._refuse("no quasi-Newton leap lowers the loss")
            return None
        if output is not None:
            move.moved += 1
            pilot.machine.count(1, limited=False)
            self._count_credit(1)  # it took a gradient and an update
        room = self.engine.planned_steps - self.engine.global_step - move.plan.correct_steps
        over = output is None or self.chain.over(pilot.slope) or room <= 0
        if self.unseen.active:
            over = self._look_inside(move, over) or over
        if over:
            self._end_chain(move, exhausted=output is None)
        return None if move.refused else output

    def _look_inside(self, move: Move, last: bool) -> bool:
        """At the held-out loss, every few leaps; whether it says that the chain is over."""
        unseen, chain = self.unseen, self.chain
        if unseen.look_due(chain.leaps, move.batch, last):
            move.cost += unseen.price(move.batch)
            if unseen.look(chain.leaps, chain.loss) and chain.secant is not None:
                chain.secant.best = chain.secant.point()
        return unseen.over

    def _end_chain(self, move: Move, exhausted: bool) -> None:
        """Where it is, or back where its held-out loss was lowest; if that is where it began, all of it is undone."""
        unseen, chain = self.unseen, self.chain
        spent, judged, back = chain.cost, None, False
        if unseen.active:
            judged, back, move.overfits = unseen.at_end, unseen.risen, unseen.overfits
        if back:
            self.undone_leaps = chain.leaps - unseen.leaps
            chain.go_back(unseen.leaps, unseen.training_loss)
        chain.end(self.pilot.slope, refused=exhausted or move.overfits, unseen=judged)
        move.cost += spent
        if back and unseen.leaps == 0:
            position = self.engine.position
            self._refuse("the held-out loss only rose")
            self.engine.position = position  # data goes on: every batch gives the same loss
        else:
            if back:
                self.safety.go_to_best()
                move.moved = unseen.leaps
            move.loss = chain.loss
            self._leave_predict(View(self.engine.global_step, confidence=1.0, horizon_reached=True, overfits=back))
        self.safety.drop_best()

    def leap(self) -> float | None:
        """The whole horizon at once; None when it is refused."""
        move, start = self.open_move, self.safety.weights()
        displacement = self.trajectory.displacement(move.plan.coefficients)
        moved, probes = False, 0

        def place(share: float) -> None:
            nonlocal moved
            self.trajectory.place(start if moved else None, displacement, share)
            moved = True
            if self.products is not None and share:
                self.products.place(start, displacement, share)

        def probe() -> float:
            nonlocal probes
            probes += 1
            if probes > self.pilot.searches:  # a search hardly ends with its first probe; any other may be the last
                self.probes.bring_back(0)
            return self._probe()

        if self.pilot.searches and self.probes.held_out:
            result = leap.search(place, probe, move.anchor, _FIRST_HELD_OUT, shorter=())
        elif self.pilot.searches:
            result = leap.search(place, probe, move.anchor)
        else:
            result = leap.careful(place, probe, self.pilot.disaster_limit(move.anchor))
        move.cost += self.probes.price(move.batch) * result.probes
        if result.share == 0:
            reason = "no length of the move lowers the loss" if self.pilot.searches else "the loss rose beyond noise"
            self._refuse(reason)
            return None
        if self.engine.average is not None:
            self.engine.average.follow(start)
        move.share, move.loss = result.share, result.loss
        move.moved = max(1, min(round(result.share * move.plan.horizon), move.plan.most))
        self._leave_predict()
        return result.loss

    def roll(self, batch: Any) -> float | None:
        """One predicted step; forward passes on incoming batches watch it. None when the move is undone."""
        move, config = self.open_move, self.pilot.config.hybrid
        forecast, steps_left = move.plan.forecast, move.plan.horizon - move.moved - 1
        if steps_left >= self.pilot.config.memory.return_ahead:
            self.probes.offload()  # it is here after a resumption
        self.probes.bring_back(steps_left)
        step = forecast.at(move.moved + 1) - forecast.at(move.moved)
        displacement = self.trajectory.displacement(step)
        self.engine.full_step.changing = True
        add_each(self.trajectory.parameters, displacement)
        if self.engine.average is not None:
            self.engine.average.shift(displacement, 1.0)
        move.moved += 1
        self.pilot.machine.count(1)
        last = move.moved >= move.plan.horizon
        loss, reset = math.nan, False
        view = View(self.engine.global_step, confidence=1.0, horizon_reached=last)
        if move.moved % config.monitor_interval == 0 or last:
            loss = self._probe(batch)
            move.cost += FORWARD
            expected = float(np.interp(move.moved, (0, *forecast.horizons), (move.anchor, *forecast.loss)))
            confidence = self.pilot.estimate(forecast, move.plan.horizon)
            threshold = min(self.pilot.recovery.threshold, move.plan.confidence)
            verdict, actions = self.pilot.check_move(
                StepReading(self.engine.global_step, Phase.PREDICT, loss, None, expected, confidence, threshold)
            )
            for action in actions:
                reset = reset or action.kind is Kind.RESET_PREDICTOR
                if action.kind is not Kind.RESET_PREDICTOR:  # it comes last: a rollback would bring the old one back
                    self.pilot.apply(action, self.engine.global_step)
            view = View(
                self.engine.global_step,
                confidence=confidence,
                confidence_threshold=threshold,
                horizon_reached=last,
                prediction_error=self.pilot.guard.prediction_error,
                prediction_error_limit=self.pilot.config.guard.prediction_error,
                oscillating=verdict.exit_to is Phase.CORRECT,
                diverged=verdict.exit_to is Phase.FULL,
            )
        leaving = self.pilot.machine.decide(view)
        if not leaving.changed:
            return loss
        if leaving.undo:
            self._refuse(leaving.reason)
            if reset:
                self._reset_predictor("it led to numbers that are not finite")
            return None
        move.loss = self._probe()
        move.cost += self.probes.price(move.batch)
        if move.plan.low_noise and not move.loss < move.anchor:
            self._refuse("the exact loss is no lower than before")
            return None
        self._leave_predict(view)
        return loss if math.isfinite(loss) else move.loss

    def _leave_predict(self, view: View | None = None) -> None:
        """What the move counts, as far as that is known now; then on to CORRECT. `view`: why, if not at the horizon."""
        self.probes.bring_back(-1)
        move, pilot = self.open_move, self.pilot
        if move.chained:
            move.credit = 0  # every leap was counted by itself
        elif move.plan.low_noise:
            move.credit = pilot.exact_credit(move.plan, self._worth(move, move.anchor, move.loss))
        elif not move.plan.audited:
            move.credit = pilot.gate.credit(move.moved)
        if self.pilot.config.hybrid.mode == "leap" and not move.chained:
            pilot.machine.count(move.moved)
        pilot.left_predict(view or View(self.engine.global_step, confidence=1.0, horizon_reached=True))
        if move.plan.low_noise:
            pilot.guard.after_move()
        self._count_credit(move.credit)

    def _worth(self, move: Move, before: float, after: float) -> float:
        """Full steps that the fall of the loss that judges it is worth."""
        most = _MOST_WORTH * max(1, move.moved)
        if self.probes.held_out:
            return self.probes.worth(move.moved, before - after, most)
        steps = self.pilot.worth_exactly(before, after)
        if not move.chained:
            return steps
        uphill = after < before and not steps > 0  # where the optimizer's own steps lead: they never get there
        return most if uphill else min(steps, most)

    def _audited_worth(self, move: Move, before: float, after: float) -> float:
        return min(self._worth(move, before, after), _MOST_WORTH * max(1, move.moved))

    def _count_credit(self, credit: int) -> None:
        self.engine.global_step += credit
        self.pilot.count(credit, Phase.PREDICT)

    def _refuse(self, reason: str) -> None:
        """Take the move back before any full step: the batch it was probed on will be trained on."""
        move, pilot = self.open_move, self.pilot
        move.refused = True
        self.safety.rewind()
        pilot.refused(self.engine.global_step, move.plan, move.cost, move.overfits)
        transition = pilot.machine.force_full(reason)
        pilot.last_reason = reason
        if not np.isfinite(move.plan.coefficients).all():
            self._reset_predictor("its forecast was no number")
        self.move = None
        self._tell(move, "refused", transition.reason, math.nan, 0.0)

    def abandon(self, reason: str) -> Any:
        """Take a move back that something else than its forecast stopped, wherever it is; full steps follow.

        Returns the batch it began with, if it had begun.
        """
        move, pilot = self.move, self.pilot
        self._outputs.clear()
        self.safety.drop_best()
        if move is not None:  # else not even its snapshot was taken
            move.refused = True
            self.safety.rewind()
            pilot.abandoned(move.plan, move.cost + move.steps)
        pilot.machine.force_full(reason)
        pilot.last_reason = reason
        self.move = None
        if move is None:
            return None
        self._tell(move, "refused", reason, math.nan, 0.0)
        return move.batch

    def interrupt(self, reason: str) -> Any:
        """End the open move at once. A chain that lowered the loss stays: each of its leaps was judged by itself.
        Any other move is taken back; returns the batch it began with then."""
        move, pilot = self.open_move, self.pilot
        if move.chained and self.chain.leaps and pilot.machine.phase is Phase.PREDICT:
            self._end_chain(move, exhausted=True)
        if self.move is None:
            return move.batch
        lower = move.chained and self.chain.leaps and move.loss < move.anchor
        if not lower:
            return self.abandon(reason)
        self._outputs.clear()
        pilot.interrupted(move.plan, move.cost)
        pilot.machine.settle(reason)
        pilot.last_reason = reason
        self._keep(move, None)
        self.move = None
        self._tell(move, "kept", reason, move.loss, 0.0)
        return None

    def cover(self) -> None:
        """Others are trained from now on; no move is open. All that was seen of how weights move is forgotten."""
        engine, config, trained = self.engine, self.pilot.config, self.engine.trained
        dtype = basis_type(config.hybrid.basis_type, sum(p.numel() for p in trained.parameters))
        self.pilot.observer.cover(trained.parameters, trained.names, dtype)
        if config.hybrid.space == "product":
            self.products = Products.of(engine.model, self.trajectory.parameters)
        self.chain.cover()
        self.forks.cover()
        self.unseen.forget()
        self.safety.cover()

    def _reset_predictor(self, why: str) -> None:
        action = Action(Kind.RESET_PREDICTOR, f"the predictor starts anew: {why}")
        self.pilot.apply(action, self.engine.global_step)
        self.emit(Recovered(self.engine.global_step, action.kind.value, action.text))

    # --- CORRECT -----------------------------------------------------------------------------------------------------

    def validate(self, batch: Any, full_step: Callable[[Any], StepOutput]) -> StepOutput:
        """A full step that validates the move."""
        move = self.open_move
        output = full_step(batch)
        self.pilot.count(1, Phase.CORRECT)
        self._outputs.extend((output.loss, output.gradient_norm))
        move.steps += 1
        if move.plan.audited:
            move.batches.append(map_tensors(batch, lambda tensor: tensor.clone()))
            if move.steps > move.plan.correct_steps // 2:
                move.mean = self.forks.add(move.mean)
        return output

    @property
    def due(self) -> bool:
        return self.open_move.steps >= self.open_move.plan.correct_steps

    def judge(self, full_step: Callable[[Any], StepOutput]) -> list[Action]:
        """Keep the move or take it back; an audited one against the fork that never made it."""
        move, pilot = self.open_move, self.pilot
        losses = torch.stack([value.float() for value in self._outputs]).tolist()
        self._outputs.clear()
        first = self.engine.global_step - move.steps + 1
        numbers = enumerate(zip(losses[::2], losses[1::2], strict=True), start=first)
        readings = [StepReading(step, Phase.CORRECT, loss, norm) for step, (loss, norm) in numbers]
        actions = pilot.check_validation(readings)
        if move.chained and move.loss < move.anchor and not self._validated_well(move):
            self.chain.return_to_end()  # the optimizer's own steps are too long here
        harmed = not move.chained and any(action.kind is Kind.ROLL_BACK for action in actions)
        if move.plan.low_noise and self.unseen.active and not move.chained:
            move.cost += self.unseen.price(move.batch)
            move.overfits = self.unseen.loss() > move.unseen
        audit = None
        if move.plan.audited and not move.overfits:
            audit = self.forks.compare(move, [*self._recent, move.batch], full_step, partial(self._audited_worth, move))
        if audit is not None:
            kept, worth = audit.gain_steps > 0, audit.gain_steps
            after = audit.loss_with
        else:
            after = self._probe()
            move.cost += self.probes.price(move.batch) * (1 + move.chained)
            kept = after < move.anchor and not harmed and (move.chained or not move.overfits)
            before = min(move.anchor, self.chain.start_loss) if move.chained else move.anchor
            worth = self._worth(move, before, move.loss) if move.plan.low_noise else float(move.credit)
        if not kept and audit is None:
            move.cost += move.steps  # these full steps are taken back
        if kept and move.plan.low_noise:
            self._note_exact(move, after)
        self.probes.remember(after if kept else move.anchor)
        transition = pilot.settled(
            self.engine.global_step, move.plan, kept, worth, move.cost, audit, overfits=move.overfits
        )
        if kept:
            self._keep(move, audit)
        else:
            self._take_back(move, audit)
        self.move = None
        verdict = "rolled back" if not kept else "shrunk" if move.share < 1 else "kept"
        why = "the held-out loss rose; " if move.overfits else ""
        self._tell(move, verdict, why + transition.reason, after, worth)
        actions = [action for action in actions if action.kind is not Kind.ROLL_BACK]
        return actions + pilot.end_cycle(self.engine.global_step, kept)

    def _note_exact(self, move: Move, after: float) -> None:
        """What a kept move did to a loss without noise, for the summary."""
        pilot, engine = self.pilot, self.engine
        if self.probes.held_out or not (move.chained or pilot.predictability.same_batch):
            return
        counted = move.moved if move.chained else move.credit
        before = min(move.anchor, self.chain.start_loss) if move.chained else move.anchor
        start = Point(before, engine.global_step - move.steps - counted, passes=self.safety.taken_at)
        now = Point(after, engine.global_step, engine.clock.seconds, engine.backward_passes)
        pilot.exact.kept(start, move.loss, now, pilot.slope, move.moved, move.chained)

    def _validated_well(self, move: Move) -> bool:
        """The optimizer's own steps after a chain lowered what judges it further."""
        if not self._probe() < move.loss:
            return False
        if not self.unseen.active:
            return True
        move.cost += self.unseen.price(move.batch)
        return not self.unseen.loss() > self.unseen.at_end

    def _keep(self, move: Move, audit: Audit | None) -> None:
        counts = self.pilot.counts
        counts.moves["shrunk" if move.share < 1 else "kept"] += 1
        counts.predicted_steps += move.moved
        if audit is not None and not (move.plan.low_noise or move.chained):
            gain = audit.gain_steps - audit.deviation_steps
            self._count_credit(self.pilot.gate.audited_credit(move.moved, gain))
        self.pilot.observer.restart(new_level=move.chained)

    def _take_back(self, move: Move, audit: Audit | None) -> None:
        """An audited move is already gone: the run stands at the end of the fork without it."""
        counts = self.pilot.counts
        counts.moves["rolled_back"] += 1
        if audit is None:
            self.safety.rewind()
        else:
            self.pilot.observer.restart()

    # --- probes ------------------------------------------------------------------------------------------------------

    def _probe(self, batch: Any = None) -> float:
        return self.probes.loss(self.open_move, batch)

    def _tell(self, move: Move, verdict: str, reason: str, after: float, worth: float) -> None:
        self.emit(
            Moved(
                step=self.engine.global_step,
                horizon=move.moved if move.chained else move.plan.horizon,
                chained=move.chained,
                verdict=verdict,
                share=move.share,
                audited=move.plan.audited,
                anchor=move.anchor,
                predicted_loss=move.plan.predicted_loss,
                loss=after,
                confidence=move.plan.confidence,
                worth_steps=round(worth, 2),
                cost_steps=round(move.cost, 2),
                reason=f"{move.plan.reason}; {reason}",
            )
        )

    def own(self, batch: Any) -> Any:
        """A copy on the device: what comes from a file is a view of it, and not laid out as a batch is."""
        return self.engine.to_device(map_tensors(batch, lambda tensor: tensor.clone()))

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "move": plain(self.move),
            **self.safety.state_dict(),
            "chain": self.chain.state_dict(),
            "recent": self._recent,
            "held_out": self.probes.state_dict(),
            "unseen": self.unseen.state_dict(),
            "outputs": torch.stack([value.float() for value in self._outputs]) if self._outputs else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.trajectory.device
        self.safety.load_state_dict(state, device)
        self.chain.load_state_dict(state["chain"])
        self._recent = [self.own(batch) for batch in state["recent"]]
        self.probes.load_state_dict(state["held_out"])
        self.unseen.load_state_dict(state["unseen"])
        outputs = state["outputs"]
        self._outputs = [] if outputs is None else list(outputs.to(device).clone().unbind())
        self.move = None if state["move"] is None else unpack_move(state["move"], self.own)
        if self.move is not None:
            self.move.mean = self.forks.remembered(self.move.mean)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=False)
    return bool(tensors_of(one)) and all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)
