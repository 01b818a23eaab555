"""A signal to one process of many asks all of them to stop, after the same step."""

from __future__ import annotations

import signal
from types import FrameType

from foretrain.launch.roll import Roll
from foretrain.persist.signals import StopRequest

EARLY = "stop "
"""A stop that no signal has asked for begins with this; what follows is its reason."""


class AgreedStop(StopRequest):
    """`requested` is set in all processes after the same step, whichever of them was asked.

    A second signal is not obeyed by itself: a launcher hands on to each process what a terminal has sent them already.
    It is the launcher that ends those that do not stop in time.
    """

    def __init__(self, roll: Roll) -> None:
        super().__init__()
        self.roll = roll

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.roll.asked = self.roll.asked or signal.Signals(number).name

    def after_step(self, step: int) -> None:
        """Called where all processes are at the end of a step."""
        self.roll.after_step(step)
        if not self.roll.agreed.startswith(EARLY):
            self.requested = self.roll.agreed

    def ask(self, reason: str) -> None:
        """The run's own code wants to end it, here if not everywhere: `early` is set when all know."""
        self.roll.asked = self.roll.asked or EARLY + reason

    @property
    def early(self) -> str | None:
        """The reason that one process gave, once all of them stop for it; None before that."""
        return self.roll.agreed.removeprefix(EARLY) if self.roll.agreed.startswith(EARLY) else None
