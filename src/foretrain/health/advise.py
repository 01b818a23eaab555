"""Judges the health of a run at every look: one finding per ailment, said once. It judges and never acts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.config import Config
from foretrain.health.findings import Advice, Ailment, Effective, HealthFinding, Levers
from foretrain.health.guard import RUNAWAY_SHARE
from foretrain.health.layers import Measured
from foretrain.health.recovery import HARM
from foretrain.health.vitals import Record, Row, Vitals
from foretrain.persist.stateful import Stateful

PLATEAU_STEPS = 500
PLATEAU_GAIN = 1e-3
"""Relative fall of the loss below which 500 steps are a plateau."""
CRITICAL_NORM = 100.0
"""A gradient norm that is one in any case, where nothing clips it."""
DEVIATION = 3.0
OVERFITTING_EVALUATIONS = 3
OVERFITTING_RISE = 0.01
LEVEL = 0.05
"""Share of the training loss by which the held-out loss may be above it while both are called level."""
LOW_UPDATE = 1e-4
BOLD_UPDATE = 1e-3
"""Updates of a healthy layer are about this share of its weights; on a plateau, larger ones had better be smaller."""
VANISHED = 1e-3
"""Share of the highest update/weight ratio of all layers below which a layer hardly moves."""
FLAT = 1e-2
"""The same for the gradient/weight ratio: an update can also be lost in rounding."""
STILL = 1e-5
"""Update/weight ratio above which a layer moves, whatever others do."""
HIGHEST_RATE_FACTOR, LOWEST_RATE_FACTOR = 4.0, 1e-3
UNDONE_SHARE = 1 / 3
"""Of all moves; two in a row among many that were kept are bad luck."""
MOST_TUNINGS = 3
"""Times that one ailment is tuned away."""
_KEPT_LOOKS = 1000
"""That the training loss is averaged over where nothing is evaluated for so long."""
HARMS = (Ailment.NOT_FINITE, Ailment.EXPLOSION, Ailment.DIVERGENCE)
"""What a rollback undoes."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a look has to know besides its own numbers."""

    step: int
    now: Effective
    high_rate: bool = True
    """The scheduled rate is at least half of its peak."""
    falling: bool = False
    """It will be below that in the end."""
    loops: int = 0
    """Times that moves were undone again and again."""
    undone: int = 0
    tried: int = 0
    distrusts: int = 0
    """Times that confidence alone was missing for several cycles."""
    confidence: float = 0.0
    threshold: float = 0.0
    leaps: bool = False
    """Quasi-Newton leaps were kept: they, and not the optimizer's rate, say how far the weights go, and a climb of the
    optimizer's own steps after them is taken back."""


