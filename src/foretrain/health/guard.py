"""Watches the numbers of every step and says in words when something goes wrong. It judges and never acts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.baseline import ENOUGH, KEPT_LOSSES, SHORT, GradientBaseline, LossBaseline
from foretrain.persist.stateful import Stateful

LARGE_AMPLITUDE = 2.5
"""Sigmas from which ten alternating losses are an oscillation; smaller ones must go on for 64 steps."""
ANCHORS = 8
RUNAWAY_SHARE = 0.5
"""A run that has lost this share of all it had gained, far beyond noise, is running away."""


class Level(IntEnum):
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


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of one step."""

    step: int
    phase: Phase
    loss: float
    gradient_norm: float | None = None
    """Before clipping. None in predicted steps."""
    predicted_loss: float | None = None
    """What the predictor said this loss would be: a loss, never an error."""
    confidence: float | None = None
    confidence_threshold: float | None = None
    """None: the configured one."""
    finite: bool = True
    """False where a loss, gradient, weight or forecast is not a number. A mere overflow of the fp16 loss scale, which
    the scaler repairs by itself, is no such case."""


@dataclass(frozen=True, slots=True)
class Finding:
    signal: Signal
    level: Level
    text: str
    exit_to: Phase | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    step: int
    level: Level
    findings: tuple[Finding, ...] = ()
    exit_to: Phase | None = None
    """Where a predicted or correcting phase should go now. FULL means that the open move is to be undone."""
    text: str = "nothing unusual"
    improving: bool = False
    """The average loss still falls, beyond noise."""
    setback: float = 0.0
    """Share of all that the run had gained which is lost at present; looked up only for warnings."""

    @property
    def signals(self) -> frozenset[Signal]:
        """Those that are at least a warning."""
        return frozenset(finding.signal for finding in self.findings if finding.level >= Level.WARNING)


