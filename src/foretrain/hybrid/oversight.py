"""What the guard sees in losses and gradient norms, and what recovery wants done about it."""

from __future__ import annotations

import math

from foretrain.config import Config
from foretrain.events import Phase
from foretrain.health.act import Action, Context, Kind, Recovery
from foretrain.health.detect import Detector
from foretrain.health.signs import Severity, StepDiagnosis, StepReading
from foretrain.hybrid.cycle import Cycle


class Oversight:
    """Guard and recovery, asked about full steps, rests and moves. Others carry the actions out."""

    def __init__(self, config: Config, cycle: Cycle) -> None:
        self.cycle = cycle
        self.nan_check = config.guard.nan_check
        self.divergence_threshold = config.hybrid.divergence_threshold
        self.guard = Detector(config.hybrid, config.guard)
        self.recovery = Recovery(config.hybrid, config.guard)

    def decide(self, verdict: StepDiagnosis, move_open: bool = False, predicted: bool = False) -> list[Action]:
        """What recovery wants done about a verdict; good verdicts are for it, too."""
        return self.recovery.decide(verdict, Context(self.cycle.phase, move_open, predicted, skipped=self.nan_check))

    def check_full(self, first: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """(loss, gradient norm) of full steps, up to an emergency: after it the rest of them never was. Each kind of
        action comes once, at its last and strongest."""
        actions: list[Action] = []
        for step, (loss, norm) in enumerate(numbers, start=first):
            if fp16 and not (math.isfinite(loss) and math.isfinite(norm)):
                continue  # the loss scale finds its level by overflowing
            actions += self.decide(self.guard.check(StepReading(step, self.cycle.phase, loss, norm)))
            if actions and actions[-1].kind in (Kind.ROLL_BACK, Kind.ABORT):
                break
        return list({(action.kind, action.rate_factor): action for action in actions}.values())

    def check_rest(self, step: int, numbers: list[tuple[float, float]], fp16: bool) -> list[Action]:
        """All steps of a rest since the last look. As long as nothing is remarkable this is cheap."""
        losses, norms = [loss for loss, _ in numbers], [norm for _, norm in numbers]
        if self.guard.check_calmly(losses, norms):
            for _ in losses:  # what was taken from the run is given back in time
                self.decide(StepDiagnosis(step, Severity.NORMAL))
            return []
        return self.check_full(step - len(numbers) + 1, numbers, fp16)

    def check_validation(self, readings: list[StepReading]) -> list[Action]:
        """The validating steps of a move, judged together by the worst of them; there may be none."""
        if not readings:
            return []
        verdicts = [self.guard.check(reading) for reading in readings]
        return self.decide(max(verdicts, key=lambda verdict: verdict.level), move_open=True)

    def check_anchor(self, step: int, loss: float) -> list[Action]:
        """Anchors of moves that drift upwards, although every move was kept."""
        drift = self.guard.anchor(step, loss)
        return self.decide(drift) if drift.symptoms else []

    def check_predicted(self, reading: StepReading) -> tuple[Phase | None, list[Action]]:
        """A predicted step: the phase that it is to be left for, if any, and what is to be done."""
        verdict = self.guard.check(reading)
        return verdict.exit_to, self.decide(verdict, move_open=True, predicted=True)

    @property
    def tolerance(self) -> float:
        """Rise of the loss that noise explains."""
        sigma = self.guard.losses.sigma if self.guard.losses.count else 0.0
        return self.divergence_threshold * (sigma if math.isfinite(sigma) else 0.0)
