"""Define what a tracker is to foretrain."""

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
    """It describes the run that a tracker shows."""

    folder: Path
    """It is the run folder, as an absolute path."""
    settings: Mapping[str, str | int | float | bool]
    run_id: str | None = None
    """The tracker knows the run by this id, where the run is resumed."""
    row: int = -1
    """The tracker has written rows up to this one, for trackers whose rows can only grow."""
    keep_row: Callable[[int], None] = lambda _: None
    """It writes down the last row, for a run that is resumed."""

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(ABC):
    """It is made in the main thread and may raise anything there; all else is told in a thread of its own, in order."""

    run_id: str | None = None
    """It is kept in the run folder, so that a resumed run goes on in the same one."""
    look: str = ""
    """It says where the tracker writes, and how to look at it; the end of a run says so."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Begin the run, or go on with it, after this step."""

    @abstractmethod
    def log(self, entry: TrackerEntry) -> None: ...

    @abstractmethod
    def close(self, reason: str) -> None:
        """End the run. reason: as in `RunEnded`."""
