"""How far a move goes, and whether at all, by forward passes on the same tokens before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SHRINK = (0.5, 0.25)
"""Shares of a move that are tried where the whole of it is a disaster. Chosen: two more probes at the most."""
SHORTER = (0.5, 0.25, 0.125, 0.0625)
"""Shares of a move that are tried where the whole of it does not lower the loss. Chosen: four more probes at most."""
_LONGEST = 2.0**9
"""Largest share that a search doubles up to. Chosen: far beyond what forecasts are good for."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was tried and what remained. The weights stand where this says."""

    share: float
    """How much of the displacement was made; 0 when it was refused."""
    loss: float
    """Probe loss where the weights stand now."""
    probes: int


Place = Callable[[float], None]
"""Puts the weights at this share of the move."""


def careful(place: Place, probe: Callable[[], float], limit: float) -> Found:
    """The whole move, or half, or a quarter of it: the first that does not lift the loss above `limit`.

    With noisy gradients the loss right after a move says nothing about its worth; it only shows disasters.
    """
    probes = 0
    for share in (1.0, *_SHRINK):
        place(share)
        probes += 1
        loss = probe()
        if loss <= limit:  # false for NaN
            return Found(share, loss, probes)
    return _refuse(place, probes)


def search(
    place: Place, probe: Callable[[], float], anchor: float, first: float = 1.0, shorter: Sequence[float] = SHORTER
) -> Found:
    """From `first` on double the move while the loss falls; where it does not fall at all, the first of `shorter` that
    lowers it. For losses that can be trusted."""
    probes, best, best_loss = 0, 0.0, anchor

    def lowers(share: float) -> bool:
        nonlocal probes, best, best_loss
        place(share)
        loss = probe()
        probes += 1
        if loss < best_loss:
            best, best_loss = share, loss
        return best == share

    share = first
    while lowers(share) and share < _LONGEST:
        share *= 2
    if best == 0:
        any(lowers(share) for share in shorter)
    if best == 0:
        return _refuse(place, probes)
    place(best)
    return Found(best, best_loss, probes)


def _refuse(place: Place, probes: int) -> Found:
    place(0.0)
    return Found(0.0, math.nan, probes)
