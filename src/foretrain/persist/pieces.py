"""What one process needs of a checkpoint, whoever saved it: its parts of spread tensors, joined from pieces, and all of
the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from foretrain.errors import CheckpointError
from foretrain.persist.codec import OWN, RANDOM, Snapshot, put_together, random_state, take_apart
from foretrain.persist.model_state import ROW_SQUARES, SCALE
from foretrain.persist.parts import FLAT, SpreadForm, form_of_spread, region, spread_as
from foretrain.persist.shards import (
    RANDOM_MARK,
    Piece,
    StoredTensor,
    Where,
    names_in,
    own_trees_of,
    rank_file,
)

_WEIGHT_LIKE = ("optimizer.state", "average.average", "look_ahead.m", "look_ahead.before")
"""Names in a state under which tensors are cut as the weights of their shape are."""
_ANEW = "random anew"


class Layouts:
    """How the tensors of this run are spread, as far as its parameters tell: what belongs to one is cut as it is."""

    def __init__(self, parameters: Mapping[str, Tensor], flat: Callable[[int], SpreadForm] | None = None) -> None:
        """flat: gives the form of so many numbers in one line, where ranks share what is of replicated weights."""
        self._flat = flat
        found = {name: form_of_spread(parameter) for name, parameter in parameters.items()}
        self._by_name = {name: form for name, form in found.items() if form is not None}
        self._by_shape = {form.shape: form for form in reversed(self._by_name.values())}

    def of(self, name: str, shape: tuple[int, ...], cut: bool) -> SpreadForm | None:
        """Return how this run spreads the tensor; None: each process holds all of it. cut: several ranks saved pieces
        of it."""
        if f"{FLAT}." in name:
            return None if self._flat is None else _with_rows(self._flat(shape[-1]), shape)
        _, of_model, own_name = f".{name}".partition(".model.")
        named = self._by_name.get(own_name)
        if named is not None and named.shape == shape:
            return named
        if not of_model and name.endswith((SCALE, ROW_SQUARES)):
            return self._of_rows(shape) if cut else None
        if not cut and (of_model or not any(f".{start}." in f".{name}" for start in _WEIGHT_LIKE)):
            return None
        row = self._by_shape.get(shape[1:])  # several directions in one tensor: each is cut as the weights are
        return self._by_shape.get(shape) or (None if row is None else row.rows(shape[0]))

    def _of_rows(self, shape: tuple[int, ...]) -> SpreadForm | None:
        """Return how numbers are spread of which each row of a weight has some; None where weights differ in that."""
        forms = [form for form in self._by_name.values() if form.shape[0] == shape[0] and form.by_rows]
        alike = all(form[:2] == forms[0][:2] for form in forms)
        return forms[0].with_columns(shape[1]) if forms and alike and len(shape) == 2 else None


def _with_rows(form: SpreadForm, shape: tuple[int, ...]) -> SpreadForm:
    return form.rows(shape[0]) if len(shape) > 1 else form


def as_needed(
    name: str, shape: tuple[int, ...], cut: bool, layouts: Layouts | None, read: Callable[..., Tensor]
) -> Tensor:
    """Return a tensor as this process needs it. read: gives the region of it that begins there and has this shape."""
    form = None if layouts is None else layouts.of(name, shape, cut)
    if form is None:
        return read((0,) * len(shape), shape)
    sizes, begin = form.region()
    return spread_as(read(begin, sizes), form)


class Pieces:
    """The tensors in the rank files of one checkpoint."""

    def __init__(self, folder: Path, where: Where) -> None:
        self.folder = folder
        self.where = where
        self._files: dict[int, Any] = {}

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / rank_file(rank), "pt")
        return self._files[rank]

    def tensor(self, name: str, rank: int) -> Tensor:
        """Return a tensor of a rank's file. It is a view of the file, which is read where it is used."""
        stored: Tensor = self._file(rank).get_tensor(name)
        return stored

    def own_trees(self, rank: int) -> list[Any]:
        return own_trees_of(self._file(rank).metadata())

    def read(self, name: str, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a region of a tensor, joined from the pieces that it touches."""
        pieces = self._pieces(name)
        common = [(piece, _common(piece, begin, shape)) for piece in pieces]
        touched = [(piece, low, sizes) for piece, (low, sizes) in common if math.prod(sizes)]
        if len(touched) == 1 and touched[0][2] == tuple(shape):
            piece, low, sizes = touched[0]
            return region(self.tensor(name, piece.rank), _minus(low, piece.begin), sizes)
        joined = torch.empty(tuple(shape), dtype=self.tensor(name, pieces[0].rank).dtype)
        for piece, low, sizes in touched:
            source = region(self.tensor(name, piece.rank), _minus(low, piece.begin), sizes)
            region(joined, _minus(low, begin), sizes).copy_(source)
        if sum(math.prod(sizes) for _, _, sizes in touched) != joined.numel():
            raise CheckpointError(f"{self.folder}: {name} is not complete in it")
        return joined

    def _pieces(self, name: str) -> tuple[Piece, ...]:
        number = self.where.tensors[name].pieces
        if number is None:
            raise CheckpointError(f"{self.folder}: {name} is there in another form for each rank")
        return self.where.patterns[number]


def _common(piece: Piece, begin: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return beginning and shape of what a piece has in common with a region."""
    ranges = list(zip(piece.begin, piece.shape, begin, shape, strict=True))
    low = tuple(max(one, other) for one, _, other, _ in ranges)
    high = [min(one + size, other + wanted) for one, size, other, wanted in ranges]
    return low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True))


