"""A tracker never stops a run, never makes a step wait, and hears everything in order."""

from __future__ import annotations

import errno
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.show.trackers.conftest import LAST, fit, tiny_config

from foretrain.events import Bus, Evaluated, Event, Notice, RunEnded, RunStarted
from foretrain.show.trackers import listener as module
from foretrain.show.trackers.entries import TrackerEntry
from foretrain.show.trackers.listener import TrackerListener, close_all
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

    def log(self, entry: TrackerEntry) -> None:
        self.threads.add(threading.get_ident())
        self.told.append(entry)

    def close(self, reason: str) -> None:
        self.told.append(("close", reason))


def on_a_bus(tracker: Tracker) -> tuple[Bus, TrackerListener, list[Event]]:
    bus, heard = Bus(), []
    bus.subscribe(heard.append)
    listener = TrackerListener("notebook", tracker, bus.emit)
    bus.subscribe(listener)
    return bus, listener, heard


def notices(heard: list[Event]) -> list[str]:
    return [event.message for event in heard if isinstance(event, Notice)]


def test_everything_is_told_in_order_in_a_thread_of_its_own() -> None:
    notebook = Notebook()
    bus, listener, heard = on_a_bus(notebook)
    for event in (Notice("before it starts"), STARTED, evaluated(1), Notice("careful"), evaluated(3), ENDED):
        bus.emit(event)
    close_all([listener])
    assert notebook.told == [
        ("start", 0),
        TrackerEntry(1, {"held_out/loss": 1.0}),
        TrackerEntry(1, texts={"warning": "careful"}),
        TrackerEntry(3, {"held_out/loss": 3.0}),
        TrackerEntry(3, {"summary/final_val_loss": 0.5}, {"summary/reason": "finished"}),
        ("close", "finished"),
    ]
    assert threading.get_ident() not in notebook.threads
    assert notices(heard) == ["before it starts", "careful"]


def test_the_end_of_a_run_says_where_to_look() -> None:
    notebook = Notebook()
    notebook.look = "notes.txt (look at it with: cat notes.txt)"
    bus, listener, heard = on_a_bus(notebook)
    bus.emit(STARTED)
    assert notices(heard) == []
    bus.emit(ENDED)
    close_all([listener])
    assert notices(heard) == ["notebook: notes.txt (look at it with: cat notes.txt)"]
    assert [type(entry).__name__ for entry in notebook.told] == ["tuple", "TrackerEntry", "tuple"]


def test_a_run_that_never_ended_is_closed_as_failed() -> None:
    notebook = Notebook()
    bus, listener, _ = on_a_bus(notebook)
    bus.emit(STARTED)
    close_all([listener])
    assert notebook.told == [("start", 0), ("close", "failed")]


class Full(Notebook):
    """Fails at its second entry."""

    def log(self, entry: TrackerEntry) -> None:
        super().log(entry)
        if len(self.told) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tracker_that_fails_is_off_after_one_warning() -> None:
    full = Full()
    bus, listener, heard = on_a_bus(full)
    for event in (STARTED, *map(evaluated, range(1, 6)), ENDED):
        bus.emit(event)
    close_all([listener])
    assert len(notices(heard)) == 1
    assert notices(heard)[0].startswith("tracker notebook failed and is off from here on (OSError: [Errno 28] No space")
    assert [entry.step for entry in full.told if isinstance(entry, TrackerEntry)] == [1, 2]
    assert full.told[-1][0] == "close"


def test_nothing_piles_up_for_a_tracker_that_has_failed() -> None:
    bus, listener, _ = on_a_bus(Full())
    for event in (STARTED, *map(evaluated, range(1, 6))):
        bus.emit(event)
    listener._thread.join()
    bus.emit(evaluated(6))
    waiting = listener._tasks.qsize()
    for event in map(evaluated, range(7, 100)):
        bus.emit(event)
    assert listener._tasks.qsize() == waiting
    close_all([listener])


