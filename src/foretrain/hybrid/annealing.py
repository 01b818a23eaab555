"""Annealed copies: what the run would have come to had its rate been brought to 0 here. A few steps on a copy tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from foretrain.engine.engine import Engine
from foretrain.engine.fence import OwnCodeError
from foretrain.errors import ConfigError, InputError
from foretrain.events import Annealed, Event, Notice
from foretrain.forecast.records import AnnealedPoint
from foretrain.hybrid.replay import Interrupted, Replay
from foretrain.persist.stateful import Stateful

_PATIENCE = 64
"""A copy that could be made waits for so many batches, or for as many as it has steps, until no move is open. Chosen:
only a chain of leaps takes longer, and nobody knows when it will end."""
_NO_MEMORY = "there is not enough memory for it"


class AnnealedCopies(Stateful):
    """Makes copies at the shares of the run that `forecast.copies` names, and where `anneal` asks for one.

    From the step where a copy is asked for the run goes on as ever, and its batches are noted. When there are enough,
    the copy is trained on them from the noted point while the rate falls in a straight line to 0; its held-out loss
    is told by `Annealed`. The run then goes on, bit for bit, as if nothing had been. What a copy takes is charged.
    """

    saved = ("replay", "wanted", "steps", "before", "begun", "points")
    begun: list[int]
    points: list[AnnealedPoint]

    clip = math.inf
    """As a source of the learning rate, it wants no clipping."""

    def __init__(self, engine: Engine, probe: Sequence[Any], emit: Callable[[Event], None]) -> None:
        """probe: held-out batches that judge copies where `fit` is given none."""
        self.engine, self.emit = engine, emit
        self.held_out = list(probe)
        """They judge copies. Set by `fit` where it has some."""
        self.replay = Replay(engine)
        self.wanted = 0
        """Steps of a copy that was asked for and has not begun; 0: none."""
        self.steps = 0
        """Steps of the copy that batches are noted for."""
        self.before = math.nan
        """Held-out loss where it begins."""
        self.begun = []
        """Steps at which those of `forecast.copies` have begun."""
        self.points = []
        """What was measured so far."""
        self.off = ""
        """Why no copies are made in this run."""
        self._told = False
        """It was said at the end which copies were not made."""
        self.interrupted: Interrupted = lambda: False
        """Set by `fit`."""
        self._factor = 1.0
        engine.on_cover.append(self._begin_anew)

    @property
    def rate_factor(self) -> float:
        """What the scheduled rate is multiplied with: 1 but in a copy."""
        return self._factor

    def ask(self, steps: int) -> None:
        """Make a copy of so many steps from the next step on that belongs to no move."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"anneal({steps!r}): say for how many steps, 1 or more")
        if self.off:
            raise InputError(f"anneal: {self.off}")
        if self.busy:
            raise InputError("anneal: another copy is on its way; ask again when `Annealed` has told of it")
        self.check()
        self.wanted = steps

    @property
    def busy(self) -> bool:
        """A copy was asked for, and is not made yet."""
        return self.replay.open or bool(self.wanted)

    def check(self) -> None:
        """Refuse to make copies that nothing could judge."""
        if not self.held_out:
            raise ConfigError(
                "an annealed copy is judged by held-out batches, and there are none: give held_out to fit(), or "
                "probe= to HybridTrainer"
            )

    # --- between steps -----------------------------------------------------------------------------------------------

    def follow(self, batch: Any) -> None:
        """Before a step of the run, while nothing else is on trial: begin a copy that is due, or make it."""
        if self.replay.open and self.replay.noted >= self.steps:
            self._make(batch)
        if not self.replay.open:
            self._plan()
            if self.wanted and self._can_keep(batch):
                self._begin()

    def note(self, batch: Any, position: int) -> None:
        """A batch is handed in for a step of the run."""
        replay = self.replay
        if replay.open and replay.noted < self.steps and self._can_keep(batch):
            replay.note(batch, position)
        elif replay.open and position - replay.position - self.steps > max(_PATIENCE, self.steps):
            self._give_up("moves have been under way since its steps were over")

    def _can_keep(self, batch: Any) -> bool:
        """Whether a copy could be trained on the batch after a stop; else no more copies are tried."""
        if found := self.replay.foreign_to_states(batch):
            self.off = f"batches hold what cannot be saved: {found}"
            self._give_up(f"{self.off}; no other is tried")
            self.wanted = 0
        return not found

    def _plan(self) -> None:
        """Ask for the next of `forecast.copies`, if it is due."""
        config, step = self.engine.config, self.engine.progress.global_step
        shares = sorted(config.forecast.copies)
        if self.wanted or self.off or len(self.begun) >= len(shares) or not self.engine.has_end:
            return
        if step >= shares[len(self.begun)] * config.max_steps:
            self.check()
            self.begun.append(step)
            self.wanted = max(1, round(config.forecast.copy_steps * config.max_steps))

    def _begin(self) -> None:
        self.steps, self.wanted = self.wanted, 0
        try:
            self.before = self.replay.loss(self.held_out)
        except OwnCodeError as error:
            self._give_up(f"the loss failed on held-out batches ({error.failure.error})")
            return
        except RuntimeError as error:
            if not self.replay.is_bearable(error):
                raise
            self._give_up(_NO_MEMORY)
            return
        if not self.replay.fits(self.replay.begin):
            self._give_up(_NO_MEMORY)

    def _make(self, batch: Any) -> None:
        """Train the copy, measure it, and put the run back. An interrupted one stays due."""
        try:
            with self.replay.aside():
                self.replay.go_back()
                loss = self._annealed(batch)
        except OwnCodeError as error:
            self._give_up(f"the loss failed on held-out batches ({error.failure.error})")
            return
        except RuntimeError as error:
            if not self.replay.is_bearable(error):
                raise
            self._give_up(_NO_MEMORY)
            return
        finally:
            self._factor = 1.0
        if loss is not None:
            point = AnnealedPoint(self.replay.step, self.steps, loss, self.before)
            self.replay.forget()
            self.points.append(point)
            self.emit(Annealed(point.step, point.steps, point.loss, point.before))

    def _annealed(self, given: Any) -> float | None:
        """Return the held-out loss of the copy at its end; None where the run is to stop."""
        engine, first = self.engine, self.engine.schedule(self.replay.step)
        for done in range(self.steps):
            if self.interrupted():
                return None
            now = engine.schedule(engine.progress.global_step)
            self._factor = (1.0 - done / self.steps) * (first / now if now else 1.0)
            self.replay.full(done, given)
        return self.replay.loss(self.held_out)

    def _give_up(self, why: str) -> None:
        step = self.replay.step if self.replay.open else self.engine.progress.global_step
        self.replay.forget()
        self.emit(Notice(f"the annealed copy of step {step} is given up: {why}"))

    def end(self) -> None:
        """The run ends: forget a copy that is not made yet, and tell of those of `forecast.copies` that were not."""
        shares = sorted(self.engine.config.forecast.copies)
        late = shares[len(self.begun) :]
        if self.replay.open and self.replay.step in self.begun:
            late.insert(0, shares[self.begun.index(self.replay.step)])
        self.replay.forget()
        self.wanted = 0
        if late and not self.off and not self._told:
            self._told = True
            named = ", ".join(f"{share:g}" for share in late)
            why = "the run ended first, or moves were under way"
            self.emit(Notice(f"no annealed copy was made at {named} of the run (forecast.copies): {why}"))

    def _begin_anew(self) -> None:
        """Others are trained from now on: what was noted of those before is of no use."""
        if self.replay.open:
            self.replay.forget()
            self.wanted = self.steps

    def taken_back(self) -> None:
        """The run went back: forget what was measured, or has begun, at steps that are undone. They come again."""
        step = self.engine.progress.global_step
        self.points = [point for point in self.points if point.step <= step]
        self.begun = [begun for begun in self.begun if begun <= step]
        if self.replay.open and self.replay.step > step:
            self.replay.forget()

    def summary(self) -> dict[str, Any]:
        """What copies said, and what they took."""
        points = [{"step": one.step, "steps": one.steps, "loss": one.loss, "before": one.before} for one in self.points]
        return {"copies": points, "backward_passes": self.replay.passes, "tokens": self.replay.tokens}
