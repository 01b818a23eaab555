"""Reports what ails a run at every measurement, each ailment once, with advice. It acts only with `guard.auto_tune`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.config import Config
from foretrain.health.findings import Advice, Ailment, Effective, HealthFinding, Levers
from foretrain.health.layers import LayerNorms
from foretrain.health.signs import EMERGENCY_CLIP, HARM
from foretrain.health.vitals import Monitor, Row, Vitals
from foretrain.persist.stateful import Stateful

PLATEAU_STEPS = 500
"""Steps without progress that are a plateau. Chosen: five measurements, so that a pause is none."""
PLATEAU_GAIN = 1e-3
"""Relative fall of the loss below which 500 steps are a plateau. Chosen: less is hard to see on a chart."""
CRITICAL_NORM = 100.0
"""Gradient norm that is an explosion in any case where nothing clips it. Chosen: a hundred times the usual clipping."""
OVERFITTING_EVALUATIONS = 3
"""Evaluations without a better held-out loss. Chosen: one or two are noise."""
OVERFITTING_RISE = 0.01
"""Share of the best held-out loss by which it must have risen. Chosen: less is noise of a small held-out set."""
LEVEL = 0.05
"""Share of the training loss by which the held-out loss may be above it while both are called level. Chosen."""
LOW_UPDATE = 1e-4
"""Median update/weight ratio below which updates are tiny. Chosen: a tenth of the usual advice of 1e-3."""
BOLD_UPDATE = 1e-3
"""Updates of a healthy layer are about this share of its weights, by common advice; on a plateau larger ones had better
be smaller."""
VANISHED = 1e-3
"""Share of the highest update/weight ratio of all layers below which a layer hardly moves. Chosen: gradient/weight
ratios of healthy layers of a small GPT differ by a factor of 500 already (docs/health.md)."""
FLAT = 1e-2
"""Share of the highest gradient/weight ratio below which a layer gets next to no gradient. Chosen: a small update alone
can also be lost in rounding."""
STILL = 1e-5
"""Update/weight ratio above which a layer moves, whatever others do. Chosen: it turns over within a long run."""
HIGHEST_RATE_FACTOR, LOWEST_RATE_FACTOR = 4.0, 1e-3
"""Limits of what tuning makes of the learning rate. Chosen: two doublings, three tenths."""
UNDONE_SHARE = 1 / 3
"""Share of all moves that must have been undone. Chosen: two in a row among many that were kept are bad luck."""
MOST_TUNINGS = 3
"""How often one ailment is tuned away. Chosen: what three changes do not cure has another cause."""
_KEPT_MEANS = 1000
"""Measurements that the training loss is averaged over where nothing is evaluated for long. Chosen: to bound memory."""
HARMS = (Ailment.NOT_FINITE, Ailment.EXPLOSION, Ailment.DIVERGENCE)
"""What a rollback undoes."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What advice has to know about a run besides what was measured."""

    step: int
    now: Effective
    high_rate: bool = True
    """The scheduled rate is at least half of its peak."""
    falling: bool = False
    """The scheduled rate will be below half of its peak in the end."""
    loops: int = 0
    """How often two moves were undone shortly after each other."""
    undone: int = 0
    tried: int = 0
    distrusts: int = 0
    """How often confidence alone was missing for several cycles."""
    confidence: float = 0.0
    threshold: float = 0.0
    lowest_step: int = 0
    """Step of the lowest loss since leaps that an exact loss judged were kept; 0 where none were."""
    leaps: bool = False
    """Quasi-Newton leaps were kept. They decide how far the weights go, not the optimizer's rate, and a climb of the
    optimizer's own steps after them is undone."""


