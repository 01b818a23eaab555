"""What is not needed for a while lives in host memory: snapshots, and the optimizer's state during PREDICT."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.engine.batch import tensors_of
from foretrain.engine.memory.host import Lane, copy_each, host_like, on_device
from foretrain.persist.codec import Snapshot, form_of, take_apart

_UNNOTICED = 0.8
"""Share of the device's time that copies beside its work may take. More would make it wait now and then."""


class HostSnapshots:
    """Snapshots in host memory, filled on a side stream. Those of one run use the same memory over and over."""

    def __init__(self, device: torch.device, stays: tuple[str, ...] = ()) -> None:
        """stays: names begin so of what is on the host anyway."""
        self.lane = Lane(device)
        self.stays = stays

    @torch.no_grad()
    def take(self, state: Any, into: Snapshot | None = None) -> Snapshot:
        """`into`: an older one, whose memory is used again. What is copied must not change before `lane.join`."""
        parts = take_apart(state)
        old = into.tensors if into is not None else {}
        if any(not _fits(memory, parts.tensors.get(name)) for name, memory in old.items()):
            self.lane.finish()  # memory is about to be given back
        copies = {name: self._memory(name, tensor, old.get(name)) for name, tensor in parts.tensors.items()}
        with self.lane.behind():
            for name, tensor in parts.tensors.items():
                copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
                self.lane.used(tensor)
        return Snapshot(copies, parts.tree, parts.spread)

    def _memory(self, name: str, tensor: Tensor, old: Tensor | None) -> Tensor:
        if old is not None and _fits(old, tensor):
            return old
        if name.startswith(self.stays):
            return torch.empty_like(tensor, device="cpu")
        return host_like(tensor, self.lane.device)


def _fits(memory: Tensor, tensor: Tensor | None) -> bool:
    return tensor is not None and form_of(memory) == form_of(tensor)


