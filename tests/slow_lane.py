"""A side stream at its slowest, for tests without a GPU: whoever does not wait for a copy finds out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.engine.memory.host import Lane


def spoil(tensor: Tensor) -> None:
    """Not what anybody expects there."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 113)


class _Place:
    """Where a tensor is in memory, without keeping that memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.dtype = tensor.dtype
        self.memory = StorageWeakRef(tensor.untyped_storage())

    def tensor(self) -> Tensor | None:
        """None: the memory was given back."""
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return None if memory is None else torch.empty(0, dtype=self.dtype).set_(memory, *self.form)


class _Queueing(TorchDispatchMode):
    """Copies inside the block are put off."""

    def __init__(self, lane: SlowLane) -> None:
        super().__init__()
        self.lane = lane

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name == "aten::copy_":
            self.lane.put_off(args[0], args[1])
            return args[0]
        if name == "aten::_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self.lane.put_off(target, source)
            return None
        made = function(*args, **(kwargs or {}))
        assert not name.startswith("aten::empty") or made.is_meta, "memory of the side stream: only it may use that"
        return made


class SlowLane(Lane):
    """What is copied on it happens only when somebody waits for it, and in the order in which it was asked for.

    Until then there is no sense in what is copied to. Memory that is given back without `used` is another's at once.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ahead: list[Callable[[], object]] = []
        """Work on the current stream that was asked for and is not done yet."""
        self._copies: list[tuple[_Place, _Place]] = []
        self._held: list[Any] = []

    @contextmanager
    def behind(self, size: int = 0) -> Iterator[None]:
        self.catch_up()
        with _Queueing(self):
            yield

    def put_off(self, target: Tensor, source: Tensor) -> None:
        self._copies.append((_Place(target), _Place(source)))
        if all(read.memory != StorageWeakRef(target.untyped_storage()) for _, read in self._copies):
            spoil(target)

    def used(self, tensor: Tensor) -> None:
        self._held.append(tensor.untyped_storage())

    def join(self) -> None:
        if self._copies:
            self.catch_up()
        for to, of in self._copies:
            target, source = to.tensor(), of.tensor()
            assert target is not None, "a copy to memory that is another's by now"
            if source is None:
                spoil(target)
            else:
                target.copy_(source)
        self._copies.clear()
        self._held.clear()

    def finish(self) -> None:
        self.catch_up()
        SlowLane.join(self)

    def catch_up(self) -> None:
        """The current stream does what it was asked for."""
        for work in self.ahead:
            work()
        self.ahead.clear()


class LaneForHost(SlowLane):
    """As the host sees it: nothing has arrived because streams wait for each other."""

    def join(self) -> None:
        """The host does not wait."""
