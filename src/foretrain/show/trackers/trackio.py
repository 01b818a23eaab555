"""Trackio: an SQLite file in `trackio/` of the run folder, unless TRACKIO_DIR names another."""

from __future__ import annotations

import os
import shlex
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.persist.files import make_folder
from foretrain.show.trackers.entries import SERIOUS, TrackerEntry
from foretrain.show.trackers.tracker import PROJECT, Place, Tracker

_FOLDER = "TRACKIO_DIR"
_ONE_AT_A_TIME = threading.Lock()


class Trackio(Tracker):
    """Writes with Trackio's own storage: `trackio.init` would ask the network who the user is, and hide errors."""

    def __init__(self, place: Place) -> None:
        self._folder = Path(os.environ.get(_FOLDER) or place.folder / "trackio").absolute()
        make_folder(self._folder)
        command = f"{_FOLDER}={shlex.quote(str(self._folder))} trackio show --project {PROJECT}"
        self.look = f"{self._folder} (look at it with: {command})"
        self._run = place.name
        self.run_id = place.run_id or uuid.uuid4().hex
        self._settings: dict[str, Any] | None = {**place.settings, "_Created": datetime.now(UTC).isoformat()}
        with self._storage() as storage:
            path = storage.init_db(PROJECT)
        if Path(path).parent != self._folder:
            raise RuntimeError(f"it writes to {path}, not to {self._folder}: set {_FOLDER}")

    @contextmanager
    def _storage(self) -> Iterator[Any]:
        """Trackio reads its folder when it is imported; another run of this process may have another one."""
        with _ONE_AT_A_TIME:
            before = os.environ.get(_FOLDER)
            os.environ[_FOLDER] = str(self._folder)
            try:
                from trackio import sqlite_storage, utils
            finally:
                if before is None:
                    del os.environ[_FOLDER]
                else:
                    os.environ[_FOLDER] = before
            sqlite_storage.TRACKIO_DIR = utils.TRACKIO_DIR = self._folder
            yield sqlite_storage.SQLiteStorage

    def start(self, step: int) -> None:
        """Its storage takes the settings with the first numbers."""

    def log(self, entry: TrackerEntry) -> None:
        sentences = {kind: text for kind, text in entry.texts.items() if kind.startswith("summary/")}
        alerts = {kind: text for kind, text in entry.texts.items() if kind not in sentences}
        with self._storage() as storage:
            if entry.numbers:
                row = {**entry.numbers, **sentences}
                storage.bulk_log(
                    PROJECT, self._run, [row], steps=[entry.step], config=self._settings, run_id=self.run_id
                )
                self._settings = None
            if alerts:
                storage.bulk_alert(
                    PROJECT,
                    self._run,
                    titles=list(alerts),
                    texts=list(alerts.values()),
                    levels=["warn" if kind in SERIOUS else "info" for kind in alerts],
                    steps=[entry.step] * len(alerts),
                    run_id=self.run_id,
                )

    def close(self, reason: str) -> None:
        """Every entry is written whole; nothing is left open."""
