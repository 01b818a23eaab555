"""Leaps as recorded CUDA graphs, where launching kernels takes longer than running them: one graph gives outputs, rows
and the products of rows, another the outputs alone, for trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, tensors_of
from foretrain.engine.graphs import record, same_form
from foretrain.engine.objective import OutputPart
from foretrain.engine.world import World
from foretrain.hybrid.linearised.choice import Choice, everything, system_of
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.solve import System
from foretrain.hybrid.linearised.way import Way

Outputs = Callable[[Any, bool], Linearisation]
"""Of a batch, with rows or without."""


@dataclass
class Losses:
    """What a look tells without its graph."""

    parts: list[OutputPart]
    """Their outputs are those of the recording: only their shapes and names say something."""
    pair: Tensor
    """The loss of the chosen units, and that of all."""
    means: dict[str, Tensor]

    calls = ()
    stale = True

    @property
    def loss(self) -> Tensor:
        return self.pair[1]

    def loss_of(self, chosen: Choice) -> Tensor:
        """chosen: those that it was recorded for."""
        return self.pair[0]


class RecordedLook(Losses):
    """Outputs and rows of a batch at the weights as they are. Nothing is computed before `system`."""

    def __init__(self, leap: RecordedLeap, batch: Any) -> None:
        super().__init__(leap.losses.parts, leap.losses.pair, leap.losses.means)
        self.leap, self.batch, self.form = leap, batch, leap.way.form

    def system(self, chosen: Choice | None) -> System:
        """chosen: as many as it was recorded for."""
        leap = self.leap
        leap.load(self.batch, chosen)
        leap.replay()
        self.pair = leap.losses.pair.clone()
        return leap.system_now()

    def trial(self) -> Losses:
        """The losses of the same units at other weights."""
        self.leap.replay_trial()
        return replace(self.leap.trial, pair=self.leap.trial.pair.clone())


class RecordedLeap:
    """The graphs of batches of one form and of one number of rows."""

    def __init__(self, outputs: Outputs, way: Way, batch: Any, chosen: Choice | None, world: World) -> None:
        self.way = way
        self.inputs = map_tensors(batch, lambda tensor: tensor.clone())
        self.chosen = None if chosen is None else [some.clone() for some in chosen]

        def whole() -> tuple[Losses, System]:
            look = outputs(self.inputs, True)
            system = system_of(look, way, self.chosen, world)
            system.products[look.kind] = system.product(look.kind)
            system.known_gradient = system.gradient()
            return self._losses(look), system

        def alone() -> Losses:
            return self._losses(outputs(self.inputs, False))

        self.replay, (self.losses, self._system) = record(whole)
        self.replay_trial, self.trial = record(alone)

    def _losses(self, look: Linearisation) -> Losses:
        chosen = everything(look.parts) if self.chosen is None else self.chosen
        parts = [replace(part, outputs=part.outputs.detach()) for part in look.parts]
        return Losses(parts, torch.stack([look.loss_of(chosen), look.loss]), look.means)

    def fits(self, batch: Any, chosen: Choice | None) -> bool:
        """Whether it was recorded for batches and numbers of rows such as these."""
        if (chosen is None) != (self.chosen is None):
            return False
        same_rows = chosen is None or [len(some) for some in chosen] == [len(some) for some in self.chosen or ()]
        return same_rows and same_form(batch, self.inputs)

    def load(self, batch: Any, chosen: Choice | None) -> None:
        _copy(tensors_of(self.inputs), tensors_of(batch))
        if chosen is not None and self.chosen is not None:
            _copy(self.chosen, chosen)

    def system_now(self) -> System:
        """Of the last replay, until the next one."""
        return replace(self._system, products=dict(self._system.products))


def _copy(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(given), non_blocking=True)
