"""The clock of a run with `max_time`: what was spent, how long steps take, and how many are left."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from foretrain.config.kinds import MOST
from foretrain.persist.stateful import Stateful

_WINDOW = 0.05
"""Share of the whole time over which the pace is taken. Chosen: a machine that becomes slower shows soon, and a step
that took long by chance counts little."""
_FEWEST = 6
"""Looks that the pace is taken over at least."""
_OTHER_WORK = 4.0
"""Times the usual pace beyond which what was done between two looks was not only steps. Chosen: programs beside a run
make it two or three times slower."""
_STEADY = 4
"""Steps after which the pace is believed: the first ones make room, and may compile."""
_ALIKE = 1.5
"""Two successive looks agree on the pace where it differs by less than this factor."""
_SURELY_STEADY = 20
"""Steps after which the pace is believed for good: slow first steps may agree with each other."""
_LOOKS = 40
"""A look comes when this part of the steps that are left is done. Chosen: a change of pace is met in time, and looks
are few: some hundred in a run of ten thousand steps. Each waits for the device."""
_FORWARD = 1 / 3
"""Share of a step that a forward pass takes: it stands for evaluations until one was measured."""

_SAVING = 1.5
"""The end of a run as a multiple of a checkpoint: the last one, and weights for others. Chosen: weights are less than
half of a checkpoint."""


@dataclass(frozen=True)
class Took:
    """What evaluations or checkpoints took, the last ones counted most; 0: not known."""

    seconds: float = 0.0
    steps: float = 0.0
    """In steps of the pace that was known then."""

    def and_now(self, seconds: float, steps: float) -> Took:
        """Return the mean with another one."""
        if not self.seconds:
            return Took(seconds, steps)
        return Took((self.seconds + seconds) / 2, (self.steps + steps) / 2)

    def at(self, pace: float) -> float:
        """Return the seconds that one will take. Where the machine has changed its pace, the lower figure counts: a
        run that ends too early cannot be mended."""
        return min(self.seconds, self.steps * pace)


class Deadline(Stateful):
    """Knows how much of the run's time is left, and how many steps can be made in it.

    Clocks of several processes differ: there rank 0's counts, and what it says is told to all when it is looked at. The
    others wait for each other in steps, evaluations and checkpoints, so that the slowest of them is in it.
    """

    saved = ("pace", "evaluating", "saving")
    evaluating: Took
    saving: Took

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.clock: Callable[[], float] | None = None
        """Gives the seconds that all parts of the run took so far. Set when the run begins."""
        self.of_first: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None
        """Gives the numbers of the process whose clock counts. Set when a run of several begins."""
        self._told = 0.0
        """What that clock said when it was last looked at."""
        self.pace = 0.0
        """Seconds per step; 0: not known."""
        self.evaluating, self.saving = Took(), Took()
        self.batches = 0
        """Held-out batches of an evaluation."""
        self.saves = False
        """The run has a folder: it ends with a checkpoint, and with weights for others."""
        self._looks: deque[tuple[int, float]] = deque()
        """Steps done, and the seconds that they took, evaluation and saving left out."""
        self._first: int | None = None
        self._began = 0.0
        self._aside = 0.0
        self._next = 0

    def begin(self, step: int) -> None:
        """Steps follow from here on, maybe on another machine than before."""
        self._looks.clear()
        self._aside = 0.0
        self._hear()
        self._first, self._began, self._next = None, self.spent, step + 1

    @property
    def spent(self) -> float:
        """The seconds that decisions go by: those of now, or in one of several processes those of the last look."""
        return self.shown if self.of_first is None else self._told

    @property
    def shown(self) -> float:
        """The seconds of now, by the clock of this process."""
        return 0.0 if self.clock is None else self.clock()

    def _hear(self) -> None:
        """All processes go on with what rank 0 has measured so far."""
        if self.of_first is None:
            return
        one, other = self.evaluating, self.saving
        own = [self.shown, self._aside, one.seconds, one.steps, other.seconds, other.steps]
        self._told, self._aside, *took = (float(number) for number in self.of_first(np.array(own)))
        self.evaluating, self.saving = Took(*took[:2]), Took(*took[2:])

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Time inside the block is no step. what: "evaluating" or "saving"."""
        started = self.shown
        try:
            yield
        finally:
            seconds = self.shown - started
            self._aside += seconds
            if self.pace:
                setattr(self, what, getattr(self, what).and_now(seconds, seconds / self.pace))

    # --- looking at the clock ----------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether it is time to look. A rollback makes steps anew, and the pace is taken from there."""
        if self._looks and step < self._looks[-1][0]:
            self._looks.clear()
            self._next = step
        return step >= self._next

    def look(self, step: int) -> None:
        """So many steps are done by now, on the device too. The first step of all is left out: it prepares much."""
        self._hear()
        self._looks.append((step, self.spent - self._aside))
        if self._first is None:
            self._first = step
        now = self._looks[-1][1]
        while len(self._looks) > _FEWEST and now - self._looks[1][1] >= _WINDOW * self.seconds:
            self._looks.popleft()
        self.pace = self._pace() or self.pace

    def _pace(self) -> float | None:
        """Return the seconds per step over the last looks, without single steps that did other work, such as a race of
        learning rates: a machine that became slower is so for more than one look."""
        parts = [
            (later - earlier, until - since)
            for (earlier, since), (later, until) in pairwise(self._looks)
            if later > earlier
        ]
        if not parts:
            return None
        usual = statistics.median(seconds / steps for steps, seconds in parts)
        kept = [(steps, seconds) for steps, seconds in parts if seconds <= _OTHER_WORK * usual * steps]
        return max(sum(seconds for _, seconds in kept) / sum(steps for steps, _ in kept), 1e-9)

    def look_again(self, step: int, end: int, begin: int) -> None:
        """Plan the next look. begin: where the decay is to begin, which is not to be missed."""
        done = step - (self._first or 0)
        gaps = [(end - step) // _LOOKS, done // 4, *([(begin - step) // 2] if begin > step else [])]
        self._next = step + max(1, min(gaps))

    @property
    def steady(self) -> bool:
        """Return whether the pace can be believed for now: some steps are done, and the last two looks agree."""
        return self.surely_steady or (self._done >= _STEADY and self._agreed)

    @property
    def surely_steady(self) -> bool:
        """Return whether the pace can be believed for good."""
        return self._done >= _SURELY_STEADY

    @property
    def _agreed(self) -> bool:
        last = list(self._looks)[-3:]
        paces = [(until - since) / max(1, later - earlier) for (earlier, since), (later, until) in pairwise(last)]
        return len(paces) == 2 and max(paces) <= _ALIKE * min(paces)

    @property
    def _done(self) -> int:
        return self._looks[-1][0] - self._first if self._looks and self._first is not None else 0

    # --- what is left ------------------------------------------------------------------------------------------------

    @property
    def reserve(self) -> float:
        """Return the seconds that the last evaluation, the last checkpoint and what follows it will take."""
        evaluating = self.evaluating.at(self.pace) or self.batches * _FORWARD * self.pace
        return evaluating + (_SAVING * self.saving.at(self.pace) if self.saves else 0.0)

    @property
    def left(self) -> float:
        """Return the seconds that are left for steps, and for evaluations and saving between them."""
        return self.seconds - self.reserve - self.spent

    def steps_in(self, seconds: float) -> int:
        """Return the steps that can be made in this time, with what comes between them."""
        lasted = self.spent - self._began
        share = min(self._aside / lasted, 0.9) if lasted > 0 else 0.0
        return int(min(max(seconds, 0.0) * (1.0 - share) / self.pace, MOST)) if self.pace else 0
