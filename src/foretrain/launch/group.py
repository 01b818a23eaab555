"""The processes of one run: who they are, what one of them says to all, and whether all are well.

What is agreed on here goes through the key-value store of the launcher, as plain text: before the first step, around
checkpoints, at the end. Nothing of it happens in a step. Waiting there has no limit of its own: to tokenise a corpus
may take hours, and where a process ends meanwhile, the launcher ends the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from foretrain.errors import ForetrainError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE = timedelta(days=7)
"""How long one process waits for what another one prepares."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands among all that were started, as the launcher's environment says."""

    rank: int
    size: int
    local_rank: int = 0
    attempt: int = 0
    """How often the launcher has started them again."""


def place_of(environment: Mapping[str, str] | None = None) -> RankPlace | None:
    """Return what `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `TORCHELASTIC_RESTART_COUNT` say; None for one process."""
    given = os.environ if environment is None else environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    rank, size, local_rank, attempt = (int(given.get(name) or 0) for name in names)
    return RankPlace(rank, size, local_rank, attempt) if size > 1 else None


class OtherRankFailed(ForetrainError):
    """Another process of the run has failed, and says so itself; this one ends with it."""

    def __init__(self, rank: int, code: int, words: str) -> None:
        super().__init__(f"rank {rank}: {words}")
        self.exit_code = code


class Group:
    """One process among the others. Alone, every method returns at once."""

    def __init__(self, place: RankPlace, store: Store | None = None, timeout: float = 600.0) -> None:
        self.place = place
        self.rank, self.size = place.rank, place.size
        self._store = store
        self.timeout = timeout
        """Seconds after which a rank that does not answer counts as lost."""
        self._asked = 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process owns the run folder, the console and the log."""
        return self.rank == 0

    @property
    def store(self) -> Store:
        """The store that all processes share. There is none for one process alone."""
        if self._store is None:
            raise RuntimeError("one process alone has no store to share")
        return self._store

    def from_first(self, say: Callable[[], str]) -> str:
        """Return, in each process, the text that `say` gives in rank 0, as soon as it is there."""
        if self.alone:
            return say()
        key = self._question()
        if self.first:
            self.store.set(key, say())
        self.store.wait([key], PATIENCE)
        return self.store.get(key).decode()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes come out of the block well, or none: where one fails in it, the others raise OtherRankFailed
        once they have come to its end. So nobody waits later for one that is not coming."""
        if self.alone:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            self._vote(f"{exit_code_of(error)} {' '.join(str(error).split())}")
            raise
        finally:
            if failure is None:
                self._raise_for_others(self._vote(""))

    def well(self, failed: str) -> bool:
        """Return whether nobody failed. failed: what went wrong here; empty where nothing did."""
        return self.alone or not self._vote(f"1 {failed}" if failed else "")

    def by_first(self, work: Callable[[], Result]) -> Result:
        """Let rank 0 do the work, then the others: what it has written is there for them to read."""
        if self.alone:
            return work()
        if self.first:
            with self.together():
                return work()
        with self.together():
            pass
        return work()

    def meet(self) -> None:
        """Wait until all processes are here."""
        self.well("")

    def _vote(self, failure: str) -> str:
        """Return the failure of the lowest rank that has one, as "rank code words"; empty where all are well."""
        key = self._question()
        self.store.set(f"{key}/{self.rank}", failure)
        if self.first:
            votes = [f"{key}/{rank}" for rank in range(self.size)]
            self.store.wait(votes, PATIENCE)
            told = [vote.decode() for vote in self.store.multi_get(votes)]
            self.store.set(key, next((f"{rank} {text}" for rank, text in enumerate(told) if text), ""))
        self.store.wait([key], PATIENCE)
        return self.store.get(key).decode()

    def _raise_for_others(self, verdict: str) -> None:
        if verdict:
            rank, code, words = verdict.split(" ", 2)
            raise OtherRankFailed(int(rank), int(code), words)

    def _question(self) -> str:
        """Return a key that is the same in all processes, as they ask the same questions in the same order."""
        self._asked += 1
        return f"foretrain/{self._asked}"


def exit_code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, ForetrainError) else 1


ALONE = Group(RankPlace(rank=0, size=1))
