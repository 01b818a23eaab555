"""The policy: everything between what was measured and what to do next. It touches weights through moves only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretrain.config import Config
from foretrain.engine.fence import Failure, OwnCodeError
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.engine.world import World
from foretrain.events import Moved, Phase, Recovered
from foretrain.health.act import Action, Kind, Outcome
from foretrain.health.signs import StepReading
from foretrain.hybrid.appraisal import WINDOWS_TO_SCORE, Appraiser
from foretrain.hybrid.cycle import Cycle, Transition, View
from foretrain.hybrid.failures import heed
from foretrain.hybrid.gate import Answer
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.moves.base import MoveKind, MoveTools, Outlook
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.oversight import Oversight
from foretrain.hybrid.plan import Decision, Plan
from foretrain.hybrid.resting import Rest
from foretrain.hybrid.scorekeeper import Scorekeeper
from foretrain.motion.observer import Observer
from foretrain.motion.records import PhaseRecord, WindowRecord
from foretrain.motion.trajectory import basis_type
from foretrain.persist.stateful import entry, from_plain, plain

_WINDOWS_AWAKE = 10
"""Windows that are watched after a long rest. Chosen: forecasts of every length are scored again within them."""
_WATCHED_IN_VAIN = 0.1
"""Share of a run's windows that are watched though nothing will be tried. Chosen: enough to say how predictable the run
is, at a tenth of what watching costs."""
_PARTS = ("cycle", "guard", "recovery", "gate", "bandit", "confidence", "predictability")
_PARTS_OF_MOVES = ("snapshots", "recent", "worth", "unseen")


class Policy:
    """Chooses: `watch` a window, `decide`, `open` the move that was decided for, `advance` it, `settle` it."""

    def __init__(self, config: Config, observer: Observer, kind: str, world: World | None = None) -> None:
        """kind: of run, "full weights" or "adapters"."""
        self.config = config
        self.observer = observer
        self.world = world or World()
        self.cycle = Cycle(config.hybrid)
        self.oversight = Oversight(config, self.cycle)
        self.guard, self.recovery = self.oversight.guard, self.oversight.recovery
        self.appraiser = Appraiser(config, observer, kind)
        self.gate, self.bandit = self.appraiser.gate, self.appraiser.bandit
        self.confidence, self.predictability = self.appraiser.confidence, self.appraiser.predictability
        self.slope = observer.losses
        self.score = Scorekeeper(self.appraiser)
        self.rest = Rest(config, observer)
        self.kinds: list[MoveKind] = []
        """Kinds of moves, in the order in which they are asked."""
        self.tools: MoveTools
        """What moves are handed; there is none where nothing but decisions is wanted."""
        self.move: JudgedMove | None = None
        """The open one."""
        self.decision: Decision | None = None
        """What the next batch begins with."""
        self.last_reason = "the run has just begun"
        self.end_loss: float | None = None
        """Of the training batch, where a move led the run to a lower point at its end."""
        self._predictor_harmed = False
        """The open move led to numbers that are not finite."""

    def equip(self, tools: MoveTools, kinds: Sequence[MoveKind]) -> None:
        """From now on moves can be made."""
        self.tools = tools
        self.kinds = list(kinds)

    def add(self, kind: Callable[[MoveTools], MoveKind]) -> MoveKind:
        """Plug in a kind of move: it is asked before all others whether it has a move to propose. To be called before
        the first step, or before a state is loaded."""
        self.kinds.insert(0, kind(self.tools))
        return self.kinds[0]

    @property
    def off(self) -> bool:
        """Nothing is predicted any more in this run, because own code that it needs failed too often."""
        return self.observer.guarded.off

    # --- the end of a window -----------------------------------------------------------------------------------------

    def phase_record(self) -> PhaseRecord:
        cycle = self.cycle
        return PhaseRecord(cycle.phase.value, cycle.steps_in_phase, cycle.number, self.score.since_move)

    def count(self, steps: int, phase: Phase) -> None:
        """Count full steps."""
        self.score.count(steps, phase)
        self.cycle.count(steps)

    def hold_directions(self) -> None:
        """Make room for directions, once there is something that may be made of them."""
        self.rest.hold_directions(self._too_dear, first=self.predictability.windows == 0)

    def watch(self, record: WindowRecord, same_batch: bool, fp16: bool) -> list[Action]:
        """Learn everything that a window teaches. Returns what recovery wants done about it."""
        self.predictability.add(record, same_batch)
        self.hold_directions()
        numbers = list(zip(record.losses, record.gradient_norms, strict=True))
        actions = self.oversight.check_full(record.step - len(numbers) + 1, numbers, fp16)
        for followed, forecast, quality in self.observer.scored:  # would a move by them have been right?
            right = quality.cosine > 0 if self.appraiser.searches else quality.r2 > 0
            self.appraiser.learn(forecast, followed.horizon, right, weight=0.25)
        return self.world.agree(actions)

    def rested(self, step: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """(loss, gradient norm) of all steps of a rest since the last look."""
        return self.world.agree(self.oversight.check_rest(step, numbers, fp16))

    def wake(self) -> None:
        """A rest is over: a whole FULL phase is watched before anything is decided. Where every move is searched the
        last windows are enough."""
        if self.off:
            return
        watched = WINDOWS_TO_SCORE * self.config.hybrid.window_steps
        self.cycle.begin_anew(self.cycle.full_steps_needed - watched if self.appraiser.held_out else 0)
        self.observer.restart()
        self.hold_directions()

    def keep_safe(self) -> None:
        """Take a snapshot of a healthy run now and then, for emergencies. The first is of the beginning."""
        calm = self.move is None and self.guard.since_warning > self.observer.window
        if calm and self.tools.snapshots.due and self.guard.losses.sound:
            self.tools.snapshots.take(for_move=False)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def decide(self, step: int, steps_left: int, trend: int) -> Transition:
        """At the end of a window in WARMUP or FULL: stay, or go on to the next phase.

        trend: of the learning rate, -1 if it falls, 1 if it rises.
        """
        proposed = self._proposed(step, steps_left, trend)
        if proposed is not None:
            return proposed
        forecast, cycle = self.observer.forecast, self.cycle
        ready, exact = any(kind.ready for kind in self.kinds), any(kind.exact for kind in self.kinds)
        confidence, answer, decision = 0.0, Answer(False, False, "nothing is forecast yet"), None
        if forecast is not None and cycle.phase is Phase.FULL:
            found = self.appraiser.weigh(forecast, steps_left, cycle.predict_steps_left, trend, ready, exact)
            confidence, answer, decision = found.confidence, found.answer, found.decision
        elif self._watched_enough or not self.observer.trajectory.held:
            dear = self.gate.too_dear(self.appraiser.audit_cost)
            over = self._watched_enough or cycle.phase is Phase.FULL
            reason = "there is no memory for directions" if self.rest.no_room else dear
            answer = Answer(False, False, reason, rest=over, long=over)
        held_out = self.appraiser.held_out
        view = View(
            step=step,
            loss_stable=self.guard.loss_stable or held_out,
            baseline_recorded=self.guard.baseline_recorded or held_out,
            confidence=confidence,
            confidence_threshold=self.recovery.threshold,
            recent_divergence=self.guard.recent_divergence,
            exact=exact,
            gate_open=answer.open,
            gate_reason=answer.reason,
            nothing_to_try=answer.long,
        )
        view, answer, decision = self.world.agree((view, answer, decision))
        transition = cycle.next(view)
        self.last_reason = transition.reason
        if transition.phase is Phase.PREDICT and decision is not None:
            self._choose(decision, transition)
        elif self._cycle_is_over() or (transition.changed and answer.long) or (held_out and answer.rest):
            self._next_cycle(step, view.confidence, answer)
        return transition

    def _proposed(self, step: int, steps_left: int, trend: int) -> Transition | None:
        """The way into PREDICT for a kind of move that wants to make one now, whatever is forecast."""
        if self.cycle.phase is not Phase.FULL:
            return None
        outlook = Outlook(step, steps_left, self.appraiser.judged_at_once, trend)
        decision = next((found for kind in self.kinds if (found := kind.propose(outlook)) is not None), None)
        decision = self.world.agree(decision)
        view = View(step, confidence=1.0, recent_divergence=self.guard.recent_divergence, gate_open=True)
        room = decision is not None and decision.horizon + self.config.hybrid.correct_steps <= steps_left
        if decision is None or not room or not self.cycle.decide(view).changed:
            return None
        transition = self.cycle.next(view)
        self._choose(decision, transition)
        return transition

    def _choose(self, decision: Decision, transition: Transition) -> None:
        self.last_reason = f"{transition.reason}; {decision.reason}"
        self.decision = replace(decision, reason=self.last_reason)

    @property
    def _too_dear(self) -> bool:
        return self.appraiser.too_dear(self.score.counts.tried)

    @property
    def _watched_enough(self) -> bool:
        """In WARMUP: nothing will be tried, and it is known well enough that nothing will."""
        share = _WATCHED_IN_VAIN * self.appraiser.max_steps / self.config.hybrid.window_steps
        return self._too_dear and self.predictability.noisy and self.predictability.windows >= share

    def _cycle_is_over(self) -> bool:
        """A FULL phase of full length, in which forecasts could be scored."""
        full = self.cycle.phase is Phase.FULL and self.cycle.steps_in_phase >= self.cycle.full_steps_needed
        watched = max(WINDOWS_TO_SCORE, min(self.rest.windows, _WINDOWS_AWAKE))
        return full and (self.appraiser.searches or self.observer.windows >= watched)

    def _next_cycle(self, step: int, confidence: float, answer: Answer) -> None:
        """A FULL phase that does not end in a move is a cycle too: waiting counts in cycles."""
        self.gate.new_cycle()
        self.rest.begin(answer, self.gate, self.appraiser.max_steps)
        if answer.open and confidence <= self.recovery.threshold:
            self.recovery.lacking = confidence
            for action in self.recovery.cycle_ended(step, self.cycle.number, Outcome.LOW_CONFIDENCE):
                self._apply_to_cycle(action, step)
        self.cycle.next_cycle()

    # --- a move ------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The move that was decided for, with what is known of the run now."""
        return self.appraiser.plan(self._decided, self.oversight.tolerance)

    @property
    def _decided(self) -> Decision:
        if self.decision is None:
            raise RuntimeError("nothing is forecast")  # PREDICT is entered with a decision only
        return self.decision

    def open(self, batch: Any) -> JudgedMove:
        """The open move, or the one that was decided for, begun with this batch. It may be refused at once."""
        if self.move is not None:
            return self.move
        decision, plan, spent = self._decided, self.plan(), 0.0
        for kind in self.kinds:
            applies, cost = kind.applies(decision, batch)
            spent += cost
            if applies:
                break
        else:
            raise RuntimeError(f"there is no kind of move for {plan.kind!r}")
        move = self.move = kind.make(plan)
        move.cost += spent
        move.begin(batch)
        if move.refused:
            self._learn_refused(move)
        else:
            for action in self.world.agree(self.oversight.check_anchor(self.tools.engine.global_step, move.anchor)):
                self.apply(action, self.tools.engine.global_step)
        return move

    def advance(self, batch: Any) -> StepOutput | None:
        """One step of the open move. None where the batch was not used: the move was refused, or it is in CORRECT."""
        move = self._open_move
        phase, output = move.phase, move.advance(batch)
        if move.refused:
            self._learn_refused(move)
        elif phase is Phase.CORRECT:
            self.count(1, phase)
        else:
            self._follow(move)
        return output

    def _follow(self, move: JudgedMove) -> None:
        """The cycle follows a move in PREDICT."""
        self.cycle.count(move.made - self.cycle.steps_in_phase, limited=not move.chained)
        if move.view is not None and move.phase is Phase.CORRECT:
            self.last_reason = self.cycle.next(move.view).reason
            if move.plan.low_noise:
                self.guard.after_move()

    def monitor(self, move: JudgedMove, loss: float, expected: float, last: bool) -> tuple[View, Transition]:
        """What to do after a predicted step. loss: of a probe; nan if none was made."""
        step, plan = self.tools.engine.global_step, move.plan
        self._follow(move)
        view = View(step, confidence=1.0, horizon_reached=last)
        if not math.isnan(expected) and plan.forecast is not None:
            confidence = self.appraiser.estimate(plan.forecast, plan.horizon)
            threshold = min(self.recovery.threshold, plan.confidence)
            exit_to, actions = self.oversight.check_predicted(
                StepReading(step, Phase.PREDICT, loss, None, expected, confidence, threshold)
            )
            for action in self.world.agree(actions):
                if action.kind is Kind.RESET_PREDICTOR:  # it comes last: a rollback would bring the old one back
                    self._predictor_harmed = True
                else:
                    self.apply(action, step)
            view = View(
                step,
                confidence=confidence,
                confidence_threshold=threshold,
                horizon_reached=last,
                prediction_error=self.guard.prediction_error,
                prediction_error_limit=self.config.guard.prediction_error,
                oscillating=exit_to is Phase.CORRECT,
                diverged=exit_to is Phase.FULL,
            )
        return self.world.agree((view, self.cycle.decide(view)))

    def settle(self) -> list[Action]:
        """Judge the open move, and keep or undo it. Returns what recovery wants done."""
        move, engine = self._open_move, self.tools.engine
        actions = self.world.agree(self.oversight.check_validation(move.readings()))
        move.harmed = any(action.kind is Kind.ROLL_BACK for action in actions)
        judgement = self.world.agree(move.judge())
        if judgement.kept and move.plan.low_noise:
            self.score.note_exact(move, judgement.loss)
        if self.tools.probes.held_out:
            self.tools.worth.remember_held_out(judgement.loss if judgement.kept else move.anchor)
        transition = self.settled(move.plan, judgement)
        if judgement.kept:
            self.score.kept(move)
            self.tools.count(self.score.audited_credit(move, judgement))
            self.observer.restart(new_level=move.chained)
        else:
            self.score.counts.moves["rolled_back"] += 1
            if judgement.already_undone:
                self.observer.restart()
            else:
                move.undo()
        self.move = None
        verdict = "rolled back" if not judgement.kept else "shrunk" if move.share < 1 else "kept"
        self._tell(move, verdict, judgement.reason + transition.reason, judgement.loss, judgement.worth_steps)
        outcome = Outcome.KEPT if judgement.kept else Outcome.UNDONE
        actions = [action for action in actions if action.kind is not Kind.ROLL_BACK]
        return actions + self.recovery.cycle_ended(engine.global_step, self.cycle.number, outcome)

    def settled(self, plan: Plan, judgement: Judgement) -> Transition:
        """A move was judged: everyone who can learn from it does."""
        self.score.settled(plan, judgement)
        transition = self.cycle.next(View(0, worse_than_anchor=not judgement.kept, correct_done=True))
        self.last_reason = transition.reason
        return transition

    def _learn_refused(self, move: JudgedMove) -> None:
        """The move was refused: full steps follow, first on its own batch."""
        self.score.refused(move.plan, move.cost, move.overfits)
        self._force_full(move.reason)
        coefficients = move.plan.coefficients
        if coefficients is not None and not np.isfinite(coefficients).all():
            self._reset_predictor("its forecast was no number")
        self._tell(move, "refused", move.reason)
        if self._predictor_harmed:
            self._reset_predictor("it led to numbers that are not finite")

    def abandon(self, reason: str) -> Any:
        """Take a move back that something else than its forecast stopped, wherever it is; full steps follow.

        Returns the batch it began with, if it had begun.
        """
        move = self.move
        self.tools.snapshots.drop_best()
        if move is None or move.batch is None:  # not even its snapshot was taken
            self._force_full(reason)
            return None
        move.refuse(reason)
        self.score.spent(move.plan, move.cost + move.steps)
        self.score.counts.moves["refused"] += 1
        self._force_full(reason)
        self._tell(move, "refused", reason)
        return move.batch

    def interrupt(self, reason: str) -> Any:
        """End the open move at once. One that stays without a judgement is kept; any other is taken back, and the batch
        it began with is returned."""
        move = self._open_move
        move.end_now()
        if move.refused:
            self._learn_refused(move)
            return move.batch
        self._follow(move)
        if not move.stays_if_stopped:
            return self.abandon(reason)
        self.score.spent(move.plan, move.cost)
        self.score.ledger.exact_moves += 1
        self.score.kept(move)
        self.cycle.settle(reason)
        self.last_reason, self.move = reason, None
        self.observer.restart(new_level=move.chained)
        self._tell(move, "kept", reason, move.loss)
        return None

    @property
    def _open_move(self) -> JudgedMove:
        if self.move is None:
            raise RuntimeError("no move is open")
        return self.move

    def _force_full(self, reason: str) -> None:
        self.cycle.force_full(reason)
        self.last_reason, self.move = reason, None

    def _tell(self, move: JudgedMove, verdict: str, reason: str, loss: float = math.nan, worth: float = 0.0) -> None:
        self.tools.emit(
            Moved(
                step=self.tools.engine.global_step,
                horizon=move.horizon,
                chained=move.chained,
                verdict=verdict,
                share=move.share,
                audited=move.plan.audited,
                anchor=move.anchor,
                predicted_loss=move.plan.predicted_loss,
                loss=loss,
                confidence=move.plan.confidence,
                worth_steps=round(worth, 2),
                cost_steps=round(move.cost, 2),
                reason=f"{move.plan.reason}; {reason}",
            )
        )

    # --- recovery ----------------------------------------------------------------------------------------------------

    def _apply_to_cycle(self, action: Action, step: int) -> None:
        """The part of an action that changes no weight."""
        self.score.counts.recovered(action.kind)
        if action.kind is Kind.SHORTEN_HORIZON:
            self.bandit.shorten()
        if action.kind is Kind.FORCE_FULL:
            if self.cycle.phase is Phase.FULL:
                self.cycle.force_full(action.text)
            if action.full_steps_factor > 1:
                self.cycle.lengthen_full(action.full_steps_factor)
            if action.warmup_factor > 1:
                self.cycle.postpone(step + (action.warmup_factor - 1) * self.config.hybrid.warmup_steps)

    def apply(self, action: Action, step: int) -> None:
        """Carry out the part of an action that is not the trainer's."""
        if action.kind is not Kind.CONTINUE:
            self._apply_to_cycle(action, step)
        if action.kind is Kind.RESET_PREDICTOR:
            self.observer.guarded.reset()

    def _reset_predictor(self, why: str) -> None:
        self._predictor_harmed = False
        step = self.tools.engine.global_step
        action = Action(Kind.RESET_PREDICTOR, f"the predictor starts anew: {why}")
        self.apply(action, step)
        self.tools.emit(Recovered(step, action.kind.value, action.text))

    def recover(self) -> None:
        """Go back to the last healthy state in an emergency."""
        self.tools.snapshots.recover()
        self.observer.restart()

    def fail(self, failure: Failure) -> None:
        """A loss that trains does not probe."""
        self.observer.guarded.strike(failure)
        self.heed()

    def heed(self) -> None:
        """Tell of failures of own code that prediction needs."""
        heed(self.observer.guarded, self.score.counts, self.tools.engine.global_step, self.tools.emit)

    # --- the run -----------------------------------------------------------------------------------------------------

    def watching(self) -> tuple[StepHook, ...]:
        """What watches the next full step, for moves that need to know more of it."""
        return tuple(hook for kind in self.kinds for hook in kind.watching())

    def prepare(self) -> None:
        """In WARMUP: kinds of moves find out what they have to know."""
        self.score.ledger.cost += math.fsum(kind.prepare() for kind in self.kinds)

    def obstacles(self) -> list[str | None]:
        """What keeps kinds of moves off."""
        return [kind.obstacle() for kind in self.kinds]

    def evaluated(self, loss: float) -> None:
        """A held-out loss was measured."""
        if self.move is None:
            for kind in self.kinds:
                kind.evaluated(loss)

    def finish(self, batch: Any) -> None:
        """The run is over."""
        try:
            for kind in self.kinds if self.move is None else ():
                loss = kind.finish(batch)
                self.end_loss = loss if loss is not None else self.end_loss
        except OwnCodeError as error:
            self.fail(error.failure)

    def cover(self) -> None:
        """Others are trained from now on; no move is open. All that was seen of how weights move is forgotten."""
        trained = self.tools.engine.trained
        dtype = basis_type(self.config.hybrid.basis_type, sum(p.numel() for p in trained.parameters))
        self.observer.cover(trained.parameters, trained.names, dtype)
        for kind in self.kinds:
            kind.cover()
        self.tools.forks.cover()
        self.tools.snapshots.cover_trained()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, directions: bool = True) -> dict[str, Any]:
        """directions: with those that moves are made of, which are large."""
        state: dict[str, Any] = {name: getattr(self, name).state_dict() for name in (*_PARTS, "score", "rest")}
        state |= {"observer": self.observer.state_dict(directions), "last_reason": self.last_reason}
        state["decision"] = plain(self.decision)
        if not hasattr(self, "tools"):
            return state
        state |= {name: getattr(self.tools, name).state_dict() for name in _PARTS_OF_MOVES}
        state["kinds"] = {kind.name: kind.state_dict() for kind in self.kinds}
        move = self.move
        state["move"] = None
        if move is not None:
            state["move"] = {"kind": move.kind, "plan": plain(move.plan), "state": move.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in (*_PARTS, "score", "rest", "observer"):
            getattr(self, name).load_state_dict(entry(state, name, "Policy"))
        self.last_reason = str(entry(state, "last_reason", "Policy"))
        self.decision = from_plain(Decision | None, entry(state, "decision", "Policy"), "Policy.decision")
        if not hasattr(self, "tools"):
            return
        for name in _PARTS_OF_MOVES:
            getattr(self.tools, name).load_state_dict(entry(state, name, "Policy"))
        for kind in self.kinds:
            if kind.name in state["kinds"]:
                kind.load_state_dict(state["kinds"][kind.name])
        self.move = self._loaded_move(entry(state, "move", "Policy"))

    def _loaded_move(self, saved: Any) -> JudgedMove | None:
        if saved is None:
            return None
        plan = from_plain(Plan, entry(saved, "plan", "Policy.move"), "Policy.move.plan")
        kinds = [kind for kind in self.kinds if kind.name == saved["kind"]]
        if not kinds:
            raise ValueError(f"a move of the kind {saved['kind']!r} is open, and nobody makes such moves here")
        move = kinds[0].make(plan)
        move.load_state_dict(entry(saved, "state", "Policy.move"))
        return move
