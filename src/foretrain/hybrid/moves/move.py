"""The record of one open move, and how it is saved in the middle of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretrain.hybrid.policy import Plan
from foretrain.persist.stateful import from_plain


@dataclass
class Move:
    """A move that was begun and is not judged yet."""

    plan: Plan
    batch: Any
    """The tokens of all its probes."""
    random: dict[str, Any]
    """Random states of all its probes."""
    anchor: float
    cost: float
    """Full steps spent on it that plain training would not have."""
    moved: int = 0
    """Predicted steps made so far."""
    share: float = 1.0
    loss: float = math.nan
    """Probe loss after the move, before any full step."""
    credit: int = 0
    """Virtual steps it counts."""
    batches: list[Any] = field(default_factory=list)
    """Of its validating steps, for the fork without the move."""
    steps: int = 0
    """Validating steps done."""
    mean: list[Tensor] = field(default_factory=list)
    """Sum of the weights over the second half of an audit."""
    unseen: float = math.nan
    """Held-out loss before it, where held-out data judges, too."""
    overfits: bool = False
    """It was cut short or taken back because the held-out loss rose."""
    refused: bool = False
    chained: bool = False
    """Made of quasi-Newton leaps with a gradient each, because the loss is exact."""

    @property
    def predicted_loss(self) -> float:
        return self.plan.predicted_loss

    @property
    def confidence(self) -> float:
        return self.plan.confidence


def unpack_move(state: dict[str, Any], own: Callable[[Any], Any]) -> Move:
    """The move of a saved state, with its batches where they belong."""
    move: Move = from_plain(Move, state, "Move")
    move.batch, move.batches = own(move.batch), [own(batch) for batch in move.batches]
    return move
