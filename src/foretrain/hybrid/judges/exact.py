"""The exact judge: every batch gives the same loss, so the loss right after a move says what it is worth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foretrain.hybrid.judges.judgement import ByProbe, credited

if TYPE_CHECKING:
    from foretrain.hybrid.moves.judged import JudgedMove


class Exact(ByProbe):
    """Trusts the training loss. Held-out data may object where there is any: a move must not learn by heart."""

    exact = True
    saved = ("held_out_loss",)

    def __init__(self) -> None:
        self.held_out_loss = math.nan
        """Before the move, where held-out data judges too."""

    def begin(self, move: JudgedMove) -> None:
        unseen = move.tools.unseen
        if unseen.active:
            move.cost += unseen.price(move.batch)
            self.held_out_loss = unseen.loss()

    def credit(self, move: JudgedMove) -> int:
        """A fall of the loss can be the easy part of what steps would have done, so predicted steps count only as far
        as forecasts of that length came nearly exactly true."""
        worth, exactness = self.worth(move, move.anchor, move.loss), move.plan.exactness
        return credited(worth, move.plan.horizon * min(1.0, exactness)) if exactness > 0 else 0

    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        return move.exact_worth(before, after)

    def overfits(self, move: JudgedMove) -> bool:
        unseen = move.tools.unseen
        if not unseen.active:
            return False
        move.cost += unseen.price(move.batch)
        return unseen.loss() > self.held_out_loss
