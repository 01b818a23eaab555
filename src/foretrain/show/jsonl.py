"""`metrics.jsonl`: every event as one line of JSON with the time of day, in order, appended and flushed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.events import Event, RunEnded
from foretrain.files import for_json

_BLOCK = 2**16


class JsonlLog:
    """Append-only. A line torn by a crash is cut off before going on, so every line of the file is valid JSON."""

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        try:
            _cut_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
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
        self._file.write(json.dumps(for_json(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported when the line was written
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Cut the file after its last line end, looking for it from the end of the file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = whole = file.seek(0, os.SEEK_END)
        place = -1
        while whole > 0 and place < 0:
            start = max(0, whole - _BLOCK)
            file.seek(start)
            place = file.read(whole - start).rfind(b"\n")
            whole = start + place + 1
        if whole < end:
            file.truncate(whole)
