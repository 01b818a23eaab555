"""What several processes do to one checkpoint: it works in all of them, or fails in all of them with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from foretrain.errors import ForetrainError, RanksError, SaveError

Result = TypeVar("Result")
_UNFORESEEN = "!"
"""What a rank says begins with this where the others cannot go on either."""


class FailedProcess(Protocol):
    """A process on which something failed, and what it says about it."""

    @property
    def rank(self) -> int: ...

    @property
    def words(self) -> str: ...


class Processes(Protocol):
    """The processes that save and load together, as `foretrain.engine.world.World` knows them."""

    rank: int
    size: int

    def all_well(self, words: str | None) -> FailedProcess | None: ...

    def of_first(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...


class Together:
    """One or several processes. processes: None: there is one."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes if processes is not None and processes.size > 1 else None
        self.rank, self.size = (0, 1) if self.processes is None else (self.processes.rank, self.processes.size)

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        """This process is the one that owns the folder."""
        return self.rank == 0

    def do(self, action: Callable[[], Result], raised: type[ForetrainError]) -> Result:
        """Do it in every process. Where it fails in one of them, it fails in all of them with the words of that one.

        raised: the kind of error that the others go on after. What is none of it, and no lack of memory while
        something is saved, ends all of them.
        """
        if self.processes is None:
            return action()
        error: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as found:  # noqa: BLE001 - whatever it is, the others wait to be told
            error = found
        failed = self.processes.all_well(None if error is None else _words(error, raised))
        if failed is None:
            done: Result = result
            return done
        if error is not None and (failed.rank == self.rank or not isinstance(error, raised)):
            raise error
        if failed.words.startswith(_UNFORESEEN):
            raise RanksError(f"rank {failed.rank} failed: {failed.words.removeprefix(_UNFORESEEN)}") from None
        raise (raised if error is None else type(error))(failed.words)

    def only_first(self, action: Callable[[], None], raised: type[ForetrainError]) -> None:
        """Do it in the process that owns the folder; the others wait until it is done."""
        self.do(action if self.first else lambda: None, raised)

    def number(self, found: int) -> int:
        """What the first process found."""
        return found if self.processes is None else int(self.processes.of_first(np.array([found], dtype=np.float64))[0])

    def numbers(self, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The pairs that the first process found."""
        if self.processes is None:
            return found
        count = self.number(len(found))
        table = np.zeros((count, 2))
        if self.first and found:
            table[:] = found
        return [(int(one), int(other)) for one, other in self.processes.of_first(table).tolist()]


def _words(error: Exception, raised: type[ForetrainError]) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, raised):
        return text
    if raised is SaveError and isinstance(error, (MemoryError, RuntimeError)):
        return f"memory ran out while a checkpoint was saved ({text})"
    return f"{_UNFORESEEN}{type(error).__name__}: {text}"
