"""States of models and optimizers: which of them a checkpoint holds, whether one fits, and how it is put back."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.errors import CheckpointError
from foretrain.persist.codec import copy_all, form_in_words, own_copy, real_view, take_apart
from foretrain.persist.parts import is_spread, like, local, places_in_whole, total_over_parts

SCALE = "_scale"
"""The scales of a moment in 8 bits are saved under its name with this ending."""
ROW_SQUARES = "row_squares"
"""The name of Muon's mean squares of rows: a number for each row of a matrix, [rows, 1]."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changing_state(model: nn.Module, constant: Collection[str]) -> dict[str, Any]:
    """Return the model's state without weights that never change."""
    return {name: value for name, value in model.state_dict().items() if name not in constant}


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, forms and bits, which is the same on every device. The device is waited for once."""
    sums = []
    for tensor in tensors.values():
        numbers = real_view(local(tensor)).contiguous()
        flat = numbers.view(_BITS[numbers.element_size()]).flatten()
        place = places_in_whole(tensor, len(flat) // max(1, local(tensor).numel())).to(flat.device)
        sums.append(total_over_parts((flat * place).sum(), tensor))  # wraps around, everywhere alike
    totals = torch.stack(sums).tolist() if sums else []
    forms = [f"{name} {form_in_words(tensor)}" for name, tensor in tensors.items()]
    return hashlib.sha256(repr(list(zip(forms, totals, strict=True))).encode()).hexdigest()


def left_out(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters that a state of the model does not hold, under all their names."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in saved}


def check_model(model: nn.Module, saved: Mapping[str, Any], origin: str, constant: Collection[str]) -> dict[str, Any]:
    """Refuse weights and buffers that are not this model's, and return those of the model that they belong to.

    constant: names of weights that were not to be saved.
    """
    own = changing_state(model, constant)
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "the checkpoint" if name not in saved else "this model"
            raise CheckpointError(
                f"{origin}: it belongs to another model ({name} is not in {where}); use the same one ([model] settings)"
            )
        ours, theirs = (_form_of_part(value, own[name], saved[name]) for value in (own[name], saved[name]))
        if ours != theirs:
            raise CheckpointError(
                f"{origin}: it belongs to another model ({name} is {theirs} there, {ours} here); use the same one "
                "([model] settings)"
            )
    return own


def _form_of_part(value: Any, ours: Any, theirs: Any) -> str:
    """The form by which two tensors are compared: of the whole, or of the part here where one of them is only that."""
    parts = isinstance(ours, Tensor) and isinstance(theirs, Tensor) and is_spread(ours) != is_spread(theirs)
    return form_in_words(local(value) if parts else value)


@torch.no_grad()
def restore_model(
    model: nn.Module, saved: Mapping[str, Tensor], origin: str, constant: Collection[str] | None = None
) -> None:
    """Copy weights and buffers in place, after checking that they are this model's. constant: names of weights that
    were not to be saved; None: those that are frozen."""
    constant = set(frozen_weights(model)) if constant is None else constant
    own = check_model(model, saved, origin, constant)
    copy_all([(local(value), local(saved[name])) for name, value in own.items() if isinstance(value, Tensor)])
    for name, value in own.items():
        if not isinstance(value, Tensor):  # what a module returned from get_extra_state
            model.load_state_dict({name: saved[name]}, strict=False)


_OF_SCHEDULES = {"peak_lr"}
"""What a schedule of the configuration leaves in an optimizer's groups."""
_TOGETHER = ({"momentum_buffer"}, {"momentum_buffer", ROW_SQUARES}, {"step", "exp_avg", "exp_avg_sq"})
"""Optimizers of this package save these together, beside scales of 8-bit numbers."""


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
        optimizer.load_state_dict({"state": _spread_again(optimizer, own_copy(saved["state"])), "param_groups": groups})
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
    """Refuse a state in which a part is missing of what our optimizers keep for a parameter, or has another size."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved.items():
        names = {name for name, value in kept.items() if value is not None and not name.endswith(SCALE)}
        fits = all(_fits(name, kept[name], parameters[number]) for name in names)
        if names and (names not in _TOGETHER or not fits):
            raise CheckpointError(f"{origin}: the state of its optimizer is not complete; start from another one")


def _fits(name: str, value: Any, parameter: Tensor) -> bool:
    """Say whether a part of an optimizer's state has as many numbers as it must; that of a parameter that is spread may
    be a part of it."""
    if not isinstance(value, Tensor):
        return False
    if name == ROW_SQUARES:  # all of them, as one process saves them, or those of the rows that are here
        return value.numel() in (parameter.shape[0], local(parameter).shape[0])
    whole = not is_spread(parameter) or is_spread(value)
    return value.numel() == (1 if name == "step" else parameter.numel() if whole else local(parameter).numel())


def _spread_again(optimizer: Optimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """The state with tensors that are spread over processes as their parameters are; saved are parts."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(is_spread(parameter) for parameter in parameters):
        return state
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    return {
        number: {
            name: like(value, owners[number])
            if isinstance(value, Tensor) and value.ndim and number in owners
            else value
            for name, value in values.items()
        }
        for number, values in state.items()
    }


def _put_back_others(optimizer: Optimizer, saved: Mapping[Any, Any]) -> None:
    """Put back exactly what is no tensor: torch takes texts apart, and casts tensors inside of lists."""
    numbers = optimizer.state_dict()["param_groups"]
    places = zip(numbers, optimizer.param_groups, strict=True)
    parameters = {number: p for one, other in places for number, p in zip(one["params"], other["params"], strict=True)}
    for number, values in saved.items():
        for name, value in values.items() if number in parameters else ():
            if isinstance(value, (str, list, tuple, Mapping)):
                optimizer.state[parameters[number]][name] = own_copy(value, parameters[number].device)


def _same_tensors(current: Any, saved: Any) -> bool:
    """Say whether both optimizer states hold the same tensors by name and shape."""
    ours = take_apart(current["state"]).tensors
    theirs = take_apart(saved["state"]).tensors
    return bool(ours) and {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def _fill(target: Any, source: Any) -> list[tuple[Tensor, Tensor]]:
    """Put every number of `source` into the equal tree `target`, and return (target, source) of every tensor."""
    tensors: list[tuple[Tensor, Tensor]] = []
    for key, value in source.items():
        if isinstance(value, Tensor):
            tensors.append((local(target[key]), local(value)))
        elif isinstance(value, Mapping):
            tensors += _fill(target[key], value)
        else:
            target[key] = own_copy(value)
    return tensors
