"""The files of a checkpoint that several processes (ranks) write together, and how any number of ranks reads them.

step-00000500/
  rank-00000.safetensors ...  the pieces that a rank holds and what is its own; rank 0 also writes what all hold alike
  where.json                  the number of ranks; of each tensor its whole shape, and where each piece begins in it
  state.json, manifest.json   as in a checkpoint of one process

While it is written, each rank leaves a note beside its file, from which rank 0 makes where.json and the manifest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from torch import Tensor

from foretrain.errors import SaveError
from foretrain.persist.codec import OWN, RANDOM, ROWS, Snapshot
from foretrain.persist.files import digest, from_json, give_mode_of_folder, sync_file, write_synced
from foretrain.persist.parts import SpreadForm

WHERE = "where.json"
RANDOM_MARK = "$random"
"""Stands in the tree for a random state of each rank."""
_OWN_TREES = "own"
"""The entry of a rank file's header with what is its own and no tensor."""


class Piece(NamedTuple):
    """A part of a tensor: which rank wrote it, where it begins in the whole one, and its shape."""

    rank: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(BaseModel):
    """A tensor of a checkpoint. pieces: the number of a pattern; None: each rank has it in another form.

    width: bytes of a number. rows: it holds rows of a batch, of which each rank has some.
    """

    model_config = ConfigDict(extra="forbid")
    shape: tuple[int, ...]
    pieces: int | None
    width: int
    rows: bool = False


class Where(BaseModel):
    """Where everything is. Tensors that are cut alike share a pattern: else this would be larger than the state."""

    model_config = ConfigDict(extra="forbid")
    ranks: int
    patterns: list[tuple[Piece, ...]]
    tensors: dict[str, StoredTensor]

    @property
    def files(self) -> list[str]:
        return [rank_file(rank) for rank in range(self.ranks)]


class Note(BaseModel):
    """What a rank tells about its file."""

    model_config = ConfigDict(extra="forbid")
    size: int
    sha256: str
    pieces: dict[str, tuple[tuple[int, ...], Piece]]
    """The whole shape, and the piece that this rank wrote."""
    rows: dict[str, tuple[int, ...]]
    """The shapes of tensors with rows of a batch."""
    widths: dict[str, int]
    """Bytes of a number."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _note(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank:05d}.json"


def own_trees_of(header: Mapping[str, str] | None) -> list[Any]:
    """Return what is no tensor and a rank's own, from the header of its file."""
    trees = from_json((header or {}).get(_OWN_TREES, ""))
    if not isinstance(trees, list):
        raise ValueError("the header of a rank file is damaged")
    return trees


def read_where(folder: Path, text: bytes, named: Iterable[str]) -> Where:
    """Return where.json. Raises ValueError unless the files that the manifest names are those of its ranks."""
    where = Where.model_validate(from_json(text))
    if sorted(name for name in named if name.endswith(".safetensors")) != where.files:
        raise ValueError(f"{folder / WHERE} is of {where.ranks} ranks, and the manifest names files of others")
    if any(stored.pieces not in (None, *range(len(where.patterns))) for stored in where.tensors.values()):
        raise ValueError(f"{folder / WHERE} refers to a pattern that is not there")
    return where


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class RankShare:
    """What one rank writes."""

    rank: int
    tree: Any = None
    """What all ranks have in common."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, tuple[tuple[int, ...], Piece]] = field(default_factory=dict)
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    """Trees of what is this rank's own."""


def share_of(parts: Snapshot, rank: int) -> RankShare:
    """Choose what this rank writes of a state that was taken apart with its marks."""
    share = RankShare(rank)
    rows: set[str] = set()
    share.tree = _cut_out(parts.tree, share.own, rows)
    of_this_rank = rows | {name for tree in share.own for name in names_in(tree)}
    for name, tensor in parts.tensors.items():
        whole, begin, owner = _place(tensor, parts.spread.get(name), rank)
        if name in rows:
            share.rows[name] = tuple(tensor.shape)
        elif name not in of_this_rank and owner:
            share.pieces[name] = whole, Piece(rank, begin, tuple(tensor.shape))
        elif name not in of_this_rank:
            continue
        share.tensors[name] = tensor
    return share


