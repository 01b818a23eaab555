"""Checkpoints that survive a kill at any moment: safetensors and JSON, a checksum manifest written last, one rename.

checkpoints/step-00000500/   appears only by rename, complete
  model.safetensors ...      one file per component
  state.json                 everything that is not a tensor
  manifest.json              size and SHA-256 of every other file, written last
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretrain.engine.files import sync_file
from foretrain.engine.state import Snapshot, put_together, take_apart
from foretrain.errors import CheckpointError, ForetrainError

FORMAT = 1
_STEP_FOLDER = re.compile(r"^step-(\d{8,})$")
_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_JSON_LIMIT = 64 * 2**20


class SaveError(ForetrainError):
    """A checkpoint could not be written. Older checkpoints are intact."""


class _FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    sha256: str


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: int
    step: int
    files: dict[str, _FileEntry]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint, and the damaged ones that were put aside on the way to it."""

    step: int
    path: Path
    state: dict[str, Any]
    rejected: list[tuple[Path, str]] = field(default_factory=list)


class CheckpointStore:
    """All checkpoints of one run, in one folder."""

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        self.root = Path(root)
        self.keep = max(2, keep)

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write `state` as the checkpoint of `step`. On failure nothing changes and SaveError says why."""
        final = self.root / f"step-{step:08d}"
        temporary = self.root / f".tmp-{final.name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
            _write(temporary, step, take_apart(state))
            if final.exists():
                self._put_aside(final)
            temporary.rename(final)
            sync_file(self.root)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise SaveError(self._explain(error, step)) from error
        self._prune()
        return final

    def _explain(self, error: Exception, step: int) -> str:
        newest = next(iter(self._steps()), None)
        intact = f"the checkpoint of step {newest[0]} is intact" if newest else "no earlier checkpoint was touched"
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        cause = "the disk is full (No space left on device)" if full else str(error)
        advice = "Free some space" if full else "Check the folder"
        return (
            f"{self.root}: cannot save the checkpoint of step {step}: {cause}; {intact}. "
            f"{advice}, then go on with --resume"
        )

    def _prune(self) -> None:
        """Remove what is older than the newest `keep`; failing to delete never hurts a run."""
        for _, folder in list(self._steps())[self.keep :]:
            with contextlib.suppress(OSError):
                (folder / "manifest.json").unlink()  # first: a half-deleted checkpoint is no checkpoint
            shutil.rmtree(folder, ignore_errors=True)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load_newest(self, on_reject: Callable[[Path, str], None] = lambda path, reason: None) -> Loaded | None:
        """The newest checkpoint that verifies. Damaged ones are renamed to `bad-...` and the one before is used.

        None if there never was one. Only damaged ones is an error: a run must not start over in silence.
        """
        self._sweep()
        rejected: list[tuple[Path, str]] = []
        for step, folder in list(self._steps()):
            try:
                return Loaded(step, folder, read(folder), rejected)
            except CheckpointError as error:
                aside = self._put_aside(folder)
                rejected.append((aside, str(error)))
                on_reject(aside, str(error))
        earlier = [path.name for path in self.root.glob("bad-step-*")] if self.root.is_dir() else []
        if rejected or earlier:
            reasons = "; ".join(reason for _, reason in rejected) or ", ".join(earlier)
            raise CheckpointError(
                f"{self.root}: no checkpoint can be used ({reasons}). "
                "Restore one from a backup, or start anew in another folder"
            )
        return None

    def _steps(self) -> Iterator[tuple[int, Path]]:
        """(step, folder), newest first."""
        if not self.root.is_dir():
            return
        found = [(int(match[1]), path) for path in self.root.iterdir() if (match := _STEP_FOLDER.match(path.name))]
        yield from sorted(found, reverse=True)

    def _sweep(self) -> None:
        """Remove what an interrupted save left behind."""
        if self.root.is_dir():
            for path in self.root.glob(".tmp-*"):
                shutil.rmtree(path, ignore_errors=True)

    def _put_aside(self, folder: Path) -> Path:
        number = 0
        while (aside := self.root / f"bad-{folder.name}{f'-{number}' if number else ''}").exists():
            number += 1
        folder.rename(aside)
        return aside


def _write(folder: Path, step: int, parts: Snapshot) -> None:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parts.tensors.items():
        groups.setdefault(name.partition(".")[0], {})[name] = tensor
    for component, tensors in groups.items():
        save_file(_separate(tensors), folder / f"{component}.safetensors")
    content = {"format": FORMAT, "step": step, "state": parts.tree}
    (folder / "state.json").write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    entries = {}
    for path in sorted(folder.iterdir()):
        sync_file(path)
        entries[path.name] = {"size": path.stat().st_size, "sha256": _digest(path)}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1), encoding="utf-8")
    sync_file(manifest)
    sync_file(folder)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two in one storage, as safetensors requires."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.cpu().contiguous()
        pointer = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return separate


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: str | Path) -> None:
    """Check every file against the manifest. Raises CheckpointError that names the file and what is wrong with it."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not _FILE_NAME.match(name) or path.is_symlink():
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is not a plain file of this folder")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry.size:
            raise CheckpointError(f"{path} is damaged: {path.stat().st_size} bytes instead of {entry.size}")
        if _digest(path) != entry.sha256:
            raise CheckpointError(f"{path} is damaged: its checksum is wrong")


def read(folder: str | Path) -> dict[str, Any]:
    """The state in a checkpoint folder, after verifying all of it. Nothing in it is ever executed."""
    folder = Path(folder)
    verify(folder)
    manifest = _read_manifest(folder)
    tensors: dict[str, Tensor] = {}
    try:
        content = json.loads(_read_limited(folder / "state.json"))
        if content["format"] != FORMAT or content["step"] != manifest.step:
            raise CheckpointError(f"{folder}: state.json does not belong to this checkpoint")
        for name in manifest.files:
            if name.endswith(".safetensors"):
                tensors.update(load_file(folder / name))
        state: dict[str, Any] = put_together(Snapshot(tensors, content["state"]))
    except (ValueError, KeyError, TypeError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from None
    return state


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / "manifest.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete: it has no manifest.json")
    try:
        manifest = _Manifest.model_validate_json(_read_limited(path))
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads format {FORMAT}")
    match = _STEP_FOLDER.match(folder.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, not of this folder")
    return manifest


def _read_limited(path: Path) -> bytes:
    if path.stat().st_size > _JSON_LIMIT:
        raise CheckpointError(f"{path} is larger than any state file can be")
    return path.read_bytes()
