"""Reads values of a saved state by the types that the attributes of an object have, and names what does not fit."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrain.errors import CheckpointError
from foretrain.persist.codec import copy_all, form_in_words, form_of, own_copy, unmarked
from foretrain.persist.parts import is_spread, local

_IN_PLACE = "in place"
Buffer = Annotated[Tensor, _IN_PLACE]
"""The type of a tensor that others hold on to: loading fills it, and never replaces it."""
_ARRAYS = (np.ndarray, get_origin(NDArray[np.float64]))
"""What an annotated array is made of; the second differs from the first in later versions of numpy."""
ArrayBuffer = Annotated[NDArray[np.float64], _IN_PLACE]
"""The type of an array of numpy that is filled in place."""

LARGEST_NUMBER = 2**64
"""No count comes near it. Chosen: larger ones take long to print, and do not fit into a tensor."""


class StateError(CheckpointError):
    """An entry of a saved state is missing, unknown, or of another kind than the object needs."""


def entry(state: Mapping[str, Any], name: str, place: str) -> Any:
    """Return one entry of a state that is read by hand; it must be there."""
    if not isinstance(state, Mapping):
        raise StateError(f"{place} is {kind_of(state)}, not a mapping")
    if name not in state:
        raise StateError(f"{place}.{name} is missing")
    return state[name]


class Reader:
    """Reads values by their types, and collects what is to be filled in place until all has been read."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.fillings: list[tuple[Tensor, Tensor]] = []

    def read(self, kind: Any, saved: Any, present: Any, place: str) -> Any:
        """Read one value. present: what is there now, or None; it says the length of a deque, the form of an array."""
        origin, arguments, saved = get_origin(kind), get_args(kind), unmarked(saved)
        if kind is Any or kind is object:
            return own_copy(saved, self.device)
        if origin is Annotated:
            return (
                self._fill_later(saved, present, place)
                if _IN_PLACE in arguments
                else self.read(arguments[0], saved, present, place)
            )
        if origin in (Union, types.UnionType):
            return self._one_of(arguments, saved, present, place)
        if origin is Literal:
            if saved not in arguments:
                raise StateError(f"{place} is {saved!r}, none of {list(arguments)}")
            return saved
        base = origin or kind
        if base in (list, deque, set, frozenset, tuple):
            return self._sequence(base, arguments, saved, present, place)
        if base in (dict, Mapping):
            return self._mapping(arguments, saved, present, place)
        if base in _ARRAYS:
            return self._array(saved, present, place)
        if base is Tensor:
            return self._tensor(saved, present, place)
        if isinstance(base, type) and issubclass(base, Enum):
            try:
                return base(saved)
            except ValueError:
                raise StateError(f"{place} is {saved!r}, none of {[one.value for one in base]}") from None
        if isinstance(base, type) and hasattr(base, "load_state_dict"):
            raise StateError(f"{place} was saved, but there is none here")
        if dataclasses.is_dataclass(base) and isinstance(base, type):
            return self._record(base, saved, place)
        return _atom(base, saved, place)

    def fill(self) -> None:
        with torch.no_grad():
            copy_all(self.fillings)

    def _one_of(self, kinds: tuple[Any, ...], saved: Any, present: Any, place: str) -> Any:
        """Read a value by the first of several types that fits."""
        if saved is None and type(None) in kinds:
            return None
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        for kind in kinds[:-1]:
            try:
                return self.read(kind, saved, present, place)
            except StateError:
                continue
        return self.read(kinds[-1], saved, present, place)

    def _sequence(self, base: Any, kinds: tuple[Any, ...], saved: Any, present: Any, place: str) -> Any:
        if not isinstance(saved, (list, tuple)):
            raise StateError(f"{place} is {kind_of(saved)}, not a list")
        if base is tuple and kinds and kinds[-1] is not Ellipsis:
            if len(saved) != len(kinds):
                raise StateError(f"{place} has {len(saved)} entries, not {len(kinds)}")
            each: tuple[Any, ...] = kinds
        else:
            each = (_one(kinds, place),) * len(saved)
        there = list(present) if isinstance(present, (list, tuple)) else []
        if there and _is_buffer(each[0] if each else None) and len(there) != len(saved):
            raise StateError(f"{place} has {len(saved)} entries, not {len(there)}")
        items = [
            self.read(kind, item, there[number] if number < len(there) else None, f"{place}.{number}")
            for number, (kind, item) in enumerate(zip(each, saved, strict=True))
        ]
        return (
            deque(items, maxlen=present.maxlen if isinstance(present, deque) else None)
            if base is deque
            else base(items)
        )

    def _mapping(self, kinds: tuple[Any, ...], saved: Any, present: Any, place: str) -> dict[Any, Any]:
        if not isinstance(saved, Mapping):
            raise StateError(f"{place} is {kind_of(saved)}, not a mapping")
        if len(kinds) != 2:
            raise TypeError(f"{place} needs the types of its keys and values: dict[str, float]")
        there = present if isinstance(present, Mapping) else {}
        return {
            self.read(kinds[0], key, None, f"{place}: a key"): self.read(
                kinds[1], item, there.get(key), f"{place}.{key}"
            )
            for key, item in saved.items()
        }

    def _record(self, kind: Any, saved: Any, place: str) -> Any:
        fields = {field.name: field for field in dataclasses.fields(kind)}
        values = {
            name: self.read(annotation(kind, name), item, None, f"{place}.{name}")
            for name, item in entries_of(saved, {name: name for name in fields}, place)
        }
        try:
            record = kind(**{name: value for name, value in values.items() if fields[name].init})
        except (TypeError, ValueError) as error:
            raise StateError(f"{place} cannot be used ({error})") from error
        for name, value in values.items():
            if not fields[name].init:
                object.__setattr__(record, name, value)
        return record

    def _tensor(self, saved: Any, present: Any, place: str) -> Tensor:
        saved = part_here(saved)
        _check_tensor(saved, present, place)
        copy: Tensor = own_copy(saved.detach(), self.device)
        return copy

    def _array(self, saved: Any, present: Any, place: str) -> Any:
        there = None if present is None else torch.from_numpy(present)
        _check_tensor(saved, there, place)
        return saved.detach().cpu().numpy().copy()

    def _fill_later(self, saved: Any, present: Any, place: str) -> Any:
        saved = part_here(saved)
        target = torch.from_numpy(present) if isinstance(present, np.ndarray) else present
        if not isinstance(target, Tensor):
            raise StateError(f"{place} was saved, but there is none here")
        _check_tensor(saved, target, place)
        self.fillings.append((target, saved))
        return present


