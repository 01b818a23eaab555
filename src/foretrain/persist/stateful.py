"""Objects that name what they save: `saved = ("count", "mean", ...)` on the class is all that most of them need.

What is saved is plain: numbers, texts, lists, tuples, dicts and tensors, as `codec` takes apart. It is read back by the
type of the attribute: that of its annotation on the class or, for plain values, that of the value which is there.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrain.errors import CheckpointError, is_out_of_memory
from foretrain.persist.codec import copy_all

_IN_PLACE = "in place"
Buffer = Annotated[Tensor, _IN_PLACE]
"""The type of a tensor that others hold on to: loading fills it, and never replaces it."""
ArrayBuffer = Annotated[NDArray[np.float64], _IN_PLACE]
"""The same for an array of numpy."""

LARGEST_NUMBER = 2**64
"""No count comes near it. Chosen: larger ones take long to print, and do not fit into a tensor."""


class StateError(CheckpointError):
    """An entry of a saved state is missing, unknown, or of another kind than the object needs."""


class Stateful:
    """Saves and loads the attributes that `saved` names. One that is itself Stateful is saved as a part of its own.

    Attributes that hold None, containers or records need their type on the class: `recent: deque[float]`. `Any` stands
    for what is plain already. A property with a setter may be named, too: it saves something in another form than the
    object holds it. A leading underscore is no part of the name in the state.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the object goes on. Tensors are referred to, not copied."""
        return {name.lstrip("_"): plain(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. Raises CheckpointError that names the class and the entry where the state does not fit;
        the attributes of this object are then as they were."""
        kind: Any = type(self)
        own = kind.__name__
        entries = _entries(state, {name.lstrip("_"): name for name in self.saved}, own)
        parts: list[tuple[Stateful, Any]] = []
        values: dict[str, Any] = {}
        reader = _Reader()
        for name, saved in entries:
            place = f"{own}.{name.lstrip('_')}"
            present = None if isinstance(getattr(kind, name, None), property) else getattr(self, name, None)
            if isinstance(present, Stateful):
                if not isinstance(saved, Mapping):
                    raise StateError(f"{place} is {kind_of(saved)}, not a mapping")
                parts.append((present, saved))
                continue
            reader.device = _device_of(present) or getattr(self, "device", None)
            values[name] = reader.read(_annotation(kind, name) or type(present), saved, present, place)
        try:
            reader.fill()
            for name, value in values.items():
                setattr(self, name, value)
            for part, saved in parts:
                part.load_state_dict(saved)
            self.after_load()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise StateError(f"{own} cannot use it ({type(error).__name__}: {error})") from error

    def after_load(self) -> None:
        """For what follows from the loaded attributes. It may raise ValueError where they do not belong together."""


