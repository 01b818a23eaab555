"""The whole state of a run, in one definition: used for snapshots in memory and for checkpoints on disk.

A state is a tree of dicts, lists, tuples, numbers, strings and tensors. It is taken apart into named tensors (which
become safetensors files) and a plain JSON tree that refers to them, and put together again without loss: integer keys,
tuples and non-finite numbers survive.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.errors import CheckpointError

SCALE = "_scale"
"""Follows the name of a moment in 8 bits, for its scales."""


@dataclass(frozen=True)
class Snapshot:
    """Named tensors and the tree that refers to them; equal to what is on disk, tensor for tensor."""

    tensors: dict[str, Tensor]
    tree: Any


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself; of complex numbers their parts, in the same memory: [..., 2]."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def take_apart(state: Any) -> Snapshot:
    """Separate tensors from everything else. Tensors are referred to, not copied."""
    tensors: dict[str, Tensor] = {}
    return Snapshot(tensors, _encode(state, "", tensors))


def put_together(snapshot: Snapshot) -> Any:
    """The inverse of `take_apart`."""
    return _decode(snapshot.tree, snapshot.tensors)


_AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""Most of a state. They are told by their exact type, at once: a state is taken apart at every move."""


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # such as {"a.b": ...} beside {"a": {"b": ...}}
            path += "'"
        tensors[path] = real_view(value.detach())
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
    """A copy in memory that later steps do not touch. `into`: an older one, whose memory is used again."""
    parts = take_apart(state)
    old = into.tensors if into is not None else {}
    copies: dict[str, Tensor] = {}
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for name, tensor in parts.tensors.items():
        memory = old.get(name)
        if memory is not None and _place(memory) == _place(tensor):
            targets.append(memory)
            sources.append(tensor)
            copies[name] = memory
        else:
            copies[name] = tensor.clone()
    if targets:
        torch._foreach_copy_(targets, sources)  # a few launches instead of one per tensor
    return Snapshot(copies, parts.tree)


def _place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


# --- random states ---------------------------------------------------------------------------------------------------


def seed_random(seed: int) -> None:
    """Start every generator anew, so that two runs with one seed draw the same numbers wherever they draw them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may use it


def random_state() -> dict[str, Any]:
    """Every generator a model, a loss function or a data set may draw from."""
    kind, words, place, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - user code may use it
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in range(_cuda_devices())],
        "numpy": [kind, torch.from_numpy(np.asarray(words).astype(np.int64)), place, has_gauss, gauss],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss_next],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    for index, value in enumerate(state["cuda"][: _cuda_devices()]):
        torch.cuda.set_rng_state(value.cpu(), index)
    kind, words, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, words.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


# --- model and optimizer ---------------------------------------------------------------------------------------------


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changing_state(model: nn.Module, constant: Collection[str]) -> dict[str, Any]:
    """The model's state without weights that stay what they are."""
    return {name: value for name, value in model.state_dict().items() if name not in constant}


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, forms and bits, the same on every device. The device is waited for once."""
    sums = []
    for tensor in tensors.values():
        numbers = real_view(tensor.detach()).contiguous()
        flat = numbers.view(_BITS[numbers.element_size()]).flatten()
        place = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.int64)
        sums.append((flat * place).sum())  # wraps around, everywhere alike
    totals = torch.stack(sums).tolist() if sums else []
    forms = [f"{name} {_form(tensor)}" for name, tensor in tensors.items()]
    return hashlib.sha256(repr(list(zip(forms, totals, strict=True))).encode()).hexdigest()


def left_out(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Parameters that a state of the model does not hold, under all their names."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in saved}


def check_model(model: nn.Module, saved: Mapping[str, Any], origin: str, constant: Collection[str]) -> dict[str, Any]:
    """Refuse weights and buffers that are not this model's; what they are to be copied to. constant: names of weights
    that were not to be saved."""
    own = changing_state(model, constant)
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "the checkpoint" if name not in saved else "this model"
            raise CheckpointError(
                f"{origin}: it belongs to another model ({name} is not in {where}); use the same [model] settings"
            )
        if _form(own[name]) != _form(saved[name]):
            raise CheckpointError(
                f"{origin}: it belongs to another model ({name} is {_form(saved[name])} there, {_form(own[name])} "
                "here); use the same [model] settings"
            )
    return own


@torch.no_grad()
def restore_model(
    model: nn.Module, saved: Mapping[str, Tensor], origin: str, constant: Collection[str] | None = None
) -> None:
    """Copy weights and buffers in place, after checking that they are this model's. constant: names of weights that
    were not to be saved; None: those that are frozen."""
    constant = set(frozen_weights(model)) if constant is None else constant
    own = check_model(model, saved, origin, constant)
    copy_all([(value, saved[name]) for name, value in own.items() if isinstance(value, Tensor)])
    for name, value in own.items():
        if not isinstance(value, Tensor):  # what a module returned from get_extra_state
            model.load_state_dict({name: saved[name]}, strict=False)


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Every second tensor into its first, in a few launches."""
    targets = [target for target, _ in pairs]
    if targets:
        on_device = all(target.is_cuda for target in targets)  # there the order of the stream is enough
        torch._foreach_copy_(targets, [source for _, source in pairs], non_blocking=on_device)


