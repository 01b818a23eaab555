"""A tracker never stops a run, never makes a step wait, and hears everything in order."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.show.trackers.conftest import LAST, fit, tiny_config

from foretrain.events import Bus, Evaluated, Event, Notice, RunEnded, RunStarted
from foretrain.show.trackers.entries import Entry
from foretrain.show.trackers.listener import TrackerListener
from foretrain.show.trackers.tensorboard import TensorBoard
from foretrain.show.trackers.tracker import Tracker

STARTED = RunStarted(0, 10, 1, 1, "cpu", "fp32", "a model")
ENDED = RunEnded(3, "finished", {"final_val_loss": 0.5, "config": {"seed": 1}})


def evaluated(step: int) -> Evaluated:
    return Evaluated(step, float(step), 0.1, False, True)


class Notebook(Tracker):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.threads: set[int] = set()

    def start(self, step: int) -> None:
        self.told.append(("start", step))

    def log(self, entry: Entry) -> None:
        self.threads.add(threading.get_ident())
        self.told.append(entry)

    def close(self, reason: str) -> None:
        self.told.append(("close", reason))


def on_a_bus(tracker: Tracker, **options: Any) -> tuple[Bus, TrackerListener, list[Event]]:
    bus, heard = Bus(), []
    bus.subscribe(heard.append)
    listener = TrackerListener("notebook", tracker, bus.emit, **options)
    bus.subscribe(listener)
    return bus, listener, heard


def notices(heard: list[Event]) -> list[str]:
    return [event.message for event in heard if isinstance(event, Notice)]


def test_everything_is_told_in_order_in_a_thread_of_its_own() -> None:
    notebook = Notebook()
    bus, listener, heard = on_a_bus(notebook)
    for event in (Notice("before it starts"), STARTED, evaluated(1), Notice("careful"), evaluated(3), ENDED):
        bus.emit(event)
    listener.close()
    assert notebook.told == [
        ("start", 0),
        Entry(1, {"held_out/loss": 1.0}),
        Entry(1, texts={"warning": "careful"}),
        Entry(3, {"held_out/loss": 3.0}),
        Entry(3, {"summary/final_val_loss": 0.5}, {"summary/reason": "finished"}),
        ("close", "finished"),
    ]
    assert threading.get_ident() not in notebook.threads
    assert notices(heard) == ["before it starts", "careful"]


def test_a_run_that_never_ended_is_closed_as_failed() -> None:
    notebook = Notebook()
    bus, listener, _ = on_a_bus(notebook)
    bus.emit(STARTED)
    listener.close()
    assert notebook.told == [("start", 0), ("close", "failed")]


class Full(Notebook):
    """Fails at its second entry."""

    def log(self, entry: Entry) -> None:
        super().log(entry)
        if len(self.told) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tracker_that_fails_is_off_after_one_warning() -> None:
    full = Full()
    bus, listener, heard = on_a_bus(full)
    for event in (STARTED, *map(evaluated, range(1, 6)), ENDED):
        bus.emit(event)
    listener.close()
    assert len(notices(heard)) == 1
    assert notices(heard)[0].startswith("tracker notebook failed and is off from here on (OSError: [Errno 28] No space")
    assert [entry.step for entry in full.told if isinstance(entry, Entry)] == [1, 2]
    assert full.told[-1][0] == "close"


def test_a_failure_at_the_very_end_is_told_too() -> None:
    class Unclosable(Notebook):
        def close(self, reason: str) -> None:
            raise ValueError("the last page is missing")

    bus, listener, heard = on_a_bus(Unclosable())
    bus.emit(STARTED)
    bus.emit(ENDED)
    listener.close()
    listener.close()
    assert len(notices(heard)) == 1
    assert "the last page is missing" in notices(heard)[0]


def test_no_step_waits_for_a_tracker() -> None:
    free = threading.Event()

    class Stuck(Notebook):
        def start(self, step: int) -> None:
            free.wait()
            super().start(step)

    stuck = Stuck()
    bus, listener, heard = on_a_bus(stuck, patience=0.01)
    for event in (STARTED, evaluated(1), ENDED):
        bus.emit(event)
    assert stuck.told == [], "all was emitted while the tracker had done nothing"
    listener.close()
    (notice,) = notices(heard)
    assert notice.startswith("tracker notebook has not written everything within 0.01 seconds; the run itself goes on")
    free.set()
    listener._thread.join()
    assert stuck.told[-1] == ("close", "finished")


def test_a_run_outlives_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real writer of TensorBoard's files, whose disk is full from the fourth step on."""
    from tensorboardX.record_writer import RecordWriter

    really = TensorBoard.log

    def log(self: TensorBoard, entry: Entry) -> None:
        if entry.step == 4:
            monkeypatch.setattr(RecordWriter, "write", full)
        really(self, entry)

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoard, "log", log)
    summary = fit(tiny_config(log__trackers=["tensorboard"]), tmp_path / "run")
    assert (summary["reason"], summary["global_step"]) == ("finished", LAST)
    log_lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert log_lines.count("tracker tensorboard failed and is off from here on") == 1
    assert summary["final_val_loss"] == fit(tiny_config(), tmp_path / "plain")["final_val_loss"]
