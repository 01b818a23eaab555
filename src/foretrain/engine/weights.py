"""The weights of any module as one file, and the way back into a module. Nothing in such a file is ever executed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretrain.engine.described import unwrapped
from foretrain.errors import CheckpointError, InputError, SaveError
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore, separate
from foretrain.persist.codec import real_view
from foretrain.persist.files import explain_failed_write, remove, sync_file
from foretrain.persist.folder import WEIGHTS as NAME
from foretrain.persist.model_state import checksum

_WRAPPINGS = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel put before the names of weights."""
Module = TypeVar("Module", bound=nn.Module)


def write_weights(model: nn.Module, path: Path) -> None:
    """All weights and buffers by their names, tied ones under each of theirs. The file appears whole or not at all."""
    tensors = {name: value for name, value in unwrapped(model).state_dict().items() if isinstance(value, Tensor)}
    tensors |= {name: real_view(value) for name, value in tensors.items() if value.dtype is torch.complex128}
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        remove(temporary)
        temporary.touch()
        mode = temporary.stat().st_mode  # as for any new file; safetensors' own are for their owner alone
        save_file(separate(tensors), temporary)
        temporary.chmod(mode)
        sync_file(temporary)
        temporary.replace(path)
        sync_file(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        cause, advice = explain_failed_write(error)
        raise SaveError(
            f"{path}: cannot write the weights: {cause}; all checkpoints are intact. {advice}, then go on with "
            "resume=True"
        ) from error


def load_weights(module: Module, source: str | Path) -> Module:
    """Put the weights of a run into a module of the same form, and return it.

    source: a run folder (its finished weights; of one that is not finished the newest checkpoint's), one checkpoint
    folder, or a `.safetensors` file. Weights are the averaged ones where the run had an average.
    """
    source = Path(source)
    target = unwrapped(module)
    finished = source / NAME
    if source.is_file() or (finished.is_file() and not (source / "manifest.json").is_file()):
        path = source if source.is_file() else finished
        try:
            _fill(target, load_file(path), str(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read as weights ({' '.join(str(error).split())})") from None
        return module
    folder = source if (source / "manifest.json").is_file() else _newest(source)
    state = checkpoint.read_weights(folder)
    if not isinstance(state.get("model"), Mapping):
        raise CheckpointError(f"{folder}: it holds no weights of a model")
    values = _plain_names(state["model"], target)
    _fill(target, values | _averaged(target, values, state), str(folder), str(state.get("frozen") or ""))
    return module


def _newest(run: Path) -> Path:
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    if newest is None:
        raise InputError(f"{run}: neither {NAME} nor a checkpoint is there; name a run folder, a checkpoint or a file")
    return newest[1]


def _plain_names(values: Mapping[str, Any], target: nn.Module) -> dict[str, Any]:
    """By the names that the module has itself, whatever it was wrapped in when they were saved."""
    values, own = dict(values), target.state_dict().keys()
    while values and not values.keys() & own:
        wrapping = next((start for start in _WRAPPINGS if all(name.startswith(start) for name in values)), None)
        if wrapping is None:
            break
        values = {name.removeprefix(wrapping): value for name, value in values.items()}
    return values


def _averaged(target: nn.Module, values: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What an evaluation of that run saw instead of the weights themselves."""
    average = state.get("average")
    if not average or not average["updates"]:
        return {}
    correction = 1 - state["meta"]["config"]["evaluation"]["ema_decay"] ** average["updates"]
    names = [name for name, _ in target.named_parameters() if name in values]
    if len(names) != len(average["average"]):
        raise CheckpointError(
            f"the average is of {len(average['average'])} weights, not of {len(names)} as the module: another model's"
        )
    parameters = dict(target.named_parameters())
    means = {parameters[name]: mean / correction for name, mean in zip(names, average["average"], strict=True)}
    return {name: means[p] for name, p in target.named_parameters(remove_duplicate=False) if p in means}


def _as_complex(value: Any, like: Any) -> Any:
    """safetensors know no complex128: it is written as its parts."""
    parts = isinstance(value, Tensor) and isinstance(like, Tensor) and like.is_complex() and not value.is_complex()
    return torch.view_as_complex(value) if parts and value.shape == (*like.shape, 2) else value


@torch.no_grad()
def _fill(target: nn.Module, values: Mapping[str, Any], origin: str, frozen: str = "") -> None:
    """frozen: checksum of the weights that the run did not train, and so did not save."""
    values = _plain_names(values, target)
    own = target.state_dict()
    missing = [name for name, value in own.items() if name not in values and isinstance(value, Tensor)]
    if missing and frozen:
        kept = {name: p for name, p in target.named_parameters(remove_duplicate=False) if name not in values}
        if set(missing) <= kept.keys() and checksum(kept) == frozen:
            missing = []
    strange = [name for name in values if name not in own]
    if missing or strange:
        where = f"{missing[0]} is not in it" if missing else f"the module has no {strange[0]}"
        raise CheckpointError(f"{origin}: it belongs to another model ({where})")
    values = {name: _as_complex(value, own[name]) for name, value in values.items()}
    for name, value in values.items():
        if not isinstance(value, Tensor):  # what a module returned from get_extra_state
            target.load_state_dict({name: value}, strict=False)
        elif value.shape != own[name].shape:
            raise CheckpointError(
                f"{origin}: it belongs to another model "
                f"({name} is {list(value.shape)} there, {list(own[name].shape)} here)"
            )
    for name, value in values.items():
        if isinstance(value, Tensor):
            own[name].copy_(value)
