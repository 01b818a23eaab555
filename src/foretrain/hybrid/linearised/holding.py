"""Whether what leaps win on their own batches holds on the batches that follow."""

from __future__ import annotations

import math

from foretrain.persist.stateful import Stateful

_STRETCH = 6
"""Leaps after which is asked whether what they won holds; what was before counts half. Chosen: about what a try with
noisy batches may cost."""
_HELD, _HELD_IF_LOW = 0.5, 0.1
"""Share of the fall of the loss on their own batches that the batches after them show at least, at first and once the
loss has fallen far. Measured over single stretches of six leaps: 0.9 and more with one point in each cell; with
independent points 0.4 to 1 at first, save one of -0.1, later -0.4 to 0.7; of a noisy table -0.2 to 0.2."""
_FAR = 100.0
"""Times. Chosen: noise that cannot be learned keeps the loss from falling so far."""
_REPEATED = 3
"""Leaps on the batch of the one before from which on nothing is asked: points stay for a while and are then exchanged,
and new ones are often chosen where residuals are large. Chosen: the first leap of a chain is one of them."""
_LONGEST_PAUSE = 64
"""Steps. Chosen: they cost little more than looking at the loss."""


class Holding(Stateful):
    """Follows the logarithm of the loss from batch to batch: it falls by a leap, and rises where the next batch shows
    less of what was won. Where every step sees the same batch nobody asks."""

    saved = ("known", "first", "last", "left_at", "fall", "rise", "leaps", "vain", "repeated")
    known: bool | None

    def __init__(self) -> None:
        self.first = self.last = math.nan
        """Logarithms of the loss where the first chain began, and of that of the last batch before it was leapt on."""
        self.known = None
        """What leaps win on a batch holds on the next one; None until that is known."""
        self.begin()

    def begin(self) -> None:
        """A chain begins."""
        self.left_at = math.nan
        """Logarithm of the loss of its own batch where the last leap ended; nan once the next batch was met."""
        self.fall, self.rise, self.leaps = 0.0, 0.0, 0
        self.vain = 0
        """How often in a row it did not hold."""
        self.repeated = 0
        """Leaps of the chain that saw the batch of the one before."""

    def leapt(self, before: float, after: float) -> None:
        """A leap took the loss of its batch from here to there."""
        self.left_at = math.nan
        if before > 0 and after > 0:
            self.fall += math.log(before / after)
            self.left_at = math.log(after)

    def met(self, loss: float) -> None:
        """The next batch has this loss where the last leap ended, or where the chain begins."""
        if loss > 0:
            self.last = math.log(loss)
            self.first = self.last if math.isnan(self.first) else self.first
            if not math.isnan(self.left_at):
                self.rise += self.last - self.left_at
                self.leaps += 1
        self.left_at = math.nan

    @property
    def due(self) -> bool:
        return self.leaps >= _STRETCH and self.repeated < _REPEATED

    def ask(self) -> bool:
        """Whether it holds."""
        held = self.fall - self.rise >= (_HELD_IF_LOW if self._far else _HELD) * self.fall
        self.fall, self.rise, self.leaps = self.fall / 2, self.rise / 2, 0
        self.vain = 0 if held else self.vain + 1
        self.known = not self.noisy
        return held

    @property
    def _far(self) -> bool:
        return self.last < self.first - math.log(_FAR)

    @property
    def noisy(self) -> bool:
        """What was won did not hold, and was little: leaps learn the noise of their batches."""
        return self.vain > 0 and not self._far

    @property
    def pause(self) -> int:
        """Steps to stay where nothing is won any more."""
        return min(1 << self.vain, _LONGEST_PAUSE)
