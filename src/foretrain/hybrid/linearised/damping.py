"""How far a leap may go: the damping of its solve, by the ratio of real to predicted falls of the loss."""

from __future__ import annotations

from foretrain.persist.stateful import Stateful

_FIRST = 1e-2
"""Share of the mean eigenvalue. Chosen: one that is too high costs a few leaps, since it falls fivefold in each."""
_LEAST, _MOST = 1e-14, 1e8
"""Chosen: the lowest that fp64 can tell from none, and one at which a step is as good as none."""
_SHRINK = 0.2
"""Share that it keeps after a leap as good as predicted. Chosen: Nielsen's rule with a fifth, not a third."""
_LIFT, _MOST_LIFT = 2.0, 64.0
"""Factor of the first rise, and of the highest one. Chosen: Nielsen's rule, which doubles the factor each time."""
_UNSOLVED = 10.0
"""Factor where the solve failed. Chosen: rounding is far too large then."""


class Damping(Stateful):
    """Falls after good leaps, and rises faster and faster after bad ones."""

    saved = ("value", "lift")

    def __init__(self) -> None:
        self.value, self.lift = _FIRST, _LIFT

    def ease(self, ratio: float) -> None:
        """A leap was good. ratio: the real fall of the loss as a share of the predicted one."""
        eased = self.value * max(_SHRINK, 1 - (2 * min(ratio, 1.0) - 1) ** 3)
        self.value, self.lift = min(max(eased, _LEAST), _MOST), _LIFT

    def rise(self) -> None:
        """A leap was bad."""
        self.value, self.lift = min(self.value * self.lift, _MOST), min(2 * self.lift, _MOST_LIFT)

    def rise_unsolved(self) -> None:
        self.value = min(_UNSOLVED * self.value, _MOST)

    def return_to(self, value: float) -> None:
        """Nothing was good: other rows begin where these did."""
        self.value, self.lift = value, _LIFT