def part_here(saved: Any) -> Any:
    """Return this process's part of a tensor that is spread over several."""
    return local(saved) if is_spread(saved) else saved


def kind_of(value: Any) -> str:
    """Say in words what a value of a state is."""
    kind: Any = type(value)
    return _kind_in_words(kind)


@cache
def _kind_in_words(kind: Any) -> str:
    kinds: dict[str, Any] = {"true or false": bool, "a number": (int, float), "a text": str, "a tensor": Tensor}
    kinds |= {"a mapping": Mapping, "a list": (list, tuple), "nothing": type(None)}
    return next((words for words, known in kinds.items() if issubclass(kind, known)), str(kind.__name__))


def _atom(kind: Any, saved: Any, place: str) -> Any:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "nothing"}
    if kind not in words or (kind is type(None) and saved is not None):
        raise TypeError(f"{place}: name its type on the class ({kind!r} does not say how it is read)")
    allowed = (int, float) if kind is float else kind
    if not isinstance(saved, allowed) or (isinstance(saved, bool) and kind is not bool):
        raise StateError(f"{place} is {kind_of(saved)}, not {words[kind]}")
    if isinstance(saved, int) and abs(saved) > LARGEST_NUMBER:
        raise StateError(f"{place} is a number of {len(hex(saved)) * 4} bits")
    return saved


def entries_of(state: Any, names: Mapping[str, str], place: str) -> list[tuple[str, Any]]:
    """Return (attribute, saved value) of every name. Nothing may be missing, and nothing may be left over."""
    found = [(attribute, entry(state, name, place)) for name, attribute in names.items()]
    for name in state:
        if name not in names:
            raise StateError(f"{place}.{name} is not known here")
    return found


def _check_tensor(saved: Any, present: Tensor | None, place: str) -> None:
    if not isinstance(saved, Tensor):
        raise StateError(f"{place} is {kind_of(saved)}, not a tensor")
    if isinstance(present, Tensor) and form_of(saved) != form_of(present):
        raise StateError(f"{place} is {form_in_words(saved)}, not {form_in_words(present)}")


def _one(kinds: tuple[Any, ...], place: str) -> Any:
    if not kinds:
        raise TypeError(f"{place} needs the type of its items: list[float]")
    return kinds[0]


def _is_buffer(kind: Any) -> bool:
    return get_origin(kind) is Annotated and _IN_PLACE in get_args(kind)


def device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor in the value."""
    if isinstance(value, Tensor):
        return value.device
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, deque)) else ()
    return next((device for item in items if (device := device_of(item)) is not None), None)


@cache
def annotation(kind: Any, name: str) -> Any:
    """Return the type of an attribute as the class or one of its bases annotates it, or that of a property; None where
    there is none. Other annotations are not evaluated: their names may be known to type checkers only."""
    for one in kind.__mro__:
        own = vars(one).get("__annotations__", {}).get(name)
        if isinstance(found := vars(one).get(name), property) and found.fget is not None:
            own = found.fget.__annotations__.get("return")
        if own is not None:
            holder = types.SimpleNamespace(__annotations__={name: own})
            return get_type_hints(holder, vars(sys.modules[one.__module__]), include_extras=True)[name]
    return None
