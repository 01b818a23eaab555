"""What ails a run, in words: each finding says what was measured, what it means, and what to set to which value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from torch.optim import Optimizer

from foretrain.config import Config

RUN = "run"
"""The place of what concerns no single layer."""


class Ailment(StrEnum):
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
    ailment: Ailment
    step: int
    measure: str
    place: str
    """A layer, or "run"."""
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
        """For `summary.json`."""
        value = self.value if math.isfinite(self.value) else None
        return {**asdict(self), "ailment": self.ailment.value, "value": value, "change": dict(self.change)}


@dataclass(frozen=True, slots=True)
class Effective:
    """What the run goes by at present; the configuration, unless something was tuned."""

    rate: float
    """Peak learning rate."""
    clip: float
    """0: none."""
    full_steps: int


@dataclass(frozen=True, slots=True)
class Levers:
    """What of a run its user can set, by the names he knows it by. None: there is no such thing in this run."""

    rate: str = "optimizer.learning_rate"
    decay: str | None = "optimizer.weight_decay"
    decay_now: float = 0.0
    epsilon: str | None = "optimizer.epsilon"
    epsilon_now: float = 1e-8
    kind: str = "adamw"
    """`optimizer.type`; empty for an optimizer of the user's own."""
    dropout: str = "model.dropout"


def levers_of(config: Config) -> Levers:
    """Where model and optimizer are made from the configuration."""
    optimizer = config.optimizer
    return Levers(decay_now=optimizer.decay, epsilon_now=optimizer.epsilon, kind=optimizer.type)


def levers_of_own(optimizer: Optimizer) -> Levers:
    """Where the optimizer is the user's own."""
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


