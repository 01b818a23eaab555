"""Batches by number: batch k is always the same, so a position in the data is one integer."""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrain.data import nested, randomness
from foretrain.data.order import random_integer, shuffled
from foretrain.errors import ConfigError, DataError
from foretrain.models.loss import IGNORED

ORDER_BLOCK = 4096
_GRACE = 10
"""Seconds that a worker outlives SIGTERM."""


class Samples(Protocol):
    """A finite set of samples that can be fetched by number.

    With an attribute `deterministic = True` it says that fetching draws no random numbers from the global generators,
    so that a thread may do it ahead.
    """

    def __len__(self) -> int: ...
    def fetch(self, indices: NDArray[np.int64], epoch: int) -> Any: ...


class TokenWindows:
    """A token stream cut into windows of `context` tokens and their targets; the cuts move with every epoch."""

    deterministic = True

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
    """Any object with `len()` and integer indexing, such as a `torch.utils.data.Dataset`.

    What a sample draws from the global generators of torch, numpy and Python follows from (seed, epoch, index) alone,
    and leaves them as they were. deterministic: nothing is drawn, so that samples may be fetched ahead by a thread;
    None: so it is if all values are in memory already (a TensorDataset, tensor, array, list or tuple).
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, deterministic: bool | None = None
    ) -> None:
        from torch.utils.data import default_collate

        if len(dataset) == 0:
            raise DataError("the data set is empty")
        self.dataset = dataset
        self.collate = collate or default_collate
        self.deterministic = collate is None and _in_memory(dataset) if deterministic is None else deterministic

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: NDArray[np.int64], epoch: int, seed: int = 0) -> Any:
        if self.deterministic:
            return self.collate([self.dataset[int(index)] for index in indices])
        samples: list[Any] = []
        with randomness.undisturbed():
            for index, key in zip(indices.tolist(), randomness.sample_keys(seed, epoch, indices), strict=True):
                randomness.start_generators(key)
                samples.append(self.dataset[index])
            _start_batch(seed, epoch, indices)
            return self.collate(samples)


def _in_memory(dataset: Any) -> bool:
    """Return whether getting a sample runs no code but torch's, numpy's or Python's own."""
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    if type(dataset) is Subset:
        return _in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_in_memory(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, Tensor, np.ndarray, np.memmap, list, tuple, range)


def _start_batch(seed: int, epoch: int, indices: NDArray[np.int64]) -> None:
    randomness.start_generators(randomness.sample_keys(seed, epoch, indices[:1], randomness.BATCH)[0])


class Loader:
    """Endless batches in an order that follows from (seed, epoch, index) alone.

    Iterating starts at `position` and moves it. `seek(position)` goes anywhere at once.

    prefetch: batches prepared ahead, by a thread if the samples are deterministic, else by as many processes as
    `workers` says. Without workers, samples that may draw random numbers are fetched when they are needed: the
    generators they draw from are those of the whole process.

    rank, world: of several processes each fetches its rows of every batch, as many as the others. `batch_size` and
    `position` stay those of the whole: with another number of processes the same batches follow.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        seed: int,
        prefetch: int = 4,
        pin_memory: bool = False,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size % world:
            raise ConfigError(
                f"batch_size = {batch_size} rows cannot be shared by {world} ranks: it must be a multiple of {world}"
            )
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.workers = workers
        self.rows = batch_size // world
        """Rows of a batch that this process fetches."""
        self.first_row = rank * self.rows
        self.position = 0
        self._block: tuple[int, int, NDArray[np.int64]] | None = None

    def seek(self, position: int) -> None:
        """Go on with batch number `position`."""
        self.position = position

    def batch(self, position: int) -> Any:
        """Return this process's rows of batch number `position`, which may span the end of one epoch and the start of
        the next."""
        count = len(self.samples)
        first = position * self.batch_size + self.first_row
        end = first + self.rows
        pieces: list[Any] = []
        while first < end:
            epoch, index = divmod(first, count)
            stop = min(index + end - first, count)
            pieces.append(self._fetch(self._order(np.arange(index, stop), epoch), epoch))
            first += stop - index
        return nested.join(pieces)

    def _fetch(self, indices: NDArray[np.int64], epoch: int) -> Any:
        if isinstance(self.samples, MappedSamples):
            return self.samples.fetch(indices, epoch, self.seed)
        if self._deterministic:
            return self.samples.fetch(indices, epoch)
        with randomness.undisturbed():
            _start_batch(self.seed, epoch, indices)
            return self.samples.fetch(indices, epoch)

    @property
    def _deterministic(self) -> bool:
        return bool(getattr(self.samples, "deterministic", False))

    @property
    def batches_per_epoch(self) -> float:
        """Batches may reach from one epoch into the next, so it need not be whole."""
        return len(self.samples) / self.batch_size

    def _order(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return this epoch's order at `indices`, from a block computed ahead: one call for many small batches."""
        start, stop = int(indices[0]), int(indices[-1]) + 1
        block = self._block
        if block is None or block[0] != epoch or start < block[1] or stop > block[1] + len(block[2]):
            count = len(self.samples)
            ahead = np.arange(start, max(stop, min(count, start + ORDER_BLOCK)))
            block = self._block = (epoch, start, shuffled(ahead, count, self.seed, epoch))
        return block[2][indices - block[1]]

    def __iter__(self) -> Iterator[Any]:
        if self.workers > 0:
            yield from self._from_workers()
        elif self.prefetch > 0 and self._deterministic:
            yield from self._prefetched()
        while True:
            batch = self.batch(self.position)
            self.position += 1
            yield nested.pin(batch) if self.pin_memory else batch

    def _from_workers(self) -> Iterator[Any]:
        """Yield batches in order, each made in a process whose generators are nobody else's."""
        from torch.utils.data import DataLoader

        batches: Any = DataLoader(
            _Numbered(self),  # type: ignore[arg-type]
            batch_size=None,
            sampler=itertools.count(self.position),
            num_workers=self.workers,
            prefetch_factor=max(1, -(-self.prefetch // self.workers)),
            worker_init_fn=_outlive_signals,
            generator=torch.Generator(),  # else starting the workers would draw from the global one
        )
        for batch in batches:
            self.position += 1
            yield nested.pin(batch) if self.pin_memory else batch

    def _prefetched(self) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(maxsize=self.prefetch)
        stop = threading.Event()

        def produce(position: int) -> None:
            while not stop.is_set():
                try:
                    item: Any = self.batch(position)
                    if self.pin_memory:
                        item = nested.pin(item)
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


class _Numbered:
    """Batches by number, for worker processes."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, position: int) -> Any:
        return self.loader.batch(position)


def _outlive_signals(worker: int) -> None:
    """A signal to all processes of a run, as Ctrl-C is one, lets the run end its step: its workers end with it."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE))


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def held_out_batches(tokens: NDArray[Any], context: int, batch_size: int, limit: int) -> list[tuple[Tensor, Tensor]]:
    """Yield always the same held-out windows, spread evenly over all of them.

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
    """Yield the whole windows of `tokens` one after the other, at most `limit` batches of them, spread evenly."""
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
    """Return how many windows `window_batches` gives."""
    count = (len(tokens) - 1) // context
    return count if limit is None else min(count, limit * batch_size)
