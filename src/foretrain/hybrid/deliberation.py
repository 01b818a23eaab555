"""Deliberation: from what was measured to what to do next. It knows no weights, so it can be tried without any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretrain.config import Config
from foretrain.engine.world import World
from foretrain.events import Phase
from foretrain.health.act import Action, Kind, Outcome
from foretrain.hybrid.appraisal import WINDOWS_TO_SCORE, Appraiser
from foretrain.hybrid.correction import Correction
from foretrain.hybrid.cycle import Cycle, Transition, View
from foretrain.hybrid.gate import Answer
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.moves.base import MoveKind, Outlook
from foretrain.hybrid.oversight import Oversight
from foretrain.hybrid.plan import Decision, Plan
from foretrain.hybrid.resting import Rest
from foretrain.hybrid.scorekeeper import Scorekeeper
from foretrain.motion.observer import Observer
from foretrain.motion.records import PhaseRecord, WindowRecord
from foretrain.persist.stateful import entry, from_plain, plain

_WINDOWS_AWAKE = 10
"""Windows that are watched after a long rest. Chosen: forecasts of every length are scored again within them."""
_WATCHED_IN_VAIN = 0.1
"""Share of a run's windows that are watched though nothing will be tried. Chosen: enough to say how predictable the run
is, at a tenth of what watching costs."""
_PARTS = ("cycle", "guard", "recovery", "gate", "bandit", "confidence", "correction", "predictability", "score", "rest")


class Deliberation:
    """Learns from windows and judgements, and decides what follows."""

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
        self.correction = Correction(config.correction)
        self.slope = observer.losses
        self.score = Scorekeeper(self.appraiser)
        self.rest = Rest(config, observer)
        self.kinds: list[MoveKind] = []
        """Kinds of moves, in the order in which they are asked."""
        self.decision: Decision | None = None
        """The move that the next batch begins with, or that is open."""
        self.last_reason = "the run has just begun"

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
            self.correction.observe(followed, forecast.at(followed.horizon))
            right = quality.cosine > 0 if self.appraiser.searches else quality.r2 > 0
            self.appraiser.learn(forecast, followed.horizon, right, weight=0.25)
        return self.world.agree(actions, "what a window shows")

    def rested(self, step: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """(loss, gradient norm) of all steps of a rest since the last look."""
        return self.world.agree(self.oversight.check_rest(step, numbers, fp16), "what a rest shows")

    def wake(self) -> None:
        """A rest is over: a whole FULL phase is watched before anything is decided. Where every move is searched the
        last windows are enough."""
        if self.off:
            return
        watched = WINDOWS_TO_SCORE * self.config.hybrid.window_steps
        self.cycle.begin_anew(self.cycle.full_steps_needed - watched if self.appraiser.judged_on_probes else 0)
        self.observer.restart()
        self.hold_directions()

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
            found = self.appraiser.weigh(step, forecast, steps_left, cycle.predict_steps_left, trend, ready, exact)
            confidence, answer, decision = found.confidence, found.answer, found.decision
        elif self._watched_enough or not self.observer.trajectory.held:
            dear = self.gate.too_dear(self.appraiser.audit_cost)
            over = self._watched_enough or cycle.phase is Phase.FULL
            reason = "there is no memory for directions" if self.rest.no_room else dear
            answer = Answer(False, False, reason, rest=over, long=over)
        on_probes = self.appraiser.judged_on_probes
        view = View(
            step=step,
            loss_stable=self.guard.loss_stable or on_probes,
            baseline_recorded=self.guard.baseline_recorded or on_probes,
            confidence=confidence,
            confidence_threshold=self.recovery.threshold,
            recent_divergence=self.guard.recent_divergence,
            exact=exact,
            gate_open=answer.open,
            gate_reason=answer.reason,
            nothing_to_try=answer.long,
        )
        view, answer, decision = self.world.agree((view, answer, decision), "the decision")
        transition = cycle.next(view)
        self.last_reason = transition.reason
        if transition.phase is Phase.PREDICT and decision is not None:
            self._choose(decision, transition)
        elif self._cycle_is_over() or (transition.changed and answer.long) or (on_probes and answer.rest):
            self._next_cycle(step, view.confidence, answer)
        return transition

    def _proposed(self, step: int, steps_left: int, trend: int) -> Transition | None:
        """The way into PREDICT for a kind of move that wants to make one now, whatever is forecast."""
        outlook = Outlook(step, steps_left, self.appraiser.judged_at_once, trend)
        warm = self.cycle.phase is Phase.FULL
        asked = (kind for kind in self.kinds if warm or kind.at_once)
        found = ((decision, kind.at_once) for kind in asked if (decision := kind.propose(outlook)) is not None)
        decision, at_once = self.world.agree(next(found, (None, False)), "the proposal")
        diverged = self.guard.recent_divergence and not at_once
        view = View(step, confidence=1.0, recent_divergence=diverged, exact=at_once, at_once=at_once, gate_open=True)
        if decision is None or not self.cycle.decide(view).changed:
            return None
        if decision.horizon + self.appraiser.correct_steps(decision.audited) > steps_left:
            return None  # its validation would run past the end
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
            for action in self.recovery.cycle_ended(self.cycle.number, Outcome.LOW_CONFIDENCE):
                self._apply_to_cycle(action, step)
        self.cycle.next_cycle()

    # --- what follows on a decision ---

    def plan(self) -> Plan:
        """The move that was decided for, with what is known of the run now."""
        return self.appraiser.plan(self._decided, self.oversight.tolerance)

    @property
    def _decided(self) -> Decision:
        if self.decision is None:
            raise RuntimeError("nothing is forecast")  # PREDICT is entered with a decision only
        return self.decision

    def after_judgement(self, step: int, plan: Plan, judgement: Judgement) -> Transition:
        """A move was judged: everyone who can learn from it does."""
        self.score.learn_from(step, plan, judgement)
        transition = self.cycle.next(View(0, worse_than_anchor=not judgement.kept, correct_done=True))
        self.last_reason = transition.reason
        return transition

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
        """Carry out what is not left to `Hybrid.carry_out`: counts, the cycle and the predictor."""
        if action.kind is not Kind.CONTINUE:
            self._apply_to_cycle(action, step)
        if action.kind is Kind.RESET_PREDICTOR:
            self.observer.guarded.reset()

    # --- state ---

    def state_dict(self, directions: bool = True) -> dict[str, Any]:
        """directions: with those that moves are made of, which are large."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        own = {"last_reason": self.last_reason, "decision": plain(self.decision)}
        return parts | own | {"observer": self.observer.state_dict(directions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back."""
        for name in (*_PARTS, "observer"):
            getattr(self, name).load_state_dict(entry(state, name, "Policy"))
        self.last_reason = str(entry(state, "last_reason", "Policy"))
        self.decision = from_plain(Decision | None, entry(state, "decision", "Policy"), "Policy.decision")
