"""Batches by number: batch k is always the same, so a position in the data is one integer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrain.data.order import random_integer, shuffled
from foretrain.errors import DataError

ORDER_BLOCK = 4096
IGNORED = -100
"""Targets with this value do not count in the loss."""


class Samples(Protocol):
    """A finite set of samples that can be fetched by number."""

    def __len__(self) -> int: ...
    def fetch(self, indices: NDArray[np.int64], epoch: int) -> Any: ...


class TokenWindows:
    """A token stream cut into windows of `context` tokens and their targets; the cuts move with every epoch."""

    def __init__(self, tokens: NDArray[Any], context: int, seed: int, name: str = "data.path") -> None:
        if len(tokens) < context + 1:
            raise DataError(
                f"{name}: {len(tokens)} tokens are too few for model.context = {context} "
                f"(at least {context + 1} are needed); use more text, a shorter context or another data.held_out"
            )
        self.tokens = tokens
        self.context = context
        self.seed = seed
        self._count = max(1, (len(tokens) - context) // context)
        self._reach = np.arange(context + 1)

    def __len__(self) -> int:
        return self._count

    def _offset(self, epoch: int) -> int:
        slack = len(self.tokens) - 1 - self._count * self.context
        return random_integer(self.seed, epoch, min(self.context, slack + 1))

    def fetch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Tensor, Tensor]:
        starts = indices * self.context + self._offset(epoch)
        windows = torch.from_numpy(self.tokens[starts[:, None] + self._reach].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


class MappedSamples:
    """Any object with `len()` and integer indexing, such as a `torch.utils.data.Dataset`."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        from torch.utils.data import default_collate

        if len(dataset) == 0:
            raise DataError("the data set is empty")
        self.dataset = dataset
        self.collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: NDArray[np.int64], epoch: int) -> Any:
        return self.collate([self.dataset[int(index)] for index in indices])


class Loader:
    """Endless batches in an order that follows from (seed, epoch, index) alone.

    Iterating starts at `position` and moves it. `seek(position)` goes anywhere at once.
    """

    def __init__(
        self, samples: Samples, batch_size: int, seed: int, prefetch: int = 4, pin_memory: bool = False
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.position = 0
        self._block: tuple[int, int, NDArray[np.int64]] | None = None

    def seek(self, position: int) -> None:
        """Go on with batch number `position`."""
        self.position = position

    def batch(self, position: int) -> Any:
        """Batch number `position`. A batch may span the end of one epoch and the start of the next."""
        count = len(self.samples)
        first = position * self.batch_size
        pieces: list[Any] = []
        while first < (position + 1) * self.batch_size:
            epoch, index = divmod(first, count)
            stop = min(index + (position + 1) * self.batch_size - first, count)
            pieces.append(self.samples.fetch(self._order(np.arange(index, stop), epoch), epoch))
            first += stop - index
        return _join(pieces)

    def _order(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """This epoch's order at `indices`, from a block computed ahead: one call for many small batches."""
        start, stop = int(indices[0]), int(indices[-1]) + 1
        block = self._block
        if block is None or block[0] != epoch or start < block[1] or stop > block[1] + len(block[2]):
            count = len(self.samples)
            ahead = np.arange(start, max(stop, min(count, start + ORDER_BLOCK)))
            block = self._block = (epoch, start, shuffled(ahead, count, self.seed, epoch))
        return block[2][indices - block[1]]

    def __iter__(self) -> Iterator[Any]:
        if self.prefetch == 0:
            while True:
                batch = self.batch(self.position)
                self.position += 1
                yield batch
        yield from self._prefetched()

    def _prefetched(self) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(maxsize=self.prefetch)
        stop = threading.Event()

        def produce(position: int) -> None:
            while not stop.is_set():
                try:
                    item: Any = self.batch(position)
                    if self.pin_memory:
                        item = _pin(item)
                except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
                    item = _Failure(error)
                while not stop.is_set():
                    try:
                        ready.put(item, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                position += 1

        thread = threading.Thread(target=produce, args=(self.position,), name="foretrain-loader", daemon=True)
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, _Failure):
                    raise item.error
                self.position += 1
                yield item
        finally:
            stop.set()
            thread.join()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _like(batch: Any, parts: list[Any]) -> Any:
    """A tuple, named tuple or list of `parts`, as `batch` is one."""
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _pin(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: _pin(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return _like(batch, [_pin(value) for value in batch])
    return batch


def _join(pieces: Sequence[Any]) -> Any:
    """Concatenate batches along their first dimension."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(pieces))
    if isinstance(first, dict):
        return {key: _join([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, (tuple, list)):
        return _like(first, [_join([piece[place] for piece in pieces]) for place in range(len(first))])
    raise DataError(f"a batch of {type(first).__name__} cannot span two epochs; return tensors, tuples or dicts")


def held_out_batches(tokens: NDArray[Any], context: int, batch_size: int, limit: int) -> list[tuple[Tensor, Tensor]]:
    """Always the same held-out windows, spread evenly over all of them.

    Every batch has the same shape; what is missing in the last one is filled with targets that do not count.
    """
    if len(tokens) < context + 1:
        raise DataError(
            f"held-out data: {len(tokens)} tokens are too few for model.context = {context} "
            f"(at least {context + 1} are needed); use more text, a shorter context or a larger data.held_out"
        )
    return list(window_batches(tokens, context, batch_size, limit))


def window_batches(
    tokens: NDArray[Any], context: int, batch_size: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole windows of `tokens` one after the other, at most `limit` batches of them, spread evenly."""
    count = windows_in(tokens, context, batch_size, limit)
    chosen = np.unique(np.linspace(0, (len(tokens) - 1) // context - 1, count).round().astype(np.int64))
    for first in range(0, len(chosen), batch_size):
        starts = chosen[first : first + batch_size] * context
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        missing = (0, 0, 0, batch_size - len(rows))
        inputs = torch.nn.functional.pad(rows[:, :-1], missing)
        targets = torch.nn.functional.pad(rows[:, 1:], missing, value=IGNORED)
        yield inputs, targets


def windows_in(tokens: NDArray[Any], context: int, batch_size: int, limit: int | None) -> int:
    """How many windows `window_batches` gives."""
    count = (len(tokens) - 1) // context
    return count if limit is None else min(count, limit * batch_size)
