"""Reads a checkpoint folder: its files against the manifest first, then what is in them. Nothing is ever executed."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foretrain.errors import CheckpointError
from foretrain.persist.codec import Snapshot, put_together
from foretrain.persist.files import digest, from_json
from foretrain.persist.form import IN_PIECES, USABLE, WITH_READABLE_WEIGHTS, check_format
from foretrain.persist.pieces import ONE_PROCESS, ReadBy, state_in_pieces, state_of_one
from foretrain.persist.shards import WHERE, Where, read_where
from foretrain.persist.together import Together

MANIFEST = "manifest.json"
STATE = "state.json"
STEP_FOLDER = re.compile(r"step-([0-9]{8,18})(?:-after-rollback-([0-9]{1,9}))?")
"""The second number counts how often a checkpoint was saved at an earlier step than the one before it."""
BEST_FOLDER = re.compile(r"best-step-([0-9]{8,18})")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
JSON_LIMIT = 64 * 2**20
_WEIGHTS = ("model", "average", "frozen", "meta", "progress")
"""Parts of a state that do not depend on how a run is steered."""


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    sha256: str


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: int
    step: int
    files: dict[str, FileEntry]


def verify(folder: str | Path) -> None:
    """Check every file against the manifest. Raises CheckpointError that names the file and what is wrong with it."""
    try:
        verified(Path(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def verified(
    folder: Path, formats: tuple[int, ...] = WITH_READABLE_WEIGHTS, together: Together | None = None
) -> Manifest:
    """Check the files against the manifest. together: each process checks its part of them."""
    rank, size = (0, 1) if together is None else (together.rank, together.size)
    manifest = _read_manifest(folder)
    if manifest.format not in formats:
        check_format(manifest.format, str(folder))
    for place, (name, entry) in enumerate(manifest.files.items()):
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is not a plain file of this folder")
        if place % size == rank:
            _check_file(folder, name, entry)
    for path in folder.iterdir() if rank == 0 else ():  # hidden ones are left by file managers and network file systems
        if path.name not in manifest.files and path.name != MANIFEST and not path.name.startswith("."):
            raise CheckpointError(f"{path} does not belong to this checkpoint: the manifest does not name it")
    return manifest


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    path = folder / name
    if path.is_symlink():
        raise CheckpointError(f"{folder}: the manifest names {name!r}, which is not a plain file of this folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {MANIFEST} names it")
    if path.stat().st_size != entry.size:
        raise CheckpointError(f"{path} is damaged: {path.stat().st_size} bytes, not {entry.size} as in {MANIFEST}")
    if digest(path) != entry.sha256:
        raise CheckpointError(f"{path} is damaged: its checksum is not that in {MANIFEST}")


def read(folder: str | Path) -> dict[str, Any]:
    """Read the state in a checkpoint folder, after verifying all of it. Nothing in it is ever executed."""
    return _read(Path(folder), USABLE)


def read_weights(folder: str | Path) -> dict[str, Any]:
    """Read weights, averages, step and configuration of a checkpoint folder, also where it has an earlier format."""
    return _read(Path(folder), WITH_READABLE_WEIGHTS, _WEIGHTS)


def _read(folder: Path, formats: tuple[int, ...], wanted: tuple[str, ...] | None = None) -> dict[str, Any]:
    return state_in(folder, checked(folder, formats), ONE_PROCESS, wanted)


def checked(folder: Path, formats: tuple[int, ...], together: Together | None = None) -> Manifest:
    """Check the files before anything in them is used."""
    try:
        return verified(folder, formats, together)
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged: {' '.join(str(error).split())}") from None


def state_in(folder: Path, manifest: Manifest, reader: ReadBy, wanted: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the state in a verified folder. wanted: parts of it; None: all."""
    try:
        content = from_json(read_limited(folder / STATE))
        if content["format"] != manifest.format or content["step"] != manifest.step:
            raise CheckpointError(f"{folder / STATE} does not belong to this checkpoint")
        tree = content["state"]
        if not isinstance(tree, dict):
            raise CheckpointError(f"{folder / STATE} holds no state")
        if wanted is not None:
            tree = {name: tree[name] for name in wanted if name in tree}
        state = _state_of(folder, manifest, tree, reader)
        if not isinstance(state, dict):
            raise CheckpointError(f"{folder / STATE} holds no state")
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {' '.join(str(error).split())}") from None
    return state


def _state_of(folder: Path, manifest: Manifest, tree: Any, reader: ReadBy) -> Any:
    if manifest.format == IN_PIECES:
        where = read_where(folder, read_limited(folder / WHERE), manifest.files)
        return state_in_pieces(folder, tree, where, reader)
    tensors: dict[str, Tensor] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            tensors.update(_read_tensors(folder / name))
    parts = Snapshot(tensors, tree)
    return put_together(parts) if reader.size == 1 else state_of_one(parts, reader)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file whose checksum is right. A lack of memory comes out of safetensors as a strange ValueError and is no
    damage, so it is read twice before it counts as damaged."""
    try:
        return load_file(path)
    except (ValueError, SafetensorError):
        return load_file(path)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if folder.is_symlink() or path.is_symlink():
        raise CheckpointError(f"{folder} is no checkpoint: a link stands in place of it or of its manifest")
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete: it has no {MANIFEST}")
    try:
        manifest = Manifest.model_validate_json(read_limited(path))
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_problem(error)}") from None
    match = STEP_FOLDER.fullmatch(folder.name) or BEST_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} is of step {manifest.step}, not of this folder")
    if STATE not in manifest.files:
        raise CheckpointError(f"{path} is damaged: it does not name {STATE}")
    if (manifest.format == IN_PIECES) != (WHERE in manifest.files):
        raise CheckpointError(f"{path} is damaged: format {manifest.format} is not that of the files it names")
    return manifest


def _first_problem(error: ValidationError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


def read_limited(path: Path) -> bytes:
    if path.stat().st_size > JSON_LIMIT:
        raise CheckpointError(f"{path} is larger than any state file can be")
    return path.read_bytes()


def sizes_of(folder: Path) -> dict[str, float]:
    """Return how large the parts of a checkpoint are, in MB, by the names of its files without their endings; where
    several ranks saved it, by the names of its components, and `rest`."""
    files = {file.stem: file.stat().st_size / 1e6 for file in folder.iterdir()}
    if not (folder / WHERE).is_file():
        return files
    where = Where.model_validate(from_json(read_limited(folder / WHERE)))
    sizes: Counter[str] = Counter()
    for name, stored in where.tensors.items():
        sizes[name.partition(".")[0]] += math.prod(stored.shape) * stored.width
    components = {name: size / 1e6 for name, size in sizes.items()}
    return components | {"rest": sum(files.values()) - sum(components.values())}
