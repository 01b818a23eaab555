"""Checkpoints that survive a kill at any moment: safetensors and JSON, a checksum manifest written last, one rename.

checkpoints/step-00000500/   appears only by rename, complete; later than an emergency: step-00000500-after-rollback-1
  model.safetensors ...      one file per component
  state.json                 everything that is not a tensor
  manifest.json              size and SHA-256 of every other file, written last
checkpoints/best-step-00000400/  the same way, but weights and buffers alone: where the held-out loss was lowest
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretrain.errors import CheckpointError, SaveError
from foretrain.persist.codec import Snapshot, put_together, take_apart
from foretrain.persist.files import (
    explain_failed_write,
    from_json,
    give_mode_of_folder,
    make_folder,
    remove,
    sync_file,
    write_synced,
)
from foretrain.persist.form import FORMAT, WITH_READABLE_WEIGHTS, FormatError, check_format

_MANIFEST = "manifest.json"
_STATE = "state.json"
_STEP_FOLDER = re.compile(r"step-([0-9]{8,18})(?:-after-rollback-([0-9]{1,9}))?")
"""The second number counts how often a checkpoint was saved at an earlier step than the one before it."""
_BEST_FOLDER = re.compile(r"best-step-([0-9]{8,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_JSON_LIMIT = 64 * 2**20
_WEIGHTS = ("model", "average", "frozen", "meta", "progress")
"""Parts of a state that do not depend on how a run is steered."""


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
    """Holds a verified checkpoint, and names the damaged ones that were put aside on the way to it."""

    step: int
    path: Path
    state: dict[str, Any]
    rejected: list[tuple[Path, str]] = field(default_factory=list)


class CheckpointStore:
    """Saves, finds and loads the checkpoints of one run, which are in one folder."""

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        self.root = Path(root)
        self.keep = max(2, keep)

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write `state` as the checkpoint of `step`. On failure nothing changes and SaveError says why."""
        final = self._save(self.root / self._name(step), step, state)
        self._prune()
        return final

    def save_best(self, step: int, state: Mapping[str, Any], keep_others: bool = False) -> Path:
        """Write `state` as that of the lowest held-out loss.

        keep_others: earlier ones stay, because one of them may turn out to be the best after all.
        """
        final = self._save(self.root / f"best-step-{step:08d}", step, state)
        if not keep_others:
            self.prune_best(step)
        return final

    def _save(self, final: Path, step: int, state: Mapping[str, Any]) -> Path:
        temporary = self.root / f".tmp-{final.name}"
        parts = take_apart(state)
        try:
            make_folder(self.root)
            remove(temporary)
            temporary.mkdir()
            _write(temporary, step, parts)
            self._put_in_place(temporary, final)
        except (OSError, SafetensorError) as error:
            self._sweep()
            raise SaveError(self._explain(error, step)) from error
        except (RuntimeError, MemoryError):  # out of memory
            self._sweep()
            raise
        return final

    def _name(self, step: int) -> str:
        """Return a name by which what is saved after a rollback is newer than what was saved before it."""
        rollbacks, newest = next((place for place, _ in self._found()), (0, 0))
        rollbacks += step < newest
        return f"step-{step:08d}" + (f"-after-rollback-{rollbacks}" if rollbacks else "")

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """Rename once. A checkpoint of the same step is replaced, and comes back if a kill falls in between."""
        replaced = self.root / f".old-{final.name}"
        if final.exists():
            remove(replaced)
            final.rename(replaced)
        temporary.rename(final)
        sync_file(self.root)
        with contextlib.suppress(OSError):
            remove(replaced)

    def _explain(self, error: Exception, step: int) -> str:
        newest = next(iter(self.steps()), None)
        intact = f"the checkpoint of step {newest[0]} is intact" if newest else "no earlier checkpoint was touched"
        cause, advice = explain_failed_write(error)
        return f"{self.root}: cannot save the checkpoint of step {step}: {cause}; {intact}. {advice}"

    def _prune(self) -> None:
        """Remove what is older than the newest `keep`; failing to delete never hurts a run."""
        for _, folder in list(self.steps())[self.keep :]:
            _discard(folder)

    def prune_best(self, step: int | None) -> None:
        """Remove all best weights but those of `step` (None: all), unless these are not there."""
        if step is None or step in self.best():
            for other, folder in self._best_folders().items():
                if other != step:
                    _discard(folder)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load_newest(self, on_reject: Callable[[Path, str], None] = lambda path, reason: None) -> Loaded | None:
        """Load the newest checkpoint that verifies; damaged ones newer than it are renamed to `bad-...`.

        None if there never was one. If none can be used, nothing is touched and CheckpointError says why: a run must
        not start over in silence.
        """
        self._sweep()
        damaged: list[tuple[Path, CheckpointError]] = []
        for step, folder in list(self.steps()):
            try:
                state = read(folder)
            except CheckpointError as error:
                damaged.append((folder, error))
                continue
            rejected = [(self._put_aside(path), str(reason)) for path, reason in damaged]
            for path, reason in rejected:
                on_reject(path, reason)
            return Loaded(step, folder, state, rejected)
        if damaged and isinstance(damaged[0][1], FormatError):
            raise damaged[0][1]
        aside = sorted(path.name for path in self.root.glob("bad-step-*")) if self.root.is_dir() else []
        if damaged or aside:
            reasons = "; ".join(str(reason) for _, reason in damaged) or f"only {', '.join(aside)} is left"
            raise CheckpointError(
                f"{self.root}: no checkpoint can be used ({reasons}). "
                "Restore one from a backup, or start anew in another folder"
            )
        return None

    def steps(self) -> Iterator[tuple[int, Path]]:
        """Give (step, folder) of every checkpoint, newest first, whether it is intact or not."""
        for (_, step), folder in self._found():
            yield step, folder

    def best(self) -> dict[int, Path]:
        """Map step to folder for the lowest held-out loss, latest step first: one, or two while a move is open."""
        return {step: folder for step, folder in self._best_folders().items() if (folder / _MANIFEST).is_file()}

    def _best_folders(self) -> dict[int, Path]:
        """Find the folders of best weights, including those that a kill left half deleted."""
        if not self.root.is_dir():
            return {}
        matches = [(_BEST_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
        return dict(sorted(((int(match[1]), path) for match, path in matches if match), reverse=True))

    def _found(self) -> list[tuple[tuple[int, int], Path]]:
        """Find ((rollbacks, step), folder) of all checkpoints, newest first."""
        if not self.root.is_dir():
            return []
        matches = [(_STEP_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
        return sorted((((int(match[2] or 0), int(match[1])), path) for match, path in matches if match), reverse=True)

    def _sweep(self) -> None:
        """Remove what an interrupted save left behind, and put back what it was about to replace."""
        if not self.root.is_dir():
            return
        with contextlib.suppress(OSError):  # a folder that cannot be written can still be read
            for path in self.root.glob(".old-*step-*"):
                final = self.root / path.name.removeprefix(".old-")
                if final.exists():
                    remove(path)
                else:
                    path.rename(final)
            for path in self.root.glob(".tmp-*"):
                remove(path)

    def _put_aside(self, folder: Path) -> Path:
        """Rename a damaged checkpoint out of the way; where that is impossible it is only passed over."""
        number = 0
        while (aside := self.root / f"bad-{folder.name}{f'-{number}' if number else ''}").exists():
            number += 1
        try:
            folder.rename(aside)
        except OSError:
            return folder
        return aside


def _discard(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            (folder / _MANIFEST).unlink(missing_ok=True)  # first: half a checkpoint is no checkpoint
        remove(folder)


def _write(folder: Path, step: int, parts: Snapshot) -> None:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parts.tensors.items():
        groups.setdefault(name.partition(".")[0], {})[name] = tensor
    for component, tensors in groups.items():
        path = folder / f"{component}.safetensors"
        if not _FILE_NAME.fullmatch(path.name):
            raise ValueError(f"{component!r} cannot be the name of a part of a checkpoint; use letters and digits")
        save_file(separate(tensors), path)
        give_mode_of_folder(path)
        sync_file(path)
    write_synced(folder / _STATE, _state_text(step, parts.tree))
    entries = {path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": entries}
    write_synced(folder / _MANIFEST, json.dumps(manifest, indent=1))
    sync_file(folder)


def _state_text(step: int, tree: Any) -> str:
    text = json.dumps({"format": FORMAT, "step": step, "state": tree}, allow_nan=False)
    if len(text) > _JSON_LIMIT:
        raise ValueError(f"the state holds {len(text) >> 20} MB that are not tensors; keep large values in tensors")
    return text


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, and no two in one storage, as safetensors requires."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.cpu().contiguous()
        pointer = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return apart


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: str | Path) -> None:
    """Check every file against the manifest. Raises CheckpointError that names the file and what is wrong with it."""
    try:
        _verified(Path(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def _verified(folder: Path, formats: tuple[int, ...] = WITH_READABLE_WEIGHTS) -> _Manifest:
    manifest = _read_manifest(folder)
    if manifest.format not in formats:
        check_format(manifest.format, str(folder))
    for name, entry in manifest.files.items():
        path = folder / name
        if not _FILE_NAME.fullmatch(name) or path.is_symlink():
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is not a plain file of this folder")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {_MANIFEST} names it")
        if path.stat().st_size != entry.size:
            raise CheckpointError(f"{path} is damaged: {path.stat().st_size} bytes, not {entry.size} as in {_MANIFEST}")
        if _digest(path) != entry.sha256:
            raise CheckpointError(f"{path} is damaged: its checksum is not that in {_MANIFEST}")
    for path in folder.iterdir():  # hidden files are left by file managers and network file systems
        if path.name not in manifest.files and path.name != _MANIFEST and not path.name.startswith("."):
            raise CheckpointError(f"{path} does not belong to this checkpoint: the manifest does not name it")
    return manifest


def write(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a state as a folder of its own, whole or not at all, in place of the one that is there.

    Raises SaveError that says why nothing was written.
    """
    temporary, replaced = (folder.with_name(f".{what}-{folder.name}") for what in ("tmp", "old"))
    try:
        make_folder(folder.parent)
        remove(temporary)
        temporary.mkdir()
        _write(temporary, step, take_apart(state))
        if folder.exists():
            remove(replaced)
            folder.rename(replaced)
        temporary.rename(folder)
        sync_file(folder.parent)
        remove(replaced)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        cause, advice = explain_failed_write(error)
        raise SaveError(f"{folder}: cannot be written: {cause}. {advice}") from error


def put_back_replaced(folder: Path) -> None:
    """A kill may have come between the two renames of `write`: then the folder from before counts."""
    replaced = folder.with_name(f".old-{folder.name}")
    if not folder.exists() and replaced.is_dir():
        replaced.rename(folder)


def read(folder: str | Path) -> dict[str, Any]:
    """Read the state in a checkpoint folder, after verifying all of it. Nothing in it is ever executed."""
    return _read(Path(folder), (FORMAT,))


def read_weights(folder: str | Path) -> dict[str, Any]:
    """Read weights, averages, step and configuration of a checkpoint folder, also where it has an earlier format."""
    state = _read(Path(folder), WITH_READABLE_WEIGHTS)
    return {name: state[name] for name in _WEIGHTS if name in state}


def _read(folder: Path, formats: tuple[int, ...]) -> dict[str, Any]:
    try:
        manifest = _verified(folder, formats)
        content = from_json(_read_limited(folder / _STATE))
        if content["format"] != manifest.format or content["step"] != manifest.step:
            raise CheckpointError(f"{folder / _STATE} does not belong to this checkpoint")
        tensors: dict[str, Tensor] = {}
        for name in manifest.files:
            if name.endswith(".safetensors"):
                tensors.update(_read_tensors(folder / name))
        state = put_together(Snapshot(tensors, content["state"]))
        if not isinstance(state, dict):
            raise CheckpointError(f"{folder / _STATE} holds no state")
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {' '.join(str(error).split())}") from None
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file whose checksum is right. A lack of memory comes out of safetensors as a strange ValueError and is no
    damage, so it is read twice before it counts as damaged."""
    try:
        return load_file(path)
    except (ValueError, SafetensorError):
        return load_file(path)


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / _MANIFEST
    if folder.is_symlink() or path.is_symlink():
        raise CheckpointError(f"{folder} is no checkpoint: a link stands in place of it or of its manifest")
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete: it has no {_MANIFEST}")
    try:
        manifest = _Manifest.model_validate_json(_read_limited(path))
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_problem(error)}") from None
    match = _STEP_FOLDER.fullmatch(folder.name) or _BEST_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, not of this folder")
    if _STATE not in manifest.files:
        raise CheckpointError(f"{path} is damaged: it does not name {_STATE}")
    return manifest


def _first_problem(error: ValidationError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


def _read_limited(path: Path) -> bytes:
    if path.stat().st_size > _JSON_LIMIT:
        raise CheckpointError(f"{path} is larger than any state file can be")
    return path.read_bytes()