def plain(value: Any) -> Any:
    """The value as a state holds it. Containers are new, tensors are referred to."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, (Enum, np.generic))):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, (list, deque)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    raise TypeError(f"a state may hold tensors, numbers, strings, lists, tuples and dicts, not {type(value).__name__}")


def from_plain(kind: Any, saved: Any, place: str, device: torch.device | None = None) -> Any:
    """The inverse of `plain` for a value of that type (a class, or any annotation). Tensors are copied to the device;
    None: to that on which they are. Raises StateError that names the place."""
    reader = _Reader(device)
    return reader.read(kind, saved, None, place)


def entry(state: Mapping[str, Any], name: str, place: str) -> Any:
    """One entry of a state that is read by hand."""
    if not isinstance(state, Mapping):
        raise StateError(f"{place} is {kind_of(state)}, not a mapping")
    if name not in state:
        raise StateError(f"{place}.{name} is missing")
    return state[name]


class _Reader:
    """Reads values by their types, and collects what is to be filled in place until all has been read."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.fillings: list[tuple[Tensor, Tensor]] = []

    def read(self, kind: Any, saved: Any, present: Any, place: str) -> Any:
        """present: what is there now, None if nothing; it says the length of a deque, the form of an array."""
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return self._own_copy(saved)
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
        if base is np.ndarray:
            return self._array(saved, present, place)
        if base is Tensor:
            return self._tensor(saved, present, place)
        if isinstance(base, type) and issubclass(base, Enum):
            try:
                return base(saved)
            except ValueError:
                raise StateError(f"{place} is {saved!r}, none of {[one.value for one in base]}") from None
        if isinstance(base, type) and issubclass(base, Stateful):
            raise StateError(f"{place} was saved, but there is none here")
        if dataclasses.is_dataclass(base) and isinstance(base, type):
            return self._record(base, saved, place)
        return _atom(base, saved, place)

    def fill(self) -> None:
        with torch.no_grad():
            copy_all(self.fillings)

    def _one_of(self, kinds: tuple[Any, ...], saved: Any, present: Any, place: str) -> Any:
        """The first of several types that the value has."""
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
            name: self.read(_annotation(kind, name), item, None, f"{place}.{name}")
            for name, item in _entries(saved, {name: name for name in fields}, place)
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
        _check_tensor(saved, present, place)
        copy: Tensor = self._own_copy(saved.detach())
        return copy

    def _array(self, saved: Any, present: Any, place: str) -> Any:
        there = None if present is None else torch.from_numpy(present)
        _check_tensor(saved, there, place)
        return saved.detach().cpu().numpy().copy()

    def _fill_later(self, saved: Any, present: Any, place: str) -> Any:
        target = torch.from_numpy(present) if isinstance(present, np.ndarray) else present
        if not isinstance(target, Tensor):
            raise StateError(f"{place} was saved, but there is none here")
        _check_tensor(saved, target, place)
        self.fillings.append((target, saved))
        return present

    def _own_copy(self, saved: Any) -> Any:
        if isinstance(saved, Tensor):
            return saved.clone() if self.device is None else saved.to(self.device, copy=True)
        if isinstance(saved, Mapping):
            return {key: self._own_copy(item) for key, item in saved.items()}
        return type(saved)(map(self._own_copy, saved)) if isinstance(saved, (list, tuple)) else saved


def kind_of(value: Any) -> str:
    """What a value of a state is, in words."""
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


def _entries(state: Any, names: Mapping[str, str], place: str) -> list[tuple[str, Any]]:
    """(attribute, saved value) of every name; nothing may be missing, nor be left over."""
    found = [(attribute, entry(state, name, place)) for name, attribute in names.items()]
    for name in state:
        if name not in names:
            raise StateError(f"{place}.{name} is not known here")
    return found


def _check_tensor(saved: Any, present: Tensor | None, place: str) -> None:
    if not isinstance(saved, Tensor):
        raise StateError(f"{place} is {kind_of(saved)}, not a tensor")
    if isinstance(present, Tensor) and (saved.shape, saved.dtype) != (present.shape, present.dtype):
        theirs, ours = (f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (saved, present))
        raise StateError(f"{place} is {theirs}, not {ours}")


def _one(kinds: tuple[Any, ...], place: str) -> Any:
    if not kinds:
        raise TypeError(f"{place} needs the type of its items: list[float]")
    return kinds[0]


def _is_buffer(kind: Any) -> bool:
    return get_origin(kind) is Annotated and _IN_PLACE in get_args(kind)


def _device_of(value: Any) -> torch.device | None:
    """That of the first tensor in it."""
    if isinstance(value, Tensor):
        return value.device
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, deque)) else ()
    return next((device for item in items if (device := _device_of(item)) is not None), None)


@cache
def _annotation(kind: Any, name: str) -> Any:
    """The type of an attribute as the class, or one that it inherits from, annotates it, or of a property; None where
    there is none. Others are not looked at: their names may be known to type checkers only."""
    for one in kind.__mro__:
        own = vars(one).get("__annotations__", {}).get(name)
        if isinstance(found := vars(one).get(name), property) and found.fget is not None:
            own = found.fget.__annotations__.get("return")
        if own is not None:
            holder = types.SimpleNamespace(__annotations__={name: own})
            return get_type_hints(holder, vars(sys.modules[one.__module__]), include_extras=True)[name]
    return None
