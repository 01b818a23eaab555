"""From what went wrong to what to do about it. Decides and keeps count; others carry the actions out.

Nothing here touches a healthy run: learning rate and clipping change on repeated evidence only, never on one warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.guard import Level, Signal, Verdict
from foretrain.persist.stateful import Stateful

PAUSE = 50
"""Full steps that a change is given to work before the next one; as many good ones take half of it back."""
HARM = 0.1
"""Share of all gained so far that must be lost before an explosion is one. Adam's spikes near the end of training
without noise raise loss and gradient a hundredfold, from nothing to next to nothing, and heal by themselves."""
STEPS_TO_FORGET = 200
"""Good full steps in a row after which earlier rollbacks no longer count."""
LOW_CONFIDENCE_CYCLES = 3
HIGHEST_THRESHOLD = 0.98


class Kind(StrEnum):
    CONTINUE = "continue"
    SHORTEN_HORIZON = "shorten_horizon"
    FORCE_FULL = "force_full"
    RAISE_THRESHOLD = "raise_threshold"
    ROLL_BACK = "roll_back"
    SKIP_BATCH = "skip_batch"
    RESET_PREDICTOR = "reset_predictor"
    PREDICTION_OFF = "prediction_off"
    """Own code that prediction needs failed for the second time."""
    ABORT = "abort"


class Outcome(StrEnum):
    """How a cycle ended."""

    KEPT = "kept"
    UNDONE = "undone"
    LOW_CONFIDENCE = "low_confidence"
    """No move was tried, for want of confidence alone."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    text: str
    rate_factor: float = 1.0
    """Multiplies the learning rate; already contained in `Recovery.rate_factor`."""
    clip: float | None = None
    """Largest gradient norm from now on; already in `Recovery.clip`."""
    full_steps_factor: int = 1
    """For `Machine.lengthen_full`."""
    warmup_factor: int = 1
    """Above 1: no prediction for (this - 1) x `warmup_steps` more steps (`Machine.postpone`)."""
    threshold_delta: float = 0.0
    """Already contained in `Recovery.threshold`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a decision needs to know besides the verdict."""

    phase: Phase
    move_open: bool = False
    """A move was made and is not judged yet, so there is something to undo."""
    predicted: bool = False
    """The numbers come from a predicted move, a probe or a forecast, not from a full step."""
    skipped: bool = True
    """The update of a step that was not finite was left out on the device: the weights are unharmed."""


