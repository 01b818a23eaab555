"""Takes states apart into named tensors and plain JSON, for snapshots in memory and for checkpoints on disk.

A state is a tree of dicts, lists, tuples, numbers, strings and tensors. Its tensors become safetensors files, the rest
becomes a JSON tree that refers to them. Nothing is lost: integer keys, tuples and non-finite numbers survive.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.persist.parts import SpreadForm, form_of_spread, local, spread_as


@dataclass(frozen=True)
class Snapshot:
    """Holds named tensors and the tree that refers to them, as they are on disk.

    spread: of tensors that are spread over several processes, how they are; `tensors` has this process's parts.
    """

    tensors: dict[str, Tensor]
    tree: Any
    spread: dict[str, SpreadForm] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfRank:
    """Marks a part of a state of which each of several processes has its own.

    rows: its tensors hold rows of a batch, of which all processes have some; otherwise nobody else can use it.
    """

    value: Any
    rows: bool


def unmarked(value: Any) -> Any:
    """Return what a mark is put around, or the value itself."""
    return value.value if isinstance(value, OfRank) else value


class _Taken(dict[str, Tensor]):
    """Tensors that are taken out of a tree. marked: `OfRank` leaves its mark there."""

    def __init__(self, marked: bool) -> None:
        self.marked = marked
        self.spread: dict[str, SpreadForm] = {}


def real_view(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the parts [..., 2] of complex numbers in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return what two tensors must have in common to be copied into each other without loss."""
    return tensor.shape, tensor.dtype


def form_in_words(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "no tensor"


ROWS, OWN = "$rows", "$own"


def take_apart(state: Any, marked: bool = False) -> Snapshot:
    """Separate tensors from everything else. Tensors are referred to, not copied. marked: the tree says what belongs
    to one of several processes."""
    tensors = _Taken(marked)
    return Snapshot(tensors, _encode(state, "", tensors), tensors.spread)


def put_together(snapshot: Snapshot, spread: bool = False) -> Any:
    """Return the state that `take_apart` was given. spread: with spread tensors, and not with parts in their place."""
    tensors = snapshot.tensors
    if spread and snapshot.spread:
        tensors = {name: spread_as(tensor, snapshot.spread.get(name)) for name, tensor in tensors.items()}
    return _decode(snapshot.tree, tensors)


_AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""Most of a state. They are told by their exact type, at once: a state is taken apart at every move."""


def _encode(value: Any, path: str, tensors: _Taken) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # such as {"a.b": ...} beside {"a": {"b": ...}}
            path += "'"
        tensors[path] = real_view(local(value))
        if (form := form_of_spread(value)) is not None:
            tensors.spread[path] = form
        return {"$complex" if value.is_complex() else "$tensor": path}
    if isinstance(value, (list, tuple)):
        items = [
            item
            if (kind := type(item)) in _AS_THEY_ARE or (kind is float and math.isfinite(item))
            else _encode(item, _join(path, index), tensors)
            for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, (dict, Mapping)):  # `dict` alone is told faster
        if all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {
                key: item if type(item) in _AS_THEY_ARE else _encode(item, f"{path}.{key}" if path else key, tensors)
                for key, item in value.items()
            }
        entries = [[_plain(key), _encode(item, _join(path, key), tensors)] for key, item in value.items()]
        return {"$entries": entries}
    if isinstance(value, OfRank):
        inner = _encode(value.value, path, tensors)
        return {ROWS if value.rows else OWN: inner} if tensors.marked else inner
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a state may hold tensors, numbers, strings, lists, tuples and dicts, not {type(value).__name__}")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) if isinstance(item, (dict, list)) else item for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value or "$complex" in value:
        name = value["$tensor"] if "$tensor" in value else value["$complex"]
        if name not in tensors:
            raise ValueError(f"the state refers to a tensor {name!r} that is not there")
        return tensors[name] if "$tensor" in value else torch.view_as_complex(tensors[name])
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    if "$entries" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$entries"]}
    if "$float" in value:
        return float(value["$float"])
    return {key: _decode(item, tensors) if isinstance(item, (dict, list)) else item for key, item in value.items()}


def snapshot(state: Any, into: Snapshot | None = None) -> Snapshot:
    """Copy a state in memory, so that later steps do not touch it. `into`: an older copy whose memory is used again."""
    parts = take_apart(state)
    old = into.tensors if into is not None else {}
    copies: dict[str, Tensor] = {}
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for name, tensor in parts.tensors.items():
        memory = old.get(name)
        if memory is not None and memory.device == tensor.device and form_of(memory) == form_of(tensor):
            targets.append(memory)
            sources.append(tensor)
            copies[name] = memory
        else:
            copies[name] = tensor.clone()
    if targets:
        torch._foreach_copy_(targets, sources)  # a few launches instead of one per tensor
    return Snapshot(copies, parts.tree, parts.spread)


def own_copy(state: Any, device: torch.device | None = None) -> Any:
    """Return the state with tensors of its own: loaded ones may be views of a mapped file, or a part of a snapshot.

    device: where they are to be; None: where they are.
    """
    if isinstance(state, Tensor):
        return state.clone() if device is None else state.to(device, copy=True)
    if isinstance(state, Mapping):
        return {key: own_copy(value, device) for key, value in state.items()}
    return type(state)(own_copy(value, device) for value in state) if isinstance(state, (list, tuple)) else state


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy every second tensor into its first, in a few launches."""
    targets = [target for target, _ in pairs]
    if targets:
        on_device = all(target.is_cuda for target in targets)  # there the order of the stream is enough
        torch._foreach_copy_(targets, [source for _, source in pairs], non_blocking=on_device)


# --- random states ---------------------------------------------------------------------------------------------------


def seed_random(seed: int) -> None:
    """Start every generator anew, so that two runs with one seed draw the same numbers wherever they draw them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may use it


def random_state() -> dict[str, Any]:
    """Return the states of all generators that a model, a loss function or a data set may draw from."""
    kind, words, place, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - user code may use it
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in _cuda_devices()],
        "numpy": [kind, torch.from_numpy(np.asarray(words).astype(np.int64)), place, has_gauss, gauss],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss_next],
    }


RANDOM = frozenset({"torch", "cuda", "numpy", "python"})
"""The entries of a random state: by these one is told from all else in a tree."""


def random_state_anew(seed: int, step: int, rank: int) -> dict[str, Any]:
    """Return random states that follow from these numbers, where those that were saved belong to other processes."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    with same_random_numbers():
        seed_random(int.from_bytes(digest[:7]))
        return random_state()


def restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    for index, value in zip(_cuda_devices(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(value.cpu(), index)
    kind, words, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, words.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random generators go on after the block as if it had not been."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def _cuda_devices() -> Sequence[int]:
    """Devices with generators that are used: all, or in one of several processes its own only, since to ask another one
    takes memory on it."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return ()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return (torch.cuda.current_device(),)
    return range(torch.cuda.device_count())