class Aside:
    """Copies of some tensors: beside them, or in host memory that is used over and over."""

    def __init__(self, tensors: Sequence[Tensor], on_host: bool) -> None:
        self.tensors = list(tensors)
        self.on_host = on_host
        self._memory: dict[str, list[Tensor]] = {}

    def keep(self, name: str, values: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A copy of the tensors as they are, or of `values` of their form; in host memory it replaces an older one of
        that name."""
        values = self.tensors if values is None else values
        if self.on_host and name not in self._memory:
            self._memory[name] = [host_like(tensor, tensor.device) for tensor in self.tensors]
        memory = self._memory[name] if self.on_host else [torch.empty_like(tensor) for tensor in self.tensors]
        copy_each(memory, values)
        return memory

    @torch.no_grad()
    def add_to(self, sums: Sequence[Tensor]) -> None:
        """Add the tensors to `sums`, which is such a copy."""
        if not self.on_host:
            torch._foreach_add_(list(sums), self.tensors)
            return
        for value, tensor in zip(sums, self.tensors, strict=True):
            added = on_device(value, tensor.device)
            torch._foreach_add_([added], [tensor])
            copy_each([value], [added])


class Parking:
    """Tensors that leave the device for a while and come back. They stay the same objects: while they are away their
    data is in host memory, where it can be read after `lane.finish`."""

    def __init__(self, device: torch.device) -> None:
        self.lane = Lane(device)
        self._away: list[tuple[Tensor, Tensor]] = []
        """Tensors that are away, and their host memory."""
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}
        """Host memory by form, to be used again."""
        self._lent: set[int] = set()
        """Host memory that is another's."""

    @property
    def away(self) -> bool:
        return bool(self._away)

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor], copies: Mapping[int, Tensor] | None = None) -> None:
        """Copy to host memory what is not there yet, and free it on the device.

        copies: by id of a tensor, what already is a copy of it in host memory, and stays one until it is back.
        """
        self.lane.join()  # of an earlier way back
        known, there = copies or {}, {id(tensor) for tensor, _ in self._away}
        leaving = [(tensor, known.get(id(tensor))) for tensor in _separate(tensors) if id(tensor) not in there]
        gone: list[tuple[Tensor, Tensor]] = []
        with self.lane.behind(sum(tensor.nbytes for tensor, copy in leaving if copy is None)):
            for tensor, copy in leaving:
                host = copy if copy is not None else self._take(tensor)
                if copy is None:
                    host.copy_(tensor, non_blocking=tensor.is_cuda)
                    self.lane.used(tensor)
                else:
                    self._lent.add(id(host))
                gone.append((tensor, host))
        for tensor, host in gone:
            tensor.data = host  # nobody else holds its memory on the device: it is free for others
        self._away += gone

    @torch.no_grad()
    def fetch(self, most: float = math.inf) -> None:
        """Begin to bring it back, no more bytes than `most`; `lane.join` before it is used."""
        coming, others = _split(most, self._away)
        if not coming:
            return
        device = self.lane.device
        places = [torch.empty_like(host, device=device) for _, host in coming]  # from the current stream's memory
        with self.lane.behind(sum(place.nbytes for place in places)):
            for (_, host), place in zip(coming, places, strict=True):
                place.copy_(host, non_blocking=place.is_cuda)
                self.lane.used(place)
        for (tensor, host), place in zip(coming, places, strict=True):
            tensor.data = place
            if id(host) not in self._lent:
                self._free.setdefault(_layout(host), []).append(host)
            self._lent.discard(id(host))
        self._away = others

    def back(self) -> None:
        """Everything is where it was."""
        self.fetch()
        self.lane.join()

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Host memory for all of them, at once: to pin more of it later would stop the device again."""
        for host in [self._take(tensor) for tensor in tensors]:
            self._free.setdefault(_layout(host), []).append(host)

    def _take(self, tensor: Tensor) -> Tensor:
        memory = self._free.get(_layout(torch.empty_like(tensor, device="meta")))
        return memory.pop() if memory else host_like(tensor, self.lane.device)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return *form_of(tensor), tensor.stride()


def _separate(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that fill a memory of their own: a view can leave neither alone nor with what it is a view of."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in unique)

    def own(tensor: Tensor) -> bool:
        memory = tensor.untyped_storage()
        return tensor.numel() * tensor.element_size() == memory.nbytes() > 0 and users[memory.data_ptr()] == 1

    return [tensor for tensor in unique if own(tensor)]


class OptimizerParking:
    """The optimizer's state and the gradients leave the device, and are back before anything uses them.

    The next full step makes gradients anew, so they are dropped; the state is parked. The optimizer itself may be
    asked for its state or given another at any time.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.parking = Parking(device)
        self._to_leave: list[tuple[Tensor, Tensor | None]] | None = None
        """While it leaves: what is still here, and copies of it in host memory."""
        self._left = 0
        """Bytes that have left so far."""
        optimizer.register_step_pre_hook(lambda *_: self.back())
        optimizer.register_state_dict_pre_hook(lambda _: self._readable())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.back())

    @property
    def away(self) -> bool:
        return self.parking.away

    @property
    def begun(self) -> bool:
        """It is leaving, away or on its way back."""
        return self._to_leave is not None

    def leave(
        self, snapshot: Mapping[str, Any] | None = None, at_once: float = math.inf, in_all: float = math.inf
    ) -> None:
        """Also in several calls; none leaves after `fetch` before all of it was `back`.

        snapshot: a state of the optimizer in host memory, equal to the present one and not overwritten meanwhile; the
        first call is the one to give it to.
        at_once, in_all: so many bytes leave by this call, and by all, at the most.
        """
        if self._to_leave is None:
            for parameter in self.parameters:
                parameter.grad = None
            self._to_leave, self._left = self._found(snapshot), 0
            self.parking.reserve(tensor for tensor, copy in self._to_leave if copy is None)
        some, self._to_leave = _split(min(at_once, in_all - self._left), self._to_leave)
        self._left += sum(tensor.nbytes for tensor, _ in some)
        self.parking.park([t for t, _ in some], {id(t): copy for t, copy in some if copy is not None})

    def _found(self, snapshot: Mapping[str, Any] | None) -> list[tuple[Tensor, Tensor | None]]:
        state = self.optimizer.state_dict()["state"]
        here = [t for t in tensors_of(state) if t.ndim and t.device.type == self.parking.lane.device.type]
        copies: dict[int, Tensor] = {}
        if snapshot is not None:
            pairs = zip(tensors_of(state), tensors_of(snapshot["state"]), strict=True)
            copies = {id(t): copy for t, copy in pairs if _layout(t) == _layout(copy)}
        return [(tensor, copies.get(id(tensor))) for tensor in _separate(here)]

    def hidden_bytes(self, seconds: float) -> float:
        """What can be copied beside something that takes so long, and is done before it."""
        rate = self.parking.lane.rate
        return rate if math.isinf(rate) else _UNNOTICED * rate * seconds

    def fetch(self, most: float = math.inf) -> None:
        """Begin to come back, beside what the device does meanwhile, no more bytes than `most`."""
        self.parking.fetch(most)
        self._to_leave = []

    def back(self) -> None:
        self.parking.back()
        self._to_leave = None

    def _readable(self) -> None:
        if self.away:
            self.parking.lane.finish()
        else:
            self.parking.lane.join()


_Pair = TypeVar("_Pair", bound=tuple[Tensor, Any])


def _split(most: float, pairs: Iterable[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Those whose tensors have no more bytes than `most` together, and the others."""
    fit: list[_Pair] = []
    others: list[_Pair] = []
    for pair in pairs:
        fits = pair[0].nbytes <= most
        most -= pair[0].nbytes if fits else 0
        (fit if fits else others).append(pair)
    return fit, others
