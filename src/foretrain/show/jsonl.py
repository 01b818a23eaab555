"""Write `metrics.jsonl`: every event is one line of JSON with the time of day, appended in order and flushed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.events import Event, Listener, Notice, RunEnded
from foretrain.persist.files import explain_failed_write, for_json, open_own

_BLOCK = 2**16
_MOST_WAITING = 20_000
"""So many lines wait for room on the disk; if there are more, the oldest are lost."""


class JsonlLog:
    """Append-only. A line torn by a crash is cut off before going on, so every line of the file is valid JSON.

    Lines that a full disk does not take wait, and are written in their order when there is room again.
    emit: hears when lines begin to wait, and when they are written.
    """

    def __init__(
        self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC), emit: Listener = lambda _: None
    ) -> None:
        self._now = now
        self.path = path
        self._emit = emit
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._lost = 0
        self._stuck = False
        try:
            _cut_torn_line(path)
            self._file = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise InputError(
                f"{path}: cannot write the log ({error.strerror}); free some space or choose another folder"
            ) from None

    def __call__(self, event: Event) -> None:
        time = self._now().isoformat(timespec="milliseconds")
        record: dict[str, Any] = {"event": type(event).__name__, "time": time}
        for item in dataclasses.fields(event):
            value = getattr(event, item.name)
            if isinstance(event, RunEnded) and item.name == "summary":
                continue  # summary.json holds it
            record[item.name] = value
        self._lost += len(self._waiting) == _MOST_WAITING
        self._waiting.append((json.dumps(for_json(record)) + "\n").encode())
        self._write()

    def _write(self) -> None:
        was_stuck = self._stuck
        try:
            while self._waiting:
                _write_whole(self._file, self._waiting[0], self._size)
                self._size += len(self._waiting.popleft())
            self._stuck = False
        except OSError as error:
            self._stuck = True
            if not was_stuck:
                cause, advice = explain_failed_write(error)
                self._emit(Notice(f"{self.path}: {cause}; {advice.lower()}: what is to be logged waits in memory"))
            return
        if was_stuck:
            lost, self._lost = self._lost, 0
            missing = f"; {lost:,} lines are lost" if lost else ""
            self._emit(Notice(f"{self.path}: there is room again, the log goes on{missing}", "info"))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported when the line was written
            os.close(self._file)


def _write_whole(descriptor: int, line: bytes, size: int) -> None:
    """Write all of it, or nothing. size: how long the file is now."""
    try:
        done = 0
        while done < len(line):
            done += os.write(descriptor, line[done:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _cut_torn_line(path: Path) -> None:
    """Cut the file after its last line end, looking for it from the end of the file."""
    if not path.exists():
        return
    with os.fdopen(open_own(path, os.O_RDWR), "rb+") as file:
        end = whole = file.seek(0, os.SEEK_END)
        place = -1
        while whole > 0 and place < 0:
            start = max(0, whole - _BLOCK)
            file.seek(start)
            place = file.read(whole - start).rfind(b"\n")
            whole = start + place + 1
        if whole < end:
            file.truncate(whole)
