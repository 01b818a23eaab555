"""The part of a tensor that this process holds, where a tensor is spread over several (a DTensor); else all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
FLAT = "_flat"
"""Names end so of what is saved of parts of replicated weights, which are cut as numbers in one line."""


def is_spread(tensor: Any) -> bool:
    """Whether it is a DTensor, as FSDP2 and tensor parallelism make of parameters."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part, in the same memory and without a gradient; of a tensor that is not spread, all."""
    if not is_spread(tensor):
        return tensor.detach()
    spread: Any = tensor
    with torch.no_grad():
        part: Tensor = spread.to_local()
    return part.detach()


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a part as a tensor that is spread as `whole` is; `part` itself where it is no part of such a form."""
    if not is_spread(whole) or is_spread(part) or part.shape != local(whole).shape:
        return part
    from torch.distributed.tensor import DTensor

    form: Any = whole
    made: Tensor = DTensor.from_local(
        part, form.device_mesh, form.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


class SpreadForm(NamedTuple):
    """How a tensor is spread over processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    """That of the whole tensor."""

    def rows(self, count: int) -> SpreadForm:
        """Return the form of so many such tensors, one below the other."""
        from torch.distributed.tensor import Shard

        moved = [Shard(how.dim + 1) if how.is_shard() else how for how in self.placements]
        return SpreadForm(self.mesh, tuple(moved), (count, *self.shape))

    @property
    def by_rows(self) -> bool:
        """Whether each process holds whole rows that follow each other, or nothing is cut."""
        return all(how.is_replicate() or how.is_shard(0) for how in self.placements) and not any(
            type(how).__name__ == "_StridedShard" for how in self.placements
        )

    def with_columns(self, count: int) -> SpreadForm:
        """Return the form of so many numbers per row, cut as these rows are."""
        return SpreadForm(self.mesh, self.placements, (self.shape[0], count))

    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and beginning of the part that this process holds."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, begin = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(sizes), tuple(begin)


def form_of_spread(tensor: Tensor) -> SpreadForm | None:
    """Return how a tensor is spread, complex numbers as their real view; None where it is not."""
    if not is_spread(tensor):
        return None
    spread: Any = tensor
    shape = (*spread.shape, 2) if spread.is_complex() else tuple(spread.shape)
    return SpreadForm(spread.device_mesh, tuple(spread.placements), shape)


def flat_forms(ranks: int, device: str) -> Callable[[int], SpreadForm]:
    """Return what gives the form of so many numbers in one line, of which each rank has as many. device: its type."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh(device, (ranks,))
    return lambda numbers: SpreadForm(mesh, (Shard(0),), (numbers,))


def spread_as(part: Tensor, form: SpreadForm | None) -> Tensor:
    """Return a part as a spread tensor, in the same memory, which need not be on the device of the other parts."""
    if form is None:
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = [math.prod(form.shape[place + 1 :]) for place in range(len(form.shape))]
    meta = TensorMeta(torch.Size(form.shape), tuple(strides), part.dtype)
    spec = DTensorSpec(form.mesh, form.placements, tensor_meta=meta)
    made: Tensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def part_for(saved: Tensor, whole: Tensor) -> Tensor:
    """Return this process's part of a saved tensor of the form of another one: it may be the part already, or all of
    it, as one process saves it."""
    form = form_of_spread(whole)
    if form is None or is_spread(saved) or tuple(saved.shape) != form.shape:
        return local(saved)
    sizes, begin = form.region()
    return region(saved.detach(), begin, sizes)


def spread_like(parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Return parts, in the same memory, as tensors that are spread as others are: so they are saved."""
    return [spread_as(part, form_of_spread(whole)) for part, whole in zip(parts, wholes, strict=True)]


def region(tensor: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a view of a part of a tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(begin, shape, strict=True))]


def places_in_whole(tensor: Tensor, width: int = 1) -> Tensor:
    """Return where the numbers of this process's part are in the whole tensor, flattened, counted from 1.

    width: real numbers that one of its numbers is made of.
    """
    part = local(tensor)
    if not is_spread(tensor):
        return torch.arange(1, part.numel() * width + 1, device=part.device, dtype=torch.int64)
    spread: Any = tensor
    shape, starts = SpreadForm(spread.device_mesh, tuple(spread.placements), tuple(tensor.shape)).region()
    place = torch.zeros((), dtype=torch.int64)
    for dimension, (count, start) in enumerate(zip(shape, starts, strict=True)):
        step = math.prod(tensor.shape[dimension + 1 :])
        place = place.unsqueeze(-1) + (start + torch.arange(count)) * step
    return (place.reshape(-1, 1) * width + torch.arange(width)).flatten() + 1


def own_of_every(tensor: Tensor, stride: int, count: int) -> slice | Tensor:
    """Return where the numbers 0, stride, 2 stride, ... of a tensor are in the part of this process, flattened.

    count: of them in the whole tensor, at the most.
    """
    if not is_spread(tensor):
        return slice(0, stride * count, stride)
    spread: Any = tensor
    sharding = [placement for placement in spread.placements if not placement.is_replicate()]
    if len(sharding) == 1 and sharding[0].is_shard(0):
        mesh = spread.device_mesh
        begin = _first_row(tensor.shape, mesh, spread.placements, tuple(mesh.get_coordinate() or ()))
        begin *= math.prod(tensor.shape[1:])
        first = -begin % stride
        return slice(first, max(first, stride * count - begin), stride)
    places = places_in_whole(tensor) - 1
    return ((places % stride == 0) & (places < stride * count)).nonzero().flatten().to(local(tensor).device)


@lru_cache(maxsize=4096)
def _first_row(shape: torch.Size, mesh: Any, placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> int:
    """Return the row of the whole tensor that a part begins with. It is kept, as torch reads numbers of tensors to find
    it out. coordinate: where this process is in the mesh; meshes of different groups may be equal."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(shape, mesh, placements)[1][0])


def total_over_parts(number: Tensor, tensor: Tensor) -> Tensor:
    """Add up what every part of a tensor gives; parts of which several processes hold a copy count once."""
    if not is_spread(tensor):
        return number
    spread: Any = tensor
    for dimension, placement in enumerate(spread.placements):
        if not placement.is_replicate():
            number = number.clone()
            torch.distributed.all_reduce(number, group=spread.device_mesh.get_group(dimension))
    return number
