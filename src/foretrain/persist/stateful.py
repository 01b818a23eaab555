"""Objects that name what they save: `saved = ("count", "mean", ...)` on the class is all that most of them need.

What is saved is plain: numbers, texts, lists, tuples, dicts and tensors, as `codec` takes apart. It is read back by the
type of the attribute: that of its annotation on the class or, for plain values, that of the value which is there.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretrain.errors import is_out_of_memory
from foretrain.persist.codec import OfRank
from foretrain.persist.typed import (
    ArrayBuffer,
    Buffer,
    Reader,
    StateError,
    annotation,
    device_of,
    entries_of,
    entry,
    kind_of,
)

__all__ = ["ArrayBuffer", "Buffer", "StateError", "Stateful", "entry", "from_plain", "plain"]


class Stateful:
    """Saves and loads the attributes that `saved` names. One that is itself Stateful is saved as a part of its own.

    Attributes that hold None, containers or records need their type on the class: `recent: deque[float]`. `Any` stands
    for what is plain already. A property with a setter may be named, too: it saves something in another form than the
    object holds it. A leading underscore is no part of the name in the state.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    rows_of_rank: ClassVar[tuple[str, ...]] = ()
    """Names in `saved` of batches, of which each of several processes has its own rows."""
    own_of_rank: ClassVar[tuple[str, ...]] = ()
    """Names in `saved` of what belongs to one of several processes, and means nothing to another number of them."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides how the object goes on. Tensors are referred to, not copied."""
        state = {name.lstrip("_"): plain(getattr(self, name)) for name in self.saved}
        for name in (*self.rows_of_rank, *self.own_of_rank):
            entry_name = name.lstrip("_")
            state[entry_name] = OfRank(state[entry_name], rows=name in self.rows_of_rank)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. Raises CheckpointError that names the class and the entry where the state does not fit;
        the attributes of this object are then as they were."""
        kind: Any = type(self)
        own = kind.__name__
        entries = entries_of(state, {name.lstrip("_"): name for name in self.saved}, own)
        parts: list[tuple[Stateful, Any]] = []
        values: dict[str, Any] = {}
        reader = Reader()
        for name, saved in entries:
            place = f"{own}.{name.lstrip('_')}"
            present = None if isinstance(getattr(kind, name, None), property) else getattr(self, name, None)
            if isinstance(present, Stateful):
                if not isinstance(saved, Mapping):
                    raise StateError(f"{place} is {kind_of(saved)}, not a mapping")
                parts.append((present, saved))
                continue
            reader.device = device_of(present) or getattr(self, "device", None)
            values[name] = reader.read(annotation(kind, name) or type(present), saved, present, place)
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
        """Derive what follows from the loaded attributes. It may raise ValueError where they do not belong together."""


def plain(value: Any) -> Any:
    """Return the value as a state holds it. Containers are new, tensors are referred to."""
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
    """Return the value of that type (a class, or any annotation) that `plain` was given. Tensors are copied to the
    device (None: they stay where they are). Raises StateError that names the place."""
    reader = Reader(device)
    return reader.read(kind, saved, None, place)