class Health(Stateful):
    """`note` every step's numbers as they arrive, `examine` at every look, `evaluated` after every evaluation."""

    saved = (
        *("record", "findings", "rate_factor", "clip", "full_steps", "put_back", "_tuned", "_evaluations"),
        *("_best_evaluation", "_since_best", "_trained", "_suspects", "_oscillated", "_update"),
    )
    findings: list[HealthFinding]
    _tuned: dict[str, list[int]]
    _evaluations: list[tuple[float, float]]
    _best_evaluation: tuple[float, float]
    _trained: list[float]
    _suspects: set[int]

    def __init__(self, config: Config, layers: Sequence[str], levers: Levers | None = None) -> None:
        self.config = config
        self.layers = list(layers)
        self.advice = Advice(config, levers)
        self.record = Record(config.guard.explosion_factor, PLATEAU_GAIN)
        self.findings = []
        self.rate_factor = 1.0
        """What tuning made of the learning rate."""
        self.clip = math.inf
        self.full_steps = config.hybrid.full_steps
        self.put_back = False
        """A rollback since the last look put back sound weights, and something was tuned: what harms the run now is the
        fault of what was tuned, and need not be waited for."""
        self._tuned = {}
        """Ailment -> steps at which something was done about it."""
        self._evaluations = []
        """(held-out loss, mean training loss before it) of the last few."""
        self._best_evaluation = (math.inf, math.inf)
        self._since_best = 0
        """Evaluations."""
        self._trained = []
        """Mean losses of the looks since the last evaluation."""
        self._suspects = set()
        """Layers that hardly moved at the last look."""
        self._oscillated = False
        self._update = math.nan
        """Median update/weight ratio of all layers at the last look."""

    def cover(self, layers: Sequence[str]) -> None:
        """These are trained from now on."""
        self.layers, self._suspects = list(layers), set()

    def note(self, rows: Sequence[Row]) -> None:
        self.record.note(rows)

    # --- what is wrong? ----------------------------------------------------------------------------------------------

    def examine(
        self, situation: Situation, measured: Measured | None = None
    ) -> tuple[Vitals | None, list[HealthFinding]]:
        """What the steps since the last look say, and what is new about it."""
        found: list[HealthFinding] = []
        if measured is not None:
            self._update = _typical_update(measured)
            found += self._layers(situation, measured)
        vitals = self.record.vitals(situation.step)
        if vitals is not None:
            self._trained = [*self._trained[1 - _KEPT_LOOKS :], vitals.loss]
            found += self._run(situation, vitals)
        found += self._prediction(situation)
        news = self._news(found)
        self.put_back = self.put_back and vitals is None
        return vitals, news

    def evaluated(self, situation: Situation, held_out: float, training: float | None) -> list[HealthFinding]:
        """After every evaluation. training: what the training loss is, where no look has averaged it since."""
        known = [loss for loss in self._trained if math.isfinite(loss)] or ([] if training is None else [training])
        self._trained = []
        if not known or not math.isfinite(held_out):
            return []
        self._count((held_out, sum(known) / len(known)))
        return self._news([*self._overfitting(situation), *self._underfitting(situation)])

    def _count(self, evaluation: tuple[float, float]) -> None:
        self._evaluations = [*self._evaluations[-OVERFITTING_EVALUATIONS:], evaluation]
        self._since_best += 1
        if evaluation[0] < self._best_evaluation[0]:
            self._best_evaluation, self._since_best = evaluation, 0

    def rolled_back(self, situation: Situation) -> list[HealthFinding]:
        """What ailed the steps that were undone. The guard has done something about it."""
        vitals = self.record.undone(situation.step)
        self._oscillated = False
        return [] if vitals is None else self._news(list(self._harms(situation, vitals)))

    def _harms(self, situation: Situation, vitals: Vitals) -> Iterator[HealthFinding]:
        step, now = situation.step, situation.now
        if vitals.not_finite:
            yield self.advice.not_finite(step, vitals.not_finite, now)
        if not math.isfinite(vitals.loss):
            return
        senseless = vitals.ruined and vitals.usual_norm > CRITICAL_NORM  # what is usual in ruin is no limit to clip to
        if self._explodes(vitals, now) and not senseless and not situation.leaps:
            yield self.advice.explosion(step, vitals.largest_norm, vitals.usual_norm, vitals.spikes, now)
        if vitals.ruined:
            yield self.advice.ruin(step, vitals.loss, self.record.start.loss, now)
        elif vitals.lost > RUNAWAY_SHARE and vitals.deviation > DEVIATION:
            yield self.advice.divergence(step, vitals.deviation, vitals.loss, vitals.best, now)

    def _run(self, situation: Situation, vitals: Vitals) -> Iterator[HealthFinding]:
        yield from self._harms(situation, vitals)
        if not math.isfinite(vitals.loss):
            return
        oscillates = vitals.sign_changes > self.config.guard.oscillation_changes and vitals.stalled_steps > vitals.steps
        if oscillates and self._oscillated:  # batches of two kinds in turn look like this for a while
            yield self.advice.oscillation(situation.step, vitals.sign_changes, situation.now)
        self._oscillated = oscillates
        if vitals.stalled_steps >= PLATEAU_STEPS and not (oscillates or vitals.ruined):
            yield from self._plateau(situation, vitals)

    def _plateau(self, situation: Situation, vitals: Vitals) -> Iterator[HealthFinding]:
        """Unless there is nothing left to learn, or the schedule will do what would be advised; but a rate at which the
        loss is worse than it was is too high all the while."""
        learned = vitals.best < PLATEAU_GAIN * abs(self.record.first)
        bold = self._update > BOLD_UPDATE
        cured = not situation.high_rate or (bold and situation.falling and not vitals.fallen_back)
        if not (learned or cured or Ailment.UNDERFITTING in self.known):
            yield self.advice.plateau(situation.step, vitals.stalled_steps, vitals.best, bold, situation.now)
            self.record.start_over(situation.step)

    def _explodes(self, vitals: Vitals, now: Effective) -> bool:
        """Gradients far beyond the usual, that did harm. While the loss goes on falling they do none: equations begin
        with gradients like that."""
        if vitals.spikes < self.config.guard.patience:
            return False
        unchecked = not now.clip and vitals.largest_norm > CRITICAL_NORM and vitals.deviation > 0
        return vitals.lost > HARM or not vitals.gained or vitals.not_finite > 0 or unchecked

    def _layers(self, situation: Situation, measured: Measured) -> Iterator[HealthFinding]:
        """A layer that does not move at two looks in a row. The first look is at weights that may still be zero."""
        ratios, gradients = measured.update_to_weight, measured.gradient_to_weight
        dead = measured.gradient == 0
        alive = np.isfinite(ratios) & np.isfinite(gradients)
        usual, steep = (float(np.max(values[alive], initial=0.0)) for values in (ratios, gradients))
        still = alive & (ratios < min(VANISHED * usual, STILL)) & (gradients < FLAT * steep)
        suspects = set(np.flatnonzero(still | dead).tolist())
        confirmed = sorted(suspects & self._suspects) if measured.step > 0 else []
        self._suspects = suspects if measured.step > 0 else set()
        gone = [place for place in confirmed if dead[place]]
        weak = [place for place in confirmed if not dead[place]]
        step = situation.step
        if gone:
            yield self.advice.dead(step, self.layers[gone[0]], len(gone) - 1, situation.now)
        if weak:
            worst = min(weak, key=lambda place: float(ratios[place]))
            yield self.advice.vanishing(step, self.layers[worst], float(ratios[worst]), usual, len(weak) - 1)

    def _prediction(self, situation: Situation) -> Iterator[HealthFinding]:
        if situation.loops and situation.undone >= UNDONE_SHARE * situation.tried:
            yield self.advice.frequent_divergence(situation.step, situation.undone, situation.tried, situation.now)
        if situation.distrusts:
            yield self.advice.low_confidence(situation.step, situation.confidence, situation.threshold)

    def _overfitting(self, situation: Situation) -> Iterator[HealthFinding]:
        (lowest, trained_then), (held_out, trained) = self._best_evaluation, self._evaluations[-1]
        rise = held_out - lowest
        worse = self._since_best >= OVERFITTING_EVALUATIONS and rise > OVERFITTING_RISE * abs(lowest)
        start = self.record.start.loss
        learned = trained < trained_then and not trained > start - LEVEL * abs(start)
        by_heart = held_out - trained > LEVEL * abs(trained)  # else both losses suffer
        if worse and learned and by_heart:
            yield self.advice.overfitting(situation.step, rise, self._since_best)

    def _underfitting(self, situation: Situation) -> Iterator[HealthFinding]:
        last = self._evaluations
        if len(last) <= OVERFITTING_EVALUATIONS or not situation.high_rate or not 0 < self._update < LOW_UPDATE:
            return
        if situation.leaps:
            return
        falling = all(after[0] < before[0] for before, after in itertools.pairwise(last))
        held_out, trained = last[-1]
        level = held_out - trained <= LEVEL * abs(trained)
        if falling and level and Ailment.PLATEAU not in self.known:
            yield self.advice.underfitting(situation.step, self._update, situation.now)

    # --- once each ---------------------------------------------------------------------------------------------------

    @property
    def known(self) -> set[Ailment]:
        return {finding.ailment for finding in self.findings}

    def _news(self, found: list[HealthFinding]) -> list[HealthFinding]:
        news = [finding for finding in found if finding.ailment not in self.known or self._returns(finding)]
        self.findings += news
        return news

    def _returns(self, finding: HealthFinding) -> bool:
        """It was tuned away and is back."""
        tuned = self._tuned.get(finding.ailment.value, [])
        if self.put_back and finding.ailment in HARMS:
            return len(tuned) < MOST_TUNINGS
        pause = max(100, 2 * self.config.health.interval)
        return bool(tuned) and len(tuned) < MOST_TUNINGS and finding.step - tuned[-1] >= pause

    def tune(self, finding: HealthFinding, peak: float) -> dict[str, Any]:
        """With `guard.auto_tune`: what of a finding's change is made now, as far as it is safe."""
        if not (self.config.guard.auto_tune and finding.safe):
            return {}
        made: dict[str, Any] = {}
        for name, value in finding.change.items():
            if name == self.advice.levers.rate:
                factor = min(max(value / peak, LOWEST_RATE_FACTOR), HIGHEST_RATE_FACTOR)
                if factor == self.rate_factor:
                    continue
                self.rate_factor = factor
                made[name] = peak * factor
            elif name == "optimizer.gradient_clip_norm" and value < self.clip:
                self.clip = made[name] = value
            elif name == "hybrid.full_steps":
                self.full_steps = made[name] = value
        if made:
            self._tuned.setdefault(finding.ailment.value, []).append(finding.step)
        return made

    def keep(self, factor: float, peak: float, clip: float) -> tuple[dict[str, Any], float]:
        """With `guard.auto_tune`, when the guard rolls back: its lower rate stays, and gradients are clipped. What is
        changed, and what the rate was multiplied with. clip: the present limit, 0 for none."""
        if not self.config.guard.auto_tune:
            return {}, 1.0
        before, self.rate_factor = self.rate_factor, max(self.rate_factor * factor, LOWEST_RATE_FACTOR)
        made: dict[str, Any] = {}
        if self.rate_factor < before:
            made[self.advice.levers.rate] = float(f"{peak * self.rate_factor:.6g}")
        if not 0 < clip <= 1 and not self.config.engine.update_in_backward:
            self.clip = made["optimizer.gradient_clip_norm"] = 1.0
        self.put_back = bool(made)
        return made, self.rate_factor / before

    def effective(self, peak: float, clip: float, full_steps: int) -> Effective:
        """What the run goes by, tuning included."""
        limit = min(clip or math.inf, self.clip)
        return Effective(peak * self.rate_factor, 0.0 if math.isinf(limit) else limit, max(full_steps, self.full_steps))


def _typical_update(measured: Measured) -> float:
    """Median update/weight ratio. The first step says nothing: its learning rate may be next to nothing."""
    ratios = measured.update_to_weight
    ratios = ratios[np.isfinite(ratios)]
    return float(np.median(ratios)) if measured.step > 0 and len(ratios) else math.nan
