"""Put a queue and a thread between the bus and a tracker, so that no step waits for one, and none can stop training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from foretrain.events import Event, Listener, Notice, RunEnded, RunStarted
from foretrain.show.trackers.entries import entry_of, summary_entry
from foretrain.show.trackers.tracker import Tracker

_Task = Callable[[], None]


class TrackerListener:
    """Hears events from `RunStarted` on. A tracker that fails is told nothing any more; the user is told once."""

    def __init__(self, name: str, tracker: Tracker, emit: Listener) -> None:
        self.name = name
        self._tracker = tracker
        self._emit = emit
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._on = True
        self._step = 0
        self._unit = "tokens"
        self._started = self._ending = False
        self._reason = "failed"
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._look()
        if not self._on or self._ending:
            return
        self._step = getattr(event, "step", self._step)
        if isinstance(event, RunStarted):
            self._started, self._unit = True, event.unit
            self._tasks.put(lambda: self._tracker.start(event.step))
        elif isinstance(event, RunEnded):
            self._reason = event.reason
            told = summary_entry(event.step, {"reason": event.reason, **event.summary})
            self._tasks.put(lambda: self._tracker.log(told))
            if self._tracker.look:
                self._emit(Notice(f"{self.name}: {self._tracker.look}", level="info"))
        elif self._started and (entry := entry_of(event, self._step, self._unit)) is not None:
            self._tasks.put(lambda: self._tracker.log(entry))

    def _work(self) -> None:
        """Run in the tracker's thread. It emits nothing itself: other listeners are not made for two threads."""
        try:
            while (task := self._tasks.get()) is not None:
                task()
        except BaseException as error:  # noqa: BLE001 - a tracker may raise anything, even SystemExit
            self._failure = error
        try:
            self._tracker.close(self._reason)
        except BaseException as error:  # noqa: BLE001
            self._failure = self._failure or error

    def _look(self) -> None:
        if not self._on:
            return
        if self._failure is not None:
            self._give_up(f"failed and is off from here on ({type(self._failure).__name__}: {self._failure})")
        elif not self._ending and not self._thread.is_alive():
            self._give_up("ended by itself and is off from here on")

    def _give_up(self, text: str) -> None:
        self._on = False
        self._emit(Notice(f"tracker {self.name} {text}; the run itself goes on, and metrics.jsonl has everything"))

    def finish(self) -> None:
        """End it without waiting for what is not written yet."""
        self._look()
        self._ending = True
        self._tasks.put(None)

    def close(self, until: float, patience: float) -> None:
        """Wait until all is written, at the longest until this moment of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self._look()
        if self._on and self._thread.is_alive():
            self._give_up(f"has not written everything within {patience:g} seconds")
        self._on = False


def close_all(listeners: Sequence[TrackerListener], patience: float = 60.0) -> None:
    """Let all trackers write what is left, side by side. patience: seconds, for all of them together."""
    for listener in listeners:
        listener.finish()
    until = time.monotonic() + patience
    for listener in listeners:
        listener.close(until, patience)
