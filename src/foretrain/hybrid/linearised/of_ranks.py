"""The lookout of several ranks, each of which holds all weights and its rows of the batch.

What a rank computes from its own rows it computes alone; after each such piece of work ranks meet and share a few
numbers, from which all of them decide alike. Rows are of all ranks together, and so is what they are chosen from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.objective import Objective, OutputPart, UnknownForm
from foretrain.hybrid.linearised.bend import AHEAD, bend_of
from foretrain.hybrid.linearised.choice import (
    Choice,
    everything,
    of_rank,
    outputs_of,
    outputs_of_unit,
    system_of,
)
from foretrain.hybrid.linearised.lookout import Look, Lookout
from foretrain.hybrid.linearised.matrix import RowMatrix, as_rows
from foretrain.hybrid.linearised.meeting import Meeting, Numbers
from foretrain.hybrid.linearised.price import Price, numbers_of
from foretrain.hybrid.linearised.recorded import Attempt, Trial, place
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.shared import SharedSystem
from foretrain.hybrid.linearised.solve import System, predicted_by
from foretrain.hybrid.linearised.way import COUPLED, Way

_OF_LOOK = 5
"""Numbers that are told of a look."""
_OF_WAY = 5


class LookoutOfRanks(Lookout):
    """Losses and prices that it gives are those of the batch of all ranks."""

    def __init__(self, engine: Engine, objective: Objective, prices: Price) -> None:
        super().__init__(engine, objective, prices)
        self.world = engine.world
        self.meeting = Meeting(engine.world, engine.device, engine.full_step.syncing.apart)
        self.recordable = False

    # --- looks --------------------------------------------------------------------------------------------------------

    def measured(self, batch: Any, first: bool = False) -> Linearisation:
        def work() -> tuple[Linearisation, list[Tensor | float]]:
            look = Lookout.measured(self, batch, first)
            return look, self._of_look(look)

        look, told = self.meeting.tell(work, _OF_LOOK)
        self._take_in(look, told)
        return look

    def seen(self, batch: Any, made: int) -> tuple[Look, Way]:
        def work() -> tuple[tuple[Linearisation, Way], list[Tensor | float]]:
            look = self.look(batch)
            way = self.find_way(look, made)
            how = (way.reason == COUPLED, *numbers_of(way))
            return (look, way), [*self._of_look(look), *map(float, how)]

        (look, way), told = self.meeting.tell(work, _OF_LOOK + _OF_WAY)
        self._take_in(look, told)
        return look, self._agreed(look, way, [each[_OF_LOOK:] for each in told])

    def _of_look(self, look: Linearisation) -> list[Tensor | float]:
        """What a rank tells of its look."""
        return [look.own_loss, bool(self.exact), _number(_rows_of(look.parts)), look.work, look.numbers_made]

    def _take_in(self, look: Linearisation, told: Numbers) -> None:
        """What all ranks told of theirs: the mean of their losses is that of all rows if they have as many of each
        kind."""
        losses, exact, forms, work, numbers = zip(*(each[:_OF_LOOK] for each in told), strict=True)
        if len(set(forms)) > 1:
            other = self.world.all_well(None if forms[self.world.rank] == forms[0] else _rows_of(look.parts))
            which = "" if other is None else f" (rank {other.rank} has {other.words}, and rank 0 has not)"
            raise UnknownForm(f"ranks have different numbers of residuals{which}; give each rank as many of each block")
        look.loss = look.own_loss.new_tensor(sum(losses) / len(losses))
        self.exact = all(exact)
        self.prices.outputs, self.prices.work = self.world.size * look.count, int(sum(work))
        self.prices.numbers = int(sum(numbers))

    def _agreed(self, look: Linearisation, way: Way, told: Numbers) -> Way:
        """Where one rank takes its rows one by one, all do. The price is that of the dearest rank."""
        coupled, passes, per_pass, pair_work, held = zip(*told, strict=True)
        if 1 in per_pass:
            reason = COUPLED if any(coupled) else way.reason or "those of another rank are"
            elements = sum(p.numel() for p in look.parameters)
            self.way = Way(look.form, reason, pair_work=elements, held=elements)
            self.prices.note_way(self.way)
            return self.way
        self.prices.passes, self.prices.per_pass = int(max(passes)), int(min(per_pass))
        self.prices.pair_work, self.prices.held = max(pair_work), max(held)
        return way

    # --- rows and problems --------------------------------------------------------------------------------------------

    def problem(
        self, look: Look, way: Way, some: Choice | None, damping: float
    ) -> tuple[Look, System, tuple[float, float]]:
        parts, ranks = look.parts, self.world.size
        chosen = everything(parts) if some is None else of_rank(some, parts, self.world.rank)
        units = self._units(parts, some)
        totals = [sum(of_part) for of_part in zip(*units, strict=True)]
        whole = None if some is None else chosen

        def work() -> tuple[tuple[Linearisation, System], list[Tensor | float]]:
            now = look if isinstance(look, Linearisation) and not look.stale else self.outputs(look.batch)
            system = system_of(now, way, whole, self.world, totals)
            return (now, system), [now.part_of_loss(chosen, totals), now.own_loss, _number(_form_of(system.rows))]

        (now, own), told = self.meeting.tell(work, 3)
        parts_of_loss, losses, forms = zip(*told, strict=True)
        rows = own.rows if len(set(forms)) == 1 else as_rows(own.rows.numbers())
        widths = list(map(outputs_of_unit, parts))
        outputs = [[n * width for n, width in zip(of_one, widths, strict=True)] for of_one in units]
        system = SharedSystem(rows, own.root, own.target, self.world, chosen=chosen, totals=totals, outputs=outputs)
        before_all = sum(losses) / ranks
        now.loss = now.own_loss.new_tensor(before_all)
        return now, system, (sum(parts_of_loss), before_all)

    def _units(self, parts: Sequence[OutputPart], some: Choice | None) -> list[list[int]]:
        """How many units of each part are chosen on each rank."""
        ranks = self.world.size
        if some is None:
            return [[part.units for part in parts]] * ranks
        counts = [torch.bincount(few // part.units, minlength=ranks) for few, part in zip(some, parts, strict=True)]
        flat = self.world.to_host(torch.stack(counts, 1))
        return [[int(n) for n in flat[at : at + len(parts)]] for at in range(0, len(flat), len(parts))]

    # --- trials -------------------------------------------------------------------------------------------------------

    def attempt(self, look: Look, system: System, trial: Trial) -> Attempt | None:
        if not isinstance(system, SharedSystem) or not isinstance(look, Linearisation):
            raise TypeError("ranks solve problems that they share")
        step, numbers = system.solve(trial.damping, system.types(trial.damping), trial.carried_on)
        step = torch.where(torch.isfinite(step), step, 0.0)  # what could not be solved for is told below
        bends: Tensor | float = 0.0
        if trial.bent:
            ahead, _ = self.meeting.tell(lambda: (self._outputs_at(look, trial, AHEAD * step, system), ()), 0)
            bend, bends = bend_of(system, step, outputs_of(look.parts, system.chosen), ahead)
            step = step + bend

        def work() -> tuple[Linearisation, list[Tensor | float]]:
            place(self.parameters, trial.start, step)
            seen = self.outputs(look.batch, with_rows=bool(self.exact))
            return seen, [*numbers, seen.part_of_loss(system.chosen, system.totals), seen.own_loss, bends]

        seen, told = self.meeting.tell(work, 6)
        scale, failed, fall, after, after_all, bent = (sum(each) for each in zip(*told, strict=True))
        predicted = predicted_by((scale, failed, fall))
        if predicted is None:
            return None
        after_all /= self.world.size
        seen.loss = seen.own_loss.new_tensor(after_all)
        return Attempt(step, predicted, after, after_all, seen, bent > 0)

    def _outputs_at(self, look: Look, trial: Trial, step: Tensor, system: SharedSystem) -> Tensor:
        """The chosen outputs where a step leads to."""
        place(self.parameters, trial.start, step)
        return outputs_of(self.outputs(look.batch, with_rows=False).parts, system.chosen)


def _rows_of(parts: Sequence[OutputPart]) -> str:
    """The parts and their sizes, in words."""
    return ", ".join(f"{' x '.join(map(str, part.outputs.shape))} of {part.name!r}" for part in parts)


def _form_of(rows: RowMatrix) -> list[object]:
    """What must be the same of rows that are multiplied by each other, beside their number."""
    factors = [(f.start, f.out.shape[1], f.into.shape[1], [uses for _, uses in f.shape]) for f in rows.factors]
    return [rows.columns, factors, rows.dtype]


def _number(form: object) -> float:
    """A number that is another one for another form; a double holds all of its bits."""
    return float(int.from_bytes(hashlib.blake2b(repr(form).encode(), digest_size=6).digest()))