class Recovery(Stateful):
    """`decide` after every verdict, good ones included.

    A rollback must not restore this (nor the machine), or the run would walk into the same wall again.
    """

    saved = (
        *("clock", "rate_factor", "clip", "threshold", "rollbacks", "good", "not_finite_in_a_row", "explosions"),
        *("oscillating", "last_change", "undone_cycles", "low_confidence", "loops", "distrusts", "lacking"),
    )
    explosions: list[int]
    undone_cycles: list[int]

    def __init__(self, hybrid: HybridConfig, guard: GuardConfig) -> None:
        self.hybrid = hybrid
        self.config = guard
        self.clock = 0
        """Verdicts on full steps. Rollbacks turn `global_step` back, never this."""
        self.rate_name = "optimizer.learning_rate"
        """What its user calls it."""
        self.rate_factor = 1.0
        """Multiply the scheduled learning rate by this."""
        self.clip = math.inf
        """Clip the gradient norm to this as well as to the configured one. Infinite: no such order."""
        self.threshold = hybrid.confidence_threshold
        """What confidence must exceed now."""
        self.rollbacks = 0
        """Emergency rollbacks not yet forgotten. Undone moves are part of the method and do not count."""
        self.good = 0
        """Good full steps in a row."""
        self.not_finite_in_a_row = 0
        self.explosions = []
        self.oscillating = 0
        """Critical verdicts on oscillation since the last pause of it."""
        self.last_change = -PAUSE
        """Clock at the last change of learning rate or clipping."""
        self.undone_cycles = []
        self.low_confidence = 0
        """Cycles in a row."""
        self.loops = 0
        """Times that moves were undone again and again."""
        self.distrusts = 0
        """Times that confidence was too low for several cycles."""
        self.lacking = 0.0
        """Confidence at the last cycle that lacked nothing else."""

    def decide(self, verdict: Verdict, context: Context) -> list[Action]:
        """What to do now, most urgent first; nothing at all after a normal verdict."""
        full_step = context.phase is not Phase.PREDICT and not context.predicted
        self.clock += full_step
        signals = verdict.signals
        if Signal.NOT_FINITE in signals:
            return self._not_finite(verdict, context)
        if full_step:
            self._note(verdict)
        if verdict.level is Level.NORMAL:
            return []
        if signals & {Signal.RUIN, Signal.RUNAWAY}:
            return self._runaway(verdict, 0.1 if Signal.RUIN in signals else 0.5)
        actions = [*self._explosion(verdict), *self._oscillation(verdict)]
        if context.move_open and (verdict.exit_to is Phase.FULL or verdict.level is Level.CRITICAL):
            actions += self._undo(verdict)
        elif Signal.PREDICTION_ERROR in signals:
            actions.append(Action(Kind.SHORTEN_HORIZON, f"shorter moves for a while: {verdict.text}"))
        elif Signal.DRIFT in signals:
            longer = f"twice as many full steps before the next move: {verdict.text}"
            actions.append(Action(Kind.FORCE_FULL, longer, full_steps_factor=2))
        elif verdict.level is Level.CRITICAL and not actions:
            actions.append(Action(Kind.FORCE_FULL, f"no prediction for now: {verdict.text}"))
        return actions or [Action(Kind.CONTINUE, verdict.text)]

    def cycle_ended(self, step: int, cycle: int, outcome: Outcome) -> list[Action]:
        """To be told at the end of every cycle, and of every FULL phase that lacked nothing but confidence."""
        self.low_confidence = self.low_confidence + 1 if outcome is Outcome.LOW_CONFIDENCE else 0
        if outcome is Outcome.UNDONE:
            self.undone_cycles = [*(known for known in self.undone_cycles if known > cycle - 3), cycle]
            if len(self.undone_cycles) >= 2:
                text = f"{len(self.undone_cycles)} moves undone within 3 cycles: twice as many full steps"
                self.undone_cycles = []
                self.loops += 1
                return [Action(Kind.FORCE_FULL, text, full_steps_factor=2)]
        if self.low_confidence >= LOW_CONFIDENCE_CYCLES:
            self.low_confidence = 0
            self.distrusts += 1
            more = f"the predictor is trained for {self.hybrid.warmup_steps} more steps before the next try"
            text = f"confidence was too low for {LOW_CONFIDENCE_CYCLES} cycles: {more}"
            return [Action(Kind.FORCE_FULL, text, warmup_factor=2)]
        return []

    def _note(self, verdict: Verdict) -> None:
        """After good full steps what was taken from the run is given back bit by bit."""
        self.not_finite_in_a_row = 0
        self.good = self.good + 1 if verdict.level < Level.WARNING else 0
        if self.good == STEPS_TO_FORGET:
            self.rollbacks = 0
        if self.good == 0 or self.good % PAUSE:
            return
        if self.rate_factor < 1:
            self.rate_factor = min(1.0, self.rate_factor * 2)
        if self.rate_factor >= 1:
            self.clip = math.inf
        excess = self.threshold - self.hybrid.confidence_threshold
        self.threshold = self.hybrid.confidence_threshold + (excess / 2 if excess > 0.005 else 0.0)
        self.oscillating = 0

    def _not_finite(self, verdict: Verdict, context: Context) -> list[Action]:
        if context.predicted or context.phase is Phase.PREDICT:
            return [
                Action(Kind.ROLL_BACK, f"the predicted move is undone: {verdict.text}"),
                Action(Kind.RESET_PREDICTOR, "the predictor starts anew: it led to numbers that are not finite"),
            ]
        self.good = 0
        self.not_finite_in_a_row += 1
        times = self.not_finite_in_a_row
        if context.skipped and times < self.config.patience:
            return [Action(Kind.SKIP_BATCH, f"the batch is skipped, the weights are unharmed: {verdict.text}")]
        self.not_finite_in_a_row = 0
        harm = f"{times} steps in a row were not finite" if context.skipped else "the weights took the harm"
        return self._roll_back(0.1, f"{harm} ({verdict.text})")

    def _runaway(self, verdict: Verdict, rate_factor: float) -> list[Action]:
        if self._pausing():
            return [Action(Kind.FORCE_FULL, f"no prediction while the last rollback takes effect: {verdict.text}")]
        return self._roll_back(rate_factor, verdict.text)

    def _roll_back(self, rate_factor: float, why: str) -> list[Action]:
        self.rollbacks += 1
        if self.rollbacks > self.config.max_rollbacks:
            text = f"given up: {why}, in spite of {self.config.max_rollbacks} rollbacks"
            return [Action(Kind.ABORT, f"{text}; lower {self.rate_name} or look at the data")]
        self._change_rate(rate_factor)
        text = f"rolled back, with the learning rate x {rate_factor:g}: {why}"
        return [Action(Kind.ROLL_BACK, text, rate_factor=rate_factor)]

    def _explosion(self, verdict: Verdict) -> list[Action]:
        if Signal.GRADIENT_EXPLOSION not in verdict.signals:
            return []
        recent = [time for time in self.explosions if time > self.clock - 20]
        self.explosions = [*recent, self.clock][-self.config.patience :]
        if len(self.explosions) < self.config.patience or verdict.setback < HARM or self._pausing():
            return []
        self._change_rate(0.5, clip=1.0)
        text = f"learning rate x 0.5, gradients clipped to 1: {verdict.text}"
        return [Action(Kind.FORCE_FULL, text, rate_factor=0.5, clip=1.0)]

    def _oscillation(self, verdict: Verdict) -> list[Action]:
        if Signal.OSCILLATION not in verdict.signals or verdict.level < Level.CRITICAL or verdict.improving:
            return []  # batches of two kinds in turn look like this too, and do no harm
        self.oscillating += 1
        if self.oscillating < PAUSE or self._pausing():
            return []
        self.oscillating = 0
        self._change_rate(0.3, clip=1.0)
        text = f"learning rate x 0.3, gradients clipped to 1: {verdict.text}"
        return [Action(Kind.FORCE_FULL, text, rate_factor=0.3, clip=1.0)]

    def _undo(self, verdict: Verdict) -> list[Action]:
        raised = min(self.threshold + 0.05, HIGHEST_THRESHOLD)
        delta, self.threshold = max(0.0, raised - self.threshold), max(raised, self.threshold)
        return [
            Action(Kind.ROLL_BACK, f"the move is undone: {verdict.text}"),
            Action(Kind.SHORTEN_HORIZON, "shorter moves for a while"),
            Action(Kind.RAISE_THRESHOLD, f"confidence must exceed {self.threshold:.2f} now", threshold_delta=delta),
        ]

    def hand_over(self, factor: float) -> None:
        """So much of the lower learning rate is another's from now on: it is not given back."""
        self.rate_factor = min(1.0, self.rate_factor / factor)

    def _change_rate(self, factor: float, clip: float | None = None) -> None:
        self.rate_factor *= factor
        self.clip = self.clip if clip is None else min(self.clip, clip)
        self.last_change = self.clock
        self.good = 0

    def _pausing(self) -> bool:
        return self.clock - self.last_change < PAUSE
