"""Where ranks meet in a leap: each does a part of it for itself, and tells the others what it came to, or that it
failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from foretrain.engine.fence import failure_of
from foretrain.engine.objective import UnknownForm
from foretrain.engine.world import World
from foretrain.errors import is_out_of_memory

Found = TypeVar("Found")
Numbers = list[list[float]]
"""What each rank told, by rank."""
_WELL, _UNKNOWN_FORM, _FAILED = 0.0, 1.0, 2.0


class FailedOnRank(Exception):
    """The work of a rank failed, and all of them know; its text says how."""


class Meeting:
    """Work that ranks do apart, and the numbers of it that they share."""

    def __init__(self, world: World, device: torch.device, apart: Callable[[], AbstractContextManager[None]]) -> None:
        """apart: nothing is sent by the model's own passes inside of it."""
        self.world, self.device, self.apart = world, device, apart

    def tell(self, work: Callable[[], tuple[Found, Sequence[Tensor | float]]], count: int) -> tuple[Found, Numbers]:
        """What the work of this rank found, and the so many numbers that each rank came to. Raises on all ranks, in the
        same way, where it fails on one: UnknownForm or FailedOnRank."""
        failure: Exception | None = None
        numbers: Sequence[Tensor | float] = [0.0] * count
        try:
            with self.apart():
                found, numbers = work()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = error
        state = _WELL if failure is None else _UNKNOWN_FORM if isinstance(failure, UnknownForm) else _FAILED
        told = self._gathered([state, *numbers])
        worst = max(each[0] for each in told)
        if worst == _WELL:
            return found, [each[1:] for each in told]
        words = None if failure is None else str(failure) if state == _UNKNOWN_FORM else failure_of("it", failure).error
        first = self.world.all_well(words)
        text = "" if first is None else first.words
        raise (UnknownForm if worst == _UNKNOWN_FORM else FailedOnRank)(text) from failure

    def _gathered(self, numbers: Sequence[Tensor | float]) -> Numbers:
        """In one message, and one transfer to the host."""
        host = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
        sent = torch.tensor(host, dtype=torch.float64, device=self.device)
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                sent[place] = number.detach()
        flat = self.world.to_host(self.world.gather(sent))
        return [flat[at : at + len(numbers)] for at in range(0, len(flat), len(numbers))]
