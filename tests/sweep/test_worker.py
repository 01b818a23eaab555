"""Real sweeps of tiny runs: pieces that add up, workers that die, disks that fill, trials that diverge."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
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
from foretrain.show.sweep import SweepConsole
from foretrain.sweep import study as study_module
from foretrain.sweep import worker as workers
from foretrain.sweep.place import PAGE, SPACE_FILE, SUMMARY, SweepFolder
from foretrain.sweep.records import Standing, TrialRecord
from foretrain.sweep.run import SweepRun, open_sweep
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


class Waits(Exception):
    """A worker has nothing to do for now."""


def in_vain(seconds: float) -> None:
    raise Waits


def take(worker: Worker) -> Any:
    return worker._take(worker.study.current_records(worker.place))


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
        taken = take(one)
    assert taken is not None
    record, claim = taken
    with two.folder.deciding():
        other = take(two)
    assert other is not None
    assert other[0].number != record.number
    for held in (claim, other[1]):
        held.release()
    two.work()
    assert all(found.state in ("finished", "paused") for found in two.study.records())


def test_what_another_worker_has_just_finished_is_not_taken_over(begin: Begin) -> None:
    worker = begin()
    with worker.folder.deciding():
        before = worker.study.current_records(worker.place)
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
        first = take(one)
    assert first is not None
    with two.folder.deciding():
        second = take(two)
    assert second is not None
    assert second[0].number != first[0].number, "one's trial stays one's"
    for _, claim in (first, second):
        claim.release()
    two._carry_out(*second)
    for worker in (one, two) * 6:
        with contextlib.suppress(Waits):
            worker.work(wait=in_vain)
    one.work(wait=in_vain)
    two.work(wait=in_vain)
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
        taken = take(worker)
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


def test_a_place_that_fell_silent_or_was_stopped_is_not_waited_for(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = begin(trials=2, more=f'storage = "sqlite:///{tmp_path / "shared.db"}"')
    worker.study._study.ask()
    away = TrialRecord(0, {}, "running", 16, place="elsewhere")
    worker.study.write(away)

    def seen(clock: float) -> list[str]:
        monkeypatch.setattr(study_module.time, "time", lambda: clock)
        return [record.state for record in worker.study.current_records(worker.place)]

    now = time.time()
    elsewhere = SweepStudy(worker.space, worker.folder.path)
    elsewhere.show_life("elsewhere")
    assert seen(now + 800) == ["running"]
    worker.study.write(away.with_changes(state="paused"))
    assert seen(now + 800) == ["paused"], "its machine is at work on another one"
    assert seen(now + 1000) == ["failed"]
    elsewhere.show_life("elsewhere")
    assert seen(now + 1800) == ["paused"], "it is back"
    elsewhere.sign_off("elsewhere")
    assert seen(now + 1800) == ["failed"], "it was stopped, so nobody waits"
    worker.work(wait=in_vain)
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
    with pytest.raises(InputError, match="its driver is missing; `pip install 'mysqlclient'`") as refused:
        begin("two", more='storage = "mysql://user:secret@host/none"')
    assert "secret" not in str(refused.value)
    with pytest.raises(InputError, match="cannot be used"):
        begin("three", more='storage = "no address"')


def test_machines_may_make_the_tables_of_one_database_at_the_same_moment(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError

    opened: list[str] = []

    class Late(optuna.storages.RDBStorage):
        def __init__(self, url: str, **options: Any) -> None:
            opened.append(url)
            if len(opened) == 1:
                raise IntegrityError("CREATE TYPE studydirection", {}, Exception("duplicate key"))
            if len(opened) == 2:
                raise OperationalError("CREATE TABLE studies", {}, Exception("table studies already exists"))
            super().__init__(url, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Late)
    assert begin().study.records() == []
    assert len(opened) == 3


def test_of_two_machines_that_make_the_last_trial_at_once_one_is_turned_away(begin: Begin, tmp_path: Path) -> None:
    shared = f'storage = "sqlite:///{tmp_path / "shared.db"}"'
    one, two = begin("one", more=shared, trials=1), begin("two", more=shared, trials=1)
    first, second = one.study.new_trial(), two.study.new_trial()
    assert first is not None
    assert second is None
    one.study.write(first.with_changes(place=one.place, state="running"))
    assert [record.number for record in two.study.current_records(two.place)] == [0]
    one.work()
    assert [record.state for record in one.study.records()] == ["finished"]
    larger = begin("one", more=shared, trials=3)
    larger.work()
    told = [(record.state, "one too many" in record.reason) for record in larger.study.records()]
    assert told[1] == ("failed", True)
    assert told[2][1] is False, "a larger sweep goes on beyond it"


def test_who_has_nothing_to_do_waits_while_trials_of_another_machine_are_due(begin: Begin, tmp_path: Path) -> None:
    shared = f'storage = "sqlite:///{tmp_path / "shared.db"}"'
    one, two = begin("one", more=shared, trials=1), begin("two", more=shared, trials=1)
    two.study.show_life(two.place)
    taken = take(two)
    assert taken is not None
    two._carry_out(*taken)
    taken[1].release()
    assert [record.state for record in one.study.records()] == ["paused"], "no worker has it at this moment"
    with pytest.raises(Waits):
        one.work(wait=in_vain)
    two.work()
    one.work(wait=in_vain)
    assert one.policy.is_complete(one.study.records())


def test_a_server_that_starts_anew_is_waited_for(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import OperationalError

    worker = begin()
    study, broken = worker.study, [OperationalError("SELECT", {}, Exception("the server is starting up"))] * 3
    slept: list[float] = []
    monkeypatch.setattr(study_module.time, "sleep", slept.append)

    def ask() -> str:
        if broken:
            raise broken.pop()
        return "answer"

    with pytest.raises(SaveError, match="the server is starting up"):
        study._ask(ask)
    study._served = True
    assert study._ask(ask) == "answer"
    assert len(slept) == 2
    broken.append(OperationalError("SELECT", {}, Exception("no such host")))
    monkeypatch.setattr(study_module, "_PATIENCE", -1.0)
    with pytest.raises(SaveError, match=r"no such host.*See that its server runs") as told:
        study._ask(ask)
    assert "SELECT" not in str(told.value)


def test_a_server_that_starts_anew_is_waited_for_when_a_sweep_is_opened(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna
    from sqlalchemy.exc import OperationalError

    asked: list[str] = []
    slept: list[float] = []
    storage = optuna.storages.InMemoryStorage()

    def opened(study: SweepStudy) -> optuna.storages.BaseStorage:
        asked.append(study.address)
        if len(asked) < 3:
            raise OperationalError("CREATE TABLE trials", {}, Exception("the server closed the connection"))
        return storage

    monkeypatch.setattr(study_module.time, "sleep", slept.append)
    monkeypatch.setattr(SweepStudy, "_storage", opened)
    assert begin(more='storage = "postgresql://host/sweeps"').study.records() == []
    assert (len(asked), len(slept)) == (3, 2)
    monkeypatch.setattr(study_module, "_AT_FIRST", -1.0)
    asked.clear()
    with pytest.raises(SaveError, match=r"host/sweeps: .*the server closed the connection"):
        begin("two", more='storage = "postgresql://host/sweeps"')


def test_machines_may_close_what_was_stopped_at_the_same_moment(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = f'storage = "sqlite:///{tmp_path / "shared.db"}"'
    one, two = begin("one", more=shared), begin("two", more=shared)
    with one.folder.deciding():
        taken = take(one)
    assert taken is not None
    taken[1].release()
    storage = one.study._study._storage
    ends = storage.set_trial_state_values
    came_between: list[bool] = []

    def late(*arguments: Any, **options: Any) -> bool:
        two.study.close_stopped(taken[0])
        came_between.append(True)
        return ends(*arguments, **options)

    monkeypatch.setattr(storage, "set_trial_state_values", late)
    one.study.close_stopped(taken[0])
    assert came_between == [True]
    two.study.close_stopped(taken[0])
    one.study.report(taken[0].with_changes(state="failed"))
    assert [trial.state.name for trial in two.study._study.get_trials()] == ["PRUNED"]


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


THREE_SETTINGS = SPACE.replace(
    "[sweep]",
    """"optimizer.weight_decay" = {{low = 0.0, high = 0.3}}
