"""TensorBoard: an event file in `tensorboard/` of the run folder."""

from __future__ import annotations

import shlex
import time
from typing import Any

from foretrain.persist.files import make_folder
from foretrain.show.trackers.entries import TrackerEntry
from foretrain.show.trackers.tracker import Place, Tracker


class TensorBoard(Tracker):
    """Uses tensorboardX, which needs nothing but protobuf to write what TensorBoard reads.

    Its `SummaryWriter` has a thread of its own that stops silently when the disk is full, and then blocks; the writer
    below it says so.
    """

    def __init__(self, place: Place) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._make, self._events = summary, event_pb2
        self._settings = dict(place.settings)
        folder = place.folder / "tensorboard"
        make_folder(folder)
        self.look = f"{folder} (look at it with: tensorboard --logdir {shlex.quote(str(folder))})"
        part = sum(1 for _ in folder.iterdir())  # a run that was resumed within a second has a file of its own, too
        self._writer = EventsWriter(str(folder / "events"), f".{part}")

    def start(self, step: int) -> None:
        """Steps after this one, of a run that was killed, are no longer shown: they are done again."""
        again = self._events.SessionLog(status=self._events.SessionLog.START)
        self._put(step + 1, session_log=again)
        shown = dict.fromkeys(("train/loss", "held_out/loss"))
        experiment, session, self._end = self._make.hparams(self._settings, shown)
        self._put(step, summary=experiment)
        self._put(step, summary=session)
        rows = "\n".join(f"|{name}|{value}|" for name, value in self._settings.items())
        self._put(step, summary=self._make.text("configuration", f"|setting|value|\n|---|---|\n{rows}"))
        self._writer.flush()

    def log(self, entry: TrackerEntry) -> None:
        for name, value in entry.numbers.items():
            self._put(entry.step, summary=self._make.scalar(name, value))
        for kind, text in entry.texts.items():
            self._put(entry.step, summary=self._make.text(kind, text))
        self._writer.flush()

    def close(self, reason: str) -> None:
        if reason in ("finished", "stopped early"):
            self._put(0, summary=self._end)
        self._writer.close()

    def _put(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), step=step, **content))
