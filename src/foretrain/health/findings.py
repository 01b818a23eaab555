"""Puts into words what ails a run: what was measured, what it means, and what to set to which value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from torch.optim import Optimizer

from foretrain.config import Config
from foretrain.health.signs import EMERGENCY_CLIP, RATE_EXPLOSION, RATE_OSCILLATION, RATE_RUIN, RATE_RUNAWAY
from foretrain.motion.losses import BEYOND_NOISE

RUN = "run"
"""The place of what concerns no single layer."""
HIGHEST_EXPLOSION = 100.0
"""Times the usual norm from which an explosion is critical. Chosen: ten times what makes it one by default."""
PLATEAU_FACTOR = 2.0
"""Factor of the learning rate on a plateau, up or down. Chosen: the least that shows."""


class Ailment(StrEnum):
    """What a run can suffer from."""

    NOT_FINITE = "NaN"
    EXPLOSION = "explosion"
    DIVERGENCE = "divergence"
    OSCILLATION = "oscillation"
    PLATEAU = "plateau"
    OVERFITTING = "overfitting"
    UNDERFITTING = "underfitting"
    VANISHING_LAYER = "vanishing layer"
    DEAD_LAYER = "dead layer"
    LOW_CONFIDENCE = "low confidence"
    FREQUENT_DIVERGENCE = "frequent divergence"


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One ailment, found at one step."""

    ailment: Ailment
    step: int
    measure: str
    place: str
    """The name of a layer, or "run"."""
    value: float
    healthy: str
    """The range in which there would be no finding."""
    level: str
    """"warning" or "critical"."""
    meaning: str
    change: Mapping[str, Any] = field(default_factory=dict)
    """Settings as in the configuration file: what to set, and to what. Empty where no setting helps."""
    safe: bool = False
    """`guard.auto_tune` may make this change by itself while the run goes on."""

    def record(self) -> dict[str, Any]:
        """The finding as `summary.json` holds it."""
        value = self.value if math.isfinite(self.value) else None
        return {**asdict(self), "ailment": self.ailment.value, "value": value, "change": dict(self.change)}


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings that count at present: those of the configuration, unless something was tuned."""

    rate: float
    """Peak learning rate."""
    clip: float
    """Largest gradient norm; 0 where nothing is clipped."""
    full_steps: int


@dataclass(frozen=True, slots=True)
class Levers:
    """The user's names of what can be set. None stands for what this run does not have."""

    rate: str = "optimizer.learning_rate"
    decay: str | None = "optimizer.weight_decay"
    decay_now: float = 0.0
    epsilon: str | None = "optimizer.epsilon"
    epsilon_now: float = 1e-8
    kind: str = "adamw"
    """`optimizer.type`; empty where the optimizer is the user's own."""
    dropout: str = "model.dropout"


def levers_of(config: Config) -> Levers:
    """The names where model and optimizer are made from the configuration."""
    optimizer = config.optimizer
    return Levers(decay_now=optimizer.decay, epsilon_now=optimizer.epsilon, kind=optimizer.type)


def levers_of_own(optimizer: Optimizer) -> Levers:
    """The names where the optimizer is the user's own."""
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    decay, epsilon = group.get("weight_decay"), group.get("eps")
    return Levers(
        rate=f"lr of your {name}",
        decay=None if not decay else f"weight_decay of your {name}",  # from 0 on it would end quasi-Newton leaps
        decay_now=float(decay or 0.0),
        epsilon=None if not isinstance(epsilon, float) else f"eps of your {name}",
        epsilon_now=epsilon if isinstance(epsilon, float) else 0.0,
        kind="",
    )


_MEASURES = {
    Ailment.NOT_FINITE: "steps that are not finite",
    Ailment.EXPLOSION: "gradient norm",
    Ailment.DIVERGENCE: "loss deviation",
    Ailment.OSCILLATION: "changes of direction of the loss in 10 steps, above the 5 of noise",
    Ailment.PLATEAU: "steps without a better loss",
    Ailment.OVERFITTING: "held-out loss above its best",
    Ailment.UNDERFITTING: "update/weight ratio",
    Ailment.VANISHING_LAYER: "update/weight ratio",
    Ailment.DEAD_LAYER: "gradient norm",
    Ailment.LOW_CONFIDENCE: "confidence",
    Ailment.FREQUENT_DIVERGENCE: "moves undone",
}


