"""Signals to a real process: it saves after the step it is in, says how to go on, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANGS

from foretrain import config
from foretrain.events import Event, Progress
from foretrain.persist.checkpoint import CheckpointStore, verify
from foretrain.recipes import train as run

from .conftest import wait_until

# As the command `foretrain`, with signals as a terminal has them, even if the tests themselves run in the background.
FORETRAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); from foretrain.cli.app import main; main()"
)
ENDLESS = ["max_steps=1000000", "schedule.type=constant", "evaluation.interval=50", "log.interval=1"]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


def settings(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def start(code: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    with Path("output.txt").open("wb") as output:
        return subprocess.Popen([sys.executable, "-c", code], stderr=output, stdout=output, env=environment)


def steps_in(log: Path) -> int:
    return log.read_text().count('"Progress"') if log.exists() else 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_stops_and_saves_and_the_printed_command_goes_on(
    number: signal.Signals, workshop: Any, warm: Any, foretrain: Callable[..., tuple[int, str]]
) -> None:
    out = workshop.folder / "my run"
    process = warm.start(workshop.folder, "train", "tiny.toml", "--out", "my run", *settings(*ENDLESS))
    try:
        wait_until(lambda: steps_in(out / "metrics.jsonl") >= 5, process)
        code, printed = foretrain("train", "tiny.toml", "--out", "my run", "--resume", *settings(*ENDLESS))
        assert (code, printed.count("\n")) == (2, 1)
        assert "another run is writing there; wait for it or choose another folder" in printed
        process.send_signal(number)
        assert process.wait(HANGS) == 128 + number
    finally:
        process.kill()
        process.wait()

    printed = Path("output.txt").read_text()
    match = re.search(rf"^{number.name}: stopped after step (\d+); go on with: foretrain (.*)$", printed, re.MULTILINE)
    assert match is not None, printed
    assert printed.splitlines()[-1] == match[0], "how to go on is the last that is said"
    step, arguments = int(match[1]), shlex.split(match[2])
    assert "Traceback" not in printed
    verify(out / "checkpoints" / f"step-{step:08d}")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["reason"], summary["signal"], summary["global_step"]) == ("interrupted", number.name, step)
    assert not (out / "model").exists()

    last = f"max_steps={step + 10}"
    code, printed = foretrain(*arguments, "--set", last)
    assert code == 0
    assert f"resumed from step {step}" in printed
    assert f"changed since this checkpoint was saved: max_steps 1000000 -> {step + 10}\n" in printed
    run.train(config.load("tiny.toml", [*ENDLESS, last]).config, "straight", progress=False)
    ends = [workshop.folder / name / "model" / "model.safetensors" for name in ("my run", "straight")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_kill_needs_no_goodbye(workshop: Any, warm: Any, foretrain: Callable[..., tuple[int, str]]) -> None:
    out = workshop.folder / "run"
    changes = settings(*ENDLESS, "checkpoint.interval=7")
    process = warm.start(workshop.folder, "train", "tiny.toml", "--out", "run", *changes)
    try:
        wait_until(lambda: steps_in(out / "metrics.jsonl") >= 20, process)
    finally:
        process.kill()
        assert process.wait(HANGS) == 128 + signal.SIGKILL
    steps = steps_in(out / "metrics.jsonl")
    assert not (out / "summary.json").exists()

    last = f"max_steps={steps + 10}"
    code, printed = foretrain("train", "--out", "run", "--resume", "--set", last)
    assert code == 0
    match = re.search(r"resumed from step (\d+)", printed)
    assert match is not None
    assert steps - 7 <= int(match[1]) <= steps + 1
    run.train(config.load("tiny.toml", [*ENDLESS, last]).config, "straight", progress=False)
    ends = [workshop.folder / name / "model" / "model.safetensors" for name in ("run", "straight")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


STUCK = """
import signal, sys, time
import torch
from foretrain import Config, HybridTrainer
from foretrain.config import from_mapping

signal.signal(signal.SIGINT, signal.default_int_handler)
handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
steps = 0

def loss(model, batch):
    global steps
    steps += 1
    if steps == 4:
        print("stuck", flush=True)
        while signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]:
            time.sleep(0.005)
        print("asked", flush=True)
        while True:
            time.sleep(0.005)
    return model(batch).square().mean()

config = from_mapping({"max_steps": 9, "checkpoint.interval": 1, "log.interval": 1})
trainer = HybridTrainer(torch.nn.Linear(2, 2), loss_fn=loss, config=config)
trainer.fit([torch.ones(3, 2)], out="stuck", progress=False)
"""


@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
def test_a_second_signal_ends_it_at_once(number: signal.Signals, workshop: Any) -> None:
    process = start(STUCK)
    output = workshop.folder / "output.txt"
    try:
        wait_until(lambda: "stuck" in output.read_text(), process)
        process.send_signal(number)
        wait_until(lambda: "asked" in output.read_text(), process)
        process.send_signal(number)
        assert process.wait(HANGS) == -number
    finally:
        process.kill()
        process.wait()
    loaded = CheckpointStore(workshop.folder / "stuck" / "checkpoints").load_newest()
    assert loaded is not None
    assert loaded.step == 3


@pytest.mark.parametrize("step", range(1, 11))
def test_stopped_after_any_step_it_ends_as_if_nothing_had_been(step: int, workshop: Any) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    configuration = config.load("tiny.toml", ["log.interval=1"]).config
    summary = run.train(configuration, "stopped", progress=False, listeners=[interrupt])
    assert (summary["reason"], summary["global_step"]) == ("interrupted", step)
    summary = run.train(configuration, "stopped", resume=True, progress=False)
    assert (summary["reason"], summary["global_step"]) == ("finished", 11)
    assert workshop.is_as_undisturbed("stopped")


def test_a_signal_in_the_last_step_changes_nothing(workshop: Any) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    summary = run.train(config.load("tiny.toml").config, "stopped", progress=False, listeners=[interrupt])
    assert summary["reason"] == "finished"
    assert summary["signal"] is None
    assert workshop.is_as_undisturbed("stopped")


@pytest.mark.parametrize("out", [None, "run"])
def test_in_a_program_of_ones_own(out: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from foretrain import HybridTrainer

    def loss(model: Any, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return model(batch).square().mean()

    trainer = HybridTrainer(torch.nn.Linear(2, 2), loss_fn=loss, config=config.from_mapping({"device": "cpu"}))
    path = str(tmp_path / out) if out else None
    with pytest.raises(SystemExit) as ended:
        trainer.fit([torch.ones(3, 2)], out=path)
    assert (ended.value.code, trainer.global_step) == (128 + signal.SIGTERM, 1)
    advice = "; nothing is saved without out=..., but the model has its weights"
    advice = f"; go on with fit(..., out={path!r}, resume=True)" if out else advice
    assert capsys.readouterr().err.endswith(f"\nSIGTERM: stopped after step 1{advice}\n")


def test_a_terminal_that_goes_away_stops_and_saves(workshop: Any) -> None:
    """As an ssh connection that breaks: SIGHUP, and nothing can be printed any more."""
    out = workshop.folder / "run"
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + FORETRAIN
    mine, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "tiny.toml", "--out", "run", *settings(*ENDLESS)],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(its)
    try:
        wait_until(lambda: steps_in(out / "metrics.jsonl") >= 5, process)
        os.close(mine)
        assert process.wait(HANGS) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["reason"], summary["signal"]) == ("interrupted", "SIGHUP")
    verify(out / "checkpoints" / f"step-{summary['global_step']:08d}")