def _form(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "no tensor"


_OF_SCHEDULES = {"peak_lr"}
"""What a schedule of the configuration leaves in an optimizer's groups."""
_TOGETHER = ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"})
"""Beside scales of 8-bit numbers."""


def restore_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], origin: str, *, keep_settings: bool = False
) -> None:
    """Put an optimizer's state back; tensors that exist already are filled in place, so recorded graphs stay valid.

    keep_settings: weight decay and the like stay what they are now. Otherwise all values of the saved groups come back,
    because some optimizers keep a part of their state there.
    """
    check_groups(optimizer, saved["param_groups"], origin)
    current, groups = optimizer.state_dict(), saved["param_groups"]
    if keep_settings:
        groups = current["param_groups"]
        _check_complete(optimizer, saved["state"], origin)
    rates = [group.get("lr") for group in optimizer.param_groups]
    if _same_tensors(current, saved):
        with torch.no_grad():
            copy_all(_fill(current["state"], saved["state"]))
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for key in (values.keys() & group.keys()) - {"params", "lr"}:
                if isinstance(group[key], Tensor):
                    group[key].copy_(values[key])
                else:
                    group[key] = values[key]
    else:
        optimizer.load_state_dict({"state": _own_copies(saved["state"]), "param_groups": groups})
        _put_back_others(optimizer, saved["state"])
    for group, rate, values in zip(optimizer.param_groups, rates, groups, strict=True):
        if rate is not None:
            value = float(values["lr"])
            group["lr"] = rate.fill_(value) if isinstance(rate, Tensor) else value  # a tensor stays on its device


def check_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Refuse the groups of another kind of optimizer, or of other parameters."""
    ours, theirs = (
        [(len(group["params"]), sorted(group.keys() - _OF_SCHEDULES)) for group in groups]
        for groups in (optimizer.param_groups, saved)
    )
    if [count for count, _ in ours] == [count for count, _ in theirs] and ours != theirs:
        raise CheckpointError(
            f"{origin}: its optimizer keeps its state in another form; use the same optimizer, or optimizer.type and "
            "optimizer.state_type (a memory.budget may have chosen another one: name it), and the same scheduler"
        )
    if ours != theirs:
        raise CheckpointError(
            f"{origin}: it was saved with another optimizer, or other parameters in its groups "
            f"({[count for count, _ in theirs]} there, {[count for count, _ in ours]} here); "
            "use the same [optimizer] settings, and begin with the same weights frozen"
        )


def _check_complete(optimizer: Optimizer, saved: Mapping[int, Mapping[str, Any]], origin: str) -> None:
    """What optimizers of ours keep of a parameter belongs together, and has its size."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved.items():
        names = {name for name, value in kept.items() if value is not None and not name.endswith(SCALE)}
        sizes = {name: 1 if name == "step" else parameters[number].numel() for name in names}
        fits = all(isinstance(kept[name], Tensor) and kept[name].numel() == size for name, size in sizes.items())
        if names and (names not in _TOGETHER or not fits):
            raise CheckpointError(f"{origin}: the state of its optimizer is not complete; start from another one")


def _own_copies(state: Any) -> Any:
    """Loaded tensors may be views of a mapped file, or a part of a snapshot; those that stay in use are copied."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {key: _own_copies(value) for key, value in state.items()}
    return type(state)(map(_own_copies, state)) if isinstance(state, (list, tuple)) else state


def _put_back_others(optimizer: Optimizer, saved: Mapping[Any, Any]) -> None:
    """What of a state is no tensor, exactly: torch takes texts apart, and casts tensors inside of lists."""
    numbers = optimizer.state_dict()["param_groups"]
    places = zip(numbers, optimizer.param_groups, strict=True)
    parameters = {number: p for one, other in places for number, p in zip(one["params"], other["params"], strict=True)}
    for number, values in saved.items():
        for name, value in values.items() if number in parameters else ():
            if isinstance(value, (str, list, tuple, Mapping)):
                optimizer.state[parameters[number]][name] = _moved(_own_copies(value), parameters[number].device)


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {key: _moved(value, device) for key, value in state.items()}
    return type(state)(_moved(value, device) for value in state) if isinstance(state, (list, tuple)) else state


def _same_tensors(current: Any, saved: Any) -> bool:
    """Whether both optimizer states hold the same tensors by name and shape."""
    ours = take_apart(current["state"]).tensors
    theirs = take_apart(saved["state"]).tensors
    return bool(ours) and {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def _fill(target: Any, source: Any) -> list[tuple[Tensor, Tensor]]:
    """Put every number of `source` into the equal tree `target`; (target, source) of every tensor."""
    tensors: list[tuple[Tensor, Tensor]] = []
    for key, value in source.items():
        if isinstance(value, Tensor):
            tensors.append((target[key], value))
        elif isinstance(value, Mapping):
            tensors += _fill(target[key], value)
        else:
            target[key] = _own_copies(value)
    return tensors
