"""`metrics.jsonl`: every event as one line of JSON, in order, appended and flushed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from foretrain.events import Event, RunEnded


class JsonlLog:
    """Append-only. A line torn by a crash is cut off before going on, so every line of the file is valid JSON."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        record: dict[str, Any] = {"event": type(event).__name__}
        for item in dataclasses.fields(event):
            value = getattr(event, item.name)
            if isinstance(event, RunEnded) and item.name == "summary":
                continue  # summary.json holds it
            record[item.name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.write(json.dumps(record, default=dict) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
