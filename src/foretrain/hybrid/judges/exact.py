"""Judges that trust the loss right after a move: every batch gives the same loss, or probe batches are given."""

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
        held_out = move.tools.held_out
        if held_out.active:
            move.cost += held_out.price(move.batch)
            self.held_out_loss = held_out.loss()

    def credit(self, move: JudgedMove) -> int:
        """A fall of the loss can be the easy part of what steps would have done, so predicted steps count only as far
        as forecasts of that length came nearly exactly true."""
        worth, exactness = self.worth(move, move.anchor, move.loss), move.plan.exactness
        return credited(worth, move.plan.horizon * min(1.0, exactness)) if exactness > 0 else 0

    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        return move.exact_worth(before, after)

    def overfits(self, move: JudgedMove) -> bool:
        held_out = move.tools.held_out
        if not held_out.active:
            return False
        move.cost += held_out.price(move.batch)
        return held_out.loss() > self.held_out_loss


class OnProbes(Exact):
    """Every probe is made on the probe batches, which are never trained on: they alone say what a move is worth."""

    def worth(self, move: JudgedMove, before: float, after: float) -> float:
        return move.tools.worth.on_probes(before - after, move.moved)
