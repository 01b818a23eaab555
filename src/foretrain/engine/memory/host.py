"""Host memory that a device copies to and from without waiting, and the side stream on which it does.

Without a CUDA device the same functions use ordinary memory and copy at once, so that everything built on them runs
everywhere.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foretrain.errors import ConfigError


class _Pages(mmap.mmap):
    """Whole pages of their own, locked while they live if a GPU copies to them. They end with the last tensor in them.

    torch's own pinned memory comes in powers of two: up to twice what is asked for.
    """

    in_use = 0
    address = 0
    counted = 0

    def lock(self, address: int) -> None:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            torch.cuda.check_error(cudart.cudaHostRegister(address, len(self), 0))
        except RuntimeError as error:
            raise ConfigError(
                f"{len(self) / 2**20:.0f} MB of host memory cannot be pinned, {_Pages.in_use / 2**20:.0f} MB are "
                f"already ({error}); set memory.snapshots and memory.basis to 'device' and memory.offload to false, or "
                "raise the limit on locked memory (ulimit -l)"
            ) from error
        self.address = address

    def count(self) -> None:
        self.counted = len(self)
        _Pages.in_use += self.counted

    def __del__(self) -> None:
        _Pages.in_use -= self.counted
        if self.address and not sys.is_finalizing():
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.address)


def host_bytes() -> int:
    """How much host memory stands in for device memory now."""
    return _Pages.in_use


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, pinned if `device` is a CUDA device."""
    like = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return host_like(like, device)


def host_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros with the form of `tensor` in host memory, pinned if `device` is a CUDA device."""
    form = torch.empty_like(tensor, device="meta")  # dense, its dimensions in the same order
    size = form.numel() * form.element_size()
    if size == 0:
        return torch.empty_like(tensor, device="cpu")
    pages = _Pages(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=form.dtype, count=form.numel())
    if device.type == "cuda":
        pages.lock(memory.data_ptr())
    pages.count()
    return memory.as_strided(form.size(), form.stride())


_FIRST_RATE = 1e10
"""Bytes per second between device and host memory, before any were copied."""


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Lane:
    """A side stream for copies between a device and host memory; elsewhere than on CUDA copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: torch.cuda.Event | None = None
        self._timed: tuple[int, torch.cuda.Event, torch.cuda.Event] | None = None
        self._rate = math.inf if self._stream is None else _FIRST_RATE

    @contextmanager
    def behind(self, size: int = 0) -> Iterator[None]:
        """Copies inside the block begin when what is queued so far on the current stream is done, and wait for nothing
        that is queued later. size: bytes that are copied, where `rate` is wanted."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        began = self._stream.record_event(_timer()) if size else None
        with torch.cuda.stream(self._stream):
            yield
        self._pending = self._stream.record_event(_timer()) if size else self._stream.record_event()
        if began is not None:
            self._timed = (size, began, self._pending)

    @property
    def rate(self) -> float:
        """Bytes per second, by copies that are done."""
        if self._timed is not None and self._timed[2].query():  # type: ignore[no-untyped-call]
            size, began, ended = self._timed
            self._rate, self._timed = 1e3 * size / max(began.elapsed_time(ended), 1e-3), None
        return self._rate

    def used(self, tensor: Tensor) -> None:
        """Its memory is not given to others before the copies that were queued here are done."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """What is queued on the current stream from now on finds the copies done. The host does not wait."""
        if self._pending is not None:
            torch.cuda.current_stream(self.device).wait_event(self._pending)
            self._pending = None

    def finish(self) -> None:
        """The host waits: afterwards it may read what was copied, or let go of the memory."""
        settle(self.device)


def settle(device: torch.device) -> None:
    """Everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, also between the device and pinned memory, in the order of the stream."""
    if not targets:
        return
    if targets[0].device == sources[0].device:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=target.is_cuda or source.is_cuda)


@torch.no_grad()
def add_each(targets: Sequence[Tensor], sources: Sequence[Tensor], share: float = 1.0) -> None:
    """targets + share x sources, in place. Sources in host memory pass through the device one at a time."""
    if not targets:
        return
    if targets[0].device == sources[0].device:
        torch._foreach_add_(list(targets), list(sources), alpha=share)
        return
    for target, source in zip(targets, sources, strict=True):
        # as a list of one, so that the arithmetic is that of the line above
        torch._foreach_add_([target], [on_device(source, target.device)], alpha=share)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself, or a copy on `device` that later work on the stream finds there."""
    return tensor.to(device, non_blocking=device.type == "cuda")