class Advice:
    """Makes a finding of each ailment. Factors are those of the methodology's emergency table."""

    def __init__(self, config: Config, levers: Levers | None = None) -> None:
        self.config = config
        self.levers = levers or levers_of(config)

    def not_finite(self, step: int, count: int, now: Effective) -> HealthFinding:
        often = count >= self.config.guard.patience
        meaning = f"{count} steps since the last look had a loss or gradient that is no number; "
        if often:
            meaning += "the weights go where the loss overflows: the steps are too long"
            change = self._lower_rate(now, 0.1)
        else:
            meaning += "they changed nothing: look at the data of those batches"
            change = {}
        if not self.config.guard.nan_check:
            change = {"guard.nan_check": True, **self._lower_rate(now, 0.1)}
            meaning = f"{count} steps had a loss or gradient that is no number, and guard.nan_check is off"
        return HealthFinding(
            Ailment.NOT_FINITE,
            step,
            "steps that are not finite",
            RUN,
            count,
            "0",
            "critical" if often or not self.config.guard.nan_check else "warning",
            meaning,
            change,
            safe=often,
        )

    def explosion(self, step: int, norm: float, usual: float, count: int, now: Effective) -> HealthFinding:
        limit = max(1.0, rounded(usual))
        clipped = 0 < now.clip <= limit
        change = self._lower_rate(now, 0.5) if clipped else {"optimizer.gradient_clip_norm": limit}
        meaning = (
            f"{count} gradients since the last look were far longer than usual ({usual:.3g}), and the loss suffered"
        )
        return HealthFinding(
            Ailment.EXPLOSION,
            step,
            "gradient norm",
            RUN,
            norm,
            f"below {self.config.guard.explosion_factor:g} times the usual",
            "critical" if norm > 100 * usual else "warning",
            meaning + ("; clipping is on already" if clipped else ""),
            change,
            safe=True,
        )

    def divergence(self, step: int, sigmas: float, loss: float, best: float, now: Effective) -> HealthFinding:
        return HealthFinding(
            Ailment.DIVERGENCE,
            step,
            "loss deviation",
            RUN,
            sigmas,
            "below 3 sigma",
            "critical",
            f"the average loss {loss:.4g} is far above the best so far, {best:.4g}: the run loses what it had learned",
            self._lower_rate(now, 0.5),
            safe=True,
        )

    def ruin(self, step: int, loss: float, start: float, now: Effective) -> HealthFinding:
        return HealthFinding(
            Ailment.DIVERGENCE,
            step,
            "average loss",
            RUN,
            loss,
            f"below {start:.4g}, that of the first step",
            "critical",
            f"the average loss {loss:.4g} is far above {start:.4g}, where the run began: the model is worse than "
            "before any training, because the steps are far too long",
            self._lower_rate(now, 0.1),
            safe=True,
        )

    def oscillation(self, step: int, changes: float, now: Effective) -> HealthFinding:
        return HealthFinding(
            Ailment.OSCILLATION,
            step,
            "changes of direction of the loss in 10 steps, above the 5 of noise",
            RUN,
            changes,
            f"below {self.config.guard.oscillation_changes:g}",
            "warning",
            "the loss goes up and down and gets no better: steps jump over the valley, to and fro",
            self._lower_rate(now, 0.3) | ({} if 0 < now.clip <= 1 else {"optimizer.gradient_clip_norm": 1.0}),
            safe=True,
        )

    def plateau(self, step: int, steps: int, best: float, bold: bool, now: Effective) -> HealthFinding:
        """bold: updates are long already, so that longer ones would not help."""
        why = (
            "updates are large beside the weights: they jump about" if bold else "updates are small beside the weights"
        )
        factor = 0.5 if bold else 2.0
        return HealthFinding(
            Ailment.PLATEAU,
            step,
            "steps without a better loss",
            RUN,
            steps,
            "below 500",
            "warning",
            f"the average loss is no better than {best:.4g} for {steps} steps; {why}",
            {self.levers.rate: rounded(now.rate * factor)},
            safe=True,
        )

    def overfitting(self, step: int, rise: float, evaluations: int) -> HealthFinding:
        decay, name = self.levers.decay_now, self.levers.decay
        return HealthFinding(
            Ailment.OVERFITTING,
            step,
            "held-out loss above its best",
            RUN,
            rise,
            "below 1 % of it",
            "warning",
            f"the held-out loss was best {evaluations} evaluations ago and rose since, while the training loss fell: "
            f"the model learns its examples by heart; more data, {self.levers.dropout} or "
            "evaluation.early_stopping_patience help too, and `checkpoint.keep_best` has the best weights",
            {} if name is None else {name: rounded(decay * 10) if decay > 0 else 0.1},
        )

    def underfitting(self, step: int, ratio: float, now: Effective) -> HealthFinding:
        factor = min(10.0, max(2.0, 1e-3 / ratio))
        return HealthFinding(
            Ailment.UNDERFITTING,
            step,
            "update/weight ratio",
            RUN,
            ratio,
            "above 0.0001 while the loss falls",
            "warning",
            "training and held-out loss are level and still fall slowly, with tiny updates: the run will end before it "
            "has learned what it could; more max_steps or a larger model help too",
            {self.levers.rate: rounded(now.rate * factor)},
        )

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
        return HealthFinding(
            Ailment.VANISHING_LAYER,
            step,
            "update/weight ratio",
            layer,
            ratio,
            f"above a thousandth of the highest, {usual:.1e}",
            "critical",
            f"this layer{also} gets next to no gradient and hardly moves, as behind saturated activations; {why}",
            change,
        )

    def dead(self, step: int, layer: str, others: int, now: Effective) -> HealthFinding:
        also = f" and {others} more layers" if others else ""
        return HealthFinding(
            Ailment.DEAD_LAYER,
            step,
            "gradient norm",
            layer,
            0.0,
            "above 0",
            "critical",
            f"this layer{also} gets no gradient at all: units after it are dead or saturated, driven so by long steps",
            self._lower_rate(now, 0.1),  # not made by itself: what is dead stays dead
        )

    def low_confidence(self, step: int, confidence: float, threshold: float) -> HealthFinding:
        return HealthFinding(
            Ailment.LOW_CONFIDENCE,
            step,
            "confidence",
            RUN,
            confidence,
            f"above {threshold:.2f}",
            "warning",
            "nothing but confidence was missing for a move, cycle after cycle: the predictor has seen too little",
            {"hybrid.warmup_steps": 2 * self.config.hybrid.warmup_steps},
        )

    def frequent_divergence(self, step: int, undone: int, tried: int, now: Effective) -> HealthFinding:
        return HealthFinding(
            Ailment.FREQUENT_DIVERGENCE,
            step,
            "moves undone",
            RUN,
            undone,
            "below a third of all moves",
            "warning",
            f"{undone} of {tried} moves had to be undone: the predictor sees too few full steps between them",
            {"hybrid.full_steps": 2 * now.full_steps},
            safe=True,
        )

    def _lower_rate(self, now: Effective, factor: float) -> dict[str, Any]:
        return {self.levers.rate: rounded(now.rate * factor)}


def rounded(value: float) -> float:
    """To two digits, as one would write it."""
    return float(f"{value:.2g}")