def _cut_out(tree: Any, own: list[Any], rows: set[str]) -> Any:
    """Return the tree without what is this rank's own, which is added to `own`, and name its batches in `rows`."""
    if isinstance(tree, list):
        return [_cut_out(item, own, rows) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if ROWS in tree:
        rows.update(names_in(tree[ROWS]))
        return tree[ROWS]
    if OWN in tree or tree.keys() == RANDOM:
        own.append(tree.get(OWN, tree))
        return {OWN if OWN in tree else RANDOM_MARK: len(own) - 1}
    return {key: _cut_out(item, own, rows) for key, item in tree.items()}


def names_in(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that a tree refers to."""
    if isinstance(tree, dict) and ("$tensor" in tree or "$complex" in tree):
        yield str(tree.get("$tensor", tree.get("$complex")))
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from names_in(item)


def _place(part: Tensor, form: SpreadForm | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return the whole shape, where this rank's part begins in it, and whether it is this rank that writes it."""
    if form is None:
        return tuple(part.shape), (0,) * part.ndim, rank == 0
    if any(how.is_partial() for how in form.placements):
        raise ValueError("a part of a sum that was not added up yet cannot be saved")
    _, begin = form.region()
    coordinate = form.mesh.get_coordinate()
    replicas = zip(coordinate or (), form.placements, strict=False)
    owner = coordinate is not None and all(place == 0 for place, how in replicas if how.is_replicate())
    return form.shape, begin, owner


def write_share(folder: Path, share: RankShare, tensors: dict[str, Tensor]) -> None:
    """Write this rank's file, and the note about it. tensors: those of the share, as safetensors takes them."""
    path = folder / rank_file(share.rank)
    save_file(tensors, path, metadata={_OWN_TREES: json.dumps(share.own, allow_nan=False)})
    give_mode_of_folder(path)
    sync_file(path)
    widths = {name: tensor.element_size() for name, tensor in tensors.items()}
    note = Note(size=path.stat().st_size, sha256=digest(path), pieces=share.pieces, rows=share.rows, widths=widths)
    write_synced(_note(folder, share.rank), note.model_dump_json())


def join_notes(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """Write where.json from the notes of all ranks, which are deleted then. Returns size and checksum of their
    files."""
    notes = [Note.model_validate_json(_note(folder, rank).read_bytes()) for rank in range(ranks)]
    patterns: dict[tuple[Piece, ...], int] = {}
    tensors: dict[str, StoredTensor] = {}
    widths = {name: width for note in notes for name, width in note.widths.items()}
    for name, (shape, pieces) in _gathered(notes).items():
        number = patterns.setdefault(pieces, len(patterns))
        tensors[name] = StoredTensor(shape=shape, pieces=number, width=widths[name])
    for name in notes[0].rows:
        rows = _joined_rows([note.rows.get(name) for note in notes])
        place = None if rows is None else patterns.setdefault(rows, len(patterns))
        shape = () if rows is None else (sum(piece.shape[0] for piece in rows), *rows[0].shape[1:])
        tensors[name] = StoredTensor(shape=shape, pieces=place, width=widths[name], rows=True)
    write_synced(folder / WHERE, Where(ranks=ranks, patterns=list(patterns), tensors=tensors).model_dump_json())
    for rank in range(ranks):
        _note(folder, rank).unlink()
    return {rank_file(rank): {"size": note.size, "sha256": note.sha256} for rank, note in enumerate(notes)}


def _gathered(notes: Sequence[Note]) -> dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]]:
    """Return the whole shape of each tensor, and its pieces. Raises SaveError where they are not all of it."""
    found: dict[str, list[tuple[tuple[int, ...], Piece]]] = {}
    for note in notes:
        for name, piece in note.pieces.items():
            found.setdefault(name, []).append(piece)
    for name, pieces in found.items():
        whole = math.prod(pieces[0][0])
        count = sum(math.prod(piece.shape) for _, piece in pieces)
        if any(shape != pieces[0][0] for shape, _ in pieces) or count != whole:
            raise SaveError(f"ranks hold {count} of the {whole} numbers of {name}: their states are not alike")
    return {name: (pieces[0][0], tuple(piece for _, piece in pieces)) for name, pieces in found.items()}


def _joined_rows(shapes: Sequence[tuple[int, ...] | None]) -> tuple[Piece, ...] | None:
    """Return rows of all ranks, one after the other; None where they do not have one form."""
    pieces: list[Piece] = []
    begin = 0
    for rank, shape in enumerate(shapes):
        if not shape or (pieces and shape[1:] != pieces[0].shape[1:]):
            return None
        pieces.append(Piece(rank, (begin, *[0] * (len(shape) - 1)), shape))
        begin += shape[0]
    return tuple(pieces)
