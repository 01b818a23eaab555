"""Read a run folder again and again while the run goes on: what was added, or all of it when it was replaced."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.persist.files import from_json
from foretrain.show.record import RunRecord

_BLOCK = 2**20
_REMEMBERED = 256


class Follower:
    """It follows one run folder, which may come later. `poll` reads what is new; it never writes and never waits."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.name = name or folder.resolve().name
        self.generation = 0
        """The log was found replaced so many times."""
        self._begin()

    def _begin(self) -> None:
        self.record = RunRecord(self.name, str(self.folder))
        self._offset = 0
        self._tail = b""
        self._stamps: dict[str, tuple[int, int]] = {}

    @property
    def version(self) -> str:
        """Changes whenever something was read."""
        stamps = "".join(f"-{size}-{time}" for time, size in self._stamps.values())
        return f"{self.generation}-{self._offset}{stamps}"

    def poll(self) -> bool:
        """Read what is new, and tell whether there was something."""
        before = self.version
        try:
            with self.metrics.open("rb") as file:
                size = file.seek(0, 2)
                if not self._is_the_same(file, size):
                    self.generation += 1
                    self._begin()
                self._read(file)
        except FileNotFoundError:
            if self._offset:  # an earlier run was deleted; its successor has not begun
                self.generation += 1
                self._begin()
        except OSError as error:
            raise InputError(f"{self.metrics}: cannot be read ({error.strerror})") from None
        self._describe()
        return self.version != before

    def _is_the_same(self, file: Any, size: int) -> bool:
        """Tell whether what was read last is still in its place: a log that was begun anew has other bytes there."""
        if size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return bool(file.read(len(self._tail)) == self._tail)

    def _read(self, file: Any) -> None:
        """Read whole lines only: the last one may not be finished."""
        file.seek(self._offset)
        rest = b""
        while block := file.read(_BLOCK):
            whole, end, rest_now = (rest + block).rpartition(b"\n")
            rest = rest_now
            if end:
                for line in whole.split(b"\n"):
                    self.record.take(line)
                self._offset += len(whole) + 1
                self._tail = (self._tail + whole + end)[-_REMEMBERED:]

    def _describe(self) -> None:
        """Read summary and configuration when they changed. The summary counts once the log says that the run ended."""
        record = self.record
        ended = record.ended is not None and record.ended.get("reason") != "failed"
        if not ended:
            self._stamps.pop("summary.json", None)
        for name in ("summary.json", "config.toml") if ended else ("config.toml",):
            path = self.folder / name
            try:
                found = path.stat()
                stamp = (found.st_mtime_ns, found.st_size)
                if self._stamps.get(name) == stamp:
                    continue
                text = path.read_text(encoding="utf-8")
                read = from_json(text, parse_constant=lambda _: None) if name == "summary.json" else tomllib.loads(text)
            except (OSError, ValueError, RecursionError):  # not there yet, or written by hand; the log says enough
                continue
            self._stamps[name] = stamp
            if isinstance(read, dict) and name == "summary.json":
                record.summary = read
            elif isinstance(read, dict):
                record.config = read


def has_begun(folder: Path) -> bool:
    """Tell whether a run has begun in the folder. Raises InputError for one that is no run folder."""
    if (folder / "metrics.jsonl").is_file():
        return True
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file; name the folder of a run")
    known = {"config.toml", "checkpoints", ".lock"}  # of a run that reads its data, or was saved without a log
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found and not found & known:
        raise InputError(f"{folder}: no run folder (it holds no metrics.jsonl); name one that a run has written")
    return False


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Read the run of each folder as it stands. Folders of one name are told apart by those above them."""
    names = [folder.resolve().name for folder in folders]
    records = []
    for folder, name in zip(folders, names, strict=True):
        if not (folder / "metrics.jsonl").is_file():
            raise InputError(f"{folder}: no run folder (it holds no metrics.jsonl); name one that a run has written")
        unique = name if names.count(name) == 1 else str(folder)
        follower = Follower(folder, unique)
        follower.poll()
        records.append(follower.record)
    return records
