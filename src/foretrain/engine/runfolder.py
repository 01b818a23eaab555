"""Where a run leaves its files, and the lock that keeps two runs out of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from foretrain.engine.files import write_atomic
from foretrain.errors import InputError


class RunFolder:
    """`config.toml`, `tokenizer.json`, `metrics.jsonl`, `summary.json`, `checkpoints/` and `model/` of one run."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.resume = resume
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise InputError(
                f"--out {self.path}: cannot write there ({error.strerror}); choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._release()
            raise InputError(
                f"--out {self.path}: another run is writing there; wait for it or choose another folder"
            ) from None
        if not self.resume and self.holds_run():
            self._release()
            raise InputError(
                f"--out {self.path}: it already holds a run; go on with --resume, or choose another folder"
            )
        return self

    def holds_run(self) -> bool:
        return self.metrics.exists() or self.checkpoints.exists()

    def write(self, name: str, text: str) -> None:
        """A small text file of the run, whole or not at all."""
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            raise InputError(
                f"{self.path / name}: cannot write it ({error.strerror}); free some space or choose another --out"
            ) from None

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write("summary.json", json.dumps(summary, indent=2) + "\n")

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
