"""The held-out batches of `fit`: they judge moves beside an exact loss, which alone would let moves learn by heart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.judges.probes import Probes
from foretrain.hybrid.snapshot import Snapshots
from foretrain.persist.codec import same_random_numbers
from foretrain.persist.parts import local, part_for, spread_like
from foretrain.persist.stateful import Stateful

_FEWEST_LEAPS = 4
"""A chain makes at least this many leaps of one full step each between two looks at the held-out loss. Chosen: as many
as it is judged by."""
_SHARE = 0.1
"""Looks may take this share of the chain's own cost: where held-out data is large they are made less often. Chosen."""
_PATIENCE = 4
"""A chain that overfits ends after so many looks in a row without a new lowest loss. Chosen: such a loss wobbles."""
_RISE = 1e-3
"""A loss has risen when it is above the lowest one by this share of it. Chosen: far more than rounding, less than any
rise that matters."""
_OVERFITTING_RISE = 0.05
"""A rise by this share may be overfitting. Chosen: on the way down a held-out loss wobbles, by up to a fifth within
three looks in physics-informed networks."""
_BY_HEART = 0.1
"""It is overfitting if the held-out loss is also above the training loss by this share of it. Chosen."""


class HeldOut(Stateful):
    """Where in a chain the held-out loss was lowest, and the way back to there. `fit` gives it the held-out batches."""

    saved = (
        *("lowest", "leaps", "training_loss", "last", "last_training_loss", "looked_at", "since", "evaluated", "step"),
        "_weights",
    )
    _weights: list[Tensor]

    def __init__(self, engine: Engine, probes: Probes, snapshots: Snapshots) -> None:
        self.engine = engine
        self.probes = probes
        self.snapshots = snapshots
        self.batches: list[Any] = []
        self.lowest = math.nan
        """Lowest held-out loss of the open chain, the point where it began included."""
        self.leaps = 0
        """Leaps that the chain had made when it was lowest; 0 means where it began."""
        self.training_loss = math.nan
        """Training loss at that point."""
        self.last = math.nan
        self.last_training_loss = math.nan
        self.looked_at = 0
        """Leaps at the last look."""
        self.since = 0
        """Looks since the lowest."""
        self.evaluated = math.nan
        """Lowest held-out loss of an evaluation outside of moves."""
        self.step = 0
        """When that was."""
        self._weights = []
        """The weights at that evaluation."""

    @property
    def active(self) -> bool:
        return bool(self.batches) and not self.probes.batches

    def loss(self) -> float:
        """Measure the held-out loss of the weights as they are. Random generators go on as if it had not been."""
        with same_random_numbers():
            return self.engine.probe_all(self.batches)

    def price(self, batch: Any) -> float:
        """What one look costs, in full steps."""
        count = self.engine.count
        held_out, whole = self.engine.world.total([sum(count(one) for one in self.batches), count(batch)])
        return FORWARD * held_out / max(1, whole)

    # --- the end of the run ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def note(self, loss: float) -> None:
        """An evaluation of weights that stay: they are kept where the loss is the lowest so far."""
        if self.active and self.engine.average is None and not loss >= self.evaluated:
            self.evaluated, self.step = loss, self.engine.progress.global_step
            parameters = self.engine.full_step.parameters
            self._weights = spread_like([local(p).clone() for p in parameters], parameters)

    @torch.no_grad()
    def finish(self) -> tuple[float, float] | None:
        """Go to the lowest evaluation; (held-out loss here, there), or None if it is no lower than where the run is."""
        if not (self.active and self._weights):
            return None
        parameters = [local(p) for p in self.engine.full_step.parameters]
        here, now = self.loss(), [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, [local(weight) for weight in self._weights])
        there = self.loss()
        if there >= here:
            torch._foreach_copy_(parameters, now)
            return None
        return here, there

    def forget(self) -> None:
        """Other weights are trained: the lowest evaluation is of weights that are gone."""
        self.evaluated, self._weights = math.nan, []

    # --- a chain -----------------------------------------------------------------------------------------------------

    def begin(self, training_loss: float) -> None:
        """At the point where a chain begins."""
        self.lowest = self.last = self.loss()
        self.leaps = self.looked_at = self.since = 0
        self.training_loss = self.last_training_loss = training_loss

    def look_due(self, leaps: int, batch: Any, last: bool, steps_of_leap: int = 1) -> bool:
        """last: the chain ends here in any case. steps_of_leap: full steps that a leap costs; one that costs several
        leads as far, too."""
        every = max(1, round(max(_FEWEST_LEAPS, math.ceil(self.price(batch) / _SHARE)) / steps_of_leap))
        return leaps > self.looked_at and (last or leaps - self.looked_at >= every)

    def look(self, leaps: int, training_loss: float) -> bool:
        """After a leap: whether this is the lowest point so far. It is remembered then."""
        self.last, self.last_training_loss, self.looked_at = self.loss(), training_loss, leaps
        if not self.last < self.lowest and not math.isnan(self.lowest):
            self.since += 1
            return False
        self.lowest, self.leaps, self.training_loss, self.since = self.last, leaps, training_loss, 0
        self.snapshots.take_best()
        return True

    @property
    def risen(self) -> bool:
        """The held-out loss is above the lowest of the chain."""
        return not self.last <= self.lowest + _RISE * abs(self.lowest)

    @property
    def overfits(self) -> bool:
        """The examples are learned by heart: not only a wobble."""
        rise, gap = self.last - self.lowest, self.last - self.last_training_loss
        return not (rise <= _OVERFITTING_RISE * abs(self.lowest) or gap <= _BY_HEART * abs(self.last_training_loss))

    @property
    def over(self) -> bool:
        """The chain has had its time."""
        return self.since >= _PATIENCE and self.overfits

    @property
    def at_end(self) -> float:
        """Where the chain ends: there, or back at the lowest."""
        return self.lowest if self.risen else self.last

    def after_load(self) -> None:
        parameters = self.engine.full_step.parameters if self._weights else []
        pairs = zip(self._weights, parameters, strict=True)
        parts = [part_for(weight, parameter).to(self.engine.device) for weight, parameter in pairs]
        self._weights = spread_like(parts, parameters)
