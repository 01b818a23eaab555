"""What a judge says about a move, and how a judge looks to a move."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrain.hybrid.ledger import Audit
from foretrain.persist.stateful import Stateful

if TYPE_CHECKING:
    from foretrain.hybrid.moves.judged import JudgedMove


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a move. Everyone who can learn from a move learns from this record."""

    kept: bool
    worth_steps: float
    """Full steps that the move saved, as measured."""
    cost_steps: float
    """Full steps spent on it that plain training would not have spent."""
    reason: str = ""
    loss: float = math.nan
    """Probe loss that it was judged by."""
    audit: Audit | None = None
    overfits: bool = False
    """It raised the held-out loss."""
    stands_at_fork: bool = False
    """The run stands at the end of the fork without the move, which the judge made: nothing is left to undo."""


def credited(worth: float, most: float) -> int:
    """Virtual steps that a move counts: what it is worth in full steps, from 0 to `most`."""
    return int(max(0.0, min(worth, most))) if math.isfinite(worth) and math.isfinite(most) else 0


class Judge(Stateful, ABC):
    """Measures one move. The same judge is asked at the move's beginning, after each validating step and at its end."""

    exact: bool = False
    """The loss right after a move can be trusted: it alone says what the move is worth."""

    def begin(self, move: JudgedMove) -> None:
        """The move is about to leave its anchor."""

    @abstractmethod
    def credit(self, move: JudgedMove) -> int:
        """Virtual steps that the move counts before it is validated."""

    @abstractmethod
    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        """Full steps that this fall of the loss is worth."""

    def validated(self, move: JudgedMove, batch: Any) -> None:
        """A validating step on this batch is done."""

    def loaded(self, move: JudgedMove) -> None:
        """The state of the move was put back."""

    @abstractmethod
    def judge(self, move: JudgedMove) -> Judgement:
        """Say whether the move stays, after its last validating step. An audit leaves the run at the better of two
        forks, so it may have rolled the move back itself; any other judge changes no weight."""


class ByProbe(Judge):
    """Keeps a move whose probe loss is below its anchor once full steps have validated it."""

    def overfits(self, move: JudgedMove) -> bool:
        """Whether held-out data objects."""
        return False

    def judge(self, move: JudgedMove) -> Judgement:
        return self.judged(move, self.overfits(move))

    def judged(self, move: JudgedMove, overfits: bool) -> Judgement:
        after = move.probe()
        move.cost += move.tools.probes.price(move.batch)
        kept = after < move.anchor and not move.harmed and not overfits
        worth = self.worth(move, move.anchor, move.loss)
        if not kept:
            move.cost += move.steps  # these full steps are undone
        reason = "the held-out loss rose; " if overfits else ""
        return Judgement(kept, worth, move.cost, reason, after, overfits=overfits)


class Trusted(ByProbe):
    """For noisy losses: the move is worth what earlier audits say, and a probe only shows whether it did harm."""

    exact = False

    def credit(self, move: JudgedMove) -> int:
        return credited(move.plan.least_worth * move.moved, move.moved)

    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        return float(move.credit)
