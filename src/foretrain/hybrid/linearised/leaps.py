"""A chain of leaps of the linearised run, for losses whose form is known: each solves for the end of the linearised
run, and the ratio of the real fall of the loss to the predicted one says how far the next may go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.fence import failure_of
from foretrain.engine.memory.host import copy_each
from foretrain.engine.objective import Objective, UnknownForm
from foretrain.engine.precision import full_precision
from foretrain.engine.step import StepOutput
from foretrain.errors import is_out_of_memory
from foretrain.hybrid.linearised.choice import Choice
from foretrain.hybrid.linearised.conditions import check_size
from foretrain.hybrid.linearised.damping import Damping
from foretrain.hybrid.linearised.holding import Holding
from foretrain.hybrid.linearised.lookout import Look, Lookout, Seen
from foretrain.hybrid.linearised.meeting import FailedOnRank
from foretrain.hybrid.linearised.of_ranks import LookoutOfRanks
from foretrain.hybrid.linearised.price import Price
from foretrain.hybrid.linearised.recorded import Trial
from foretrain.hybrid.linearised.row_count import RowCount
from foretrain.hybrid.linearised.solve import System
from foretrain.hybrid.linearised.way import COUPLED, Way
from foretrain.hybrid.moves.chained import ChainedLeaps
from foretrain.motion.losses import WindowLosses

Result = TypeVar("Result")
_ACCEPTED = 1e-3
"""Least ratio of the real to the predicted fall. Chosen: any fall that is more than rounding."""
_MOST_TRIES = 10
"""Dampings that are tried with some rows. Chosen: they rise by 2, 4, 8 and so on."""
_CARRIED_ON = 0.5
"""Share of the last leap that a leap by a part of the rows begins with (Kaczmarz, SPRING): other rows asked for it.
Measured as below, on six runs of Burgers and Helmholtz: 0.5 is faster than none in five of them, by up to a half, and
0.8 slower than 0.5 in four."""
_WORSE = 2.0
"""A leap by a part of the rows may raise the loss of all by this factor, for once. Chosen: what it does to all rows
wobbles, and the chain ends at the best of its points."""
_FEWEST_ROWS = 160
"""Rows that there must be memory for, unless all of them or those of `hybrid.linear_rows` are fewer. Measured on 256
rows of a network of a million weights, 24 s: with 44 of them at a time the loss ended 600 times above that of Adam
alone, with 170 of them as low."""
_FAR_WORSE = 4.0
"""Times the lowest loss of a chain that leaps by a part of the rows may lead to. Chosen: two such leaps in a row; from
there on more damping or more rows must lower the loss of all."""
_LONGEST_HOLD = 64
"""Steps that pass without a try where the last tries were in vain. Chosen: they cost nothing."""
_LEAST_PROMISE = 1e-4
"""Share of the loss that a leap promises to take away at a least point. Chosen: an optimizer would find no slope."""
_LOW_ENOUGH = 1e-4
"""Share of the loss that the first chain began with, from which on chains stay where they are. Chosen: after
a fall by four powers of ten the optimizer's own steps, which are long, hardly help."""
_HARDLY = 0.1
"""Fall of the logarithm of the loss. Chosen: less than a tenth in so many leaps is no progress, however steeply the
optimizer's first steps fell."""
_FEWEST = 32
"""Leaps before a chain is compared with the optimizer's own steps. Chosen: the first ones look for their damping."""
_DEAR = 8.0
"""Full steps per leap. Chosen: twice what leaps of small networks cost; where they cost more, as with many classes or
rows that are taken one by one, the optimizer may well be faster."""
_MOST_IF_COUPLED = 8.0
"""Full steps that a leap by coupled rows may cost. Measured with an integral over 512 points, where one costs 26: such
leaps take twice as long as quasi-Newton ones, and end at 0.08, 0.8 and 51 times their loss."""
_FIRST_LENGTH = 64.0
"""Full steps that the first chain of dear leaps costs: those of the optimizer after it show who is faster there.
Chosen: few enough to be lost where leaps are slow, and the next chain is twice as long where they are not."""


