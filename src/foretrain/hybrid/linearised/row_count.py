"""How many rows a leap takes: as many as lower the loss of all by the most, for what they cost."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.persist.stateful import Stateful

_PATIENCE = 6
"""Leaps after which the number of rows is thought over. Measured on Burgers, Helmholtz and the diabetes network, as
time to the loss of a tuned Adam, single runs: 4 is up to a third slower and 8 up to a quarter, and each is faster in
some."""
_LONGEST_PATIENCE = 48
"""Chosen: three changes in vain, each waited for twice as long."""
_AS_FAST = 0.6
"""Share of the pace before a change that is as good as before. Chosen: leaps become slower by themselves as the loss
falls."""
_HARDLY_DEARER, _DEARER = 1.25, 1.65
"""Times the price that twice the rows may cost in the beginning, and where each change is recorded anew. Chosen: they
say much more than that."""
_PATIENCE_IF_RECORDED = 12
"""Chosen: recording a leap takes as long as ten of them."""
ALWAYS_TAKEN = 32
"""Rows that are always taken. Chosen: outputs alone cost more than so few rows."""

Price = Callable[[int], float]
"""Full steps that a leap by so many rows costs."""


class RowCount(Stateful):
    """Doubles or halves the rows where that should pay, and goes back where it did not."""

    saved = ("now", "since", "own_fall", "whole_fall", "patience", "before", "pace_before")

    def __init__(self, first: int, most: int, recorded: bool = False) -> None:
        """recorded: leaps are, so that each change costs as much as some of them."""
        self.now, self.most, self.recorded = min(first, most), most, recorded
        self.since, self.own_fall, self.whole_fall = 0, 0.0, 0.0
        """Leaps since it was thought over, and what they lowered the logarithm of the loss by: of the rows that they
        took, and of all."""
        self.least_patience = _PATIENCE_IF_RECORDED if recorded else _PATIENCE
        self.patience = self.least_patience
        self.before, self.pace_before = 0, 0.0
        """Rows before the last change, and what they lowered the loss of all by for each full step that they cost; 0:
        the change is no longer in question."""

    def limit(self, most: int) -> None:
        """There is memory for so many."""
        self.now, self.most = min(self.now, most), most

    def begin(self, price: Price, outputs: int) -> None:
        """Take more rows than asked for where they cost hardly more."""
        limit = _DEARER if self.recorded else _HARDLY_DEARER
        while self.now < outputs and price(2 * self.now) <= limit * price(self.now):
            if not self.more():
                return

    def without_recording(self) -> None:
        """Leaps are not recorded, perhaps after all."""
        if self.recorded:
            self.recorded, self.least_patience, self.patience = False, _PATIENCE, min(self.patience, _PATIENCE)

    def begin_chain(self) -> None:
        self.since, self.own_fall, self.whole_fall = 0, 0.0, 0.0
        self.before = 0

    def more(self) -> bool:
        """Twice as many rows from now on, if there is memory for them."""
        if self.now >= self.most:
            return False
        self.now = min(2 * self.now, self.most)
        return True

    def note(self, own_fall: float, whole_fall: float) -> None:
        self.own_fall += own_fall
        self.whole_fall += whole_fall

    def think_over(self, price: Price) -> None:
        """After a leap by a part of all rows."""
        self.since += 1
        in_vain = self.since >= self.least_patience and self.whole_fall <= 0
        if self.since < self.patience and not in_vain:
            return
        now, whole, own = self.now, max(self.whole_fall, 0.0), self.own_fall
        pace = whole / (self.since * price(now))
        if self.before and 0 < pace < _AS_FAST * self.pace_before:
            self.now, self.before = self.before, 0
            self.patience = min(2 * self.patience, _LONGEST_PATIENCE)
        else:
            if self.before:
                self.patience = self.least_patience
            self._change(price, whole, own)
            self.before, self.pace_before = (now, pace) if self.now != now else (0, 0.0)
        self.since, self.own_fall, self.whole_fall = 0, 0.0, 0.0

    def _change(self, price: Price, whole: float, own: float) -> None:
        """Twice as many should win half of what the chosen rows fell beyond all of them, half as many lose all of
        it."""
        now = self.now
        if (whole + own) / 2 * price(now) > whole * price(2 * now):
            self.more()
        elif (2 * whole - own) * price(now) > whole * price(now // 2):
            self.now = max(now // 2, min(now, ALWAYS_TAKEN))
