"""How much of the examples a fine-tuning run sees, and whether it ended too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RECENT = 0.2
"""The last share of a run, over which the loss must have fallen."""
ENOUGH, OF_ALL = 0.03, 0.01
"""Shares of itself, and of its whole fall since the first evaluation, by which the loss must have fallen. Less comes
from the falling learning rate alone, or from a loss that is almost nothing."""
_LEAST_EVALUATIONS = 4
_LONGER = 3


def in_words(steps: int, batch_size: int, examples: int) -> str:
    """Say how often examples are seen: 0.36 (300 steps x 16 are 36% of 13,484 examples, once)."""
    epochs = steps * batch_size / examples
    count = f"{steps:,} steps x {batch_size}"
    if epochs < 1:
        return f"{epochs:.2g} ({count} are {epochs:.0%} of {examples:,} examples, once)"
    return f"{epochs:.3g} ({count} of {examples:,} examples)"


def still_falling(evaluations: Sequence[tuple[int, float]], max_steps: int) -> dict[str, Any] | None:
    """Return what says that the loss was still falling, and a better `max_steps`; None where it was not.

    evaluations: (step, held-out loss), in order. It was if the last is the lowest of all and is 3 % below the one at
    four fifths of the steps. A loss that only trickles down at the end, or rises, asks for no more.
    """
    if len(evaluations) < _LEAST_EVALUATIONS:
        return None
    last_step, last = evaluations[-1]
    before = [(step, loss) for step, loss in evaluations if step <= (1 - RECENT) * last_step]
    if not before or last > min(loss for _, loss in evaluations):
        return None
    step, loss = before[-1]
    if loss - last < max(ENOUGH * loss, OF_ALL * (evaluations[0][1] - last)) or loss <= last:
        return None
    return {"from": loss, "to": last, "steps": last_step - step, "max_steps": _LONGER * max_steps}
