"""Muon's matrices shared out: each has one owner among the processes that hold its rows.

The owner gets the whole update, orthogonalises it, and hands each process its rows of the step. So each matrix is
orthogonalised once, and a step takes two operations between processes, however many matrices there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.persist.parts import SpreadForm, form_of_spread


class Owners:
    """Who owns which matrix, and what goes to and fro. All processes come to the same answer by themselves.

    place: this process's among those of the group. shapes: of whole matrices, whose rows the group shares. more: how
    many numbers go to and fro with each row, behind its own.
    """

    def __init__(self, group: Any, place: int, size: int, shapes: Sequence[tuple[int, int]], more: int = 0) -> None:
        self.group, self.place, self.size = group, place, size
        self.shapes = [(rows, columns + more) for rows, columns in shapes]
        owners = shared_out(shapes, size)
        self._order = sorted(range(len(owners)), key=owners.__getitem__)
        """All matrices, one owner after the other."""
        self.own = [number for number in self._order if owners[number] == place]
        """Those that this process owns."""
        self._given = [0] * size
        """How many numbers of updates go to each process; as many of steps come back."""
        for number, owner in enumerate(owners):
            self._given[owner] += self._numbers(number, place)
        self._taken = [sum(self._numbers(number, one) for number in self.own) for one in range(size)]

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """parts: the rows of all matrices that are here, in one number format. Return the matrices that are owned
        here, in the order of `own`."""
        flat = torch.cat([parts[number].reshape(-1) for number in self._order])
        from_each = self._exchange(flat, self._given, self._taken).split_with_sizes(self._taken)
        numbers = [[self._numbers(number, one) for number in self.own] for one in range(self.size)]
        cut = [one.split_with_sizes(few) for one, few in zip(from_each, numbers, strict=True)]
        rows = (torch.cat(pieces) for pieces in zip(*cut, strict=True))
        return [flat.view(self.shapes[number]) for number, flat in zip(self.own, rows, strict=True)]

    def scatter(self, steps: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """steps: whole ones, in the order of `own`. Return the rows that belong here, of all matrices. like: a tensor
        of the format that is sent, and of the device."""
        sizes = [[self._numbers(number, one) for one in range(self.size)] for number in self.own]
        cut = [step.reshape(-1).split_with_sizes(few) for step, few in zip(steps, sizes, strict=True)]
        pieces = [piece for to_one in zip(*cut, strict=True) for piece in to_one]
        flat = torch.cat(pieces) if pieces else like.new_empty(0)
        came = self._exchange(flat, self._taken, self._given)
        parts = came.split_with_sizes([self._numbers(number, self.place) for number in self._order])
        found = dict(zip(self._order, parts, strict=True))
        return [found[number].view(-1, columns) for number, (_, columns) in enumerate(self.shapes)]

    def _exchange(self, flat: Tensor, given: list[int], taken: list[int]) -> Tensor:
        if self.size == 1:
            return flat
        came = flat.new_empty(sum(taken))
        torch.distributed.all_to_all_single(came, flat, taken, given, group=self.group)
        return came

    def _numbers(self, number: int, place: int) -> int:
        rows, columns = self.shapes[number]
        return rows_of(place, rows, self.size) * columns


def owners_of(params: Sequence[Tensor], more: int = 0) -> Owners | None:
    """Return the owners of matrices whose rows are shared by the same processes, as FSDP2 shares them; None where some
    are cut in another way. more: numbers that go with each row."""
    forms = [form_of_spread(p) for p in params]
    cuts = [None if form is None else _cut(form) for form in forms]
    first = cuts[0]
    if first is None or any(cut != first for cut in cuts):
        return None
    mesh, dimension = first
    group, place, size = mesh.get_group(dimension), mesh.get_local_rank(dimension), mesh.size(dimension)
    return Owners(group, place, size, [(p.shape[0], p.shape[1]) for p in params], more)


def _cut(form: SpreadForm) -> tuple[Any, int] | None:
    """Return the mesh, and its only dimension that cuts: between rows, one part for each process."""
    from torch.distributed.tensor import Shard

    cutting = [(dimension, how) for dimension, how in enumerate(form.placements) if not how.is_replicate()]
    if len(cutting) != 1:
        return None
    dimension, how = cutting[0]
    return (form.mesh, dimension) if type(how) is Shard and how.dim == 0 else None


def rows_of(place: int, rows: int, size: int) -> int:
    """Return how many of so many rows a process has: all as many, but for the last ones, which may have none."""
    most = -(-rows // size)
    return max(0, min(most, rows - place * most))


def shared_out(shapes: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return the owner of each matrix: the dearest one goes first, each to whoever has the least to do so far."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    owners, load = [0] * len(costs), [0] * size
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = min(range(size), key=load.__getitem__)
        load[owners[number]] += costs[number]
    return owners
