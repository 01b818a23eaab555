"""Decides what is done about a diagnosis and keeps count. `Hybrid.carry_out` does it.

A healthy run is left alone: learning rate and clipping change on repeated evidence only, never on one warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.signs import (
    EMERGENCY_CLIP,
    HARM,
    RATE_EXPLOSION,
    RATE_OSCILLATION,
    RATE_RUIN,
    RATE_RUNAWAY,
    Severity,
    Signal,
    StepDiagnosis,
)
from foretrain.persist.stateful import Stateful

PAUSE = 50
"""Full steps that a change is given to work before the next one; as many good ones take half of it back. Chosen: five
windows, so that the averages of the loss have followed."""
EXPLOSION_STEPS = 20
"""Full steps within which `guard.patience` exploding gradients count together. Chosen: about two windows."""
STEPS_TO_FORGET = 200
"""Good full steps in a row after which earlier rollbacks no longer count. Chosen: a lowered rate is whole again."""
LOW_CONFIDENCE_CYCLES = 3
"""Cycles in a row without enough confidence that postpone prediction. Chosen: one or two are chance."""
LOOP_CYCLES = 3
"""Cycles within which two undone moves are a loop. Chosen: two in a row, or with one kept between them."""
THRESHOLD_STEP, HIGHEST_THRESHOLD = 0.05, 0.98
"""By how much an undone move raises the confidence that the next one needs, and how far. Chosen: about ten undone moves
in a row end prediction for a while; confidence itself ends at 0.995 (motion.confidence.MOST_SURE)."""


class Kind(StrEnum):
    """What is to be done."""

    CONTINUE = "continue"
    SHORTEN_HORIZON = "shorten_horizon"
    FORCE_FULL = "force_full"
    RAISE_THRESHOLD = "raise_threshold"
    ROLL_BACK = "roll_back"
    SKIP_BATCH = "skip_batch"
    RESET_PREDICTOR = "reset_predictor"
    PREDICTION_OFF = "prediction_off"
    """Code of the user's own that prediction needs failed for the second time."""
    ABORT = "abort"


class Outcome(StrEnum):
    """How a cycle ended."""

    KEPT = "kept"
    UNDONE = "undone"
    LOW_CONFIDENCE = "low_confidence"
    """No move was tried, and only confidence was missing."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, and why."""

    kind: Kind
    text: str
    rate_factor: float = 1.0
    """Factor of the learning rate; `Recovery.rate_factor` contains it already."""
    clip: float | None = None
    """Largest gradient norm from now on; `Recovery.clip` contains it already."""
    full_steps_factor: int = 1
    """Factor of the length of FULL phases (`Cycle.lengthen_full`)."""
    warmup_factor: int = 1
    """Above 1, prediction is postponed by (this - 1) x `warmup_steps` (`Cycle.postpone`)."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a decision needs to know besides the diagnosis."""

    phase: Phase
    move_open: bool = False
    """A move was made and is not judged yet, so there is something to undo."""
    predicted: bool = False
    """The numbers come from a predicted move, a probe or a forecast, not from a full step."""
    skipped: bool = True
    """The update of a step that was not finite was left out on the device: the weights are unharmed."""


