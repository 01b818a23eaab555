"""Looks at the loss where the weights are: at outputs and their rows, and at where a step would lead to. By recorded
graphs where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, same_batch
from foretrain.engine.engine import Engine
from foretrain.engine.graphs import same_form
from foretrain.engine.memory.host import copy_each
from foretrain.engine.objective import Objective
from foretrain.errors import is_out_of_memory
from foretrain.hybrid.linearised.bend import AHEAD, bend_of
from foretrain.hybrid.linearised.choice import Choice, choose, everything, outputs_of, system_of
from foretrain.hybrid.linearised.conditions import repeatable
from foretrain.hybrid.linearised.finding import agrees, find_way
from foretrain.hybrid.linearised.price import Price
from foretrain.hybrid.linearised.recorded import Attempt, Losses, RecordedLeap, RecordedLook, Trial, place
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.solve import System
from foretrain.hybrid.linearised.way import Way
from foretrain.persist.stateful import Stateful

Look = Linearisation | RecordedLook
Seen = Linearisation | Losses
"""What a trial tells."""
_ALWAYS_CHECKED, _CHECKED_EVERY = 4, 16
"""Leaps after which rows of other batches are checked against a true product each time, and then every so many. Chosen:
a check costs a step."""
_MOST_RECORDED = 3
"""Leaps of different sizes that are recorded at a time. Chosen: rows are doubled and halved, and each takes memory."""


class Lookout(Stateful):
    """Knows the last batch, how its rows are taken, and what is recorded."""

    saved = ("exact", "volatile", "tapped", "_batch")
    rows_of_rank = ("_batch",)
    exact: bool | None
    _batch: Any

    def __init__(self, engine: Engine, objective: Objective, prices: Price) -> None:
        self.engine, self.objective, self.prices = engine, objective, prices
        self.exact = None
        """The last batch is the one before."""
        self.volatile = False
        """Which rows belong to which output changes from batch to batch: it is found out for each."""
        self.tapped = True
        """Rows are taken by taps; else one by one, because taps stand in the way of what the loss is made of."""
        self.recordable = engine.device.type == "cuda" and engine.execution.cuda_graph is not False
        self.release()

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self.engine.full_step.parameters

    def release(self) -> None:
        """Give back the memory of the last outputs, of their graph and of recordings."""
        self.way: Way | None = None
        self._look: Linearisation | None = None
        self._batch = None
        self.recorded: list[RecordedLeap] = []
        """Leaps of this chain that are replayed."""
        self.alike: tuple[object, ...] | None = None
        """Form of the batch and rows of each part that the last leap took without a graph."""

    def begin(self) -> None:
        """A chain begins: how rows are taken is found out anew."""
        self._look = self.way = None

    def moved(self, seen: Seen | None = None) -> None:
        """The weights are elsewhere. seen: what is known of the loss there."""
        self._look = seen if isinstance(seen, Linearisation) and seen.calls else None  # else it has no rows

    # --- outputs, rows and problems ----------------------------------------------------------------------------------

    def look(self, batch: Any) -> Linearisation:
        """Outputs of this batch at the weights as they are: those of the last trial, if the batch is the same."""
        known = self._look
        self.exact = same_batch(batch, self._batch)
        if known is not None and self.exact and not known.stale:
            return known
        self._batch = map_tensors(batch, lambda tensor: tensor.clone())
        self._look = self.outputs(self._batch)
        self.prices.note(self._look)
        return self._look

    def measured(self, batch: Any, first: bool = False) -> Linearisation:
        """A look whose loss is that of all processes. first: it is checked that another one would see the same."""
        with repeatable(self.engine.full_step.buffers) if first else nullcontext():
            return self.look(batch)

    def seen(self, batch: Any, made: int) -> tuple[Look, Way]:
        """A look, and how its rows are taken. made: leaps so far."""
        look = self.recorded_look(batch, made) or self.look(batch)
        return look, self.find_way(look, made)

    def recorded_look(self, batch: Any, made: int) -> RecordedLook | None:
        """Replays what `look` would compute; None where nothing is recorded for it. made: leaps so far."""
        if not self.recorded or not same_form(batch, self.recorded[-1].inputs):
            return None
        self.exact = same_batch(batch, self._batch)
        if not self.exact and _check_due(made):
            return None
        if not self.exact:
            self._batch = map_tensors(batch, lambda tensor: tensor.clone())
        return RecordedLook(self.recorded[-1], self._batch)

    def outputs(self, batch: Any, with_rows: bool = True) -> Linearisation:
        with_taps = with_rows and self.tapped
        return Linearisation(self.objective, self.engine.model, self.parameters, batch, with_taps=with_taps)

    def find_way(self, look: Look, made: int) -> Way:
        """That of the last batch, if this one has the same form. made: leaps so far."""
        if isinstance(look, RecordedLook):
            return look.leap.way
        known = self.way if self.way is not None and self.way.form == look.form else None
        if known is not None and not self.exact:
            if _check_due(made) and not self.volatile:
                self.volatile = not agrees(look, known)
            known = None if self.volatile else known
        if known is None:
            self.way = known = find_way(look)
            self.prices.note_way(known)
        return known

    def choose(self, look: Look, way: Way, rows: int, seed: int) -> Choice | None:
        """Units of all processes with so many outputs together; None: all of them."""
        return choose(look.parts, rows, seed, way.grid, self.engine.world.size)

    def problem(
        self, look: Look, way: Way, some: Choice | None, damping: float
    ) -> tuple[Look, System, tuple[float, float]]:
        """That of these rows, at the weights as they are, and the losses of these units and of all."""
        look, system = self._problem(look, way, some, damping)
        chosen = everything(look.parts) if some is None else some
        before, before_all = self.engine.world.to_host(torch.stack([look.loss_of(chosen), look.loss]))
        return look, system, (before, before_all)

    def _problem(self, look: Look, way: Way, some: Choice | None, damping: float) -> tuple[Look, System]:
        """From a recorded graph where there is one, or where one is worth while by now."""
        batch, world = look.batch, self.engine.world
        for leap in self.recorded:
            if leap.fits(batch, some):
                look = RecordedLook(leap, batch)
                return look, look.system(some)
        alike = (look.form, *(len(few) for few in some or ()))
        if self.recordable and way.plain and not self.volatile and self.alike == alike:
            try:
                leap = RecordedLeap(self.outputs, self.parameters, way, batch, some, damping, world)
                self.recorded = [*self.recorded[1 - _MOST_RECORDED :], leap]
                return self._problem(look, way, some, damping)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._record_no_more()
        self.alike = alike
        if isinstance(look, RecordedLook) or look.stale:
            look = self.outputs(batch)
        return look, system_of(look, way, some, world)

    def _record_no_more(self) -> None:
        """Leaps go on without graphs."""
        self.recordable, self.recorded = False, []

    # --- trials ------------------------------------------------------------------------------------------------------

    def attempt(self, look: Look, system: System, trial: Trial) -> Attempt | None:
        """Solve for a step, make it, and look where it leads to. None where it could not be solved."""
        if not isinstance(look, RecordedLook):
            return self._attempt(look, system, trial)
        try:
            return look.leap.attempt(trial)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._record_no_more()
            copy_each(self.parameters, trial.start)
            return self._attempt(self.outputs(look.batch), system, trial)

    def _attempt(self, look: Linearisation, system: System, trial: Trial) -> Attempt | None:
        solved = system.step(trial.damping, trial.carried_on)
        if solved is None:
            return None
        step, predicted = solved
        chosen = everything(look.parts) if trial.chosen is None else trial.chosen
        bends = look.loss.new_zeros(())
        if trial.bent:
            place(self.parameters, trial.start, AHEAD * step)
            ahead = self.outputs(look.batch, with_rows=False)
            here, there = (outputs_of(one.parts, chosen) for one in (look, ahead))
            bend, bends = bend_of(system, step, here, there)
            step = step + bend
        place(self.parameters, trial.start, step)
        seen = self.outputs(look.batch, with_rows=bool(self.exact))
        numbers = torch.stack([seen.loss_of(chosen), seen.loss, bends.to(seen.loss.dtype)])
        after, after_all, anything = self.engine.world.to_host(numbers)
        return Attempt(step, predicted, after, after_all, seen, anything > 0)

    def after_load(self) -> None:
        self._batch = self.engine.to_device(self._batch)


def _check_due(made: int) -> bool:
    """Which rows belong to which output may be otherwise in another batch of the same form."""
    return made < _ALWAYS_CHECKED or made % _CHECKED_EVERY == 0