class Guard(Stateful):
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
        """Readings in a row with a loss too high."""
        self.misses = []
        """Loss minus predicted loss of the readings in this predicted phase."""
        self.prediction_error = 0.0
        """Of this predicted phase, relative and beyond noise; negative where the loss is better than predicted."""
        self.anchors = []

    @property
    def loss_stable(self) -> bool:
        return self.losses.stable and self.since_critical > 0

    @property
    def baseline_recorded(self) -> bool:
        return self.gradients.recorded

    @property
    def recent_divergence(self) -> bool:
        """A critical state within the last `full_steps` readings, or a warning within the last five."""
        return self.since_critical < self.hybrid.full_steps or self.since_warning < 5

    def check(self, reading: Reading) -> Verdict:
        if reading.phase is not Phase.PREDICT:
            self.misses, self.prediction_error = [], 0.0
        finite = reading.finite and math.isfinite(reading.loss) and math.isfinite(reading.gradient_norm or 0.0)
        if not finite:
            text = f"the loss is {reading.loss}" if not math.isfinite(reading.loss) else "a number is NaN or infinite"
            return self._conclude(reading, [Finding(Signal.NOT_FINITE, Level.CRITICAL, text, Phase.FULL)])
        findings = [*self._loss(reading.loss), *self._gradient(reading.gradient_norm), *self._prediction(reading)]
        if reading.phase is not Phase.PREDICT:  # losses at predicted weights must not move what they are judged by
            self.losses.update(reading.loss, self.hybrid.divergence_threshold)
            if reading.gradient_norm is not None:
                self.gradients.update(reading.gradient_norm, self.config.explosion_factor)
            findings += [*self._oscillation(), *self._ruin(), *self._runaway(), *self._slow_rise()]
        return self._conclude(reading, findings)

    def anchor(self, step: int, loss: float) -> Verdict:
        """The probe loss before each leap: a rise across cycles is a slow harm that no single step shows."""
        if not math.isfinite(loss):
            return Verdict(step, Level.NORMAL)
        self.anchors = [*self.anchors, loss][-ANCHORS:]
        values = np.asarray(self.anchors)
        if len(values) < 5:
            return Verdict(step, Level.NORMAL)
        time = np.arange(len(values)) - (len(values) - 1) / 2
        slope = float(time @ values / (time @ time))
        rest = values - values.mean() - slope * time
        error = math.sqrt(float(rest @ rest) / (len(values) - 2) / float(time @ time))
        rise = slope * (len(values) - 1)
        noise = self.losses.sigma if self.losses.count >= ENOUGH else 0.0
        if not (slope > 4 * error and rise > max(0.5 * noise, 0.002 * abs(float(values.mean())))):
            return Verdict(step, Level.NORMAL)
        text = f"the loss before each move rose by {rise:.4g} over {len(values)} cycles"
        self.anchors = self.anchors[-1:]  # one rise is reported once
        return self._verdict(step, [Finding(Signal.DRIFT, Level.WARNING, text, Phase.FULL)], None)

    def check_calmly(self, losses: list[float], norms: list[float]) -> bool:
        """Many full steps at once, cheaply, if nothing about them is remarkable; else False, and nothing is changed."""
        if not losses or not self.gradients.recorded or not np.isfinite([*losses, *norms]).all():
            return False
        low, high = (
            self.gradients.norm * factor for factor in (self.config.vanishing_factor, self.config.explosion_factor)
        )
        if self.streak or min(norms) < low or max(norms) > high:
            return False
        before = self.state_dict()
        if not self.losses.update_calmly(losses, self.hybrid.divergence_threshold):
            return False
        for norm in norms[:: max(1, len(norms) // 10)]:
            self.gradients.update(norm, self.config.explosion_factor)
        self.since_warning += len(losses)
        self.since_critical += len(losses)
        if any(True for _ in self._runaway()) or any(True for _ in self._oscillation()):
            self.load_state_dict(before)
            return False
        return True

    def after_move(self) -> None:
        """A move that lowered an exact loss changes what gradients are usual."""
        self.gradients = GradientBaseline()

    def _loss(self, loss: float) -> Iterator[Finding]:
        if self.losses.count < ENOUGH:
            return
        threshold, sigma = self.hybrid.divergence_threshold, self.losses.sigma
        deviation = (loss - self.losses.fast) / sigma
        self.deviating = self.deviating + 1 if deviation > threshold else 0
        text = f"the loss {loss:.4g} is {deviation:.1f} sigma above its average {self.losses.fast:.4g}"
        if self.deviating:
            # One hard batch is no reason to throw away a move: a second one, or a very high loss, is.
            certain = self.deviating > 1 or deviation > 2 * threshold
            yield Finding(Signal.LOSS_DEVIATION, Level.WARNING, text, Phase.FULL if certain else None)
        elif deviation > threshold * 2 / 3:
            yield Finding(Signal.LOSS_DEVIATION, Level.CAUTION, text)

    def _gradient(self, norm: float | None) -> Iterator[Finding]:
        if norm is None or not self.gradients.recorded:
            return
        ratio = norm / self.gradients.norm
        text = f"the gradient norm {norm:.4g} is {ratio:.3g} times the usual {self.gradients.norm:.4g}"
        if ratio > self.config.explosion_factor:
            yield Finding(Signal.GRADIENT_EXPLOSION, Level.WARNING, text, Phase.FULL)
        elif ratio < self.config.vanishing_factor:
            yield Finding(Signal.GRADIENT_VANISHING, Level.WARNING, text, Phase.FULL)

    def _prediction(self, reading: Reading) -> Iterator[Finding]:
        if reading.phase is not Phase.PREDICT:
            return
        threshold = reading.confidence_threshold
        threshold = self.hybrid.confidence_threshold if threshold is None else threshold
        if reading.confidence is not None and not reading.confidence >= threshold:
            text = f"confidence {reading.confidence:.2f} is below {threshold:.2f}"
            yield Finding(Signal.CONFIDENCE, Level.WARNING, text, Phase.FULL)
        if reading.predicted_loss is None:
            return
        self.misses.append(reading.loss - reading.predicted_loss)
        self.prediction_error = self._relative_error(reading.loss)
        limit = self.config.prediction_error
        side = "above" if self.prediction_error > 0 else "below"
        text = f"the loss is {abs(self.prediction_error):.0%} {side} its prediction, beyond noise"
        if not self.prediction_error <= limit:
            yield Finding(Signal.PREDICTION_ERROR, Level.WARNING, text, Phase.CORRECT)
        elif abs(self.prediction_error) > limit / 2:
            yield Finding(Signal.PREDICTION_ERROR, Level.CAUTION, text)

    def _relative_error(self, loss: float) -> float:
        """Mean miss of this phase; what the noise of single batches explains (two sigma) is not held against it."""
        mean = sum(self.misses) / len(self.misses)
        if not math.isfinite(mean):
            return math.inf
        sigma = self.losses.sigma if self.losses.count >= ENOUGH else 0.0
        beyond = max(0.0, abs(mean) - 2 * sigma / math.sqrt(len(self.misses)))
        return math.copysign(beyond / max(abs(loss), 1e-300), mean)

    def _oscillation(self) -> Iterator[Finding]:
        limit = self.config.oscillation_changes
        short = self.losses.sign_changes(SHORT)
        if short <= limit:  # whatever alternates over 64 steps has done so over most stretches of 10
            return
        if self.losses.amplitude() > LARGE_AMPLITUDE:
            changes, steps = short, SHORT
        else:
            changes, steps = self.losses.sign_changes(KEPT_LOSSES), KEPT_LOSSES
        if changes > limit:
            more = f"{changes:.1f} changes of direction in 10 steps more than noise has"
            text = f"the loss goes up and down with {more}, over {steps} steps"
            yield Finding(Signal.OSCILLATION, Level.WARNING, text, Phase.CORRECT)

    def _ruin(self) -> Iterator[Finding]:
        if self.losses.ruined:
            recent, start = self.losses.recent, self.losses.start.loss
            text = f"the loss {recent:.4g} is far above {start:.4g}, that of the first step"
            yield Finding(Signal.RUIN, Level.CRITICAL, text, Phase.FULL)

    def _runaway(self) -> Iterator[Finding]:
        if self.losses.count > KEPT_LOSSES and self.losses.middle > self.losses.far_above(RUNAWAY_SHARE):
            average, best = self.losses.middle, self.losses.best
            text = f"the average loss {average:.4g} is far above the best so far, {best:.4g}"
            yield Finding(Signal.RUNAWAY, Level.CRITICAL, text, Phase.FULL)

    def _slow_rise(self) -> Iterator[Finding]:
        if self.losses.count <= 512 or self.losses.count % 64:
            return
        rise = self.losses.slow - self.losses.lowest_slow
        if rise > 0.5 * self.losses.sigma and rise > 0.005 * abs(self.losses.slow):
            self.losses.lowest_slow = self.losses.slow  # one rise is reported once
            text = f"the long average of the loss rose by {rise:.4g} to {self.losses.slow:.4g}"
            yield Finding(Signal.DRIFT, Level.WARNING, text, Phase.FULL)

    def _conclude(self, reading: Reading, findings: list[Finding]) -> Verdict:
        worst = max((finding.level for finding in findings), default=Level.NORMAL)
        self.streak = self.streak + 1 if worst >= Level.WARNING else 0
        verdict = self._verdict(reading.step, findings, reading.phase)
        self.since_warning = 0 if verdict.level >= Level.WARNING else self.since_warning + 1
        self.since_critical = 0 if verdict.level is Level.CRITICAL else self.since_critical + 1
        return verdict

    def _verdict(self, step: int, findings: list[Finding], phase: Phase | None) -> Verdict:
        level = max((finding.level for finding in findings), default=Level.NORMAL)
        texts = [finding.text for finding in findings]
        if level is Level.WARNING and self.streak >= self.config.patience:
            level = Level.CRITICAL
            texts.append(f"{self.streak} warnings in a row")
        exits = {finding.exit_to for finding in findings}
        exit_to = next((target for target in (Phase.FULL, Phase.CORRECT) if target in exits), None)
        if phase in (Phase.WARMUP, Phase.FULL, exit_to):
            exit_to = None
        text = "; ".join(texts) or "nothing unusual"
        setback = self.losses.setback if level >= Level.WARNING else 0.0
        return Verdict(step, level, tuple(findings), exit_to, text, self.losses.improving, setback)
