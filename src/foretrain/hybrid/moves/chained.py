"""The interface of leaps that a chain is made of: quasi-Newton ones, and those of the linearised run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from foretrain.engine.step import StepOutput
from foretrain.motion.losses import WindowLosses
from foretrain.persist.stateful import Stateful


class ChainedLeaps(Stateful, ABC):
    """The leaps of a chain: where they lead, and what they know of losses."""

    name: ClassVar[str]
    steps_of_leap: int = 1
    """Virtual steps that the last leap counts: what it took."""

    def fits(self, room: int) -> bool:
        """Whether there is room for another leap, in virtual steps."""
        return room >= 1

    loss: float
    """Where the last leap led to."""
    start_loss: float
    leaps: int
    """Made in this chain."""
    cost: float
    """Full steps that this chain cost."""
    returned: bool
    """It began at the end of an earlier chain."""
    stopped: bool
    """It is to end with its next leap, whatever that brings."""
    failure: str = ""
    """Why no leap can be made any more; empty while nothing stands against them."""

    @property
    @abstractmethod
    def exact(self) -> bool | None:
        """Whether the last two batches gave the same loss. None until that is known."""

    @abstractmethod
    def begin(self, batch: Any) -> bool:
        """Begin a chain, if leaps can be made with this batch."""

    @abstractmethod
    def at_start(self) -> AbstractContextManager[None]:
        """The weights that the chain begins with, inside the block."""

    @abstractmethod
    def leap(self, batch: Any) -> StepOutput | None:
        """One leap; None when none lowers the loss."""

    @abstractmethod
    def over(self, slope: WindowLosses) -> bool:
        """Long enough, or no better than the optimizer's own steps."""

    @abstractmethod
    def end(self, slope: WindowLosses, refused: bool, held_out: float | None = None) -> None:
        """The chain is over. held_out: the held-out loss at its end, if that judges."""

    @abstractmethod
    def note_best(self) -> None:
        """Remember this point as the best by the held-out loss."""

    @abstractmethod
    def go_back(self, leaps: int, loss: float) -> None:
        """To the point that was remembered as the best, where the loss was this."""

    @abstractmethod
    def return_to_end(self) -> None:
        """Put the weights back to where the last leap ended."""

    @property
    @abstractmethod
    def marked(self) -> bool:
        """There was a chain, and there is a point of it to come back to."""

    @abstractmethod
    def finish(self, batch: Any, held_out: Callable[[], float] | None = None) -> tuple[float, float] | None:
        """The end of a run: at the lowest point that is known. held_out: measures the held-out loss of the
        weights as they are, if it is to judge.

        Returns what the judging loss was where the run came to, and what it is where it goes back to; None if it stays.
        """

    @abstractmethod
    def cover(self) -> None:
        """Others are trained: what was known is forgotten."""