@pytest.mark.parametrize("where", ["log", "close"])
def test_a_tracker_that_wants_to_end_the_program_is_off_like_any_other(where: str) -> None:
    class Leaving(Notebook):
        def log(self, entry: TrackerEntry) -> None:
            super().log(entry)
            if where == "log":
                sys.exit(3)

        def close(self, reason: str) -> None:
            super().close(reason)
            if where == "close":
                sys.exit(3)

    leaving = Leaving()
    bus, listener, heard = on_a_bus(leaving)
    bus.emit(STARTED)
    bus.emit(evaluated(1))
    if where == "log":
        listener._thread.join()
        bus.emit(evaluated(2))
        assert len(notices(heard)) == 1
    close_all([listener])
    (notice,) = notices(heard)
    assert notice.startswith("tracker notebook failed and is off from here on (SystemExit: 3); the run itself goes on")
    assert leaving.told[-1] == ("close", "failed")


def test_a_thread_that_is_gone_is_told_too() -> None:
    bus, listener, heard = on_a_bus(Notebook())
    bus.emit(STARTED)
    listener._tasks.put(None)  # as if something had ended it
    listener._thread.join()
    bus.emit(evaluated(1))
    bus.emit(evaluated(2))
    close_all([listener])
    (notice,) = notices(heard)
    assert notice.startswith("tracker notebook ended by itself and is off from here on")


def test_several_slow_trackers_end_side_by_side_within_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the number of seconds waited for; each stuck tracker uses up what it is given."""
    free, now, waited = threading.Event(), [100.0], []

    class Stuck(Notebook):
        def close(self, reason: str) -> None:
            free.wait()

    def join(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds
        others[0]._thread.join(20)  # it has been told to end before anybody waits for the first

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bus, first, heard = on_a_bus(Stuck())
    others = [TrackerListener("second", Notebook(), bus.emit), TrackerListener("third", Stuck(), bus.emit)]
    listeners = [first, *others]
    for event in (STARTED, ENDED):
        first(event)
        others[0](event)
    with monkeypatch.context() as patched:
        for listener in (first, others[1]):
            patched.setattr(listener._thread, "join", join)
        close_all(listeners, patience=60.0)
    assert waited == [60.0, 0.0]
    assert [text.partition(" has")[0] for text in notices(heard)] == ["tracker notebook", "tracker third"]
    free.set()
    for listener in listeners:
        listener._thread.join()


def test_a_failure_at_the_very_end_is_told_too() -> None:
    class Unclosable(Notebook):
        def close(self, reason: str) -> None:
            raise ValueError("the last page is missing")

    bus, listener, heard = on_a_bus(Unclosable())
    bus.emit(STARTED)
    bus.emit(ENDED)
    close_all([listener])
    close_all([listener])
    assert len(notices(heard)) == 1
    assert "the last page is missing" in notices(heard)[0]


def test_no_step_waits_for_a_tracker() -> None:
    free = threading.Event()

    class Stuck(Notebook):
        def start(self, step: int) -> None:
            free.wait()
            super().start(step)

    stuck = Stuck()
    bus, listener, heard = on_a_bus(stuck)
    for event in (STARTED, evaluated(1), ENDED):
        bus.emit(event)
    assert stuck.told == [], "all was emitted while the tracker had done nothing"
    close_all([listener], patience=0.01)
    (notice,) = notices(heard)
    assert notice.startswith("tracker notebook has not written everything within 0.01 seconds; the run itself goes on")
    free.set()
    listener._thread.join()
    assert stuck.told[-1] == ("close", "finished")


def test_a_run_outlives_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real writer of TensorBoard's files, whose disk is full from the fourth step on."""
    from tensorboardX.record_writer import RecordWriter

    really = TensorBoard.log

    def log(self: TensorBoard, entry: TrackerEntry) -> None:
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
