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
from foretrain.engine.memory.host import copy_each
from foretrain.engine.objective import OutputPart
from foretrain.engine.world import World
from foretrain.hybrid.linearised.bend import AHEAD, bend_of
from foretrain.hybrid.linearised.choice import Choice, everything, outputs_of, system_of
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.solve import System, Types, predicted_by
from foretrain.hybrid.linearised.way import Way

Outputs = Callable[[Any, bool], Linearisation]
"""A function of (batch, with rows or without)."""


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
        """The loss of the units that it was recorded for."""
        return self.pair[0]


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    chosen: Choice | None
    """None: all units."""
    start: Sequence[Tensor]
    """Weights that it leads away from."""
    damping: float
    carried_on: Tensor | None
    """What it begins with of the leap before."""
    bent: bool
    """How outputs bend along it is to be followed."""


@dataclass(frozen=True)
class Attempt:
    """A step that was solved for and made."""

    step: Tensor
    predicted: float
    """Fall of the loss."""
    after: float
    after_all: float
    """Loss of the chosen units, and of all, where it led to."""
    seen: Linearisation | Losses
    bent: bool
    """It is not the step alone: how outputs bend along it is in it."""


class RecordedLook(Losses):
    """Outputs and rows of a batch at the weights as they are. Nothing is computed before `system`."""

    def __init__(self, leap: RecordedLeap, batch: Any) -> None:
        super().__init__(leap.losses.parts, leap.losses.pair, leap.losses.means)
        self.leap, self.batch, self.form = leap, batch, leap.way.form

    def system(self, chosen: Choice | None) -> System:
        """The problem of these units, as many as it was recorded for."""
        leap = self.leap
        leap.load(self.batch, chosen)
        leap.replay()
        self.pair = leap.losses.pair.clone()
        return leap.system_now()


class RecordedLeap:
    """The graphs of batches of one form and of one number of rows."""

    def __init__(
        self,
        outputs: Outputs,
        parameters: Sequence[Tensor],
        way: Way,
        batch: Any,
        chosen: Choice | None,
        damping: float,
        world: World,
    ) -> None:
        """damping: that of the first attempt. A leap by as many rows has just been made without a graph."""
        self.outputs, self.parameters, self.way, self.world = outputs, parameters, way, world
        self.inputs = map_tensors(batch, lambda tensor: tensor.clone())
        self.chosen = None if chosen is None else [some.clone() for some in chosen]

        def whole() -> tuple[Losses, System, Tensor]:
            look = outputs(self.inputs, True)
            system = system_of(look, way, self.chosen, world)
            system.products[look.kind] = system.product(look.kind)
            system.known_gradient = system.gradient()
            return self._losses(look), system, self._chosen_outputs(look)

        self.replay, (self.losses, self._system, self._here) = record(whole, warm=True)
        self._start = [p.detach().clone() for p in parameters]
        self._damping = self._start[0].new_zeros((), dtype=torch.float64)
        self._bent = torch.ones_like(self._damping)
        """1, or 0 for a step that is straight."""
        self._carried_on = torch.cat([p.reshape(-1) for p in self._start]).to(self._system.rows.dtype)
        self._attempts: dict[Types, tuple[Callable[[], None], tuple[Tensor, Tensor, Losses]]] = {}
        """What replays an attempt, and its step, numbers and losses."""
        self.replay()
        self._record_attempt(self._system.types(damping))

    def attempt(self, trial: Trial) -> Attempt | None:
        """Solve for a step, make it, and look where it leads to. None where it could not be solved."""
        types = self._system.types(trial.damping)
        self._damping.fill_(trial.damping)
        self._bent.fill_(trial.bent)
        _copy(self._start, trial.start)
        self._carried_on.zero_() if trial.carried_on is None else self._carried_on.copy_(trial.carried_on)
        if types not in self._attempts:
            self._record_attempt(types)
        replay, (step, numbers, losses) = self._attempts[types]
        replay()
        *solved, after, after_all, bends = self.world.to_host(numbers)
        predicted = predicted_by(solved)
        if predicted is None:
            return None
        seen = replace(losses, pair=losses.pair.clone())
        return Attempt(step.clone(), predicted, after, after_all, seen, trial.bent and bends > 0)

    def _record_attempt(self, types: Types) -> None:
        """The weights are as before afterwards."""
        now = [p.detach().clone() for p in self.parameters]
        try:
            self._attempts[types] = record(lambda: self._attempt(types))
        finally:
            copy_each(self.parameters, now)

    def _attempt(self, types: Types) -> tuple[Tensor, Tensor, Losses]:
        system = self.system_now()  # what a try multiplies anew is not to be kept: it would be that of its recording
        step, numbers = system.solve(self._damping, types, self._carried_on)
        bends = torch.zeros_like(self._bent)
        if self.chosen is None:
            place(self.parameters, self._start, AHEAD * step)
            ahead = self._chosen_outputs(self.outputs(self.inputs, False))
            bend, bends = bend_of(system, step, self._here, ahead)
            step = step + self._bent.to(step.dtype) * bend
        place(self.parameters, self._start, step)
        losses = self._losses(self.outputs(self.inputs, False))
        return step, torch.cat([numbers.double(), losses.pair.double(), bends.double().view(1)]), losses

    def _chosen_outputs(self, look: Linearisation) -> Tensor:
        return outputs_of(look.parts, everything(look.parts) if self.chosen is None else self.chosen)

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
        """The problem of the last replay, good until the next one."""
        return replace(self._system, products=dict(self._system.products))


def _copy(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(given), non_blocking=True)


@torch.no_grad()
def place(parameters: Sequence[Tensor], start: Sequence[Tensor], step: Tensor) -> None:
    """Put the parameters at start + step."""
    steps = torch.split(step, [p.numel() for p in parameters])
    moved = torch._foreach_add(list(start), [one.view_as(p) for one, p in zip(steps, start, strict=True)])
    copy_each(parameters, moved)
