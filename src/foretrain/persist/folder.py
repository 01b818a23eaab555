"""Where a run leaves its files, and the lock that keeps two runs out of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from foretrain.errors import InputError, SaveError
from foretrain.persist.files import explain_failed_write, for_json, make_folder, open_own, remove, write_atomic

_SMALLER = "smaller.json"
_DESCRIBING = ("config.toml", "tokenizer.json", "summary.json", "report.html", _SMALLER)
WEIGHTS = "model.safetensors"
"""The weights of a user's own module are written here at the end of its run."""
_TRACKERS = ("trackers.json", "tensorboard", "wandb", "mlflow", "trackio")
_LARGE = ("model", "adapter", WEIGHTS, "metrics.jsonl", "checkpoints")


class RunFolder:
    """`config.toml`, `tokenizer.json`, `metrics.jsonl`, `summary.json`, `report.html`, `checkpoints/`, `model/`,
    `adapter/` or `model.safetensors`, and what `log.trackers` names."""

    def __init__(
        self, path: Path, resume: bool, overwrite: bool = False, in_python: bool = False, owner: bool = True
    ) -> None:
        """in_python: whoever made it wrote `fit(out=...)`, not `--out ...`. owner: of several processes of one run only
        one locks the folder and writes into it; the others read."""
        self.path = path
        self.owner = owner
        self.named = f"out={str(path)!r}" if in_python else f"--out {path}"
        self.again, self.anew = ("resume=True", "overwrite=True") if in_python else ("--resume", "--overwrite")
        """Return what its user writes to go on with the run, or to replace it."""
        self.resume = resume
        self.overwrite = overwrite
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.files: dict[str, str] = {}
        """Small text files that describe the run; written by `describe`."""
        self.command = "train"
        """The command of `foretrain` that goes on with it."""
        self.opened = time.monotonic()
        self._locks: list[int] = []
        self._made = False

    def __enter__(self) -> RunFolder:
        if not self.owner:
            return self
        try:
            self._made = not self.path.is_dir()
            make_folder(self.path)
            self._refuse_links()
            # The folder, too: the file can be deleted. The file, too: network file systems lock no folders.
            self._locks = [os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)]
            self._locks.append(open_own(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            self._release()
            why = "it is a file" if self.path.is_file() else error.strerror
            raise InputError(f"{self.named}: cannot write there ({why}); choose another folder") from None
        if not all(_take_lock(lock) for lock in self._locks):
            self._release()
            raise InputError(f"{self.named}: another run is writing there; wait for it or choose another folder")
        if self.holds_run() and not (self.resume or self.overwrite):
            self._release()
            raise InputError(
                f"{self.named}: it already holds a run; go on with {self.again}, replace it with {self.anew}, "
                "or choose another folder"
            )
        return self

    def _refuse_links(self) -> None:
        """Refuse links: what is written under these names would be written elsewhere."""
        cleared = self.overwrite and not self.resume
        for name in (".lock", *(() if cleared else (*_DESCRIBING, *_TRACKERS, *_LARGE))):
            if (self.path / name).is_symlink():
                raise InputError(
                    f"--out {self.path}: {name} in it is a link, and a run writes into its own folder only; delete the "
                    "link, or choose another folder"
                )

    def check_place(self) -> None:
        """Raises SaveError once the folder was moved or deleted: a new one under its name would hide it."""
        if not self.owner:
            return
        try:
            same = os.path.samestat(self.path.stat(), os.fstat(self._locks[0]))
        except OSError:
            same = False
        if not same:
            raise SaveError(
                f"{self.path}: the run folder was moved or deleted while the run goes on, so nothing can be saved "
                "there; put it back under its name"
            )

    def holds_run(self) -> bool:
        return self.metrics.exists() or self.checkpoints.exists()

    def clear(self) -> None:
        """Delete an earlier run, and only that: the files a run writes. Checkpoints go last, so that a run which is
        only half deleted still counts as one."""
        if not self.owner:
            return
        try:
            for name in (*_DESCRIBING, *_TRACKERS, *_LARGE):
                remove(self.path / name)
        except OSError as error:
            raise InputError(
                f"{self.named}: cannot delete the earlier run ({error.strerror}); choose another folder"
            ) from None

    def write(self, name: str, text: str) -> None:
        """Write a small text file of the run, whole or not at all."""
        if not self.owner:
            return
        self.check_place()
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            cause, advice = explain_failed_write(error)
            raise SaveError(
                f"{self.path / name}: cannot write it: {cause}. {advice}, then go on with {self.again}"
            ) from None

    def describe(self) -> None:
        """Write `files`. Called once it is sure that the run may use this folder. Weights of the end of the run are
        those of an earlier end, and go."""
        if self.owner:
            remove(self.path / WEIGHTS)
        for name, text in self.files.items():
            self.write(name, text)

    def note_smaller(self, settings: Mapping[str, Any]) -> None:
        """Memory ran out in one process of many, whichever: note what the next attempt of all of them begins with."""
        try:
            write_atomic(self.path / _SMALLER, json.dumps(settings))
        except OSError as error:
            raise SaveError(f"{self.path / _SMALLER}: cannot write it: {explain_failed_write(error)[0]}") from None

    def smaller(self) -> str:
        """Return what `note_smaller` has written; empty where memory never ran out."""
        path = self.path / _SMALLER
        return path.read_text(encoding="utf-8") if path.is_file() and not path.is_symlink() else ""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write("summary.json", json.dumps(for_json(summary), indent=2) + "\n")

    def _release(self) -> None:
        for lock in self._locks:
            with contextlib.suppress(OSError):
                os.close(lock)
        self._locks = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made and kind is not None:
            with contextlib.suppress(OSError):  # a run that never began leaves nothing behind
                if [path.name for path in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
        self._release()


def _take_lock(descriptor: int) -> bool:
    """Return False if another run holds it. Where the file system has no locks, nothing keeps two runs apart."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
