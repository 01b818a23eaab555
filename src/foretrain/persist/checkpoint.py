"""Checkpoints that survive a kill at any moment: safetensors and JSON, a checksum manifest written last, one rename.

checkpoints/step-00000500/   appears only by rename, complete; later than an emergency: step-00000500-after-rollback-1
  model.safetensors ...      one file per component
  state.json                 everything that is not a tensor
  manifest.json              size and SHA-256 of every other file, written last
checkpoints/best-step-00000400/  the same way, but weights and buffers alone: where the held-out loss was lowest

Where several processes train together, each writes a file of its own instead of those per component: see `shards`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretrain.errors import CheckpointError, RanksError, SaveError
from foretrain.persist import shards
from foretrain.persist.codec import take_apart
from foretrain.persist.files import (
    digest,
    explain_failed_write,
    give_mode_of_folder,
    make_folder,
    remove,
    sync_file,
    write_synced,
)
from foretrain.persist.form import FORMAT, IN_PIECES, USABLE, FormatError
from foretrain.persist.pieces import ONE_PROCESS, ReadBy
from foretrain.persist.reading import (
    BEST_FOLDER,
    FILE_NAME,
    JSON_LIMIT,
    MANIFEST,
    STATE,
    STEP_FOLDER,
    checked,
    read,
    read_weights,
    sizes_of,
    state_in,
    verify,
)
from foretrain.persist.together import Processes, Together

__all__ = [
    "CheckpointStore",
    "Loaded",
    "put_back_replaced",
    "read",
    "read_weights",
    "separate",
    "sizes_of",
    "verify",
    "write",
]


@dataclass(frozen=True)
class Loaded:
    """Holds a verified checkpoint, and names the damaged ones that were put aside on the way to it."""

    step: int
    path: Path
    state: dict[str, Any]
    rejected: list[tuple[Path, str]] = field(default_factory=list)


class CheckpointStore:
    """Saves, finds and loads the checkpoints of one run, which are in one folder.

    processes: those that save and load together; all of them call the same methods, and the first one owns the folder.
    reader: how this one reads the checkpoint of a step.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int = 2,
        processes: Processes | None = None,
        reader: Callable[[int], ReadBy] = lambda step: ONE_PROCESS,
    ) -> None:
        self.root = Path(root)
        self.keep = max(2, keep)
        self.together = Together(processes)
        self.reader = reader

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write `state` as the checkpoint of `step`. On failure nothing changes and SaveError says why."""
        final = self._save(self._name(step), step, state)
        self._prune()
        return final

    def save_best(self, step: int, state: Mapping[str, Any], keep_others: bool = False) -> Path:
        """Write `state` as that of the lowest held-out loss.

        keep_others: earlier ones stay, because one of them may turn out to be the best after all.
        """
        final = self._save(f"best-step-{step:08d}", step, state)
        if not keep_others:
            self.prune_best(step)
        return final

    def _save(self, name: str, step: int, state: Mapping[str, Any]) -> Path:
        final, temporary = self.root / name, self.root / f".tmp-{name}"
        together = self.together
        parts = take_apart(state, marked=together.several)
        share = shards.share_of(parts, together.rank) if together.several else None

        def begin() -> None:
            make_folder(self.root)
            remove(temporary)
            temporary.mkdir()

        def end() -> None:
            if share is None:
                _write_components(temporary, parts.tensors)
                _complete(temporary, step, parts.tree, FORMAT, {})
            else:
                _complete(temporary, step, share.tree, IN_PIECES, shards.join_notes(temporary, together.size))
            self._put_in_place(temporary, final)

        try:
            self._do(begin, step, first_only=True)
            if share is not None:
                self._do(lambda: shards.write_share(temporary, share, separate(share.tensors)), step)
            self._do(end, step, first_only=True)
        except (SaveError, RanksError, RuntimeError, MemoryError):  # the last two: out of memory
            if together.first:
                self._sweep()
            raise
        return final

    def _do(self, action: Callable[[], None], step: int, first_only: bool = False) -> None:
        """Do a part of a save. Where it fails in one process, it fails in all of them."""

        def explained() -> None:
            try:
                action()
            except (OSError, SafetensorError) as error:
                raise SaveError(self._explain(error, step)) from error

        self.together.do(explained if self.together.first or not first_only else lambda: None, SaveError)

    def _name(self, step: int) -> str:
        """Return a name by which what is saved after a rollback is newer than what was saved before it."""
        rollbacks, newest = next((place for place, _ in self._found()), (0, 0))
        return _folder_name(self.together.number(rollbacks + (step < newest)), step)

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
        where = f"rank {self.together.rank}: " if self.together.several else ""
        return f"{self.root}: cannot save the checkpoint of step {step}: {where}{cause}; {intact}. {advice}"

    def _prune(self) -> None:
        """Remove what is older than the newest `keep`; failing to delete never hurts a run."""

        def discard() -> None:
            for _, folder in list(self.steps())[self.keep :]:
                _discard(folder)

        self.together.only_first(discard, SaveError)

    def prune_best(self, step: int | None) -> None:
        """Remove all best weights but those of `step` (None: all), unless these are not there."""

        def discard() -> None:
            if step is None or step in self.best():
                for other, folder in self._best_folders().items():
                    if other != step:
                        _discard(folder)

        self.together.only_first(discard, SaveError)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load_newest(self, on_reject: Callable[[Path, str], None] = lambda path, reason: None) -> Loaded | None:
        """Load the newest checkpoint that verifies; damaged ones newer than it are renamed to `bad-...`.

        None if there never was one. If none can be used, nothing is touched and CheckpointError says why: a run must
        not start over in silence.
        """
        self.together.only_first(self._sweep, CheckpointError)
        damaged: list[tuple[Path, CheckpointError]] = []
        for step, folder in self._agreed_steps():
            try:
                state = self.read(folder)
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

    def read(self, folder: Path) -> dict[str, Any]:
        """Read a checkpoint of this run as this process needs it, after all of it was verified."""
        manifest = self.together.do(lambda: checked(folder, USABLE, self.together), CheckpointError)
        return self.together.do(lambda: state_in(folder, manifest, self.reader(manifest.step)), CheckpointError)

    def _agreed_steps(self) -> list[tuple[int, Path]]:
        """Find (step, folder) of all checkpoints as the process does that owns the folder, newest first."""
        if not self.together.several:
            return list(self.steps())
        places = self.together.numbers([place for place, _ in self._found()])
        return [(step, self.root / _folder_name(rollbacks, step)) for rollbacks, step in places]

    def steps(self) -> Iterator[tuple[int, Path]]:
        """Give (step, folder) of every checkpoint, newest first, whether it is intact or not."""
        for (_, step), folder in self._found():
            yield step, folder

    def best(self) -> dict[int, Path]:
        """Map step to folder for the lowest held-out loss, latest step first: one, or two while a move is open."""
        return {step: folder for step, folder in self._best_folders().items() if (folder / MANIFEST).is_file()}

    def _best_folders(self) -> dict[int, Path]:
        """Find the folders of best weights, including those that a kill left half deleted."""
        if not self.root.is_dir():
            return {}
        matches = [(BEST_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
        return dict(sorted(((int(match[1]), path) for match, path in matches if match), reverse=True))

    def _found(self) -> list[tuple[tuple[int, int], Path]]:
        """Find ((rollbacks, step), folder) of all checkpoints, newest first."""
        if not self.root.is_dir():
            return []
        matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
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
        number = self.together.number(self._move_aside(folder) if self.together.first else 0)
        return folder if number < 0 else self._aside(folder, number)

    def _move_aside(self, folder: Path) -> int:
        """Return the number of its new name; -1: it could not be renamed."""
        number = 0
        while self._aside(folder, number).exists():
            number += 1
        try:
            folder.rename(self._aside(folder, number))
        except OSError:
            return -1
        return number

    def _aside(self, folder: Path, number: int) -> Path:
        return self.root / f"bad-{folder.name}{f'-{number}' if number else ''}"


def _folder_name(rollbacks: int, step: int) -> str:
    return f"step-{step:08d}" + (f"-after-rollback-{rollbacks}" if rollbacks else "")


def _discard(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            (folder / MANIFEST).unlink(missing_ok=True)  # first: half a checkpoint is no checkpoint
        remove(folder)


def _write_components(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.partition(".")[0], {})[name] = tensor
    for component, members in groups.items():
        path = folder / f"{component}.safetensors"
        if not FILE_NAME.fullmatch(path.name):
            raise ValueError(f"{component!r} cannot be the name of a part of a checkpoint; use letters and digits")
        save_file(separate(members), path)
        give_mode_of_folder(path)
        sync_file(path)


def _complete(folder: Path, step: int, tree: Any, number: int, known: Mapping[str, dict[str, Any]]) -> None:
    """Write what is not a tensor, then the manifest. number: of the format. known: files whose checksums are known."""
    write_synced(folder / STATE, _state_text(step, tree, number))
    entries = {path.name: known.get(path.name) or _entry(path) for path in sorted(folder.iterdir())}
    write_synced(folder / MANIFEST, json.dumps({"format": number, "step": step, "files": entries}, indent=1))
    sync_file(folder)


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest(path)}


def _state_text(step: int, tree: Any, number: int) -> str:
    text = json.dumps({"format": number, "step": step, "state": tree}, allow_nan=False)
    if len(text) > JSON_LIMIT:
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


def write(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a state as a folder of its own, whole or not at all, in place of the one that is there.

    Raises SaveError that says why nothing was written.
    """
    temporary, replaced = (folder.with_name(f".{what}-{folder.name}") for what in ("tmp", "old"))
    try:
        make_folder(folder.parent)
        remove(temporary)
        temporary.mkdir()
        parts = take_apart(state)
        _write_components(temporary, parts.tensors)
        _complete(temporary, step, parts.tree, FORMAT, {})
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
