"""Detects the signs of illness in every step and says them in words. It judges and never acts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.baseline import SHORT, SLOW, GradientBaseline, LossBaseline
from foretrain.health.signs import RUNAWAY_SHARE, Severity, Signal, StepDiagnosis, StepReading, Symptom, sign
from foretrain.motion.losses import ENOUGH, KEPT
from foretrain.persist.stateful import Stateful

LARGE_AMPLITUDE = 2.5
"""Sigmas from which ten alternating losses are an oscillation; smaller ones must go on for 64 steps. Chosen: noise
alternates like that in less than 0.2 % of steps (tests/health/test_detect.py)."""
ANCHORS = 8
"""Cycles over which the losses before moves are compared. Chosen: fewer than 5 show no trend."""
ANCHOR_RISE = (4.0, 0.5, 0.002)
"""Standard errors, sigmas of the loss and share of it that anchors must rise by. Chosen: constant losses with noise set
it off less than once in a hundred cycles (tests/health/test_detect.py)."""
SLOW_RISE = (0.5, 0.005)
"""Sigmas and share of the loss by which the long average must rise above its lowest. Chosen: no healthy run of the
tests reaches both."""
RECENT_WARNING = 5
"""Steps for which a warning forbids moves. Chosen: about half a window."""


class Detector(Stateful):
    """`check` the reading of every step, in order; `anchor` once per cycle. A rollback restores it, too."""

    saved = (
        *("losses", "gradients", "streak", "since_warning", "since_critical", "deviating"),
        *("misses", "prediction_error", "anchors"),
    )
    misses: list[float]
    anchors: list[float]

    def __init__(self, hybrid: HybridConfig, guard: GuardConfig) -> None:
        self.hybrid = hybrid
        self.config = guard
        self.losses = LossBaseline()
        self.gradients = GradientBaseline()
        self.streak = 0
        """Readings in a row with a warning."""
        self.since_warning = self.since_critical = 1_000_000
        """Readings since then."""
        self.deviating = 0
        """Readings in a row with a loss that is too high."""
        self.misses = []
        """Loss minus predicted loss of the readings in this predicted phase."""
        self.prediction_error = 0.0
        """Relative error of this predicted phase beyond noise; negative where the loss is better than predicted."""
        self.anchors = []
        """Probe losses before the last moves."""

    @property
    def loss_stable(self) -> bool:
        return self.losses.stable and self.since_critical > 0

    @property
    def baseline_recorded(self) -> bool:
        return self.gradients.recorded

    @property
    def recent_divergence(self) -> bool:
        """Whether the last `full_steps` readings had a critical state, or the last five a warning."""
        return self.since_critical < self.hybrid.full_steps or self.since_warning < RECENT_WARNING

    def check(self, reading: StepReading) -> StepDiagnosis:
        """Judge the next step, then learn from it what is usual."""
        predicted = reading.phase is Phase.PREDICT
        if not predicted:
            self.misses, self.prediction_error = [], 0.0
        finite = reading.finite and math.isfinite(reading.loss) and math.isfinite(reading.gradient_norm or 0.0)
        if not finite:
            text = f"the loss is {reading.loss}" if not math.isfinite(reading.loss) else "a number is NaN or infinite"
            return self._conclude(reading, [sign(Signal.NOT_FINITE, text)])
        seen = [*self._loss(reading.loss), *self._gradient(reading.gradient_norm)]
        if predicted:  # losses at predicted weights must not move what they are judged by
            seen += self._prediction(reading)
        else:
            self.losses.update(reading.loss, self.hybrid.divergence_threshold)
            if reading.gradient_norm is not None:
                self.gradients.update(reading.gradient_norm, self.config.explosion_factor)
            seen += [*self._oscillation(), *self._ruin(), *self._runaway(), *self._slow_rise()]
        return self._conclude(reading, seen)

    def anchor(self, step: int, loss: float) -> StepDiagnosis:
        """Judge the probe loss before a leap. A rise across cycles is slow harm that no single step shows."""
        if not math.isfinite(loss):
            return StepDiagnosis(step, Severity.NORMAL)
        self.anchors = [*self.anchors, loss][-ANCHORS:]
        values = np.asarray(self.anchors)
        if len(values) < 5:
            return StepDiagnosis(step, Severity.NORMAL)
        time = np.arange(len(values)) - (len(values) - 1) / 2
        slope = float(time @ values / (time @ time))
        rest = values - values.mean() - slope * time
        error = math.sqrt(float(rest @ rest) / (len(values) - 2) / float(time @ time))
        rise = slope * (len(values) - 1)
        noise = self.losses.sigma if self.losses.count >= ENOUGH else 0.0
        errors, sigmas, share = ANCHOR_RISE
        if not (slope > errors * error and rise > max(sigmas * noise, share * abs(float(values.mean())))):
            return StepDiagnosis(step, Severity.NORMAL)
        text = f"the loss before each move rose by {rise:.4g} over {len(values)} cycles"
        self.anchors = self.anchors[-1:]  # one rise is reported once
        return self._diagnosis(step, [sign(Signal.DRIFT, text)], None)

    def check_calmly(self, losses: list[float], norms: list[float]) -> bool:
        """Take in many full steps at once, cheaply, if nothing about them is remarkable.

        Otherwise return False and change nothing.
        """
        if not losses or not self.gradients.recorded or not np.isfinite([*losses, *norms]).all():
            return False
        low, high = (
            self.gradients.norm * factor for factor in (self.config.vanishing_factor, self.config.explosion_factor)
        )
        if self.streak or min(norms) < low or max(norms) > high:
            return False
        before, self.losses = self.losses, self.losses.copy()
        calm = self.losses.update_calmly(losses, self.hybrid.divergence_threshold)
        if not calm or any(True for _ in self._runaway()) or any(True for _ in self._oscillation()):
            self.losses = before
            return False
        for norm in norms[:: max(1, len(norms) // 10)]:
            self.gradients.update(norm, self.config.explosion_factor)
        self.since_warning += len(losses)
        self.since_critical += len(losses)
        return True

    def after_move(self) -> None:
        """A move that lowered an exact loss changes what gradients are usual."""
        self.gradients = GradientBaseline()

    def is_usual(self, loss: float) -> bool:
        """Whether a loss is no more above the average than noise explains, and losses are sound; True while that is not
        known."""
        losses, threshold = self.losses, self.hybrid.divergence_threshold
        return losses.count < ENOUGH or (losses.sound and not loss > losses.fast + threshold * losses.sigma)

    def after_growth(self) -> None:
        """Another depth changes what losses and gradients are usual."""
        self.losses, self.gradients = LossBaseline(), GradientBaseline()

    # --- the signs ---------------------------------------------------------------------------------------------------

    def _loss(self, loss: float) -> Iterator[Symptom]:
        if self.losses.count < ENOUGH:
            return
        threshold, sigma = self.hybrid.divergence_threshold, self.losses.sigma
        deviation = (loss - self.losses.fast) / sigma
        self.deviating = self.deviating + 1 if deviation > threshold else 0
        text = f"the loss {loss:.4g} is {deviation:.1f} sigma above its average {self.losses.fast:.4g}"
        if self.deviating:
            # One hard batch is no reason to throw away a move: a second one, or a very high loss, is.
            certain = self.deviating > 1 or deviation > 2 * threshold
            yield Symptom(Signal.LOSS_DEVIATION, Severity.WARNING, text, Phase.FULL if certain else None)
        elif deviation > threshold * 2 / 3:
            yield Symptom(Signal.LOSS_DEVIATION, Severity.CAUTION, text)

    def _gradient(self, norm: float | None) -> Iterator[Symptom]:
        if norm is None or not self.gradients.recorded:
            return
        ratio = norm / self.gradients.norm
        text = f"the gradient norm {norm:.4g} is {ratio:.3g} times the usual {self.gradients.norm:.4g}"
        if ratio > self.config.explosion_factor:
            yield sign(Signal.GRADIENT_EXPLOSION, text)
        elif ratio < self.config.vanishing_factor:
            yield sign(Signal.GRADIENT_VANISHING, text)

    def _prediction(self, reading: StepReading) -> Iterator[Symptom]:
        threshold = reading.confidence_threshold
        threshold = self.hybrid.confidence_threshold if threshold is None else threshold
        if reading.confidence is not None and not reading.confidence >= threshold:
            yield sign(Signal.CONFIDENCE, f"confidence {reading.confidence:.2f} is below {threshold:.2f}")
        if reading.predicted_loss is None:
            return
        self.misses.append(reading.loss - reading.predicted_loss)
        self.prediction_error = self._relative_error(reading.loss)
        limit = self.config.prediction_error
        side = "above" if self.prediction_error > 0 else "below"
        text = f"the loss is {abs(self.prediction_error):.0%} {side} its prediction, beyond noise"
        if not self.prediction_error <= limit:
            yield sign(Signal.PREDICTION_ERROR, text)
        elif abs(self.prediction_error) > limit / 2:
            yield Symptom(Signal.PREDICTION_ERROR, Severity.CAUTION, text)

    def _relative_error(self, loss: float) -> float:
        """The mean miss of this phase beyond two sigma, which the noise of single batches explains."""
        mean = sum(self.misses) / len(self.misses)
        if not math.isfinite(mean):
            return math.inf
        sigma = self.losses.sigma if self.losses.count >= ENOUGH else 0.0
        beyond = max(0.0, abs(mean) - 2 * sigma / math.sqrt(len(self.misses)))
        return math.copysign(beyond / max(abs(loss), 1e-300), mean)

    def _oscillation(self) -> Iterator[Symptom]:
        limit = self.config.oscillation_changes
        short = self.losses.sign_changes(SHORT)
        if short <= limit:  # whatever alternates over 64 steps has done so over most stretches of 10
            return
        large = self.losses.amplitude() > LARGE_AMPLITUDE
        changes, steps = (short, SHORT) if large else (self.losses.sign_changes(KEPT), KEPT)
        if changes > limit:
            more = f"{changes:.1f} changes of direction in 10 steps more than noise has"
            yield sign(Signal.OSCILLATION, f"the loss goes up and down with {more}, over {steps} steps")

    def _ruin(self) -> Iterator[Symptom]:
        if self.losses.ruined:
            median, start = self.losses.median, self.losses.start_loss
            yield sign(Signal.RUIN, f"the loss {median:.4g} is far above {start:.4g}, that of the first step")

    def _runaway(self) -> Iterator[Symptom]:
        if self.losses.count > KEPT and self.losses.middle > self.losses.far_above(RUNAWAY_SHARE):
            average, best = self.losses.middle, self.losses.best
            yield sign(Signal.RUNAWAY, f"the average loss {average:.4g} is far above the best so far, {best:.4g}")

    def _slow_rise(self) -> Iterator[Symptom]:
        if self.losses.count <= 2 * SLOW or self.losses.count % KEPT:
            return
        rise = self.losses.slow - self.losses.lowest_slow
        sigmas, share = SLOW_RISE
        if rise > sigmas * self.losses.sigma and rise > share * abs(self.losses.slow):
            self.losses.lowest_slow = self.losses.slow  # one rise is reported once
            yield sign(Signal.DRIFT, f"the long average of the loss rose by {rise:.4g} to {self.losses.slow:.4g}")

    # --- the diagnosis -----------------------------------------------------------------------------------------------

    def _conclude(self, reading: StepReading, symptoms: list[Symptom]) -> StepDiagnosis:
        worst = max((symptom.level for symptom in symptoms), default=Severity.NORMAL)
        self.streak = self.streak + 1 if worst >= Severity.WARNING else 0
        diagnosis = self._diagnosis(reading.step, symptoms, reading.phase)
        self.since_warning = 0 if diagnosis.level >= Severity.WARNING else self.since_warning + 1
        self.since_critical = 0 if diagnosis.level is Severity.CRITICAL else self.since_critical + 1
        return diagnosis

    def _diagnosis(self, step: int, symptoms: list[Symptom], phase: Phase | None) -> StepDiagnosis:
        level = max((symptom.level for symptom in symptoms), default=Severity.NORMAL)
        texts = [symptom.text for symptom in symptoms]
        if level is Severity.WARNING and self.streak >= self.config.patience:
            level = Severity.CRITICAL
            texts.append(f"{self.streak} warnings in a row")
        exits = {symptom.exit_to for symptom in symptoms}
        exit_to = next((target for target in (Phase.FULL, Phase.CORRECT) if target in exits), None)
        if phase in (Phase.WARMUP, Phase.FULL, exit_to):
            exit_to = None
        text = "; ".join(texts) or "nothing unusual"
        setback = self.losses.setback if level >= Severity.WARNING else 0.0
        return StepDiagnosis(step, level, tuple(symptoms), exit_to, text, self.losses.improving, setback)
