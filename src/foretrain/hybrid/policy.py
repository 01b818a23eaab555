"""The policy: opens the move that was decided for, advances it, settles it. Only moves touch the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from foretrain.config import Config
from foretrain.engine.fence import Failure, OwnCodeError
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.engine.world import World
from foretrain.events import Phase, PhaseChanged, Recovered
from foretrain.health.act import Action, Kind, Outcome
from foretrain.health.signs import StepReading
from foretrain.hybrid.cycle import Transition, View
from foretrain.hybrid.deliberation import Deliberation
from foretrain.hybrid.failures import heed
from foretrain.hybrid.moves.base import MoveKind, MoveTools
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.obstacles import KeptOff
from foretrain.hybrid.plan import Plan
from foretrain.motion.observer import Observer
from foretrain.motion.trajectory import basis_type
from foretrain.persist.stateful import entry, from_plain, plain

_SAVED_TOOLS = ("snapshots", "recent", "worth", "held_out")


class Policy(Deliberation):
    """Chooses, and carries out what it chose: `decide`, `open` the move that was decided for, `advance`, `settle`."""

    tools: MoveTools
    """What moves are handed."""

    def __init__(self, config: Config, observer: Observer, kind: str, world: World | None = None) -> None:
        super().__init__(config, observer, kind, world)
        self.move: JudgedMove | None = None
        """The open one."""
        self.end_loss: float | None = None
        """Loss of the training batch, where a move led the run to a lower point at its end."""
        self.left_out: Callable[[], KeptOff | str] = lambda: ""
        """Tells of moves whose kind is not among those that this run can make."""
        self.new_level: Callable[[], None] = lambda: None
        """Called when a chain of leaps was kept: losses of before it say nothing of where the run is. Set by the
        trainer."""
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

    # --- a move ------------------------------------------------------------------------------------------------------

    def open(self, batch: Any) -> JudgedMove:
        """The open move, or the one that was decided for, begun with this batch. It may be refused at once."""
        if self.move is not None:
            return self.move
        decision, plan, spent = self._decided, self._of_first(self.plan()), 0.0
        for kind in self.kinds:
            applies, cost = kind.applies(decision, batch)
            spent += cost
            if applies:
                break
        else:
            raise RuntimeError(f"there is no kind of move for {plan.kind!r}")
        move = self.move = kind.make(plan)
        move.cost += spent
        try:
            move.begin(batch)
        except BaseException:
            if move.batch is None:  # not even its snapshot was taken
                self.move = None
            raise
        if move.refused:
            self._learn_refused(move)
        else:
            for action in self.world.agree(
                self.oversight.check_anchor(self.tools.engine.progress.global_step, move.anchor),
                "what the anchor shows",
            ):
                self.apply(action, self.tools.engine.progress.global_step)
        return move

    def _of_first(self, plan: Plan) -> Plan:
        """The move that all ranks make: solved on the host, its coefficients could differ in the last bits."""
        if plan.coefficients is None or self.world.size == 1:
            return plan
        return replace(plan, coefficients=self.world.of_first(plan.coefficients))

    def advance(self, batch: Any) -> StepOutput | None:
        """One step of the open move. None where the batch was not used: the move was refused, or, as chains do, it came
        to its end in this call without a step."""
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

    def monitor(self, move: JudgedMove, loss: float, expected: float | None, last: bool) -> tuple[View, Transition]:
        """What to do after a predicted step. loss: of a probe; expected: what was forecast, None if none was made."""
        step, plan = self.tools.engine.progress.global_step, move.plan
        self._follow(move)
        view = View(step, confidence=1.0, horizon_reached=last)
        if expected is not None and plan.forecast is not None:
            confidence = self.appraiser.estimate(plan.forecast, plan.horizon)
            threshold = min(self.recovery.threshold, plan.confidence)
            exit_to, actions = self.oversight.check_predicted(
                StepReading(step, Phase.PREDICT, loss, None, expected, confidence, threshold)
            )
            for action in self.world.agree(actions, "what a predicted step shows"):
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
        return self.world.agree((view, self.cycle.decide(view)), "a predicted step")

    def settle(self) -> list[Action]:
        """Judge the open move, and keep or undo it; an audit has gone to the better fork already. Returns what recovery
        wants done."""
        move, engine = self._open_move, self.tools.engine
        actions = self.world.agree(self.oversight.check_validation(move.readings()), "what validating steps show")
        move.harmed = any(action.kind is Kind.ROLL_BACK for action in actions)
        judgement = self.world.agree(move.judge(), "the judgement")
        if judgement.kept and move.plan.low_noise:
            self.score.note_exact(move, judgement.loss)
        if self.tools.probes.batches:
            self.tools.worth.remember_probes(judgement.loss if judgement.kept else move.anchor)
        transition = self.after_judgement(engine.progress.global_step, move.plan, judgement)
        if judgement.kept:
            self.score.kept(move)
            self.tools.count(self.score.audited_credit(move, judgement))
            self.observer.restart(new_level=move.chained)
            if move.chained:
                self.new_level()
        else:
            self.score.counts.moves["rolled_back"] += 1
            if judgement.stands_at_fork:
                self.observer.restart()
            else:
                move.undo()
        self.move = self.decision = None
        self._kind_of(move).ended(move, judgement)
        verdict = "rolled back" if not judgement.kept else "shrunk" if move.share < 1 else "kept"
        reason = judgement.reason + transition.reason
        self.tools.emit(move.told(verdict, reason, judgement.loss, judgement.worth_steps))
        outcome = Outcome.KEPT if judgement.kept else Outcome.UNDONE
        actions = [action for action in actions if action.kind is not Kind.ROLL_BACK]
        return actions + self.recovery.cycle_ended(self.cycle.number, outcome)

    def _learn_refused(self, move: JudgedMove) -> None:
        """The move was refused: full steps follow, first on its own batch."""
        self._kind_of(move).ended(move, None)
        self.score.refused(self.tools.engine.progress.global_step, move.plan, move.cost, move.overfits)
        self._force_full(move.reason)
        coefficients = move.plan.coefficients
        if coefficients is not None and not np.isfinite(coefficients).all():
            self._reset_predictor("its forecast was no number")
        self.tools.emit(move.told("refused", move.reason))
        if self._predictor_harmed:
            self._reset_predictor("it led to numbers that are not finite")

    def abandon(self, reason: str) -> Any:
        """Undo a move that something else than its forecast stopped, wherever it is; full steps follow.

        Returns the batch it began with, if it had begun.
        """
        move = self.move
        self.tools.snapshots.drop_best()
        if move is None:  # it had not begun
            self._force_full(reason)
            return None
        move.refuse(reason)
        self.score.spent(move.plan, move.cost + move.steps)
        self.score.counts.moves["refused"] += 1
        self._force_full(reason)
        self.tools.emit(move.told("refused", reason))
        return move.batch

    def interrupt(self, reason: str) -> Any:
        """End the open move at once. One that stays without a judgement is kept; any other is undone, and the batch
        it began with is returned."""
        move = self._open_move
        move.end_now()
        if move.refused:
            self._learn_refused(move)
            return move.batch
        if self.cycle.phase is Phase.PREDICT:
            self._follow(move)
        if not move.stays_if_stopped:
            return self.abandon(reason)
        self.score.spent(move.plan, move.cost)
        self.score.ledger.exact_moves += 1
        self.score.kept(move)
        self.cycle.keep_unjudged(reason)
        self.last_reason, self.move, self.decision = reason, None, None
        self.observer.restart(new_level=move.chained)
        self.tools.emit(move.told("kept", reason, move.loss))
        return None

    def _kind_of(self, move: JudgedMove) -> MoveKind:
        return next(kind for kind in self.kinds if kind.name == move.kind)

    @property
    def _open_move(self) -> JudgedMove:
        if self.move is None:
            raise RuntimeError("no move is open")
        return self.move

    def _force_full(self, reason: str) -> None:
        self.cycle.force_full(reason)
        self.last_reason, self.move, self.decision = reason, None, None

    def tell_phase(self) -> None:
        """The run is in another phase now."""
        step = self.tools.engine.progress.global_step
        self.tools.emit(PhaseChanged(step, self.cycle.phase.value, self.last_reason))

    # --- emergencies -------------------------------------------------------------------------------------------------

    def keep_safe(self) -> None:
        """Take a snapshot of a healthy run now and then, for emergencies. The first is of the beginning."""
        calm = self.move is None and self.guard.since_warning > self.observer.window
        if calm and self.tools.snapshots.due and self.guard.losses.sound:
            self.tools.snapshots.take(for_move=False)

    def _reset_predictor(self, why: str) -> None:
        self._predictor_harmed = False
        step = self.tools.engine.progress.global_step
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
        heed(self.observer.guarded, self.score.counts, self.tools.engine.progress.global_step, self.tools.emit)

    # --- the run -----------------------------------------------------------------------------------------------------

    def watching(self) -> tuple[StepHook, ...]:
        """What watches the next full step, for moves that need to know more of it."""
        return tuple(hook for kind in self.kinds for hook in kind.watching())

    def prepare(self) -> None:
        """In WARMUP: kinds of moves find out what they have to know."""
        self.score.ledger.cost += math.fsum(kind.prepare() for kind in self.kinds)

    def obstacles(self) -> list[KeptOff | str | None]:
        """What keeps kinds of moves off."""
        return [*(kind.obstacle() for kind in self.kinds), self.left_out()]

    def evaluated(self, loss: float) -> None:
        """A held-out loss was measured."""
        if self.move is None:
            for kind in self.kinds:
                kind.evaluated(loss)

    @contextmanager
    def at_lower_end(self) -> Iterator[None]:
        """Inside the block: the weights that the run would go back to, if it ended now."""
        with ExitStack() as entered:
            if self.move is None and self.tools.engine.average is None:
                for kind in self.kinds:
                    entered.enter_context(kind.at_lower_end())
            yield

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
        self.correction.forget()
        for kind in self.kinds:
            kind.cover()
        self.tools.forks.cover()
        self.tools.snapshots.cover_trained()
        self.heed()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, directions: bool = True) -> dict[str, Any]:
        state = super().state_dict(directions)
        state |= {name: getattr(self.tools, name).state_dict() for name in _SAVED_TOOLS}
        state["kinds"] = {kind.name: kind.state_dict() for kind in self.kinds}
        move = self.move
        state["move"] = None
        if move is not None:
            state["move"] = {"kind": move.kind, "plan": plain(move.plan), "state": move.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name in _SAVED_TOOLS:
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