class Health(Stateful):
    """`note` every step's numbers as they arrive, `examine` at every measurement, `evaluated` after an evaluation."""

    saved = (
        *("monitor", "findings", "rate_factor", "clip", "full_steps", "put_back", "_tuned", "_evaluations"),
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
        self.monitor = Monitor(config.guard.explosion_factor, PLATEAU_GAIN)
        self.findings = []
        self.rate_factor = 1.0
        """Factor of the learning rate by tuning."""
        self.clip = math.inf
        self.full_steps = config.hybrid.full_steps
        self.put_back = False
        """A rollback since the last measurement put back sound weights, and something was tuned. What harms the run now
        was not cured by it, and is tuned again without a pause."""
        self._tuned = {}
        """Ailment -> steps at which something was tuned because of it."""
        self._evaluations = []
        """(held-out loss, mean training loss before it) of the last evaluations."""
        self._best_evaluation = (math.inf, math.inf)
        self._since_best = 0
        """Evaluations since the best one."""
        self._trained = []
        """Mean training losses of the measurements since the last evaluation."""
        self._suspects = set()
        """Layers that hardly moved at the last measurement."""
        self._oscillated = False
        """The loss oscillated at the last measurement."""
        self._update = math.nan
        """Median update/weight ratio of all layers at the last measurement."""

    def cover(self, layers: Sequence[str]) -> None:
        """Other layers are trained from now on."""
        self.layers, self._suspects = list(layers), set()

    def note(self, rows: Sequence[Row]) -> None:
        self.monitor.note(rows)

    # --- what is wrong? ----------------------------------------------------------------------------------------------

    def examine(
        self, status: RunStatus, measured: LayerNorms | None = None
    ) -> tuple[Vitals | None, list[HealthFinding]]:
        """Judge the steps since the last measurement. Return their vitals and the findings that are new."""
        found: list[HealthFinding] = []
        if measured is not None:
            self._update = _typical_update(measured)
            found += self._layers(status, measured)
        vitals = self.monitor.vitals(status.step)
        if vitals is not None:
            self._trained = [*self._trained[1 - _KEPT_MEANS :], vitals.loss]
            found += self._run(status, vitals)
        found += self._prediction(status)
        news = self._news(found)
        self.put_back = self.put_back and vitals is None
        return vitals, news

    def evaluated(self, status: RunStatus, held_out: float, training: float | None) -> list[HealthFinding]:
        """Judge an evaluation. training: the training loss where no measurement has averaged it since the last one."""
        known = [loss for loss in self._trained if math.isfinite(loss)] or ([] if training is None else [training])
        self._trained = []
        if not known or not math.isfinite(held_out):
            return []
        self._count((held_out, sum(known) / len(known)))
        return self._news([*self._overfitting(status), *self._underfitting(status)])

    def _count(self, evaluation: tuple[float, float]) -> None:
        self._evaluations = [*self._evaluations[-OVERFITTING_EVALUATIONS:], evaluation]
        self._since_best += 1
        if evaluation[0] < self._best_evaluation[0]:
            self._best_evaluation, self._since_best = evaluation, 0

    def rolled_back(self, status: RunStatus) -> list[HealthFinding]:
        """Find what ailed the steps that a rollback undid."""
        vitals = self.monitor.undone(status.step)
        self._oscillated = False
        return [] if vitals is None else self._news(list(self._harms(status, vitals)))

    def _harms(self, status: RunStatus, vitals: Vitals) -> Iterator[HealthFinding]:
        step, now = status.step, status.now
        if vitals.not_finite:
            yield self.advice.not_finite(step, vitals.not_finite, now)
        if not math.isfinite(vitals.loss):
            return
        senseless = vitals.ruined and vitals.usual_norm > CRITICAL_NORM  # what is usual in ruin is no limit to clip to
        if self._explodes(vitals, now) and not senseless and not status.leaps:
            yield self.advice.explosion(step, vitals.largest_norm, vitals.usual_norm, vitals.spikes, now)
        if vitals.ruined:
            yield self.advice.ruin(step, vitals.loss, self.monitor.start_loss, now)
        elif vitals.diverged:
            yield self.advice.divergence(step, vitals.deviation, vitals.loss, vitals.best, now)

    def _run(self, status: RunStatus, vitals: Vitals) -> Iterator[HealthFinding]:
        yield from self._harms(status, vitals)
        if not math.isfinite(vitals.loss):
            return
        oscillates = vitals.sign_changes > self.config.guard.oscillation_changes and vitals.stalled_steps > vitals.steps
        if oscillates and self._oscillated:  # batches of two kinds in turn look like this for a while
            yield self.advice.oscillation(status.step, vitals.sign_changes, status.now)
        self._oscillated = oscillates
        if vitals.stalled_steps >= PLATEAU_STEPS and not (oscillates or vitals.ruined):
            yield from self._plateau(status, vitals)

    def _plateau(self, status: RunStatus, vitals: Vitals) -> Iterator[HealthFinding]:
        """A plateau is reported unless nothing is left to learn, or the schedule will do what would be advised.

        A rate at which the loss became worse than it was is too high, whatever the schedule will do.
        """
        if status.lowest_step and status.step - status.lowest_step < PLATEAU_STEPS:
            return  # leaps count many steps each, and averages know only those in between
        learned = vitals.best < PLATEAU_GAIN * abs(self.monitor.first)
        bold = self._update > BOLD_UPDATE
        cured = not status.high_rate or (bold and status.falling and not vitals.fallen_back)
        if not (learned or cured or Ailment.UNDERFITTING in self.known):
            yield self.advice.plateau(status.step, vitals.stalled_steps, vitals.best, bold, status.now)
            self.monitor.start_over(status.step)

    def _explodes(self, vitals: Vitals, now: Effective) -> bool:
        """Whether gradients far beyond the usual did harm. While the loss goes on falling they do none: runs that solve
        equations begin with gradients like that."""
        if vitals.spikes < self.config.guard.patience:
            return False
        unchecked = not now.clip and vitals.largest_norm > CRITICAL_NORM and vitals.deviation > 0
        return vitals.lost > HARM or not vitals.gained or vitals.not_finite > 0 or unchecked

    def _layers(self, status: RunStatus, measured: LayerNorms) -> Iterator[HealthFinding]:
        """Find layers that do not move in two measurements in a row. In the first, weights may still be zero."""
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
        step = status.step
        if gone:
            yield self.advice.dead(step, self.layers[gone[0]], len(gone) - 1, status.now)
        if weak:
            worst = min(weak, key=lambda place: float(ratios[place]))
            yield self.advice.vanishing(step, self.layers[worst], float(ratios[worst]), usual, len(weak) - 1)

    def _prediction(self, status: RunStatus) -> Iterator[HealthFinding]:
        if status.loops and status.undone >= UNDONE_SHARE * status.tried:
            yield self.advice.frequent_divergence(status.step, status.undone, status.tried, status.now)
        if status.distrusts:
            yield self.advice.low_confidence(status.step, status.confidence, status.threshold)

    def _overfitting(self, status: RunStatus) -> Iterator[HealthFinding]:
        (lowest, trained_then), (held_out, trained) = self._best_evaluation, self._evaluations[-1]
        rise = held_out - lowest
        worse = self._since_best >= OVERFITTING_EVALUATIONS and rise > OVERFITTING_RISE * abs(lowest)
        start = self.monitor.start_loss
        learned = trained < trained_then and not trained > start - LEVEL * abs(start)
        by_heart = held_out - trained > LEVEL * abs(trained)  # else both losses suffer
        if worse and learned and by_heart:
            yield self.advice.overfitting(status.step, rise, self._since_best)

    def _underfitting(self, status: RunStatus) -> Iterator[HealthFinding]:
        last = self._evaluations
        if len(last) <= OVERFITTING_EVALUATIONS or not status.high_rate or not 0 < self._update < LOW_UPDATE:
            return
        if status.leaps:
            return
        falling = all(after[0] < before[0] for before, after in itertools.pairwise(last))
        held_out, trained = last[-1]
        level = held_out - trained <= LEVEL * abs(trained)
        if falling and level and Ailment.PLATEAU not in self.known:
            yield self.advice.underfitting(status.step, self._update, status.now)

    # --- once each ---------------------------------------------------------------------------------------------------

    @property
    def known(self) -> set[Ailment]:
        return {finding.ailment for finding in self.findings}

    def _news(self, found: list[HealthFinding]) -> list[HealthFinding]:
        news = [finding for finding in found if finding.ailment not in self.known or self._returns(finding)]
        self.findings += news
        return news

    def _returns(self, finding: HealthFinding) -> bool:
        """Whether an ailment that was tuned away is back."""
        tuned = self._tuned.get(finding.ailment.value, [])
        if self.put_back and finding.ailment in HARMS:
            return len(tuned) < MOST_TUNINGS
        pause = max(100, 2 * self.config.health.interval)
        return bool(tuned) and len(tuned) < MOST_TUNINGS and finding.step - tuned[-1] >= pause

    def tune(self, finding: HealthFinding, peak: float) -> dict[str, Any]:
        """With `guard.auto_tune`, make the changes of a finding that are safe. Return those that were made."""
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
        """With `guard.auto_tune`, keep the lower rate of a rollback and clip gradients.

        clip: the present limit, 0 for none. Return the changes, and the factor of the rate that is kept.
        """
        if not self.config.guard.auto_tune:
            return {}, 1.0
        before, self.rate_factor = self.rate_factor, max(self.rate_factor * factor, LOWEST_RATE_FACTOR)
        made: dict[str, Any] = {}
        if self.rate_factor < before:
            made[self.advice.levers.rate] = float(f"{peak * self.rate_factor:.6g}")
        if not 0 < clip <= EMERGENCY_CLIP and not self.config.engine.update_in_backward:
            self.clip = made["optimizer.gradient_clip_norm"] = EMERGENCY_CLIP
        self.put_back = bool(made)
        return made, self.rate_factor / before

    def effective(self, peak: float, clip: float, full_steps: int) -> Effective:
        """The settings that count now, tuning included."""
        limit = min(clip or math.inf, self.clip)
        return Effective(peak * self.rate_factor, 0.0 if math.isinf(limit) else limit, max(full_steps, self.full_steps))


def _typical_update(measured: LayerNorms) -> float:
    """The median update/weight ratio. In the first step it says nothing: the learning rate may be next to nothing."""
    ratios = measured.update_to_weight
    ratios = ratios[np.isfinite(ratios)]
    return float(np.median(ratios)) if measured.step > 0 and len(ratios) else math.nan
