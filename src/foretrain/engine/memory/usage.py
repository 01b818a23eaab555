"""How much memory each phase of a run takes, from the allocator's own counters. Nothing here waits for the device."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foretrain.config.units import format_size
from foretrain.engine.memory.host import host_bytes
from foretrain.events import Event, MemoryUsed

_NEWS = 1.01
"""A peak is told again when it has risen by this factor: a run of any length tells a limited number of them."""
_UNIT_OF_RESIDENT = 1 if sys.platform == "darwin" else 1024
"""Bytes; getrusage counts in different units."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one phase. A GPU has the first four; elsewhere only the resident memory of the process is known."""

    allocated: int | None = None
    """Held by tensors when the phase was last left."""
    reserved: int | None = None
    """Held by the allocator at the most, its cache included: what other programs see as used."""
    peak: int | None = None
    """Held by tensors at the most."""
    pinned: int | None = None
    """Page-locked host memory; None where torch does not say."""
    resident_peak: int | None = None
    """Highest resident memory of the whole process from its start to the end of the phase, where there is no GPU."""

    @property
    def highest(self) -> int:
        return self.peak or self.resident_peak or 0

    def __or__(self, later: Usage) -> Usage:
        """Both together: the highest of each, and what is allocated now."""
        return Usage(
            later.allocated,
            _larger(self.reserved, later.reserved),
            _larger(self.peak, later.peak),
            _larger(self.pinned, later.pinned),
            _larger(self.resident_peak, later.resident_peak),
        )

    def __str__(self) -> str:
        if self.peak is None:
            return f"the process held {format_size(self.resident_peak or 0, 1)} at the most"
        held = f"{format_size(self.allocated or 0, 1)} allocated, {format_size(self.reserved or 0, 1)} reserved"
        pinned = f", {format_size(self.pinned, 1)} pinned" if self.pinned else ""
        return f"{held}, peak {format_size(self.peak, 1)}{pinned}"


def _larger(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


class MemoryMeter:
    """The memory of every phase. The counters are read when the phase changes, never in a step."""

    def __init__(
        self,
        device: torch.device,
        emit: Callable[[Event], None] = lambda event: None,
        step: Callable[[], int] = lambda: 0,
        on: bool = True,
    ) -> None:
        self.device = device
        self.on = on
        self.phase = "setup"
        self.phases: dict[str, Usage] = {}
        self._emit = emit
        self._step = step
        self._told: dict[str, int] = {}
        if on:
            self._start_peaks()

    def enter(self, phase: str) -> None:
        """What is used from now on belongs to this phase."""
        if phase != self.phase:
            self.read()
            self.phase = phase
            if self.on:
                self._start_peaks()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase that interrupts another one."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def read(self) -> None:
        """Add what was used since the last reading to the phase, and tell a peak that has risen."""
        if not self.on:
            return
        phase = self.phase
        usage = self.phases[phase] = self.phases.get(phase, Usage()) | self.now()
        if usage.highest > _NEWS * self._told.get(phase, 0):
            self._told[phase] = usage.highest
            self._emit(MemoryUsed(self._step(), phase, **asdict(usage)))

    def now(self) -> Usage:
        """Since the phase began."""
        if self.device.type != "cuda":
            return Usage(resident_peak=_UNIT_OF_RESIDENT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        counters = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        allocated, reserved = (
            (counters.get(name) or {}).get("all") or {} for name in ("allocated_bytes", "reserved_bytes")
        )
        return Usage(
            int(allocated.get("current", 0)), int(reserved.get("peak", 0)), int(allocated.get("peak", 0)), _pinned()
        )

    @property
    def peak(self) -> int | None:
        """Return the peak of the whole run on the device."""
        return max((usage.peak for usage in self.phases.values() if usage.peak is not None), default=None)

    def summary(self) -> dict[str, Any]:
        """Per phase, in the order in which they came; only what is known."""
        self.read()
        return {
            phase: {name: value for name, value in asdict(usage).items() if value is not None}
            for phase, usage in self.phases.items()
        }

    def _start_peaks(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def _pinned() -> int:
    """Page-locked memory: torch's, as far as this version counts it, and what stands in for device memory."""
    count: Callable[[], dict[str, Any]] | None = getattr(torch.cuda, "host_memory_stats", None)
    torchs = int(count().get("allocated_bytes.current", 0)) if count is not None else 0
    return torchs + host_bytes()
