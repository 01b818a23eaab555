"""A run read from its log: rollbacks, resumption, replacement, half-written lines."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.show.runs import STARTED, SUMMARY, append, end, moved, progress, some_run, write_run

from foretrain.errors import InputError
from foretrain.events import CheckpointSaved, Evaluated, Event, Notice, Resumed, RunEnded
from foretrain.show import record as records
from foretrain.show.follow import Follower, read_runs
from foretrain.show.pages.report_ledger import ledger_rows
from foretrain.show.record import Entry, RunRecord


def record_of(*told: Event) -> RunRecord:
    record = RunRecord("run")
    for event in told:
        record.take(json.dumps({"event": type(event).__name__, **asdict(event)}))
    return record


def steps_of(record: RunRecord) -> list[int]:
    return [entry.step for entry in record.progress]


def test_steps_that_a_rollback_took_back_are_kept_apart() -> None:
    record = record_of(STARTED, progress(10), progress(20), progress(30), progress(15), progress(25))
    assert steps_of(record) == [10, 15, 25]
    assert sorted(entry.step for entry in record.undone) == [20, 30]


def test_steps_done_again_after_a_kill_are_told_once() -> None:
    saved = CheckpointSaved(20, "checkpoints/20", 1.0, 0.1)
    before = [STARTED, progress(10), progress(20), moved(20), saved, progress(30), moved(35), progress(40)]
    record = record_of(*before, Resumed(20, "checkpoints/20"), progress(30), moved(35))
    assert steps_of(record) == [10, 20, 30]
    assert record.undone == []
    assert [entry.kind for entry in record.decisions] == ["Moved", "Resumed", "Moved"]


def test_a_resumption_from_a_checkpoint_not_in_the_log_goes_by_its_step() -> None:
    record = record_of(STARTED, progress(10), progress(20), progress(30), Resumed(15, "elsewhere"))
    assert steps_of(record) == [10]


def ledger_of(record: RunRecord) -> list[list[str]]:
    return [row for name, block in ledger_rows([record]).items() if name.startswith("rows/") for row in block]


def test_a_resumption_says_what_was_done_again_and_only_then() -> None:
    saved = CheckpointSaved(20, "checkpoints/20", 1.0, 0.1)
    killed = record_of(STARTED, progress(10), progress(20), saved, progress(30), Resumed(20, "checkpoints/20"))
    assert ledger_of(killed)[-1][-1] == "went on from a checkpoint; 10 steps after it were done again"
    ended = RunEnded(20, "interrupted", {})
    clean = record_of(STARTED, progress(10), progress(20), saved, ended, Resumed(20, "checkpoints/20"))
    assert ledger_of(clean)[-1][-1] == "went on from a checkpoint"


def test_a_rollback_before_a_resumption_is_nothing_done_again() -> None:
    saved = CheckpointSaved(20, "checkpoints/20", 1.0, 0.1)
    record = record_of(STARTED, progress(40), progress(20), saved, Resumed(20, "checkpoints/20"))
    assert ledger_of(record)[-1][-1] == "went on from a checkpoint"


def test_the_clock_of_the_ledger_never_runs_backwards() -> None:
    """Steps and times between two entries are guessed; what is read afterwards puts them right."""
    saved = CheckpointSaved(59, "checkpoints/59", 1.0, 0.1)
    slow, fast = progress(50, seconds=100.0), progress(60, seconds=101.0)
    told = [moved(55), saved, RunEnded(59, "interrupted", {}), Notice("stopped", "info"), Resumed(59, "x")]
    told += [Notice("a setting was changed", "info"), dataclasses.replace(STARTED, step=59), Notice("a note", "info")]
    for more in ([], [fast], [fast, moved(61)]):
        record = record_of(STARTED, slow, *told, *more)
        times = [entry.seconds for entry in record.decisions]
        assert times == sorted(times)
        assert [entry.step for entry in record.decisions[:4]] == [55, 59, 59, 59]
        assert not more or max(times[:4]) <= 101.0


def test_progress_keeps_only_what_is_shown() -> None:
    record = record_of(STARTED, progress(10))
    assert "tokens" not in record.progress[0].fields
    assert record.last("loss") == 2.0


def test_a_long_run_takes_little_memory() -> None:
    """Some 720 bytes an entry it was, and 300,000 entries are not rare."""
    lines = [json.dumps({"event": "Progress", **asdict(progress(step, 1 / step))}) for step in range(10, 20_010, 10)]
    record = RunRecord("run")
    tracemalloc.start()
    for line in lines:
        record.take(line)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept / len(lines) < 400
    assert record.progress[99].fields["loss"] == 1 / 1000
    assert record.progress[99].fields["phase"] == "full"
    assert record.progress[99].fields["gain_percent"] is None
    assert len(dict(record.progress[99].fields)) == len(record.progress[99].fields)


def test_reading_takes_time_in_proportion_to_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Counting(Entry):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += name == "step"
            return super().__getattribute__(name)

    monkeypatch.setattr(records, "Entry", Counting)
    record = record_of(STARTED, *(Evaluated(step, 1.0, 0.1, False, False) for step in range(1, 301)))
    assert len(record.evaluations) == 300
    assert looked < 5 * 300


def test_evaluations_of_steps_done_again_are_told_once() -> None:
    record = record_of(STARTED, *(Evaluated(step, 1.0, 0.1, False, False) for step in (10, 20, 30, 20, 25)))
    assert [entry.step for entry in record.evaluations] == [10, 20, 25]


def test_a_run_that_begins_anew_in_the_same_log_forgets_the_first() -> None:
    record = record_of(STARTED, progress(10), moved(10), STARTED, progress(5))
    assert steps_of(record) == [5]
    assert record.decisions == []


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "[]", "null", "3", '"text"', '{"event": 3}', '{"event": "Unknown"}', '{"no": "event"}'),
        '{"event": "Progress"}',
        '{"event": "Progress", "step": null, "loss": NaN}',
        '{"event": "Progress", "step": "many", "loss": "high", "seconds": {}}',
        '{"event": "Moved", "step": 1e400}',
        '{"event": "HealthMeasured", "layers": 3}',
        '{"event": "HealthMeasured", "layers": {"a": 3, "b": {"gradient_norm": "high"}}}',
        '{"event": "HealthFound", "value": "high", "change": 4}',
        "\ufeff{}",
    ],
)
def test_no_line_stops_the_reader(line: str) -> None:
    from foretrain.show.pages.report_page import page

    record = record_of(STARTED, progress(10))
    record.take(line)
    record.take(line.encode())
    assert "<html" in page([record])


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [STARTED, progress(10)])
    follower = Follower(folder)
    assert follower.poll()
    assert not follower.poll()
    line = json.dumps({"event": "Progress", "step": 20, "loss": 1.5, "seconds": 2.0}) + "\n"
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line[:20])
        file.flush()
        assert not follower.poll()
        file.write(line[20:])
        file.flush()
        assert follower.poll()
    assert steps_of(follower.record) == [10, 20]


@pytest.mark.parametrize("steps", [[5], [10, 20, 30, 40]], ids=["shorter", "longer"])
def test_a_log_that_was_replaced_is_read_anew(tmp_path: Path, steps: list[int]) -> None:
    folder = write_run(tmp_path / "run", [STARTED, progress(10), progress(20)])
    follower = Follower(folder)
    follower.poll()
    (folder / "metrics.jsonl").unlink()
    follower.poll()
    assert follower.record.progress == []
    write_run(folder, [STARTED, *(progress(step, 7.0) for step in steps)])
    version = follower.version
    assert follower.poll()
    assert follower.version != version
    assert steps_of(follower.record) == steps
    assert {entry.fields["loss"] for entry in follower.record.progress} == {7.0}


def test_a_log_written_over_in_place_is_noticed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [STARTED, progress(10), progress(20)])
    follower = Follower(folder)
    follower.poll()
    other = write_run(tmp_path / "other", [STARTED, *(progress(step, 7.0) for step in (3, 6, 9, 12))])
    (folder / "metrics.jsonl").write_bytes((other / "metrics.jsonl").read_bytes())
    assert follower.poll()
    assert steps_of(follower.record) == [3, 6, 9, 12]


def test_the_summary_counts_only_while_the_run_has_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", some_run(), SUMMARY, "interrupted")
    follower = Follower(folder)
    follower.poll()
    assert follower.record.state == "interrupted"
    assert follower.record.summary["final_val_loss"] == 1.25
    started: dict[str, Any] = {"event": "RunStarted", "step": 100, "max_steps": 200, "title": "tiny"}
    append(folder, started)
    follower.poll()
    assert (follower.record.state, follower.record.summary) == ("running", {})
    end(folder, SUMMARY | {"final_val_loss": 0.5})
    follower.poll()
    assert follower.record.summary["final_val_loss"] == 0.5


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InputError, match=r"no run folder \(it holds no metrics\.jsonl\)"):
            read_runs([folder])


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "run", [STARTED]) for parent in "ab"]
    assert [record.name for record in read_runs(folders)] == [str(folder) for folder in folders]
    assert [record.name for record in read_runs(folders[:1])] == ["run"]