class LinearisedLeaps(ChainedLeaps):
    """Leaps, their damping and how many rows they take. Outputs are cheap, so that the loss of all rows is known at
    every point; rows of the Jacobian are taken of a part of them."""

    name = "linearised"
    saved = (
        *("damping", "lookout", "row_count", "prices", "holding"),
        *("made", "first_loss", "length", "pace", "stuck", "failure", "room"),
        *("leaps", "cost", "start_loss", "loss", "returned", "stopped", "arrived", "hold", "idle", "promise"),
        *("good", "ratios", "last_step", "_norms"),
        *("lowest", "lowest_held_out", "mark", "best", "end_point", "best_loss", "best_point"),
    )
    last_step: Tensor | None
    _norms: Tensor | None
    mark: list[Tensor]
    best: list[Tensor]
    end_point: list[Tensor]
    best_point: list[Tensor]

    def __init__(self, engine: Engine, objective: Objective, rows: int, memory_mb: float) -> None:
        self.engine, self.objective = engine, objective
        self.first_rows, self._memory_mb = rows, memory_mb
        self.damping = Damping()
        self.made = 0
        """Leaps of the whole run: they number the draws of rows."""
        self.loss = self.start_loss = math.nan
        self.leaps = 0
        self.cost = 0.0
        self.returned = self.stopped = False
        self.lowest = self.lowest_held_out = math.nan
        """Losses at the marked point: the lowest end of a chain so far."""
        self.hold, self.idle = 0, 0
        """Steps that are still to pass without a try, and how many passed before the last one."""
        self.best_loss = math.nan
        """The lowest loss of all rows in this chain."""
        self.promise = math.nan
        """Share of the loss that the last leap was to take away, with the least damping that was tried."""
        self.first_loss = math.nan
        """Where the first chain began."""
        self.arrived = False
        """Nothing would get lower from here."""
        self.stuck = False
        """The last chain ended where no leap lowers the loss: the next one begins where the optimizer leads to."""
        self.holding = Holding()
        self.good, self.ratios = 0, 0.0
        """Leaps of this chain that were good, and the sum of their ratios of real to predicted falls."""
        self.room = 0
        """Virtual steps that are left for leaps."""
        self.length, self.pace = _FIRST_LENGTH, math.nan
        """Full steps that a chain may cost, and what the last one lowered the logarithm of the loss by for each."""
        self.failure = ""
        self.last_step = None
        self.cover()

    @property
    def exact(self) -> bool | None:
        return self.lookout.exact

    @property
    def rows(self) -> int:
        """That the next leap takes."""
        return self.row_count.now

    @property
    def fall_ratio(self) -> float | None:
        """Real falls of the loss as a share of the predicted ones, on the average of this chain."""
        return round(self.ratios / self.good, 3) if self.good else None

    @property
    def fewest_rows(self) -> int:
        """Rows that there must be memory for."""
        engine = self.engine
        seen = engine.progress.rows * engine.world.size or _FEWEST_ROWS  # of a batch; before the first one nobody knows
        return min(_FEWEST_ROWS, self.first_rows, seen)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self.engine.full_step.parameters

    def cover(self) -> None:
        self.mark, self.best, self.end_point, self.best_point = [], [], [], []
        self.last_step = self._norms = None
        """The last leap, and the norms of the last gradient by parameter."""
        self.lowest = self.lowest_held_out = self.best_loss = math.nan
        self.elements = sum(p.numel() for p in self.parameters)
        self.prices = Price(self.engine)
        self.prices.expect(self.engine.model, self.parameters)
        most = self.prices.most_rows(self._memory_mb, self.elements)
        kind = Lookout if self.engine.world.size == 1 else LookoutOfRanks
        self.lookout = kind(self.engine, self.objective, self.prices)
        self.row_count = RowCount(self.first_rows, most, self.lookout.recordable)

    # --- points ------------------------------------------------------------------------------------------------------

    def _point(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def _go_to(self, point: list[Tensor]) -> None:
        copy_each(self.parameters, point)
        self.lookout.moved()

    @contextmanager
    def at_start(self) -> Iterator[None]:
        yield

    def note_best(self) -> None:
        self.best = self._point()

    def go_back(self, leaps: int, loss: float) -> None:
        if self.best:
            self._go_to(self.best)
            self.leaps, self.loss, self.end_point = leaps, loss, self.best

    def return_to_end(self) -> None:
        if self.end_point:
            self._go_to(self.end_point)

    @property
    def marked(self) -> bool:
        return bool(self.mark)

    # --- a chain -----------------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> bool:
        """Begin here, or at the end of an earlier chain where that was lower. False where the loss is not finite, and
        where it cannot be linearised: `failure` says why."""
        return bool(self._guarded(self._begin, batch))

    def _begin(self, batch: Any) -> bool:
        self.leaps, self.cost, self.returned, self.stopped = 0, 0.0, False, False
        self.end_point, self.best_point, self.best_loss = [], [], math.nan
        self.hold, self.idle = 0, 0
        self.row_count.begin_chain()
        self.last_step, self.arrived = None, False
        self.good, self.ratios = 0, 0.0
        self.holding.begin()
        self.lookout.begin()
        look = self.lookout.measured(batch, first=True)
        rows, outputs = self.row_count, self.prices.outputs
        rows.now = max(rows.now, check_size(look, outputs, self.elements, rows.now, rows.most))
        self.loss = self._number(look.loss)
        if self.mark and not self.stuck:
            here = self._point()
            self._go_to(self.mark)
            there = self._number(self.lookout.measured(batch).loss)
            if there < self.loss:
                self.loss, self.returned = there, True
            else:
                self._go_to(here)
        self.start_loss = self.loss
        if not math.isfinite(self.loss):
            return False
        self.first_loss = self.loss if math.isnan(self.first_loss) else self.first_loss
        way = self._seen(batch)[1]
        if rows.most < self.fewest_rows:
            needed, given = self.prices.memory_mb(self.fewest_rows, self.elements), self._memory_mb
            raise UnknownForm(
                f"hybrid.linear_memory_mb = {given:g} has no room for enough rows; set {math.ceil(needed)} or more"
            )
        if way.reason == COUPLED and (steps := self.price(min(rows.now, outputs))) > _MOST_IF_COUPLED:
            raise UnknownForm(f"{COUPLED}, so that a leap takes as long as {steps:.0f} steps or more")
        if not self.made:
            self.row_count.begin(self.price, self.prices.outputs)
        return True

    def _guarded(self, do: Callable[[Any], Result], batch: Any) -> Result | None:
        """Do it; once more without taps where it fails with them. None where that fails, too: `failure` says why."""
        start, taps = self._point(), self.lookout.tapped
        try:
            with full_precision():
                return do(batch)
        except UnknownForm as error:
            self.failure = str(error)
        except Exception as error:
            shared = isinstance(error, FailedOnRank)
            if is_out_of_memory(error) or (self.engine.world.size > 1 and not shared):
                raise
            self.failure = f"the loss cannot be linearised ({error if shared else failure_of('it', error).error})"
            self.lookout.tapped = False
        self._go_to(start)
        self.release()
        if taps == self.lookout.tapped:
            return None
        self.failure = ""
        return self._guarded(do, batch)

    def release(self) -> None:
        """Give back the memory of the last outputs and their graph."""
        self.lookout.release()

    def leap(self, batch: Any) -> StepOutput | None:
        """One leap. Where none lowers the loss the weights stay. That is the end of the chain after a while, unless the
        loss is at a least point or has fallen very far: then nothing else would do better. None also where the loss
        cannot be linearised any more: `failure` says why."""
        return self._guarded(self._leap, batch)

    def _leap(self, batch: Any) -> StepOutput | None:
        if self.hold:
            self.hold -= 1
            return self._count(batch, self.lookout.measured(batch), None)
        start = self._point()
        look, found, system = self._search(*self._seen(batch), start)
        if found is None:
            self._go_to(start)
            self.arrived = self.promise <= _LEAST_PROMISE or self.low
            self.stuck = not self.arrived and (self.idle >= _LONGEST_HOLD or not self.end_point)
            won = self.end_point or self.returned  # else there is nothing to stay for
            if self.stuck or not won:
                return None
            self.hold = self.idle = min(2 * self.idle + 1, _LONGEST_HOLD)
            return self._count(batch, look, system)
        self.idle, self.arrived = 0, False
        self.loss, self.end_point = self._number(found.loss), self._point()
        self.lookout.moved(found)
        if self.holding.due and not self.holding.ask():
            self.stopped = not self.low
            self.hold, self.arrived = self.holding.pause, self.low
        return self._count(batch, look, system)

    @property
    def low(self) -> bool:
        """The loss has fallen very far."""
        return self.loss <= _LOW_ENOUGH * self.first_loss

    def _search(self, look: Look, way: Way, start: list[Tensor]) -> tuple[Look, Seen | None, System]:
        """Where it starts from, a point that is better, by rows as few as possible, and the problem that was solved for
        it."""
        spent = 0.0
        while True:
            some = self.lookout.choose(look, way, self.rows, self.engine.config.seed * 1_000_003 + self.made)
            look, system, losses = self.lookout.problem(look, way, some, self.damping.value)
            spent += self.price(system.count)
            found = self._try(look, system, losses, some, start)
            if not self.lookout.recordable:
                self.row_count.without_recording()
            if found is not None and some is not None:
                self.row_count.think_over(self.price)
            dear = spent + self.price(2 * self.rows) > min(max(self.length - self.cost, _FIRST_LENGTH), self.room)
            if found is not None or some is None or dear or not self.row_count.more():
                self.cost += spent
                return look, found, system
            copy_each(self.parameters, start)  # rows are taken at the weights as they are: trials have moved them

    def _seen(self, batch: Any) -> tuple[Look, Way]:
        """Outputs, and how their rows are taken. How many there is memory for follows from it."""
        look, way = self.lookout.seen(batch, self.made)
        self.row_count.limit(self.prices.most_rows(self._memory_mb, self.elements))
        return look, way

    def _try(
        self, look: Look, system: System, losses: tuple[float, float], some: Choice | None, start: list[Tensor]
    ) -> Seen | None:
        """Rising dampings until one makes a leap that is good enough; the damping of the next follows from it.

        losses: of the chosen rows and of all; some: the chosen ones, None if all are.
        """
        (before, before_all), whole = losses, some is None
        self.holding.met(before_all)
        self.holding.repeated += bool(self.exact)
        if not before_all >= self.best_loss:  # no leap was made on this batch yet
            self.best_loss, self.best_point = before_all, start
        bends = whole or (self.low and system.rows.dtype is torch.float64)
        first, self.promise, least, bent = True, 0.0, self.damping.value, bends
        for _ in range(_MOST_TRIES if math.isfinite(before_all) else 0):
            carried_on = None if whole or self.last_step is None else _CARRIED_ON * self.last_step
            made = self.lookout.attempt(look, system, Trial(some, start, self.damping.value, carried_on, bent))
            if made is None:
                bent = bends
                self.damping.rise_unsolved()
                continue
            if first:
                first, self.promise = False, made.predicted / before if before > 0 else 0.0
            ratio = (before - made.after) / made.predicted if made.predicted > 0 else -math.inf
            limit = before_all if whole else _WORSE * before_all
            if self.exact and not whole:
                limit = min(limit, max(before_all, _FAR_WORSE * self.best_loss))
            if ratio > _ACCEPTED and made.after_all <= limit:
                self.row_count.note(_log_fall(before, made.after), _log_fall(before_all, made.after_all))
                self.holding.leapt(before_all, made.after_all)
                self.good, self.ratios = self.good + 1, self.ratios + ratio
                self.damping.ease(ratio)
                self.last_step = made.step
                return made.seen
            self.cost += 1  # for outputs in vain
            bent = bends and not made.bent
            if made.bent:  # what is seen of bends may be rounding: the same step without
                continue
            self.last_step = None
            self.damping.rise()
        self.damping.return_to(least)
        return None

    def stay(self, batch: Any) -> StepOutput | None:
        """A step that leaves the weights where they are, and says what the loss is there. None where `failure` says
        why it cannot."""
        return self._guarded(lambda batch: self._count(batch, self.lookout.measured(batch), None), batch)

    def _count(self, batch: Any, look: Look, system: System | None) -> StepOutput:
        """What follows on a step. system: None where nothing was tried."""
        self.objective.note(look.means)
        self.leaps += 1
        self.made += 1
        self.engine.world.agree([self.made, self.loss, self.damping.value, self.rows], "the leap")
        self.steps_of_leap = 1 if system is None else self._steps(system.count)
        if system is not None or self._norms is None:
            gradient = look.loss.new_zeros(self.elements) if system is None else system.gradient()
            each = torch.split(gradient, [p.numel() for p in self.parameters])
            self._norms = torch.stack(torch._foreach_norm(each)).float()
        loss, norm = look.loss.float(), torch.linalg.vector_norm(self._norms)
        bad = torch.logical_not(torch.isfinite(loss)).float()
        output = StepOutput(loss, norm, bad, self._norms)
        return self.engine.count_step(batch, output, passes=0 if system is None else 1)

    # --- what a leap costs -------------------------------------------------------------------------------------------

    def price(self, rows: int) -> float:
        """Full steps that a leap by so many rows costs."""
        return self.prices.of(rows, self.elements)

    def fits(self, room: int) -> bool:
        """The last steps of a run, too few for a leap, pass without one."""
        self.room = room
        if room < self.steps_of_next:
            self.hold = max(self.hold, room)
        return room >= 1

    @property
    def steps_of_next(self) -> int:
        """Virtual steps that a leap would count now."""
        return self._steps(self.rows)

    def _steps(self, rows: int) -> int:
        return max(1, round(self.price(rows)))

    # --- its end -----------------------------------------------------------------------------------------------------

    def over(self, slope: WindowLosses) -> bool:
        """It is to end, or it hardly lowers the loss while the optimizer's own steps did before it."""
        fall, usual = _log_fall(self.start_loss, self.loss), slope.last_log_fall
        far = self.arrived or self.low
        long = self.cost >= max(self.length, _DEAR * self.leaps) and not far
        slow = self.leaps >= _FEWEST and fall < min(_HARDLY, usual * self.cost)
        return self.stopped or long or (slow and not self.returned)

    def compare(self, slope: WindowLosses) -> bool | None:
        """Once, after a chain of dear leaps: whether they were as fast as the optimizer's own steps in the window after
        it. Then the next chain may be twice as long. None: there is nothing to compare."""
        if math.isnan(self.pace) or not slope.points:
            return None
        steps = self.engine.config.hybrid.window_steps
        later = slope.points[-1][1] * math.exp(-slope.last_log_fall * (steps - 1) / 2)  # at the end of the window
        faster = not _log_fall(self.loss, later) / steps > self.pace
        self.length, self.pace = 2 * self.length if faster else _FIRST_LENGTH, math.nan
        return faster

    def end(self, slope: WindowLosses, refused: bool, held_out: float | None = None) -> None:
        if held_out is None and self.best_loss < self.loss and self.best_point:
            self._go_to(self.best_point)
            self.loss, self.end_point = self.best_loss, self.best_point
        if self.leaps or held_out is not None:
            here, lowest = (self.loss, self.lowest) if held_out is None else (held_out, self.lowest_held_out)
            if not (here >= lowest or self.holding.noisy):
                self.mark = self._point()
                self.lowest, self.lowest_held_out = self.loss, math.nan if held_out is None else held_out
        dear = self.cost > _DEAR * self.leaps > 0
        self.pace = _log_fall(self.start_loss, self.loss) / self.cost if dear else math.nan
        self.best = []
        self.release()

    def finish(self, batch: Any, held_out: Callable[[], float] | None = None) -> tuple[float, float] | None:
        if not self.mark:
            return None
        now = self._point()
        judge = held_out or (lambda: self.engine.probe(batch))
        here = judge()
        self._go_to(self.mark)
        there = judge()
        if not there < here:
            self._go_to(now)
            return None
        return here, there

    def after_load(self) -> None:
        device = self.engine.device
        self.mark, self.best, self.end_point, self.best_point = (
            [tensor.to(device) for tensor in point] for point in (self.mark, self.best, self.end_point, self.best_point)
        )
        self.last_step, self._norms = (
            None if tensor is None else tensor.to(device) for tensor in (self.last_step, self._norms)
        )

    def _number(self, loss: Tensor) -> float:
        return self.engine.world.to_host(loss)[0]


def _log_fall(before: float, after: float) -> float:
    return math.log(before / after) if before > 0 and after > 0 else 0.0
