"""Many adapters in memory beside one live model: a swap writes one index, nothing is allocated or compiled anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain.errors import CheckpointError, ConfigError
from foretrain.models import base_weights, lora
from foretrain.models.adapter_files import Adapter, fitted, read_adapter

NONE = 0
"""The slot of the base model; it holds zeros."""


class AdapterChoice(nn.Module):
    """Holds which slot each row of a batch uses: one module that all layers share."""

    one: Tensor
    rows: Tensor

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(1, dtype=torch.long, device=device), persistent=False)
        self.register_buffer("rows", torch.zeros(max_rows, dtype=torch.long, device=device), persistent=False)
        self.slot = NONE
        self.count = 0
        """How many rows have a slot of their own; 0: all use the same."""

    @torch.no_grad()
    def set(self, slots: Sequence[int]) -> None:
        """Choose one slot for all, or one for each row."""
        if len(set(slots)) == 1:
            self.one.fill_(slots[0])
            self.slot, self.count = slots[0], 0
        else:
            self.rows[: len(slots)].copy_(torch.tensor(slots))
            self.slot, self.count = NONE, len(slots)


class ResidentLinear(lora.AdaptedLinear):
    """`base(x)` plus the chosen adapter's update; all adapters lie in two stacks, scaled and padded to one rank."""

    a: Tensor
    b: Tensor

    def __init__(self, base: nn.Module, choice: AdapterChoice, slots: int, max_rank: int, dtype: torch.dtype) -> None:
        super().__init__(base)
        inputs, outputs = lora.layer_size(base)
        device = cast("Tensor", base.weight).device
        self.choice = choice
        self.register_buffer("a", torch.zeros(slots, max_rank, inputs, dtype=dtype, device=device), persistent=False)
        self.register_buffer("b", torch.zeros(slots, outputs, max_rank, dtype=dtype, device=device), persistent=False)

    def _chosen(self, recorded: bool) -> tuple[Tensor, Tensor]:
        """One adapter's matrices. What is recorded (compiled, or a CUDA graph) looks the slot up on the device."""
        if recorded:
            return self.a.index_select(0, self.choice.one)[0], self.b.index_select(0, self.choice.one)[0]
        return self.a[self.choice.slot], self.b[self.choice.slot]

    @property
    def weight(self) -> Tensor:
        """Return the weight with the chosen adapter, for code that reads it instead of calling the layer."""
        weight = cast("Tensor", self.base.weight)
        if self.choice.count:
            raise ConfigError("this model reads the layers' weights, so all rows must use the same adapter")
        recorded = _is_recorded(weight)
        if not recorded and self.choice.slot == NONE:
            return weight
        a, b = self._chosen(recorded)
        update = b @ a
        return weight + (update.t() if lora.is_conv1d(self.base) else update).to(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        choice, recorded = self.choice, _is_recorded(x)
        if choice.count:
            return self._per_row(x, y)
        if not recorded and choice.slot == NONE:
            return y
        a, b = self._chosen(recorded)
        adapted = y + F.linear(F.linear(x.to(a.dtype), a), b).to(y.dtype)
        return torch.where(choice.one > NONE, adapted, y) if recorded else adapted

    def _per_row(self, x: Tensor, y: Tensor) -> Tensor:
        count = self.choice.count
        if x.shape[0] != count:
            raise ConfigError(
                f"adapters are chosen for {count} rows, but a layer got {x.shape[0]}; name one adapter for each row of "
                "the batch (a model that does not keep the batch first needs one adapter for all)"
            )
        index = self.choice.rows[:count]
        a, b = self.a.index_select(0, index), self.b.index_select(0, index)
        update = torch.bmm(torch.bmm(x.reshape(count, -1, x.shape[-1]).to(a.dtype), a.mT), b.mT)
        chosen = (index > NONE).view(-1, *[1] * (y.ndim - 1))
        return torch.where(chosen, y + update.view(y.shape).to(y.dtype), y)


def _is_recorded(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class Resident:
    """One adapter in memory."""

    name: str
    rank: int
    layers: tuple[str, ...]
    active: bool


@dataclass(frozen=True)
class _Entry:
    slot: int
    rank: int
    layers: tuple[str, ...]


class AdapterRegistry:
    """Adapters by name for one model.

    `activate` chooses for all later calls. Where several threads share the model, each wraps its calls in `serving`:
    requests take turns, and one in progress keeps its adapters whatever is activated meanwhile.
    """

    @torch.inference_mode(False)  # stacks made in inference mode could not be filled outside of it
    def __init__(
        self,
        model: nn.Module,
        capacity: int = 8,
        max_rank: int = 16,
        *,
        targets: tuple[str, ...] = ("*",),
        max_rows: int = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("capacity", capacity), ("max_rank", max_rank), ("max_rows", max_rows)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: give at least 1")
        lora.refuse_adapted(model)
        bases = lora.linear_layers(model, targets)
        weights = {path: cast("Tensor", base.weight) for path, base in bases.items()}
        devices = {weight.device for weight in weights.values()}
        if len(devices) > 1:
            raise ConfigError(f"the model's layers lie on several devices ({devices}); a registry needs them on one")
        self.model = model
        self.capacity = capacity
        self.max_rank = max_rank
        self._choice = AdapterChoice(max_rows, devices.pop())
        self._layers: dict[str, ResidentLinear] = {}
        for path, base in bases.items():
            kind = dtype or (weights[path].dtype if weights[path].is_floating_point() else torch.float32)
            self._layers[path] = ResidentLinear(base, self._choice, capacity + 1, max_rank, kind)
        for layer in self._layers.values():
            lora.replace_module(model, layer.base, layer)
        self._entries: dict[str, _Entry] = {}
        self._active: str | None = None
        self._lock = threading.Lock()
        """Held for moments only: the entries, the stacks' free slots and the index change under it."""
        self._turn = threading.Lock()
        """Held for a whole request; a stream may end in another thread, so it belongs to none."""
        self._server: int | None = None

    @property
    def active(self) -> str | None:
        """Return the adapter of calls outside `serving`; None is the base model."""
        return self._active

    @property
    def bytes(self) -> int:
        """Return the memory of the stacks, the same from the first load to the last."""
        return sum(stack.nbytes for layer in self._layers.values() for stack in (layer.a, layer.b))

    def list(self) -> list[Resident]:
        """Return what is in memory, in the order of loading."""
        with self._lock:
            return [Resident(name, e.rank, e.layers, name == self._active) for name, e in self._entries.items()]

    def load(self, name: str, adapter: Adapter | str | Path, any_base: bool = False) -> None:
        """Bring an adapter into memory; requests in progress go on meanwhile. A refused one changes nothing.

        any_base: also one that was trained on other weights than the model's."""
        own = self._checked(name, read_adapter(adapter) if not isinstance(adapter, Adapter) else adapter)
        if own.base_checksum and not any_base:
            base_weights.check(own.base_checksum, self._base_checksum)
        with self._lock:
            if name in self._entries:
                raise ConfigError(f"adapter {name!r} is loaded already; unload it first or choose another name")
            taken = {entry.slot for entry in self._entries.values()}
            free = next((slot for slot in range(1, self.capacity + 1) if slot not in taken), None)
            if free is None:
                raise ConfigError(
                    f"adapter {name!r}: the capacity of {self.capacity} is full: unload one or make the "
                    "registry larger with grow()"
                )
            self._fill(free, own)
            self._entries[name] = _Entry(free, own.settings.rank, own.settings.targets)

    @cached_property
    def _base_checksum(self) -> str:
        return base_weights.checksum(self.model)

    def _checked(self, name: str, adapter: Adapter) -> Adapter:
        if not name:
            raise ConfigError("an adapter needs a name of at least one character")
        settings = adapter.settings
        if settings.rank > self.max_rank:
            raise ConfigError(
                f"adapter {name!r} has rank {settings.rank}, the registry holds up to {self.max_rank}; make it with "
                f"max_rank = {settings.rank}"
            )
        if settings.bias != "none":
            raise ConfigError(
                f"adapter {name!r} also changes biases (bias = {settings.bias!r}), which cannot be swapped; merge it "
                "into a model of its own, or train it with bias = 'none'"
            )
        try:
            return fitted(adapter, self.model, {path: layer.base for path, layer in self._layers.items()})
        except CheckpointError as error:
            raise CheckpointError(f"adapter {name!r} does not fit: {error}") from None

    @torch.no_grad()
    def _fill(self, slot: int, adapter: Adapter) -> None:
        rank = adapter.settings.rank
        for path, layer in self._layers.items():
            layer.a[slot].zero_()
            layer.b[slot].zero_()
            if f"{path}.lora_a" in adapter.tensors:
                layer.a[slot, :rank].copy_(adapter.tensors[f"{path}.lora_a"])
                layer.b[slot, :, :rank].copy_(adapter.tensors[f"{path}.lora_b"].float() * adapter.settings.scaling)

    def unload(self, name: str) -> None:
        """Free an adapter's slot, once the request in progress is done."""
        self._refuse_inside("unload")
        with self._turn, self._lock:
            self._slot(name)
            if name == self._active:
                raise ConfigError(f"adapter {name!r} is active; deactivate it or activate another before unloading it")
            del self._entries[name]

    def activate(self, name: str) -> None:
        """Use this adapter from now on; a request in progress keeps its own."""
        with self._lock:
            self._slot(name)
            self._active = name
            self._restore()

    def deactivate(self) -> None:
        """Use the base model from now on; a request in progress keeps its own adapter."""
        with self._lock:
            self._active = None
            self._restore()

    @contextmanager
    def serving(self, names: str | Sequence[str | None] | EllipsisType | None = ...) -> Iterator[None]:
        """Hold a choice for one request: a name, None for the base model, one of them for each row, or (by default)
        what is active when its turn comes."""
        self._refuse_inside("serving")
        with self._turn:
            with self._lock:
                self._choice.set(self._slots(names))
                self._server = threading.get_ident()
            try:
                yield
            finally:
                with self._lock:
                    self._server = None
                    self._restore()

    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Make room for more adapters: this alone allocates, and a compiled model compiles once more."""
        self._refuse_inside("grow")
        with self._turn, self._lock:
            if capacity <= self.capacity:
                raise ConfigError(f"the registry holds {self.capacity} adapters already; grow({capacity}) adds nothing")
            added = capacity - self.capacity
            stacks = {
                layer: [torch.cat([s, s.new_zeros(added, *s.shape[1:])]) for s in (layer.a, layer.b)]
                for layer in self._layers.values()
            }
            for layer, (a, b) in stacks.items():
                layer.a, layer.b = a, b
            self.capacity = capacity

    def close(self) -> None:
        """Take the serving layers out; the model is as it was before the registry."""
        self._refuse_inside("close")
        with self._turn, self._lock:
            for layer in self._layers.values():
                lora.replace_module(self.model, layer, layer.base)
            self._layers.clear()
            self._entries.clear()
            self._active = None

    def _refuse_inside(self, what: str) -> None:
        if self._server == threading.get_ident():
            raise ConfigError(f"{what} inside serving() would wait for itself; call it after the request")

    def _restore(self) -> None:
        if self._server is None:
            self._choice.set([NONE if self._active is None else self._slot(self._active)])

    def _slot(self, name: str | None) -> int:
        if name is None:
            return NONE
        if name not in self._entries:
            loaded = ", ".join(self._entries) or "none"
            raise ConfigError(f"adapter {name!r} is not loaded; load it first (loaded: {loaded})")
        return self._entries[name].slot

    def _slots(self, names: str | Sequence[str | None] | EllipsisType | None) -> Sequence[int]:
        if isinstance(names, EllipsisType):
            names = self._active
        if names is None or isinstance(names, str):
            return [self._slot(names)]
        if not 1 <= len(names) <= len(self._choice.rows):
            raise ConfigError(f"{len(names)} rows to choose for; the registry takes 1 to {len(self._choice.rows)}")
        return [self._slot(name) for name in names]
