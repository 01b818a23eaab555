"""Numbers about the run: kept on the device, read once per interval; and clocks that stop for evaluation and saving."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from foretrain.engine.step import StepOutput

_READ_AT_LEAST_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Reading:
    """Averages over the steps since the last reading."""

    loss: float
    gradient_norm: float
    skipped: int
    steps: int


class StepMeter:
    """Collects step outputs without looking at them. `read` is the only place that waits for the device."""

    def __init__(
        self,
        skipped: int = 0,
        skipped_in_a_row: int = 0,
        unread: Sequence[tuple[float, float, float]] = (),
        noted: Sequence[tuple[float, float, float]] | None = None,
    ) -> None:
        self._outputs: list[Tensor] = []
        self.noted = None if noted is None else _rows(noted)
        """The same rows once more for whoever takes them with `take_noted`; None while nobody wants them."""
        self.unread = _rows(unread)
        """(loss, gradient norm, skipped) of the steps since the last reading, as far as they were fetched."""
        self.skipped = int(skipped)
        """Skipped steps so far."""
        self.skipped_in_a_row = int(skipped_in_a_row)

    def add(self, output: StepOutput) -> None:
        self._outputs.extend((output.loss, output.gradient_norm, output.skipped))
        if len(self._outputs) >= 3 * _READ_AT_LEAST_EVERY:
            self.fetch()

    def fetch(self) -> None:
        if not self._outputs:
            return
        values = torch.stack([value.float() for value in self._outputs]).tolist()
        self._outputs.clear()
        rows = list(zip(values[::3], values[1::3], values[2::3], strict=True))
        for _, _, skipped in rows:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
            self.skipped += int(skipped)
        self.unread.extend(rows)
        if self.noted is not None:
            self.noted.extend(rows)

    def take_noted(self) -> list[tuple[float, float, float]]:
        """(loss, gradient norm, skipped) of the steps since `noted` was started or last taken."""
        self.fetch()
        rows, self.noted = self.noted or [], []
        return rows

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


def _rows(rows: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    return [(float(loss), float(norm), float(bad)) for loss, norm, bad in rows]


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