class Recovery(Stateful):
    """`decide` after every diagnosis, good ones included.

    A rollback restores neither this nor the `Cycle`, or the run would walk into the same wall again.
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
        """Full steps that were judged. Rollbacks turn `global_step` back, never this."""
        self.rate_name = "optimizer.learning_rate"
        """The user's name of the learning rate."""
        self.rate_factor = 1.0
        """Factor of the scheduled learning rate."""
        self.clip = math.inf
        """Largest gradient norm besides the configured one; infinite where there is none."""
        self.threshold = hybrid.confidence_threshold
        """Confidence that a move needs now."""
        self.rollbacks = 0
        """Emergency rollbacks that are not forgotten yet. Undone moves are part of the method and do not count."""
        self.good = 0
        """Good full steps in a row."""
        self.not_finite_in_a_row = 0
        self.explosions = []
        self.oscillating = 0
        """Critical diagnoses of oscillation since it last paused."""
        self.last_change = -PAUSE
        """Clock at the last change of learning rate or clipping."""
        self.undone_cycles = []
        self.low_confidence = 0
        """Cycles in a row without enough confidence."""
        self.loops = 0
        """How often two moves were undone shortly after each other."""
        self.distrusts = 0
        """How often confidence was too low for several cycles in a row."""
        self.lacking = 0.0
        """Confidence in the last cycle in which nothing else was missing."""

    def decide(self, diagnosis: StepDiagnosis, context: Context) -> list[Action]:
        """List what to do now, the most urgent first; nothing after a normal diagnosis."""
        full_step = context.phase is not Phase.PREDICT and not context.predicted
        self.clock += full_step
        signals = diagnosis.signals
        if Signal.NOT_FINITE in signals:
            return self._not_finite(diagnosis, context)
        if full_step:
            self._note(diagnosis)
        if diagnosis.level is Severity.NORMAL:
            return []
        if signals & {Signal.RUIN, Signal.RUNAWAY}:
            return self._runaway(diagnosis, RATE_RUIN if Signal.RUIN in signals else RATE_RUNAWAY)
        actions = [*self._explosion(diagnosis), *self._oscillation(diagnosis)]
        if context.move_open and (diagnosis.exit_to is Phase.FULL or diagnosis.level is Severity.CRITICAL):
            actions += self._undo(diagnosis)
        elif Signal.PREDICTION_ERROR in signals:
            actions.append(Action(Kind.SHORTEN_HORIZON, f"shorter moves for a while: {diagnosis.text}"))
        elif Signal.DRIFT in signals:
            longer = f"twice as many full steps before the next move: {diagnosis.text}"
            actions.append(Action(Kind.FORCE_FULL, longer, full_steps_factor=2))
        elif diagnosis.level is Severity.CRITICAL and not actions:
            actions.append(Action(Kind.FORCE_FULL, f"no prediction for now: {diagnosis.text}"))
        return actions or [Action(Kind.CONTINUE, diagnosis.text)]

    def cycle_ended(self, cycle: int, outcome: Outcome) -> list[Action]:
        """React to the end of a cycle, or of a FULL phase in which only confidence was missing."""
        self.low_confidence = self.low_confidence + 1 if outcome is Outcome.LOW_CONFIDENCE else 0
        if outcome is Outcome.UNDONE:
            self.undone_cycles = [*(known for known in self.undone_cycles if known > cycle - LOOP_CYCLES), cycle]
            if len(self.undone_cycles) >= 2:
                text = f"{len(self.undone_cycles)} moves undone within {LOOP_CYCLES} cycles: twice as many full steps"
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

    def _note(self, diagnosis: StepDiagnosis) -> None:
        """Count good full steps, and give back bit by bit what was taken from the run."""
        self.not_finite_in_a_row = 0
        self.good = self.good + 1 if diagnosis.level < Severity.WARNING else 0
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

    def _not_finite(self, diagnosis: StepDiagnosis, context: Context) -> list[Action]:
        if context.predicted or context.phase is Phase.PREDICT:
            return [
                Action(Kind.ROLL_BACK, f"the predicted move is undone: {diagnosis.text}"),
                Action(Kind.RESET_PREDICTOR, "the predictor starts anew: it led to numbers that are not finite"),
            ]
        self.good = 0
        self.not_finite_in_a_row += 1
        times = self.not_finite_in_a_row
        if context.skipped and times < self.config.patience:
            return [Action(Kind.SKIP_BATCH, f"the batch is skipped, the weights are unharmed: {diagnosis.text}")]
        self.not_finite_in_a_row = 0
        harm = f"{times} steps in a row were not finite" if context.skipped else "the weights took the harm"
        return self._roll_back(RATE_RUIN, f"{harm} ({diagnosis.text})")

    def _runaway(self, diagnosis: StepDiagnosis, rate_factor: float) -> list[Action]:
        if self._pausing():
            return [Action(Kind.FORCE_FULL, f"no prediction while the last rollback takes effect: {diagnosis.text}")]
        return self._roll_back(rate_factor, diagnosis.text)

    def _roll_back(self, rate_factor: float, why: str) -> list[Action]:
        self.rollbacks += 1
        if self.rollbacks > self.config.max_rollbacks:
            text = f"given up: {why}, in spite of {self.config.max_rollbacks} rollbacks"
            return [Action(Kind.ABORT, f"{text}; lower {self.rate_name} or look at the data")]
        self._change_rate(rate_factor)
        text = f"rolled back, with the learning rate x {rate_factor:g}: {why}"
        return [Action(Kind.ROLL_BACK, text, rate_factor=rate_factor)]

    def _explosion(self, diagnosis: StepDiagnosis) -> list[Action]:
        if Signal.GRADIENT_EXPLOSION not in diagnosis.signals:
            return []
        recent = [time for time in self.explosions if time > self.clock - EXPLOSION_STEPS]
        self.explosions = [*recent, self.clock][-self.config.patience :]
        if len(self.explosions) < self.config.patience or diagnosis.setback < HARM or self._pausing():
            return []
        return self._calm(RATE_EXPLOSION, diagnosis)

    def _oscillation(self, diagnosis: StepDiagnosis) -> list[Action]:
        if Signal.OSCILLATION not in diagnosis.signals or diagnosis.level < Severity.CRITICAL or diagnosis.improving:
            return []  # batches of two kinds in turn look like this too, and do no harm
        self.oscillating += 1
        if self.oscillating < PAUSE or self._pausing():
            return []
        self.oscillating = 0
        return self._calm(RATE_OSCILLATION, diagnosis)

    def _calm(self, factor: float, diagnosis: StepDiagnosis) -> list[Action]:
        self._change_rate(factor, clip=EMERGENCY_CLIP)
        text = f"learning rate x {factor:g}, gradients clipped to {EMERGENCY_CLIP:g}: {diagnosis.text}"
        return [Action(Kind.FORCE_FULL, text, rate_factor=factor, clip=EMERGENCY_CLIP)]

    def _undo(self, diagnosis: StepDiagnosis) -> list[Action]:
        raised = min(self.threshold + THRESHOLD_STEP, HIGHEST_THRESHOLD)
        self.threshold = max(raised, self.threshold)
        return [
            Action(Kind.ROLL_BACK, f"the move is undone: {diagnosis.text}"),
            Action(Kind.SHORTEN_HORIZON, "shorter moves for a while"),
            Action(Kind.RAISE_THRESHOLD, f"confidence must exceed {self.threshold:.2f} now"),
        ]

    def hand_over(self, factor: float) -> None:
        """Someone else keeps this factor of the learning rate from now on, so it is not given back here."""
        self.rate_factor = min(1.0, self.rate_factor / factor)

    def _change_rate(self, factor: float, clip: float | None = None) -> None:
        self.rate_factor *= factor
        self.clip = self.clip if clip is None else min(self.clip, clip)
        self.last_change = self.clock
        self.good = 0

    def _pausing(self) -> bool:
        return self.clock - self.last_change < PAUSE
