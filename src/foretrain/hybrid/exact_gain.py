"""What moves that an exact loss judged were worth, in steps of the optimizer's own trend: from the run itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from foretrain.config.units import clock, loss_text
from foretrain.motion.losses import WindowLosses
from foretrain.motion.records import WindowRecord
from foretrain.persist.stateful import Stateful

_MOST_WORTH = 5.0
"""Steps of the optimizer that a step of a move counts here at the most. After a chain the optimizer's own steps lower
the loss far more slowly than on a way of their own, and by that pace alone a leap would be worth nearly anything."""


@dataclass(frozen=True, slots=True)
class Point:
    """An exact loss, and when it was there."""

    loss: float = math.nan
    step: int = 0
    seconds: float = 0.0
    passes: int = 0
    """Gradients that the run had taken."""
    beyond: int = 0
    """Steps that leaps of the linearised run had cost beyond a gradient each."""


class ExactGain(Stateful):
    """Each kept move lowered the loss; the pace at which the optimizer's own steps lowered it just before says how many
    of them that fall would have taken. All guesses are on the low side: the faster of two paces counts; it is taken to
    go on, although losses fall ever more slowly; a leap counts a few steps at the most, and one step where the
    optimizer's own steps had stopped lowering the loss.
    """

    saved = (
        *("moves", "leaps", "worth", "bounded", "stalled", "factor", "start", "lowest", "by_moves"),
        *("best", "best_worth", "best_is_least", "share", "rising", "beyond"),
    )

    def __init__(self) -> None:
        self.moves = 0
        """Kept."""
        self.leaps = ""
        """What the leaps of the last chain among them are called."""
        self.worth = 0.0
        """Steps of the optimizer that their falls are worth."""
        self.bounded = False
        """A fall was worth more than is counted."""
        self.stalled = 0
        """Moves before which the optimizer's own steps did not lower the loss."""
        self.factor = 1.0
        """By which all of them together lowered the loss; not a number where a loss was not positive."""
        self.start = Point()
        """Where the first of them began."""
        self.lowest = Point()
        """Since then."""
        self.by_moves = False
        """It was the end of a move."""
        self.best, self.best_worth, self.best_is_least = Point(), 0.0, False
        """The end of a move up to which most steps were saved, if any were; what all falls up to there are worth; and
        whether that is only the least that they are."""
        self.share = 0.0
        """The learning rate at the end of the last window, as a share of its peak."""
        self.rising = False
        self.beyond = 0
        """Steps that leaps have cost so far beyond a gradient each."""

    def watched(self, record: WindowRecord, seconds: float, passes: int) -> None:
        """A window of the optimizer's own steps is over."""
        self.rising = record.rate_share > self.share
        self.share = record.rate_share
        low = min((loss for loss in record.losses if math.isfinite(loss)), default=math.nan)
        if self.moves and low < self.lowest.loss:
            self.lowest, self.by_moves = Point(low, record.step, seconds, passes, self.beyond), False

    def kept(
        self, start: Point, end: float, now: Point, slope: WindowLosses, steps: int, chained: str, beyond: int = 0
    ) -> None:
        """A move of so many steps from one exact loss to another was kept, and validated up to now. chained: what the
        leaps are called, if it was a chain of them. beyond: how many of these steps are more than a gradient for each
        leap."""
        self.beyond += beyond
        now = replace(now, beyond=self.beyond)
        self.start = self.start if self.moves else start
        self.moves += 1
        self.leaps = chained or self.leaps
        if not now.loss >= self.lowest.loss:
            self.lowest, self.by_moves = now, True
        logarithmic = start.loss > 0 and end > 0
        self.factor *= start.loss / end if logarithmic else math.nan
        fall = math.log(start.loss / end) if logarithmic else start.loss - end
        pace = self._pace(slope, logarithmic)
        if not pace > 0:
            self.stalled += 1
            self.worth += steps if chained else 0  # that is what they cost
        elif fall > 0:
            most = _MOST_WORTH * max(1, steps)
            self.bounded = self.bounded or fall > most * pace
            self.worth += min(fall / pace, most)
        saved = self.worth - self._spent(now)
        if saved > self.best_worth - (self._spent(self.best) if self.best_worth else 0):
            self.best, self.best_worth, self.best_is_least = now, self.worth, self.bounded or self.stalled > 0

    def _spent(self, until: Point) -> int:
        """Full steps since the first move began: gradients, and what leaps cost beyond them."""
        return until.passes + until.beyond - self.start.passes

    def _pace(self, slope: WindowLosses, logarithmic: bool) -> float:
        """At which the optimizer alone lowered the loss: within its last window or from the one before to it, whichever
        is faster. Where the learning rate was still warming up, as if it had been at its peak."""
        paces = [slope.last_log_fall if logarithmic else slope.last_fall]
        if len(slope.points) > 1:
            (earlier, high), (later, low) = slope.points[-2:]
            positive = high > 0 and low > 0
            fall = high - low if not logarithmic else math.log(high / low) if positive else math.nan
            paces.append(fall / (later - earlier))
        pace = max((value for value in paces if math.isfinite(value)), default=math.nan)
        return pace / self.share if self.rising and 0 < self.share < 1 else pace

    # --- in words ----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any] | None:
        """`exact` of the summary; None where no such move was kept."""
        if not self.moves:
            return None
        point = self.best if self.best_worth else self.lowest
        return {
            "loss": point.loss,
            "step": point.step,
            "seconds": round(point.seconds, 3),
            "trend_steps": round(self.best_worth) or None,
            "gradients": point.passes - self.start.passes,
            "cost_steps": self._spent(point),
            "leaps": self.leaps or None,
            "start_loss": self.start.loss,
            "start_step": self.start.step,
            "lowest_loss": self.lowest.loss,
            "lowest_step": self.lowest.step,
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """What was reached, and what that is worth: never more than was measured."""
        leaps = f"{self.leaps} leaps" if self.leaps else "a leap" if self.moves == 1 else "leaps"
        own = f"the optimizer's own steps just before {'it' if leaps == 'a leap' else 'them'}"
        start = f"{loss_text(self.start.loss)} (step {self.start.step:,})"
        took = f"{leaps[0].upper()}{leaps[1:]} took the training loss from {start} to"
        if self.best_worth:
            spent = f"{self._spent(self.best):,}"
            here = f"counts as {spent} steps" if self.best.beyond else f"took {spent} gradients"
            needed = f"at the pace of {own} that would have taken {self._about}, here it {here}"
            better = self.lowest.loss < self.best.loss and loss_text(self.lowest.loss) != loss_text(self.best.loss)
            more = f"; the lowest was {_reached(self.lowest)}" if better else ""
            return f"{took} {_reached(self.best)}; {needed}{more}"
        if self.stalled == self.moves and self.by_moves:
            return f"{took} {_reached(self.lowest)}; {own} no longer lowered it"
        if self.beyond and self.by_moves:  # paces between leaps that count what they cost say little
            unknown = "how many steps the optimizer alone would have taken is not known"
            return f'{took} {_reached(self.lowest)}; {unknown}: compare with hybrid.mode = "off"'
        times = f" by a factor of {self.factor:.3g}" if math.isfinite(self.factor) else ""
        said = f"The training loss came down to {_reached(self.lowest)}; on the way {leaps} lowered it{times}"
        return f"{said}, which is not shown to have saved steps"

    @property
    def _about(self) -> str:
        """Two digits, since it is a guess; cut off, so that "more than" stays true."""
        steps = round(self.best_worth)
        unit = 10 ** max(0, len(str(steps)) - 2)
        return f"{'more than' if self.best_is_least else 'some'} {steps // unit * unit:,} steps"


def _reached(point: Point) -> str:
    return f"{loss_text(point.loss)} (step {point.step:,}, {clock(point.seconds)})"
