"""Real sweeps of tiny runs: pieces that add up, workers that die, disks that fill, trials that diverge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_disk import small_disk
from tests.show.runs import write_run
from tests.waiting import HANGS

from foretrain import config as configuration
from foretrain.errors import InputError, OutOfMemory, SaveError
from foretrain.events import Evaluated
from foretrain.recipes import train as recipe
from foretrain.sweep import worker as workers
from foretrain.sweep.place import SPACE_FILE, SweepFolder
from foretrain.sweep.records import TrialRecord
from foretrain.sweep.run import open_sweep
from foretrain.sweep.study import SweepStudy
from foretrain.sweep.worker import Worker

SPACE = """
[base]
max_steps = 16
batch_size = 2
device = "cpu"
[base.data]
path = "{data}"
[base.model]
layers = 1
heads = 2
width = 16
context = 16
[base.evaluation]
batches = 1
[base.hybrid]
mode = "off"
[base.log]
interval = 1
[space]
"optimizer.learning_rate" = {{low = 1e-4, high = 1e-1, log = true}}
[sweep]
trials = {trials}
rungs = {rungs}
references = 1
audit_share = 0.5
{more}
"""
Begin = Callable[..., Worker]


@pytest.fixture
def begin(text_file: Path, tmp_path: Path) -> Begin:
    """begin("name", trials=4) gives a worker of a sweep in a folder of that name."""

    def make(name: str = "sweep", trials: int = 3, more: str = "", space: str = SPACE, rungs: str = "[0.5]") -> Worker:
        file = tmp_path / f"{name}.toml"
        file.write_text(space.format(data=text_file, trials=trials, more=more, rungs=rungs))
        folder, read = open_sweep(file, tmp_path / name)
        return Worker(folder, read)

    return make


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def undisturbed(begin: Begin, known: dict[str, Any]) -> list[tuple[Any, ...]]:
    """How a sweep of three trials ends that nobody disturbs."""
    if not known:
        worker = begin("undisturbed")
        worker.work()
        known["ends"] = ends(worker)
    return list(known["ends"])


def ends(worker: Worker) -> list[tuple[Any, ...]]:
    """What must be the same however often a sweep was disturbed."""
    return [
        (one.number, one.state, one.rung, one.step, one.final, one.audited_from, one.losses, one.annealed)
        for one in worker.study.records()
    ]


def test_a_sweep_trains_in_pieces_and_a_trial_that_ends_is_an_ordinary_run(begin: Begin, tmp_path: Path) -> None:
    worker = begin(rungs="[0.25, 0.5]")
    worker.work()
    records = worker.study.records()
    stopped = worker.policy.stopped(records)
    assert sum(record.audited for record in records) == -(-len(stopped) // 2) > 0
    best = min((one for one in records if one.final is not None), key=lambda one: one.final or 0.0)
    config = configuration.load(worker.folder.run(best.number) / "config.toml").config
    assert config.max_steps == 16
    alone = recipe.train(config, tmp_path / "alone", progress=False)
    assert alone["final_val_loss"] == best.final, "pieces change nothing"
    assert best.standing is not None
    assert best.standing.method == "annealed copy", "the schedule falls"
    assert [copy[1] for copy in best.annealed] == [1, 1]
    assert best.cost == pytest.approx(18 / 16)


def test_a_worker_that_is_killed_loses_nothing(begin: Begin, undisturbed: list[Any]) -> None:
    worker = begin("killed")
    command = [sys.executable, "-m", "foretrain.sweep.worker", str(worker.folder.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for(lambda: len(list(worker.folder.runs.glob("trial-*/metrics.jsonl"))) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait(HANGS)
    worker.work()
    assert ends(worker) == undisturbed


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None, "the worker ended by itself"
        assert time.monotonic() < deadline, "the worker hangs"
        time.sleep(0.005)


def test_two_workers_share_a_sweep(begin: Begin) -> None:
    """The second takes what the first has left, and never what it has."""
    one = begin()
    two = Worker(one.folder, one.space)
    with one.folder.deciding():
        taken = one._take(one.current_records())
    assert taken is not None
    record, claim = taken
    with two.folder.deciding():
        other = two._take(two.current_records())
    assert other is not None
    assert other[0].number != record.number
    for held in (claim, other[1]):
        held.release()
    two.work()
    assert all(found.state in ("finished", "paused") for found in two.study.records())


def test_what_another_worker_has_just_finished_is_not_taken_over(begin: Begin) -> None:
    worker = begin()
    with worker.folder.deciding():
        before = worker.current_records()
        taken = worker._take(before)
    assert taken is not None
    stale = worker.study.records()
    worker._carry_out(*taken)
    taken[1].release()
    assert worker._claim(stale[0]) is None, "it was running when the records were read, and is paused now"


def test_two_sweeps_of_two_folders_share_one_storage(begin: Begin, tmp_path: Path) -> None:
    shared = f'storage = "sqlite:///{tmp_path / "shared.db"}"'
    one, two = begin("one", more=shared), begin("two", more=shared)
    with one.folder.deciding():
        first = one._take(one.current_records())
    assert first is not None
    with two.folder.deciding():
        second = two._take(two.current_records())
    assert second is not None
    assert second[0].number != first[0].number, "one's trial stays one's"
    for _, claim in (first, second):
        claim.release()
    two._carry_out(*second)
    one.work()
    two.work()
    one.work()
    records = one.study.records()
    assert ends(one) == ends(two)
    assert {record.place for record in records} == {one.place, two.place}
    assert len(records) == 3
    assert any(record.final is not None for record in records)
    other = SPACE.replace("1e-4", "1e-3")
    with pytest.raises(InputError, match="a sweep of another base or space"):
        begin("three", more=shared, space=other)


def test_a_trial_that_was_just_made_when_its_worker_died_is_completed(begin: Begin, undisturbed: list[Any]) -> None:
    worker = begin()
    worker.study._study.ask()
    assert worker.study.records()[0].values == {}
    worker.work()
    assert ends(worker) == undisturbed


def test_a_trial_that_kills_its_workers_is_given_up(begin: Begin) -> None:
    worker = begin(trials=2)
    with worker.folder.deciding():
        taken = worker._take(worker.current_records())
    assert taken is not None
    for _ in range(9):
        worker.study.write(worker._take_over(taken[0]))  # killed before its run began: nobody knows why
    taken[1].tell(3)
    taken[1].release()
    worker.study.write(worker.study.records()[0].with_changes(deaths=4))
    worker.work()
    first = worker.study.records()[0]
    assert (first.state, first.reason) == ("failed", "its worker died 5 times after step 0")


def test_a_trial_that_fails_costs_little_and_ends_alone(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    train = recipe.train

    def failing(config: Any, path: Path, **options: Any) -> Any:
        if path.name == "trial-0001":
            raise OutOfMemory("no memory is left")
        return train(config, path, **options)

    monkeypatch.setattr(recipe, "train", failing)
    worker = begin()
    worker.work()
    records = worker.study.records()
    assert (records[1].state, records[1].reason) == ("failed", "no memory is left")
    assert records[1].cost == 0
    assert any(record.final is not None for record in records)


def test_a_rate_that_diverges_really_does(begin: Begin) -> None:
    wild = SPACE.replace("low = 1e-4, high = 1e-1", "low = 1e28, high = 1e30").replace(
        "max_steps = 16", "max_steps = 60"
    )
    worker = begin(trials=1, space=wild.replace("[base.log]", '[base.optimizer]\ntype = "sgd"\n[base.log]'))
    worker.work()
    (record,) = worker.study.records()
    assert record.state == "failed"
    assert "not finite" in record.reason or "no number" in record.reason
    assert record.cost < 1


def test_a_full_disk_stops_the_worker_and_loses_nothing(begin: Begin, undisturbed: list[Any]) -> None:
    worker = begin("full")
    with small_disk(15_000), pytest.raises(SaveError):
        worker.work()
    assert all(record.state != "failed" for record in worker.study.records())
    worker.work()
    assert ends(worker) == undisturbed


def test_an_interrupted_piece_is_gone_on_with(
    begin: Begin, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = begin("interrupted")
    tell = workers.Claim.tell

    def interrupt(claim: Any, step: int) -> None:
        tell(claim, step)
        if step == 3:
            monkeypatch.setattr(workers.Claim, "tell", tell)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(workers.Claim, "tell", interrupt)
    with pytest.raises(workers.SweepStopped, match="SIGTERM: trial 0 is saved at step 3"):
        worker.work()
    assert worker.study.records()[0].state == "running"
    worker.work()
    assert ends(worker) == undisturbed


def test_a_worker_elsewhere_that_fell_silent_is_not_waited_for(begin: Begin) -> None:
    worker = begin(trials=2)
    worker.study._study.ask()
    away = TrialRecord(0, {}, "running", 16, place="elsewhere", seen=time.time())
    worker.study.write(away)
    assert [record.open for record in worker.current_records()] == [True]
    worker.study.write(away.with_changes(seen=time.time() - 10_000))
    assert [record.open for record in worker.current_records()] == [False]
    worker.work()
    assert worker.study.records()[1].final is not None


def test_a_larger_sweep_goes_on_with_what_is_there(begin: Begin) -> None:
    worker = begin(trials=2)
    worker.work()
    before = {record.number: record.final for record in worker.study.records()}
    larger = begin(trials=3)
    larger.work()
    records = larger.study.records()
    assert len(records) == 3
    assert all(records[number].final == final for number, final in before.items() if final is not None)


def test_the_folder_of_another_sweep_is_refused(begin: Begin, tmp_path: Path) -> None:
    begin("one")
    with pytest.raises(InputError, match="a sweep of another base or space"):
        begin("one", space=SPACE.replace("max_steps = 16", "max_steps = 32"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(InputError, match="there is something in it, and no sweep"):
        begin("other")
    with pytest.raises(InputError, match="name a space file"):
        open_sweep(None, tmp_path / "none")


def test_storage_that_cannot_be_used(begin: Begin) -> None:
    with pytest.raises((InputError, SaveError), match="nowhere"):
        begin(more='storage = "sqlite:////nowhere/at/all.db"')
    with pytest.raises(InputError, match="cannot be used"):
        begin("two", more='storage = "postgresql://user:secret@host/none"')


def test_optunas_own_tools_can_read_the_study(begin: Begin) -> None:
    import optuna

    worker = begin()
    worker.work()
    study = optuna.load_study(study_name="sweep", storage=worker.study.address)
    best = min(record.final for record in worker.study.records() if record.final is not None)
    assert study.best_value == best
    assert set(study.trials[0].intermediate_values) == {step for step, _ in worker.study.records()[0].losses}
    assert json.loads((worker.folder.runs / "trial-0000" / "summary.json").read_text())["final_val_loss"] == (
        study.trials[0].value
    )
    assert isinstance(SweepStudy(worker.space, worker.folder.path).importances(), dict)
    assert (SweepFolder(worker.folder.path).path / SPACE_FILE).is_file()


def test_a_held_out_loss_of_nothing_is_a_loss(begin: Begin) -> None:
    worker = begin()
    write_run(worker.folder.run(0), [Evaluated(8, 0.5, 0.1, False, True), Evaluated(16, 0.0, 0.1, False, True)])
    assert worker.with_curve(TrialRecord(0)).losses == ((8, 0.5), (16, 0.0))
