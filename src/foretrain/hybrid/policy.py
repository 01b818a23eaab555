"""The pilot decides, the trainer acts: everything between what was measured and what to do next."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foretrain.config import Config
from foretrain.events import Phase
from foretrain.health import shortage
from foretrain.health.act import Action, Context, Kind, Outcome, Recovery
from foretrain.health.detect import Detector
from foretrain.health.signs import Diagnosis, Severity, StepReading
from foretrain.hybrid.cycle import Machine, Transition, View
from foretrain.hybrid.exact_gain import ExactGain
from foretrain.hybrid.gate import Answer, Ask, Gate, cost_of_audit, no_audit_is_affordable, steps_of_audit
from foretrain.hybrid.horizon import HorizonBandit
from foretrain.hybrid.ledger import Audit, Ledger
from foretrain.motion.confidence import Confidence, ConfidenceFeatures
from foretrain.motion.observer import Observer
from foretrain.motion.predictability import Predictability
from foretrain.motion.predictors.base import Array, Forecast
from foretrain.motion.records import PhaseRecord, WindowRecord
from foretrain.motion.trajectory import LARGEST_FP32_BASIS
from foretrain.persist.stateful import entry

_WINDOWS_TO_SCORE = 2
"""Windows after a move until a forecast has met what followed."""
_WINDOWS_AWAKE = 10
"""Windows that are watched after a long rest, so that forecasts of every length are scored again."""
_WATCHED_IN_VAIN = 0.1
"""Share of a run's windows that are watched though nothing will be tried, to say how predictable the run is."""
_NEARLY_EXACT = 0.98
"""R2 from which forecasts are steps."""
_OFF = "own code that it needs failed twice (see OwnCodeFailed in metrics.jsonl)"
_LONGEST_REST = 256
"""Windows; a short run rests an eighth of its length at the most, unless nothing will ever be tried."""
NEED_A_REASON = LARGEST_FP32_BASIS
"""Trained parameters up to which directions are kept in the warm-up though nothing will be tried, only to say how
predictable the run is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A move that is about to be made."""

    horizon: int
    audited: bool
    coefficients: Array
    """[G, R] at the horizon."""
    forecast: Forecast
    predicted_loss: float
    confidence: float
    low_noise: bool
    most: int
    """Steps that the move may count at the most."""
    correct_steps: int
    reason: str


@dataclass
class Counts:
    """What the summary counts."""

    steps: dict[str, int] = field(default_factory=lambda: {phase.value: 0 for phase in Phase})
    """Virtual steps per phase; together `global_step`."""
    moves: dict[str, int] = field(default_factory=lambda: {"kept": 0, "shrunk": 0, "refused": 0, "rolled_back": 0})
    predicted_steps: int = 0
    """Steps ahead that all kept moves went, whatever they turned out to be worth."""
    recoveries: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Kind if kind != "continue"})
    rollbacks: int = 0
    """In an emergency; a move that is undone is none."""
    undone_steps: int = 0
    """Steps that they made necessary once more."""

    @property
    def tried(self) -> int:
        return sum(self.moves.values())

    @property
    def acceptance_rate(self) -> float:
        return (self.moves["kept"] + self.moves["shrunk"] + 1) / (self.tried + 2)


