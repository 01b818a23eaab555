"""The folder of a sweep: its files, its lock, and the claims that say which worker has which trial.

A claim is a lock that its worker holds while it works: the system gives it back when the worker ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from foretrain.errors import InputError, SaveError
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.files import explain_failed_write, from_json, make_folder, open_own, write_atomic
from foretrain.sweep.records import TrialRecord

SPACE_FILE = "space.toml"
PAGE = "sweep.html"
BEST = "best.toml"
SUMMARY = "summary.json"


class SweepFolder:
    """`space.toml`, `sweep.db`, `runs/`, `workers/`, and at the end `sweep.html`, `best.toml` and `summary.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = path / "runs"
        self.claims = path / "claims"
        self.logs = path / "workers"

    def make(self) -> None:
        """Make what is not there yet."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path}: a file, not a folder; choose another name")
        holds = self.path.is_dir() and any(self.path.iterdir())
        if holds and not (self.path / SPACE_FILE).is_file():
            raise InputError(
                f"--out {self.path}: there is something in it, and no sweep; choose a new folder or that of a sweep"
            )
        try:
            for folder in (self.path, self.runs, self.claims, self.logs):
                make_folder(folder)
            if not (self.path / "place").is_file():
                write_atomic(self.path / "place", uuid.uuid4().hex)
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot write there ({error.strerror}); choose another") from None

    @property
    def place(self) -> str:
        """Return the name of this folder among all places where workers of a sweep are."""
        return (self.path / "place").read_text(encoding="utf-8").strip()

    def run(self, number: int) -> Path:
        return self.runs / f"trial-{number:04d}"

    def write(self, name: str, text: str) -> None:
        """Write a small file, whole or not at all."""
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            cause, advice = explain_failed_write(error)
            raise SaveError(f"{self.path / name}: cannot write it: {cause}. {advice}, then go on") from None

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Let one worker of this folder at a time decide what it does next."""
        descriptor = open_own(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # --- claims ------------------------------------------------------------------------------------------------------

    def claim(self, number: int) -> Claim | None:
        """Take a trial; None where a living worker has it."""
        descriptor = open_own(self.claims / f"trial-{number:04d}", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return Claim(descriptor)

    def is_claimed(self, number: int) -> bool:
        claim = self.claim(number) if (self.claims / f"trial-{number:04d}").exists() else None
        if claim is not None:
            claim.release()
        return claim is None and (self.claims / f"trial-{number:04d}").exists()

    def live_step(self, record: TrialRecord) -> int:
        """Return the step that a trial is at, as its worker last told."""
        return max(record.step, self.told_step(record.number))

    def told_step(self, number: int) -> int:
        """Return the step that the last worker of a trial has told; -1 where its run had not begun."""
        with contextlib.suppress(OSError, ValueError):
            told = from_json((self.claims / f"trial-{number:04d}").read_bytes())
            if isinstance(told, int):
                return told
        return -1

    def saved_step(self, number: int) -> int:
        """Return the step of a trial's newest checkpoint; -1 where it has none."""
        newest = next(CheckpointStore(self.run(number) / "checkpoints").steps(), None)
        return -1 if newest is None else newest[0]


class Claim:
    """A trial that this process works on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, step: int) -> None:
        """Note the step for whoever looks on; a full disk is no reason to stop."""
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, f"{json.dumps(step):<12}".encode(), 0)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
