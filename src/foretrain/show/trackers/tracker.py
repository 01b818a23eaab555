"""What a tracker is to foretrain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foretrain.show.trackers.entries import TrackerEntry

PROJECT = "foretrain"
"""Runs are gathered under this name, unless the tracker's own environment variable gives another."""


@dataclass(frozen=True)
class Place:
    """The run that a tracker shows."""

    folder: Path
    """The run folder, absolute."""
    settings: Mapping[str, str | int | float | bool]
    run_id: str | None = None
    """The tracker's own name of this run, where the run is resumed."""
    row: int = -1
    """The last row it has written of this run, for trackers whose rows can only grow."""
    keep_row: Callable[[int], None] = lambda _: None
    """Writes it down, for a run that is resumed."""

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(ABC):
    """Made in the main thread, which may raise anything; told all else in a thread of its own, in order."""

    run_id: str | None = None
    """Kept in the run folder, so that a resumed run goes on in the same one."""
    look: str = ""
    """Where it writes, and the command to look at it; said at the end of a run."""

    @abstractmethod
    def start(self, step: int) -> None:
        """The run begins, or goes on, after this step."""

    @abstractmethod
    def log(self, entry: TrackerEntry) -> None: ...

    @abstractmethod
    def close(self, reason: str) -> None:
        """reason: as in `RunEnded`."""