"optimizer.nesterov" = [true, false]
[sweep]""",
)


@pytest.mark.parametrize("matters", ["optimizer.learning_rate", "optimizer.weight_decay", "optimizer.nesterov"])
def test_importances_on_the_page_name_the_setting_that_matters(
    matters: str, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of forty trials follow from one of three settings. Half of them have ended, of the others there is a
    score."""
    worker = begin(trials=40, space=THREE_SETTINGS, more="seed = 1")
    draw = random.Random(3)  # noqa: S311 - no secret
    records = []
    for number in range(40):
        place = {name: draw.random() for name in ("optimizer.learning_rate", "optimizer.weight_decay")}
        place["optimizer.nesterov"] = draw.randrange(2)
        values = {
            "optimizer.learning_rate": 10 ** (3 * place["optimizer.learning_rate"] - 4),
            "optimizer.weight_decay": 0.3 * place["optimizer.weight_decay"],
            "optimizer.nesterov": bool(place["optimizer.nesterov"]),
        }
        loss = 2.0 + (place[matters] - 0.2) ** 2
        done = {"total_steps": 16, "step": 16, "state": "finished", "final": loss, "rung": 1}
        stopped = {"total_steps": 16, "step": 8, "state": "paused", "rung": 0, "standings": {0: Standing(loss)}}
        records.append(TrialRecord(number, values, **(done if number % 2 else stopped)))
    monkeypatch.setattr(SweepStudy, "_read", lambda study: (records, {}))
    found = worker.study.importances()
    others = set(found) - {matters}
    assert len(others) == 2
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[matters] > 0.7
    assert all(0 <= found[name] < 0.2 for name in others), "of forty trials: some of it is chance"
    sweep = SweepRun(worker.folder, worker.space, 1, SweepConsole("quiet"))
    sweep._finish("")
    summary = json.loads((worker.folder.path / SUMMARY).read_text())
    assert summary["importances"] == pytest.approx(found)
    page = (worker.folder.path / PAGE).read_text()
    row = r'<code>([a-z_.]+)</code></td>.*?width: (\d+)%.*?<td class="number">(\d+)</td>'
    shown = re.findall(row, page[page.index("Which settings mattered") : page.index("Who was stopped")])
    expected = [(name, f"{100 * share:.0f}") for name, share in sorted(found.items(), key=lambda one: -one[1])]
    assert [(name, number) for name, _, number in shown] == expected
    assert [width for _, width, _ in shown] == [number for _, _, number in shown], "bars are as long as the numbers say"


def test_few_trials_say_nothing_of_importance(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = begin(trials=40, space=THREE_SETTINGS)
    values = {"optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.1, "optimizer.nesterov": True}
    records = [TrialRecord(number, values, final=2.0 + number) for number in range(3)]
    monkeypatch.setattr(SweepStudy, "_read", lambda study: (records, {}))
    assert worker.study.importances() == {}


def test_a_held_out_loss_of_nothing_is_a_loss(begin: Begin) -> None:
    worker = begin()
    write_run(worker.folder.run(0), [Evaluated(8, 0.5, 0.1, False, True), Evaluated(16, 0.0, 0.1, False, True)])
    assert worker.with_curve(TrialRecord(0)).losses == ((8, 0.5), (16, 0.0))