def _minus(place: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(place, origin, strict=True))


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadBy:
    """The process that reads, of how many, and how tensors are spread over them."""

    rank: int = 0
    size: int = 1
    layouts: Layouts | None = None
    anew: Callable[[], Any] = random_state
    """Gives the random state of a process whose own one was not saved."""


ONE_PROCESS = ReadBy()


def state_in_pieces(folder: Path, tree: Any, where: Where, reader: ReadBy) -> Any:
    """Return the state that several ranks saved, as the reader needs it."""
    pieces = Pieces(folder, where)
    own = pieces.own_trees(reader.rank) if reader.size == where.ranks else None
    anew = take_apart({_ANEW: reader.anew()})
    tree = _put_in(tree, own, anew.tree[_ANEW])
    tensors: dict[str, Tensor] = dict(anew.tensors)
    for name in names_in(tree):
        stored = where.tensors.get(name)
        if stored is None and name not in tensors:
            tensors[name] = pieces.tensor(name, reader.rank)
        elif stored is not None and stored.rows:
            tensors[name] = _rows(pieces, name, stored, reader)
        elif stored is not None:
            cut = len(where.patterns[stored.pieces or 0]) > 1
            tensors[name] = as_needed(name, stored.shape, cut, reader.layouts, partial(pieces.read, name))
    return put_together(Snapshot(tensors, tree))


def state_of_one(parts: Snapshot, reader: ReadBy) -> Any:
    """Return the state that one process saved, as one of several needs it."""
    anew = take_apart({_ANEW: reader.anew()})
    tree = _put_in(parts.tree, None, anew.tree[_ANEW])
    tensors = {
        name: as_needed(name, tuple(tensor.shape), False, reader.layouts, partial(region, tensor))
        for name, tensor in parts.tensors.items()
    }
    return put_together(Snapshot(tensors | anew.tensors, tree))


def _put_in(tree: Any, own: Sequence[Any] | None, anew: Any) -> Any:
    """Return the tree with what is the reader's own. own: None: other ranks saved it; then random states begin anew,
    and of all else there is none."""
    if isinstance(tree, list):
        return [_put_in(item, own, anew) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if RANDOM_MARK in tree or OWN in tree:
        if own is not None:
            return own[tree[RANDOM_MARK] if RANDOM_MARK in tree else tree[OWN]]
        return anew if RANDOM_MARK in tree else None
    if own is None and tree.keys() == RANDOM:
        return anew
    return {key: _put_in(item, own, anew) for key, item in tree.items()}


def _rows(pieces: Pieces, name: str, stored: StoredTensor, reader: ReadBy) -> Tensor:
    """Return rows of a batch: a rank's own, or its part of all rows where there is another number of ranks."""
    ranks = pieces.where.ranks
    if reader.size == ranks or stored.pieces is None:
        return pieces.tensor(name, reader.rank % ranks)
    rows, *rest = stored.shape
    first, last = (rows * place // reader.size for place in (reader.rank, reader.rank + 1))
    if first == last:  # there are more ranks than rows
        first, last = reader.rank % rows, reader.rank % rows + 1
    return pieces.read(name, (first, *[0] * len(rest)), (last - first, *rest))
