"""`foretrain sweep` as a command: its words, its files, and the workers that it looks after."""

from __future__ import annotations

import io
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
from rich.console import Console

from foretrain import config as configuration
from foretrain.errors import ForetrainError, InputError
from foretrain.show.sweep import SweepConsole, news_line, regret_line, result_lines
from foretrain.sweep import worker as workers
from foretrain.sweep.records import Standing, TrialRecord
from foretrain.sweep.run import SweepRun, WorkerProcess, open_sweep
from foretrain.sweep.sampling import values_of
from foretrain.sweep.space import Space, parse_space
from foretrain.sweep.study import SweepStudy
from foretrain.sweep.summary import planned_runs, summarize
from foretrain.sweep.worker import Worker, policy_of

ONE_POINT = """
[base]
max_steps = 8
batch_size = 2
device = "cpu"
data.path = "{data}"
model = {{layers = 1, heads = 2, width = 16, context = 16}}
evaluation.batches = 1
hybrid.mode = "off"
[space]
"optimizer.learning_rate" = {rates}
"""
Command = Callable[..., int]


def write_space(folder: Path, data: Path, rates: str = "[1e-2]") -> Path:
    file = folder / "space.toml"
    file.write_text(ONE_POINT.format(data=data, rates=rates))
    return file


def test_what_is_refused_leaves_no_folder(
    command: Command, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is mended afterwards begins a sweep in the same folder."""
    out = tmp_path / "sweep"
    assert command("sweep", write_space(tmp_path, text_file), "--out", out, "--workers", "-1") == 2
    assert "--workers -1: at least 1" in capsys.readouterr().err
    assert command("sweep", write_space(tmp_path, tmp_path / "none.txt"), "--out", out) == 2
    assert "none.txt does not exist; name a file" in capsys.readouterr().err
    file = write_space(tmp_path, text_file)
    file.write_text(file.read_text().replace("[base]", '[base]\ndata.validation_path = "gone.txt"'))
    assert command("sweep", file, "--out", out) == 2
    assert "data.validation_path: gone.txt does not exist" in capsys.readouterr().err
    assert not out.exists()


def test_a_sweep_that_was_stopped_does_not_say_what_it_saved() -> None:
    summary = {"best": None, "complete": False, "runs_paid": 0.1, "runs_of_all": 1, "runs_of_audit": 0.0}
    assert result_lines(summary | {"regret": None}) == ["cost so far: 0.1 runs for 1 trial"]


def test_a_space_of_one_point_is_one_run(
    command: Command, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_space(tmp_path, text_file), tmp_path / "sweep"
    assert command("sweep", file, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["complete"]
    assert summary["best"]["values"] == {"optimizer.learning_rate": 0.01}
    assert summary["regret"]["stopped"] == 0
    best = configuration.load(out / "best.toml").config
    assert (best.optimizer.learning_rate, best.max_steps) == (0.01, 8)
    assert "Every trial" in (out / "sweep.html").read_text(encoding="utf-8")
    assert (out / "runs" / "trial-0000" / "model" / "model.safetensors").is_file()
    assert command("sweep", "--out", out) == 0  # nothing is left to do, and no worker is started
    said = capsys.readouterr()
    assert "best: trial 0, held-out loss" in said.out
    assert "regret: none, no trial was stopped" in said.out
    assert "best.toml" in said.err


def test_wrong_files_are_one_line(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("sweep", tmp_path / "none.toml") == 2
    assert "cannot read the space file" in capsys.readouterr().err
    (tmp_path / "empty.toml").write_text("[space]\n")
    assert command("sweep", tmp_path / "empty.toml", "--out", tmp_path / "out") == 2
    assert "[space] is empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert command("sweep") == 2
    assert "name a space file" in capsys.readouterr().err


def test_the_same_file_goes_on_in_whatever_order_it_names_settings(text_file: Path, tmp_path: Path) -> None:
    file, out = write_space(tmp_path, text_file, "{low = 1e-3, high = 1e-1, log = true}"), tmp_path / "sweep"
    named = file.read_text()
    schedule, seed = '"schedule.type" = ["wsd", "cosine"]\n', "seed = {low = 1, high = 1000}\n"
    drawn = []
    for lines, trials in ((schedule + seed, 1), (schedule + seed, 2), (seed + schedule, 3)):
        file.write_text(f"{named}{lines}[sweep]\ntrials = {trials}\n")
        folder, space = open_sweep(file, out)
        assert space.trials == trials
        study = SweepStudy(space, folder.path)
        drawn.append(values_of(study.space, 7, []))
        assert study.new_trial() is not None
    assert drawn[0] == drawn[1] == drawn[2]
    file.write_text(named + '"schedule.type" = ["wsd"]\n' + seed)
    with pytest.raises(InputError, match="it holds a sweep of another base or space"):
        open_sweep(file, out)


@pytest.fixture
def sweep_run(text_file: Path, tmp_path: Path) -> SweepRun:
    folder, space = open_sweep(write_space(tmp_path, text_file, "[1e-3, 1e-2]"), tmp_path / "sweep")
    return SweepRun(folder, space, 1, SweepConsole("normal"))


def started_with(run: SweepRun, code: str) -> Callable[[int], WorkerProcess]:
    def start(index: int) -> WorkerProcess:
        log = run.folder.logs / "worker.log"
        with log.open("ab") as output:
            process = subprocess.Popen([sys.executable, "-c", code], stderr=output)
        return WorkerProcess(index, process, log)

    return start


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM"),
        ("raise SystemExit(130)", "was ended by a signal"),  # it had time to save its trial
    ],
)
def test_workers_that_are_killed_are_replaced_and_not_without_end(
    sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, ended: str
) -> None:
    monkeypatch.setattr(sweep_run, "_start", started_with(sweep_run, code))
    with pytest.raises(ForetrainError, match=rf"^worker 1 {ended}; every trial is kept as it is: go on"):
        sweep_run.work(lambda seconds: time.sleep(0.01))
    said = capsys.readouterr().err.splitlines()
    assert said == 5 * [f"worker 1 {ended}; another goes on with its trial"] + [f"worker 1 {ended}"]


def test_a_worker_that_cannot_go_on_is_quoted(sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "import sys; sys.stderr.write('error: the disk is full\\n'); sys.exit(1)"
    monkeypatch.setattr(sweep_run, "_start", started_with(sweep_run, words))
    with pytest.raises(ForetrainError, match=r"^the disk is full; every trial is kept"):
        sweep_run.work(lambda seconds: time.sleep(0.01))


def test_a_signal_asks_each_worker_once_and_says_how_to_go_on(
    sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "sys.stderr.write('ready\\n'); sys.stderr.flush()\n"
        "time.sleep(3600)"
    )
    monkeypatch.setattr(sweep_run, "_start", started_with(sweep_run, patient))
    asked = []

    def sleep(seconds: float) -> None:
        if "ready" in (sweep_run.folder.logs / "worker.log").read_text() and not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    summary = sweep_run.work(sleep)
    assert summary["signal"] == "SIGTERM"
    assert not summary["complete"]
    assert (sweep_run.folder.path / "summary.json").is_file()


def test_a_worker_that_is_stopped_before_its_run_has_begun_is_no_failure(
    sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_run, "_start", started_with(sweep_run, "import time; time.sleep(3600)"))

    def sleep(seconds: float) -> None:
        if not sweep_run.processes[0].asked:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    assert sweep_run.work(sleep)["signal"] == "SIGTERM"
    assert sweep_run.failures == []
    assert capsys.readouterr().err == ""


def test_a_worker_without_its_parent_ends(sweep_run: SweepRun) -> None:
    Worker(sweep_run.folder, sweep_run.space, parent=os.getppid() + 1).work()
    assert sweep_run.study.records() == []


def test_a_worker_says_what_went_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert workers.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


# --- words -----------------------------------------------------------------------------------------------------------


def some_space() -> Space:
    return parse_space(
        '[base]\nmax_steps = 100\n[space]\n"optimizer.learning_rate" = {low = 1e-4, high = 0.1, log = true}\n'
        "[sweep]\ntrials = 6\nrungs = [0.25, 0.5]\n",
        "space.toml",
        Path(),
    )


def some_records() -> list[TrialRecord]:
    def paused(number: int, score: float, rung: int = 0, low: float | None = None) -> TrialRecord:
        high = None if low is None else 9.0
        stands = {place: Standing(score, low, high, low is not None) for place in range(rung + 1)}
        values = {"optimizer.learning_rate": 0.001 * (number + 1)}
        return TrialRecord(number, values, "paused", 100, 25 * (rung + 1), rung, stands, losses=((25, score),))

    done = [paused(n, 2.0 + n, 1).with_changes(state="finished", rung=2, step=100, final=1.5 + n) for n in (0, 1)]
    audited = paused(4, 4.0).with_changes(state="finished", rung=2, step=100, final=1.4, audited_from=0)
    failed = paused(5, 9.0).with_changes(state="failed", reason="the loss is NaN", standings={})
    return [*done, paused(2, 2.5, 0, 2.4), paused(3, 4.5), audited, failed]


@pytest.fixture
def summary() -> dict[str, Any]:
    space = some_space()
    found = summarize(space, policy_of(space), some_records(), {"optimizer.learning_rate": 1.0}, {})
    return found | {"folder": "runs/sweep"}


def test_a_summary_says_who_was_stopped_and_why(summary: dict[str, Any]) -> None:
    assert summary["complete"]
    states = [trial["state"] for trial in summary["trials"]]
    assert states == ["finished", "finished", "stopped", "stopped", "finished", "failed"]
    why = [trial["reason"] for trial in summary["trials"]]
    assert why[0] == "reference, runs to the end"
    assert why[2] == "number 2 of 5 at 25 %, but cannot win: at least 2.4000, and another ended at 1.4000"
    assert why[3] == "number 5 of 5 at 25 %, 3 go on"
    assert why[4] == "stopped at 25 %, audited by lot"
    assert why[5] == "the loss is NaN"
    best, cost, regret = result_lines(summary)
    assert best == "best: trial 4, held-out loss 1.4000 (learning_rate 0.005)"
    assert cost.startswith("cost: 3.8 runs for 6 trials, 1.6x less")
    assert regret.startswith("regret: 1 of 1 audited trials ended below ")
    assert "of those never passed over, the best by 6.7%; " in regret
    assert regret.endswith(" of all 3 (2 stopped, 1 audited) would have (90% confidence)")


def test_a_reference_that_ranks_would_have_stopped_counts_as_audited_and_says_so() -> None:
    space, records = some_space(), some_records()
    records[0] = records[0].with_changes(standings={0: Standing(8.0), 1: Standing(8.0)}, final=1.0)
    told = summarize(space, policy_of(space), records, {}, {})
    assert told["best"]["reason"] == "reference, passed over at 25 %: audited"
    assert told["trials"][1]["reason"] == "reference, runs to the end"
    assert "all 4 (2 stopped, 2 audited)" in result_lines(told)[2]


def test_a_paused_trial_waits_and_lines_without_a_terminal_say_the_time_left() -> None:
    space, clock = some_space(), iter([0.0, 0.0, 60.0])
    console = Console(record=True, width=200, force_interactive=False, file=io.StringIO())
    shown = SweepConsole("normal", console, lambda: next(clock))
    for count in (2, 4):
        shown.show(summarize(space, policy_of(space), some_records()[:count], {}, {}))
    paused = console.export_text().splitlines()[3]
    assert "number 4 of 4 at 25 % so far; waits: the best 3 go on when all are ranked; about " in paused
    assert paused.endswith(" left")


def test_the_console_says_each_news_once(summary: dict[str, Any]) -> None:
    console = Console(record=True, width=200, force_interactive=False, file=io.StringIO())
    shown = SweepConsole("normal", console)
    for _ in range(3):
        shown.show(summary)
    shown.close()
    lines = console.export_text().splitlines()
    assert len(lines) == 6
    assert lines[5] == "trial 5 (learning_rate 0.006): failed: the loss is NaN"
    assert news_line(summary["trials"][2], summary["rungs"]) in lines


def test_words_on_regret() -> None:
    told = {"stopped": 9, "audited": 0, "better": 0, "by": 0.0, "share_at_most": None, "level": 0.9}
    assert regret_line(told).startswith("regret: unknown, none of the 9 stopped trials was audited")
    few = told | {"audited": 1, "share_at_most": 0.9}
    assert "at most 90% of all 9 (8 stopped, 1 audited) would have (90% confidence)" in regret_line(few)
    assert regret_line(few | {"audited": 9}).endswith("every trial that was passed over was audited")


def test_what_a_sweep_will_cost() -> None:
    policy = policy_of(some_space())
    assert planned_runs(policy, [0.25, 0.5]) == pytest.approx(1.5 + 3 * 0.25 + 2 * 0.5 + 2 * (1 - 3.25 / 6))
