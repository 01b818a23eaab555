"""The signs of illness of a run, with the one limit of each: what is detected, acted on and advised about.

    sign                   limit                                                        act   advise
    not finite             any loss, gradient, weight or forecast that is no number     yes   yes
    worse than untrained   twice the loss of the first step, beyond noise (RUIN)       yes   yes, as divergence
    runaway loss           RUNAWAY_SHARE of all that was gained is lost, beyond noise   yes   yes, as divergence
    gradient explosion     guard.explosion_factor, guard.patience times, with HARM      yes   yes
    oscillation            guard.oscillation_changes                                    yes   yes, without progress
    loss deviation         hybrid.divergence_threshold                                  yes   reported as a number
    gradient vanishing     guard.vanishing_factor                                       yes   by layer (`layers`)
    prediction error       guard.prediction_error                                       yes   no
    low confidence         hybrid.confidence_threshold                                  yes   over several cycles
    drift                  SLOW_RISE, ANCHOR_RISE                                       yes   no

`advise` reads the same limits over many steps at once (`vitals`), because it also watches runs without prediction,
where nothing may cost time in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from foretrain.events import Phase

RUNAWAY_SHARE = 0.5
"""Share of all it had gained that a run must lose, far beyond noise, to be running away. Chosen: half of the work."""
HARM = 0.1
"""Share of all gained so far that must be lost before gradients explode. Adam's spikes near the end of training without
noise raise loss and gradient a hundredfold, from nothing to next to nothing, and heal by themselves. Chosen."""
RATE_RUIN, RATE_RUNAWAY, RATE_EXPLOSION, RATE_OSCILLATION = 0.1, 0.5, 0.5, 0.3
"""Factors of the learning rate, in an emergency and in advice. Chosen: a tenth where the weights are lost, half where
they are not, and enough below one half where steps jump over a valley, which any factor below one half ends in theory.
Runs of tests/ailing.py end better with each of them."""
EMERGENCY_CLIP = 1.0
"""Largest gradient norm after an explosion or oscillation. Chosen: the usual value of gradient clipping."""


class Severity(IntEnum):
    NORMAL = 0
    CAUTION = 1
    WARNING = 2
    CRITICAL = 3


class Signal(StrEnum):
    LOSS_DEVIATION = "loss deviation"
    RUNAWAY = "runaway loss"
    RUIN = "worse than untrained"
    GRADIENT_EXPLOSION = "gradient explosion"
    GRADIENT_VANISHING = "gradient vanishing"
    NOT_FINITE = "not finite"
    PREDICTION_ERROR = "prediction error"
    OSCILLATION = "oscillation"
    CONFIDENCE = "low confidence"
    DRIFT = "drift"


SIGNS: dict[Signal, tuple[Severity, Phase]] = {
    Signal.NOT_FINITE: (Severity.CRITICAL, Phase.FULL),
    Signal.RUIN: (Severity.CRITICAL, Phase.FULL),
    Signal.RUNAWAY: (Severity.CRITICAL, Phase.FULL),
    Signal.GRADIENT_EXPLOSION: (Severity.WARNING, Phase.FULL),
    Signal.GRADIENT_VANISHING: (Severity.WARNING, Phase.FULL),
    Signal.LOSS_DEVIATION: (Severity.WARNING, Phase.FULL),
    Signal.CONFIDENCE: (Severity.WARNING, Phase.FULL),
    Signal.DRIFT: (Severity.WARNING, Phase.FULL),
    Signal.PREDICTION_ERROR: (Severity.WARNING, Phase.CORRECT),
    Signal.OSCILLATION: (Severity.WARNING, Phase.CORRECT),
}
"""How severe each sign is, and to which phase it ends a predicted or correcting one."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """The numbers of one step."""

    step: int
    phase: Phase
    loss: float
    gradient_norm: float | None = None
    """Norm before clipping. None in predicted steps."""
    predicted_loss: float | None = None
    """What the predictor said this loss would be: a loss, never an error."""
    confidence: float | None = None
    confidence_threshold: float | None = None
    """None: the configured one."""
    finite: bool = True
    """False where a loss, gradient, weight or forecast is not a number. An overflow of the fp16 loss scale, which the
    scaler repairs by itself, does not count."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One sign that was seen."""

    signal: Signal
    level: Severity
    text: str
    exit_to: Phase | None = None


@dataclass(frozen=True, slots=True)
class StepDiagnosis:
    """What the detector says about one step."""

    step: int
    level: Severity
    symptoms: tuple[Symptom, ...] = ()
    exit_to: Phase | None = None
    """Where a predicted or correcting phase should go now. FULL means that the open move is to be undone."""
    text: str = "nothing unusual"
    improving: bool = False
    """The average loss still falls, beyond noise."""
    setback: float = 0.0
    """Share of all that the run had gained which is lost at present; computed only for warnings."""

    @property
    def signals(self) -> frozenset[Signal]:
        """The signs that are at least a warning."""
        return frozenset(symptom.signal for symptom in self.symptoms if symptom.level >= Severity.WARNING)


def sign(signal: Signal, text: str) -> Symptom:
    """The sign was seen, as severe as the table says."""
    level, exit_to = SIGNS[signal]
    return Symptom(signal, level, text, exit_to)