class Pilot:
    """All of control in one place; it never touches a weight."""

    def __init__(self, config: Config, observer: Observer, kind: str) -> None:
        self.config = config
        self.observer = observer
        hybrid = config.hybrid
        self.machine = Machine(hybrid)
        self.guard = Detector(hybrid, config.guard)
        self.recovery = Recovery(hybrid, config.guard)
        self.gate = Gate(config.max_steps, config.audit.time_budget, kind)
        self.bandit = HorizonBandit(hybrid.max_predict_steps, hybrid.window_steps)
        self.confidence = Confidence()
        self.predictability = Predictability(observer.losses)
        self.slope = observer.losses
        self.ledger = Ledger()
        self.exact = ExactGain()
        self.counts = Counts()
        self.max_steps = config.max_steps
        self.falls_once = config.schedule.type in ("wsd", "cosine")
        """The learning rate falls once, to the end of the run."""
        self.held_out = False
        """Moves are judged on tokens that are never trained on, always the same ones."""
        self.unseen = False
        """Where the loss is exact, held-out data judges moves, too."""
        self.last_reason = "the run has just begun"
        self._chosen: tuple[int, bool, int] = (0, False, 0)
        """Horizon, audited, longest move that fits into the run."""
        self._since_move = 0
        self.rest_steps = 0
        """Full steps for which the weights are not watched, because nothing would come of it."""
        self._last_rest = 0
        """Windows."""
        self._rests = 0
        """In a row; each is twice as long as the one before."""
        self.no_room = False
        """There was not enough memory for directions when they were wanted."""
        self.off = False
        """Nothing is predicted any more in this run, because the predictor is off: that is saved with it."""

    def plan_for(self, max_steps: int) -> None:
        """The run is so long, as far as is known now."""
        self.max_steps = max_steps
        self.gate.plan_for(max_steps)

    def judge_on_held_out(self) -> None:
        """Such a leap is found or refused with some probes. A rate that is too low shows at once, and a good one makes
        every further try a waste."""
        self.held_out = True
        self.gate.first_wait = self.gate.backoff = 4

    # --- the end of a window -----------------------------------------------------------------------------------------

    def phase_record(self) -> PhaseRecord:
        return PhaseRecord(self.machine.phase.value, self.machine.steps_in_phase, self.machine.cycle, self._since_move)

    def count(self, steps: int, phase: Phase) -> None:
        """Full steps, or virtual steps that a move is worth."""
        self.counts.steps[phase.value] += steps
        if phase is not Phase.PREDICT:
            self.machine.count(steps)
            self._since_move += steps

    def hold_directions(self) -> None:
        """Make room for directions, once there is something that may be made of them."""
        trajectory = self.observer.trajectory
        trained = sum(p.numel() for p in trajectory.parameters)
        if trajectory.held or self.no_room or (trained > NEED_A_REASON and self._too_dear):
            return
        try:
            trajectory.hold()
        except (RuntimeError, MemoryError) as error:
            if self.predictability.windows == 0 or shortage.look_at(error) is None:
                raise
            self.no_room = True  # the run was fine without, and goes on so

    def watch(self, record: WindowRecord, same_batch: bool, fp16: bool) -> list[Action]:
        """Everything a window teaches; what recovery wants done about it."""
        self.predictability.add(record, same_batch)
        self.hold_directions()
        numbers = list(zip(record.losses, record.gradient_norms, strict=True))
        actions = self._check_full(record.step - len(numbers) + 1, numbers, fp16)
        self._learn()
        return _once(actions)

    def rest_for_good(self) -> None:
        """Prediction is off: full steps, of which only the losses are looked at. Not while a move is open."""
        self.rest_steps = _LONGEST_REST * self.config.hybrid.window_steps
        self.observer.restart()
        self.observer.trajectory.release()

    def wake(self) -> None:
        """A rest is over: a whole FULL phase is watched before anything is decided. Where every move is searched the
        last windows are enough."""
        if self.off:
            return
        watched = _WINDOWS_TO_SCORE * self.config.hybrid.window_steps
        self.machine.steps_in_phase = max(0, self.machine.full_steps_needed - watched) if self.held_out else 0
        self.observer.restart()
        self.hold_directions()

    def rested(self, step: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """(loss, gradient norm) of all steps since the last look. As long as nothing is remarkable this is cheap."""
        losses, norms = [loss for loss, _ in numbers], [norm for _, norm in numbers]
        if self.guard.check_calmly(losses, norms):
            for _ in losses:  # what was taken from the run is given back in time
                self._decide(Diagnosis(step, Severity.NORMAL))
            return []
        return _once(self._check_full(step - len(numbers) + 1, numbers, fp16))

    def _check_full(self, first: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """Full steps one by one, up to an emergency: after it the rest of them never was."""
        actions: list[Action] = []
        for step, (loss, norm) in enumerate(numbers, start=first):
            if fp16 and not (math.isfinite(loss) and math.isfinite(norm)):
                continue  # the loss scale finds its level by overflowing
            actions += self._decide(self.guard.check(StepReading(step, self.machine.phase, loss, norm)))
            if actions and actions[-1].kind in (Kind.ROLL_BACK, Kind.ABORT):
                break
        return actions

    def _decide(self, verdict: Diagnosis, move_open: bool = False, predicted: bool = False) -> list[Action]:
        context = Context(self.machine.phase, move_open, predicted, skipped=self.config.guard.nan_check)
        return self.recovery.decide(verdict, context)

    def _learn(self) -> None:
        """Forecasts that just met what followed: would a move by them have been right?"""
        for followed, forecast, quality in self.observer.scored:
            features = self._features(forecast, followed.horizon)
            right = quality.cosine > 0 if self.searches else quality.r2 > 0
            self.confidence.learn(features, kept=right, weight=0.25)

    # --- may we predict? ---------------------------------------------------------------------------------------------

    def decide(
        self, step: int, steps_left: int, trend: int, chained: bool = False, exact: bool | None = None
    ) -> Transition:
        """At the end of a window in WARMUP or FULL: stay, or go on to the next phase.

        trend: of the learning rate, -1 if it falls, 1 if it rises; chained: pairs for quasi-Newton leaps are there;
        exact: whether the loss turned out to be, if that was tried.
        """
        forecast = self.observer.forecast
        chained = chained and self.predictability.low_noise
        exact = chained and (self.predictability.same_batch if exact is None else exact)
        needed = self._correct_steps(True)
        confidence, answer = 0.0, Answer(False, False, "nothing is forecast yet")
        if forecast is not None and self.machine.phase is Phase.FULL:
            limit = min(self.machine.predict_steps_left, steps_left - needed)
            confidence = self.estimate(forecast, min(limit, self.config.hybrid.max_predict_steps))
            horizon = self.bandit.choose(confidence, limit) if limit >= 1 else 0
            confidence = self.estimate(forecast, horizon) if horizon else confidence
            answer = self.gate.ask(self._question(horizon, steps_left, needed, trend, chained, exact))
            if not self.searches and self.observer.windows < _WINDOWS_TO_SCORE:
                answer = Answer(False, False, "forecasts since the last move are not scored yet")
            if self.held_out or (self.unseen and self.judged_at_once):  # an audit would judge by what is trained on
                answer = replace(answer, audited=False)
            self._chosen = (horizon, answer.audited, limit)
        elif self._watched_enough or not self.observer.trajectory.held:
            reason = "there is no memory for directions" if self.no_room else self.gate.too_dear(self._audit_cost)
            over = self._watched_enough or self.machine.phase is Phase.FULL
            answer = Answer(False, False, reason, rest=over, long=over)
        transition = self.machine.next(
            View(
                step=step,
                loss_stable=self.guard.loss_stable or self.held_out,
                baseline_recorded=self.guard.baseline_recorded or self.held_out,
                confidence=confidence,
                confidence_threshold=self.recovery.threshold,
                recent_divergence=self.guard.recent_divergence,
                exact=exact,
                gate_open=answer.open,
                gate_reason=answer.reason,
                nothing_to_try=answer.long,
            )
        )
        self.last_reason = transition.reason
        if transition.phase is Phase.PREDICT:
            self.last_reason = f"{transition.reason}; {answer.reason}"
        elif self._cycle_is_over() or (transition.changed and answer.long) or (self.held_out and answer.rest):
            self._next_cycle(step, confidence, answer)
        return transition

    @property
    def _audit_cost(self) -> float:
        return cost_of_audit(self.config, self.max_steps)

    @property
    def _too_dear(self) -> bool:
        """An audit costs more than this run may spend, and nothing but an audit can tell what a move is worth."""
        unknown = not self.counts.tried and not self.judged_at_once and self.gate.interval()[0] <= 0
        return unknown and no_audit_is_affordable(self.config, self.max_steps)

    @property
    def _watched_enough(self) -> bool:
        """In WARMUP: nothing will be tried, and it is known well enough that nothing will."""
        share = _WATCHED_IN_VAIN * self.max_steps / self.config.hybrid.window_steps
        return self._too_dear and self.predictability.noisy and self.predictability.windows >= share

    def _cycle_is_over(self) -> bool:
        """A FULL phase of full length, in which forecasts could be scored."""
        full = self.machine.phase is Phase.FULL and self.machine.steps_in_phase >= self.machine.full_steps_needed
        watched = max(_WINDOWS_TO_SCORE, min(self._last_rest, _WINDOWS_AWAKE))
        return full and (self.searches or self.observer.windows >= watched)

    def _next_cycle(self, step: int, confidence: float, answer: Answer) -> None:
        """A FULL phase that does not end in a move is a cycle too: waiting counts in cycles."""
        self.gate.new_cycle()
        self._rests = self._rests + 1 if answer.rest else 0
        if answer.rest:
            window = self.config.hybrid.window_steps
            windows = min(_LONGEST_REST, 2**self._rests, max(2, self.max_steps // (8 * window)))
            # while the gate waits nothing can happen, so that is slept through
            windows = max(windows, self.gate.wait * self.config.hybrid.full_steps // window)
            if answer.long:
                windows = _LONGEST_REST
                self.observer.trajectory.release()
            self.rest_steps, self._last_rest = windows * window, windows
            self.gate.new_cycle(self.rest_steps // self.config.hybrid.full_steps)
        if answer.open and confidence <= self.recovery.threshold:
            self.recovery.lacking = confidence
            for action in self.recovery.cycle_ended(step, self.machine.cycle, Outcome.LOW_CONFIDENCE):
                self._apply_to_machine(action, step)
        self.machine.steps_in_phase = 0
        self.machine.cycle += 1

    def _question(self, horizon: int, steps_left: int, needed: int, trend: int, chained: bool, exact: bool) -> Ask:
        windows = max(1, round(horizon / self.config.hybrid.window_steps))
        low_noise, quality = self.judged_at_once, self.observer.quality
        # A searched move need only point the right way: its length is found on the exact loss.
        trusted = exact or (quality.cosine(1) > 0 if self.searches else quality.trusted(windows))
        judge = "held-out examples are probed" if self.held_out else "batches hardly differ"
        for_good = self.held_out and self.falls_once
        return Ask(
            horizon,
            steps_left,
            needed,
            trusted,
            low_noise,
            decaying=trend < 0,
            cost=self._audit_cost,
            judge=judge,
            chained=chained,
            rising=trend > 0,
            for_good=for_good,
        )

    def _correct_steps(self, audited: bool) -> int:
        """An audit validates for longer; a short run can afford a short one only."""
        return steps_of_audit(self.config, self.max_steps) if audited else self.config.hybrid.correct_steps

    def _features(self, forecast: Forecast, horizon: int) -> ConfidenceFeatures:
        windows = 1 if self.searches else max(1, round(horizon / self.config.hybrid.window_steps))
        quality = self.observer.quality
        cosine = quality.cosine(windows)
        return ConfidenceFeatures(
            error=1 - (cosine * abs(cosine) if self.searches else quality.r2(windows)),
            cosine=cosine,
            disagreement=forecast.disagreement,
            spread=quality.spread(windows),
        )

    def estimate(self, forecast: Forecast, horizon: int) -> float:
        """Calibrated probability that a move over `horizon` will be kept."""
        return self.confidence.estimate(self._features(forecast, horizon))

    def plan(self) -> Plan:
        """The move that was decided for, from the forecast of the last window."""
        forecast = self.observer.forecast
        if forecast is None:
            raise RuntimeError("nothing is forecast")  # PREDICT is entered with a forecast only
        horizon, audited, most = self._chosen
        expected = float(np.interp(horizon, forecast.horizons, forecast.loss))
        return Plan(
            horizon,
            audited,
            forecast.at(horizon),
            forecast,
            expected,
            self.estimate(forecast, horizon),
            self.judged_at_once,
            most,
            self._correct_steps(audited),
            self.last_reason,
        )

    @property
    def may_chain(self) -> bool:
        """Whether gradients are worth remembering for quasi-Newton leaps."""
        exact = self.predictability.low_noise or self.predictability.same_batch
        return exact and self.config.hybrid.search is not False and not self.held_out

    @property
    def searches(self) -> bool:
        """Whether the length of a move is chosen by probing several."""
        wanted = self.config.hybrid.search
        return self.judged_at_once if wanted == "auto" else bool(wanted)

    @property
    def judged_at_once(self) -> bool:
        """Whether the loss of a probe right after a move can be trusted."""
        return self.predictability.low_noise or self.held_out

    @property
    def current_confidence(self) -> float:
        """That a move over the shortest horizon would be kept; 0 while nothing is forecast."""
        forecast = self.observer.forecast
        return self.estimate(forecast, self.config.hybrid.window_steps) if forecast is not None else 0.0

    def context(self) -> Context:
        return Context(self.machine.phase, skipped=self.config.guard.nan_check)

    def _sentence(self, others: float) -> str:
        if self.off and not self.counts.tried:
            return self._unmeasured
        if self._too_dear:
            return f"prediction was {self.gate.too_dear(self._audit_cost)}"
        if self.exact.chains and not self.ledger.audits:  # leaps take a gradient each, so their cost says nothing
            return f"{self.ledger.in_words()}; the time that this saved is not measured"
        return self.ledger.sentence(others, self._unmeasured)

    @property
    def _unmeasured(self) -> str:
        """Why no audit says what prediction was worth."""
        tried, moves = self.counts.tried, self.counts.moves
        if not tried:
            return f"prediction was not tried: {self._why_not}"
        if moves["kept"] + moves["shrunk"]:
            return "no move was audited"
        return "the one move that was tried was not kept" if tried == 1 else f"none of {tried} moves tried was kept"

    @property
    def _why_not(self) -> str:
        """Why nothing was tried so far, in plain words: of several reasons the last, which weighs most."""
        if self.off:
            return _OFF
        if self.machine.phase is Phase.WARMUP:
            return "the run was over before there was enough to forecast from"
        reason = self.last_reason.rpartition("; ")[2].removeprefix("the gate is shut: ")
        return "no forecast was likely enough to help" if reason.startswith("confidence ") else reason

    def summary(self, backward_passes: int) -> dict[str, Any]:
        """What the run's summary says of prediction."""
        others = max(0.0, backward_passes - self.ledger.cost)
        quality = self.observer.quality
        error = self.confidence.calibration_error
        return {
            "steps": dict(self.counts.steps),
            "moves": dict(self.counts.moves),
            "predicted_steps": self.counts.predicted_steps,
            "recoveries": {kind: count for kind, count in self.counts.recoveries.items() if count},
            "rollbacks": {"times": self.counts.rollbacks, "undone_steps": self.counts.undone_steps},
            "forecast": quality.summary(),
            "confidence": {
                "last": round(self.current_confidence, 4),
                "calibration_error": None if math.isnan(error) else round(error, 4),
                "outcomes": self.confidence.outcomes,
                "reliability": self.confidence.reliability(),
            },
            "predictability": self.predictability.summary(quality, self.held_out),
            "exact": self.exact.summary(),
            "audit": self.ledger.gain(others) | {"sentence": self._sentence(others)},
        }

    # --- a move ------------------------------------------------------------------------------------------------------

    def disaster_limit(self, anchor: float) -> float:
        """A probe loss above this shows a disaster, whatever the noise."""
        sigma = self.guard.losses.sigma if self.guard.losses.count else 0.0
        usual = self.config.hybrid.divergence_threshold * (sigma if math.isfinite(sigma) else 0.0)
        return anchor + max(usual, 1e-3 * abs(anchor))

    def worth(self, gain: float) -> float:
        """Full steps that a gain in loss is worth; 0 where the loss does not fall by itself."""
        steps = self.slope.steps_for(gain, low_noise=False)
        return steps if math.isfinite(steps) else 0.0

    def worth_exactly(self, before: float, after: float) -> float:
        """The same between two exact losses, by their ratio: without noise a loss falls by a share per step."""
        usual = self.slope.last_log_fall
        if before > 0 and after > 0 and usual > 0:
            return math.log(before / after) / usual
        steps = self.slope.steps_for(before - after, low_noise=True)
        return steps if math.isfinite(steps) else 0.0

    def exact_credit(self, plan: Plan, worth: float) -> int:
        """Virtual steps of a move whose loss is exact. A fall of the loss can be the easy part of what steps would have
        done, so predicted steps count only as far as forecasts of that length came nearly exactly true."""
        windows = max(1, round(plan.horizon / self.config.hybrid.window_steps))
        exactness = (self.observer.quality.r2(windows) - _NEARLY_EXACT) / (1 - _NEARLY_EXACT)
        if not (math.isfinite(worth) and exactness > 0):
            return 0
        return int(min(max(0.0, worth), plan.horizon * min(1.0, exactness)))

    def left_predict(self, view: View) -> Transition:
        transition = self.machine.next(view)
        self.last_reason = transition.reason
        return transition

    def settled(
        self,
        step: int,
        plan: Plan,
        kept: bool,
        worth: float,
        cost: float,
        audit: Audit | None,
        overfits: bool = False,
    ) -> Transition:
        """A move was judged: everyone who can learn from it does. overfits: it raised the held-out loss."""
        forecast = plan.forecast
        self.confidence.learn(self._features(forecast, plan.horizon), kept, weight=1.0)
        self.bandit.reward(plan.horizon, worth if kept else 0.0, cost)
        self.ledger.cost += cost
        if audit is not None:
            self.ledger.audits.append(audit)
            self.gate.audited(plan.horizon, audit.gain_steps, cost, exact=plan.low_noise)
        elif plan.low_noise:
            self.ledger.exact_moves += kept
            if overfits:
                self.gate.overfitted()
            else:
                self.gate.moved(kept and worth > cost)
        else:
            self.ledger.unaudited_moves += kept
            self.gate.moved(kept)
        self._since_move = 0
        transition = self.machine.next(View(0, worse_than_anchor=not kept, correct_done=True))
        self.last_reason = transition.reason
        return transition

    def refused(self, step: int, plan: Plan, cost: float, overfits: bool = False) -> None:
        """A move was taken back before any full step followed on it. overfits: it raised the held-out loss."""
        self.confidence.learn(self._features(plan.forecast, plan.horizon), kept=False, weight=1.0)
        self.bandit.reward(plan.horizon, 0.0, cost)
        self.ledger.cost += cost
        self.gate.spend(0.0 if plan.low_noise else cost)
        if overfits:
            self.gate.overfitted()
        else:
            self.gate.moved(False)
        self.counts.moves["refused"] += 1

    def abandoned(self, plan: Plan, cost: float) -> None:
        """A move was taken back for a reason that says nothing about forecasts: nobody learns from it."""
        self.ledger.cost += cost
        self.gate.spend(0.0 if plan.low_noise else cost)
        self.counts.moves["refused"] += 1

    def interrupted(self, plan: Plan, cost: float) -> None:
        """A move is kept before it was judged to the end: nobody learns from it."""
        self.ledger.cost += cost
        self.gate.spend(0.0 if plan.low_noise else cost)
        self.ledger.exact_moves += 1

    def check_validation(self, readings: list[StepReading]) -> list[Action]:
        """The validating steps of a move, judged together by the worst of them."""
        verdicts = [self.guard.check(reading) for reading in readings]
        return self._decide(max(verdicts, key=lambda verdict: verdict.level), move_open=True)

    def check_move(self, reading: StepReading) -> tuple[Diagnosis, list[Action]]:
        """A number of a predicted step, a probe, or a validating step."""
        verdict = self.guard.check(reading)
        return verdict, self._decide(verdict, move_open=True, predicted=reading.gradient_norm is None)

    def end_cycle(self, step: int, kept: bool) -> list[Action]:
        outcome = Outcome.KEPT if kept else Outcome.UNDONE
        return self.recovery.cycle_ended(step, self.machine.cycle, outcome)

    def _apply_to_machine(self, action: Action, step: int) -> None:
        """The part of an action that changes no weight."""
        self.counts.recoveries[action.kind.value] = self.counts.recoveries.get(action.kind.value, 0) + 1
        if action.kind is Kind.SHORTEN_HORIZON:
            self.bandit.shorten()
        if action.kind is Kind.FORCE_FULL:
            if self.machine.phase is Phase.FULL:
                self.machine.force_full(action.text)
            if action.full_steps_factor > 1:
                self.machine.lengthen_full(action.full_steps_factor)
            if action.warmup_factor > 1:
                self.machine.postpone(step + (action.warmup_factor - 1) * self.config.hybrid.warmup_steps)

    def apply(self, action: Action, step: int) -> None:
        if action.kind is not Kind.CONTINUE:
            self._apply_to_machine(action, step)
        if action.kind is Kind.RESET_PREDICTOR:
            self.observer.guarded.reset()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, directions: bool = True) -> dict[str, Any]:
        """directions: with those that moves are made of, which are large."""
        parts = {name: part.state_dict() for name, part in self._parts().items() if part is not self.observer}
        parts["observer"] = self.observer.state_dict(directions)
        return parts | {
            "counts": {
                "steps": dict(self.counts.steps),
                "moves": dict(self.counts.moves),
                "predicted_steps": self.counts.predicted_steps,
                "recoveries": dict(self.counts.recoveries),
                "rollbacks": self.counts.rollbacks,
                "undone_steps": self.counts.undone_steps,
            },
            "last_reason": self.last_reason,
            "chosen": list(self._chosen),
            "since_move": self._since_move,
            "rest_steps": self.rest_steps,
            "rests": self._rests,
            "last_rest": self._last_rest,
            "no_room": self.no_room,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(entry(state, name, "Pilot"))
        self.counts = Counts(**copy.deepcopy(state["counts"]))
        self.last_reason = str(state["last_reason"])
        horizon, audited, most = state["chosen"]
        self._chosen = (int(horizon), bool(audited), int(most))
        self._since_move = int(state["since_move"])
        self.rest_steps, self._rests = int(state["rest_steps"]), int(state["rests"])
        self._last_rest = int(state["last_rest"])
        self.no_room = bool(state["no_room"])

    def _parts(self) -> dict[str, Any]:
        names = ("machine", "guard", "recovery", "gate", "bandit", "confidence", "predictability")
        return {name: getattr(self, name) for name in (*names, "ledger", "exact", "observer")}


def _once(actions: list[Action]) -> list[Action]:
    """Each kind of action once per window, at its last and strongest."""
    return list({(action.kind, action.rate_factor): action for action in actions}.values())
