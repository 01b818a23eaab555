"""Numbers about the run: kept on the device, read once per interval; and clocks that stop for evaluation and saving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.step import StepOutput
from foretrain.engine.world import ALONE, World
from foretrain.persist.stateful import Stateful

_READ_AT_LEAST_EVERY = 1000
Row = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """Averages over the steps since the last reading."""

    loss: float
    gradient_norm: float
    skipped: int
    steps: int


class StepMeter(Stateful):
    """Collects step outputs without looking at them. Only `read` and `fetch` wait for the device.

    Somebody who wants every single row starts noting, and takes the rows now and then. On a GPU rows are taken one look
    late: by then they have long arrived, and the device never stands still for it.
    """

    saved = ("skipped", "skipped_in_a_row", "unread", "_noted", "_due")
    unread: list[Row]
    _noted: list[Row] | None

    def __init__(self, lagging: bool = False, world: World = ALONE) -> None:
        self._lagging = lagging
        self._world = world
        self._outputs: list[Tensor] = []
        self._flights: list[tuple[Tensor, torch.cuda.Event | None]] = []
        """Rows on their way to the host."""
        self.unread = []
        """(loss, gradient norm, skipped) of the steps since the last reading, as far as they were fetched."""
        self.skipped = 0
        """Skipped steps so far."""
        self.skipped_in_a_row = 0
        self._noted = None
        """A copy of these rows for whoever takes them; None while nobody wants them."""
        self._due = 0
        """How many of them were made before the last look."""
        self._made = 0
        """Rows made since noting began that were not taken yet, those on their way included."""
        self.tap: Callable[[list[Row]], None] | None = None
        """Called with all rows, in order, as they arrive."""

    def add(self, output: StepOutput) -> None:
        self._outputs.extend((output.loss, output.gradient_norm, output.skipped))
        self._made += 1
        if len(self._outputs) >= 3 * _READ_AT_LEAST_EVERY:
            self.fetch()

    def fetch(self) -> None:
        """All rows to the host, now."""
        self._launch()
        while self._flights:
            self._land()

    def _launch(self) -> None:
        if not self._outputs:
            return
        self._world.catch_up()
        rows = torch.stack([value.float() for value in self._outputs])
        self._outputs.clear()
        event = None
        if rows.is_cuda:
            stream = torch.cuda.current_stream(rows.device)  # of its own device, which need not be the current one
            rows = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._flights.append((rows, event))

    def _land(self) -> None:
        rows, event = self._flights.pop(0)
        if event is not None:
            event.synchronize()
        values = self._world.to_host(rows)
        found = list(zip(values[::3], values[1::3], values[2::3], strict=True))
        for _, _, skipped in found:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
            self.skipped += int(skipped)
        self.unread.extend(found)
        if self.tap is not None:
            self.tap(found)
        if self._noted is not None:
            self._noted.extend(found)

    # --- every single row --------------------------------------------------------------------------------------------

    @property
    def noting(self) -> bool:
        return self._noted is not None

    def start_noting(self) -> None:
        """From now on, whatever was noted before."""
        self.fetch()
        self._noted, self._due, self._made = [], 0, 0

    def stop_noting(self) -> None:
        self._noted = None

    def take_noted(self, everything: bool = False) -> list[Row]:
        """(loss, gradient norm, skipped) of the steps up to the last look, or of all steps."""
        if everything or not self._lagging:
            self.fetch()
            rows, self._noted = self._noted or [], []
            self._due = self._made = 0
            return rows
        while self._flights:
            self._land()
        self._launch()
        noted = self._noted or []
        rows, self._noted = noted[: self._due], noted[self._due :]
        self._made -= len(rows)
        self._due = self._made
        return rows

    @property
    def untaken(self) -> int:
        """Rows that the next look, or the one after it, will see."""
        return self._made

    def state_dict(self) -> dict[str, Any]:
        """Fetches everything first."""
        self.fetch()
        return super().state_dict()

    def after_load(self) -> None:
        self._outputs.clear()
        self._flights.clear()
        self._made = len(self._noted or ())

    def read(self) -> Reading | None:
        """Averages over good steps since the last call (all steps, if none was good); None if there was no step."""
        self.fetch()
        rows, self.unread = self.unread, []
        if not rows:
            return None
        good = [row for row in rows if not row[2]] or rows
        return Reading(
            loss=math.fsum(row[0] for row in good) / len(good),
            gradient_norm=math.fsum(row[1] for row in good) / len(good),
            skipped=sum(bool(bad) for _, _, bad in rows),
            steps=len(rows),
        )


class Stopwatch:
    """Seconds of training, over all parts of a resumed run; stands still inside `paused()`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._started: float | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self) -> None:
        self._before = self.seconds
        self._started = None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._started if self._started is not None else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        running = self._started is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()