class Advice:
    """Makes a finding of each ailment. It changes nothing by itself."""

    def __init__(self, config: Config, levers: Levers | None = None) -> None:
        self.config = config
        self.levers = levers or levers_of(config)

    def not_finite(self, step: int, count: int, now: Effective) -> HealthFinding:
        checked, often = self.config.guard.nan_check, count >= self.config.guard.patience
        change = self._rate(now, RATE_RUIN) if often or not checked else {}
        meaning = f"{count} steps since the last look had a loss or gradient that is no number; "
        if not checked:
            change = {"guard.nan_check": True, **change}
            meaning = f"{count} steps had a loss or gradient that is no number, and guard.nan_check is off"
        elif often:
            meaning += "the weights go where the loss overflows: the steps are too long"
        else:
            meaning += "they changed nothing: look at the data of those batches"
        critical = often or not checked
        return _found(Ailment.NOT_FINITE, step, count, "0", meaning, change, critical=critical, safe=often)

    def explosion(self, step: int, norm: float, usual: float, count: int, now: Effective) -> HealthFinding:
        limit = max(1.0, rounded(usual))
        clipped = 0 < now.clip <= limit
        change = self._rate(now, RATE_EXPLOSION) if clipped else {"optimizer.gradient_clip_norm": limit}
        healthy = f"below {self.config.guard.explosion_factor:g} times the usual"
        many = f"{count} gradients since the last look were far longer than usual ({usual:.3g})"
        meaning = f"{many}, and the loss suffered" + ("; clipping is on already" if clipped else "")
        critical = norm > HIGHEST_EXPLOSION * usual
        return _found(Ailment.EXPLOSION, step, norm, healthy, meaning, change, critical=critical, safe=True)

    def divergence(self, step: int, sigmas: float, loss: float, best: float, now: Effective) -> HealthFinding:
        meaning = (
            f"the average loss {loss:.4g} is far above the best so far, {best:.4g}: the run loses what it had learned"
        )
        healthy, change = f"below {BEYOND_NOISE:g} sigma", self._rate(now, RATE_RUNAWAY)
        return _found(Ailment.DIVERGENCE, step, sigmas, healthy, meaning, change, critical=True, safe=True)

    def ruin(self, step: int, loss: float, start: float, now: Effective) -> HealthFinding:
        meaning = (
            f"the average loss {loss:.4g} is far above {start:.4g}, where the run began: the model is worse than "
            "before any training, because the steps are far too long"
        )
        healthy, change = f"below {start:.4g}, that of the first step", self._rate(now, RATE_RUIN)
        found = _found(Ailment.DIVERGENCE, step, loss, healthy, meaning, change, critical=True, safe=True)
        return replace(found, measure="average loss")

    def oscillation(self, step: int, changes: float, now: Effective) -> HealthFinding:
        meaning = "the loss goes up and down and gets no better: steps jump over the valley, to and fro"
        change = self._rate(now, RATE_OSCILLATION)
        change |= {} if 0 < now.clip <= EMERGENCY_CLIP else {"optimizer.gradient_clip_norm": EMERGENCY_CLIP}
        healthy = f"below {self.config.guard.oscillation_changes:g}"
        return _found(Ailment.OSCILLATION, step, changes, healthy, meaning, change, safe=True)

    def plateau(self, step: int, steps: int, best: float, bold: bool, now: Effective) -> HealthFinding:
        """bold: updates are long already, so that longer ones would not help."""
        size = "large beside the weights: they jump about" if bold else "small beside the weights"
        meaning = f"the average loss is no better than {best:.4g} for {steps} steps; updates are {size}"
        change = self._rate(now, 1 / PLATEAU_FACTOR if bold else PLATEAU_FACTOR)
        return _found(Ailment.PLATEAU, step, steps, "below 500", meaning, change, safe=True)

    def overfitting(self, step: int, rise: float, evaluations: int) -> HealthFinding:
        decay, name = self.levers.decay_now, self.levers.decay
        meaning = (
            f"the held-out loss was best {evaluations} evaluations ago and rose since, while the training loss fell: "
            f"the model learns its examples by heart; more data, {self.levers.dropout} or "
            "evaluation.early_stopping_patience help too, and `checkpoint.keep_best` has the best weights"
        )
        change = {} if name is None else {name: rounded(decay * 10) if decay > 0 else 0.1}
        return _found(Ailment.OVERFITTING, step, rise, "below 1 % of it", meaning, change)

    def underfitting(self, step: int, ratio: float, now: Effective) -> HealthFinding:
        meaning = (
            "training and held-out loss are level and still fall slowly, with tiny updates: the run will end before it "
            "has learned what it could; more max_steps or a larger model help too"
        )
        healthy, change = "above 0.0001 while the loss falls", self._rate(now, min(10.0, max(2.0, 1e-3 / ratio)))
        return _found(Ailment.UNDERFITTING, step, ratio, healthy, meaning, change)

    def vanishing(self, step: int, layer: str, ratio: float, usual: float, others: int) -> HealthFinding:
        levers, change = self.levers, dict[str, Any]()
        if levers.kind == "sgd" or levers.epsilon is None:
            change = {"optimizer.type": "adamw", "optimizer.learning_rate": 2e-3} if levers.kind else {}
            why = f"{'adamw' if levers.kind else 'torch.optim.AdamW'} gives every layer updates of its own size"
        else:  # muon's own updates have a length of their own, but a gradient this small is lost before that
            change = {levers.epsilon: levers.epsilon_now * 1e-4}
            change |= {"optimizer.type": "adamw", "optimizer.learning_rate": 2e-3} if levers.kind == "muon" else {}
            why = f"its gradients are below {levers.epsilon}"
        also = f", and {others} more layers like it," if others else ""
        meaning = f"this layer{also} gets next to no gradient and hardly moves, as behind saturated activations; {why}"
        healthy = f"above a thousandth of the highest, {usual:.1e}"
        return _found(Ailment.VANISHING_LAYER, step, ratio, healthy, meaning, change, critical=True, place=layer)

    def dead(self, step: int, layer: str, others: int, now: Effective) -> HealthFinding:
        also = f" and {others} more layers" if others else ""
        why = "units after it are dead or saturated, driven so by long steps"
        meaning = f"this layer{also} gets no gradient at all: {why}"
        change = self._rate(now, RATE_RUIN)  # it is not made by itself: what is dead stays dead
        return _found(Ailment.DEAD_LAYER, step, 0.0, "above 0", meaning, change, critical=True, place=layer)

    def low_confidence(self, step: int, confidence: float, threshold: float) -> HealthFinding:
        meaning = "nothing but confidence was missing for a move, cycle after cycle: the predictor has seen too little"
        change = {"hybrid.warmup_steps": 2 * self.config.hybrid.warmup_steps}
        return _found(Ailment.LOW_CONFIDENCE, step, confidence, f"above {threshold:.2f}", meaning, change)

    def frequent_divergence(self, step: int, undone: int, tried: int, now: Effective) -> HealthFinding:
        why = "the predictor sees too few full steps between them"
        meaning = f"{undone} of {tried} moves had to be undone: {why}"
        healthy, change = "below a third of all moves", {"hybrid.full_steps": 2 * now.full_steps}
        return _found(Ailment.FREQUENT_DIVERGENCE, step, undone, healthy, meaning, change, safe=True)

    def _rate(self, now: Effective, factor: float) -> dict[str, Any]:
        return {self.levers.rate: rounded(now.rate * factor)}


def _found(
    ailment: Ailment,
    step: int,
    value: float,
    healthy: str,
    meaning: str,
    change: Mapping[str, Any],
    *,
    critical: bool = False,
    safe: bool = False,
    place: str = RUN,
) -> HealthFinding:
    level = "critical" if critical else "warning"
    return HealthFinding(ailment, step, _MEASURES[ailment], place, value, healthy, level, meaning, change, safe)


def rounded(value: float) -> float:
    """Round to two digits, as one would write it."""
    return float(f"{value:.2g}")
