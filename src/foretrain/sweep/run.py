"""What `foretrain sweep` does: starts workers, watches over them, and says what was found."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain.config.schema import Level
from foretrain.data import documents
from foretrain.errors import ForetrainError, InputError, SaveError
from foretrain.persist.files import for_json
from foretrain.persist.signals import StopRequest
from foretrain.show.pages import sweep_page
from foretrain.show.sweep import SweepConsole
from foretrain.sweep.place import BEST, PAGE, SPACE_FILE, SUMMARY, SweepFolder
from foretrain.sweep.policy import HalvingPolicy
from foretrain.sweep.records import TrialRecord
from foretrain.sweep.space import Space, read_space
from foretrain.sweep.study import SweepStudy, are_comparable, check_optuna
from foretrain.sweep.summary import summarize
from foretrain.sweep.worker import policy_of

_POLL_SECONDS = 0.5
_SAVED = 130
"""Exit code of a worker that a signal ended, once its trial was saved."""
_MOST_RESTARTS = 5
"""So often in a row a worker that was killed is started again while no trial makes progress."""


class SweepFailed(ForetrainError):
    """The workers could not go on. What they did is kept."""


@dataclass
class WorkerProcess:
    """A worker that was started here."""

    index: int
    process: subprocess.Popen[bytes]
    log: Path
    asked: bool = False
    """It was asked to save and end."""

    @property
    def number(self) -> int:
        """Return its number as people count."""
        return self.index + 1


def default_folder() -> Path:
    return Path("runs") / f"sweep-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def open_sweep(path: Path | None, out: Path | None) -> tuple[SweepFolder, Space]:
    """Make or find the folder of a sweep, and read what it is asked for."""
    folder = SweepFolder(out or default_folder())
    own = folder.path / SPACE_FILE
    if path is None:
        if out is None or not own.is_file():
            raise InputError("name a space file, or with --out the folder of a sweep to go on with")
        check_optuna()
        return folder, read_space(own)
    space = read_space(path)
    check_optuna()
    _check_data(space)
    if own.is_file() and not are_comparable(read_space(own), space):
        raise InputError(
            f"--out {folder.path}: it holds a sweep of another base or space; choose another folder, or go on with "
            f"`foretrain sweep --out {shlex.quote(str(folder.path))}`"
        )
    folder.make()
    folder.write(SPACE_FILE, space.text)
    return folder, read_space(own)  # as the workers will read it


def _check_data(space: Space) -> None:
    """Refuse data that is not there before anything is made, where all trials read the same."""
    if not any(one.name.startswith("data.") for one in space.ranges):
        documents.find(space.base.data.path)
        if held_out := space.base.data.validation_path:
            documents.find(held_out, "data.validation_path")


class SweepRun:
    """One call of `foretrain sweep`. Others may work on the same sweep at the same time."""

    def __init__(self, folder: SweepFolder, space: Space, workers: int, console: SweepConsole) -> None:
        self.folder = folder
        self.space = space
        self.workers = workers
        self.console = console
        self.policy: HalvingPolicy = policy_of(space)
        self.study = SweepStudy(space, folder.path)
        self.processes: list[WorkerProcess] = []
        self.restarts = 0
        self.failures: list[str] = []
        self._work = 0.0

    def work(self, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
        """Go on until nothing is left to do, or a signal comes. Returns the summary, with the signal if there was
        one."""
        with StopRequest() as stop:
            if not self.policy.is_complete(self._records()):
                self.processes = [self._start(index) for index in range(self.workers)]
            try:
                while self.processes:
                    if stop.requested:
                        self._stop_workers()
                    self._look_after_workers(bool(stop.requested))
                    self.console.show(self.summary())
                    if self.processes:
                        sleep(_POLL_SECONDS)
            except BaseException:
                for one in self.processes:
                    one.process.kill()  # nothing is lost: their trials go on from their checkpoints
                    one.process.wait()
                raise
            finally:
                self.console.close()
        return self._finish(stop.requested)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> WorkerProcess:
        log = self.folder.logs / f"{os.getpid()}-{index}.log"
        environment = dict(os.environ)
        if self.workers > 1:  # else each would take every core
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.workers)))
        command = [sys.executable, "-m", "foretrain.sweep.worker", str(self.folder.path)]
        command += ["--index", str(index), "--parent", str(os.getpid())]
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C comes to us, and from us to them: a second one would cut off a save
            )
        return WorkerProcess(index, process, log)

    def _look_after_workers(self, stopping: bool) -> None:
        done = sum(record.step for record in self.study.records())
        if done > self._work:
            self._work, self.restarts = done, 0
        for one in [one for one in self.processes if one.process.poll() is not None]:
            self.processes.remove(one)
            code = one.process.returncode
            if code == 0 or (stopping and code in (_SAVED, -signal.SIGTERM)):  # the latter before its run had begun
                continue
            killed = code < 0 or code == _SAVED
            ended = f"was ended by {_signal_name(-code)}" if killed else f"ended with exit code {code}"
            if killed and not stopping and self.restarts < _MOST_RESTARTS:
                self.restarts += 1
                self.console.say(f"worker {one.number} {ended}; another goes on with its trial")
                self.processes.append(self._start(one.index))
                continue
            said = "" if killed else _last_line(one.log)  # who is killed has said nothing of it
            self.failures.append(said or f"worker {one.number} {ended}")
            self.console.say(f"worker {one.number}: {said}" if said else self.failures[-1])

    def _stop_workers(self) -> None:
        """Ask each worker once to save and end."""
        for one in self.processes:
            if one.process.poll() is None and not one.asked:
                one.process.send_signal(signal.SIGTERM)
                one.asked = True

    # --- what was found ----------------------------------------------------------------------------------------------

    def _records(self) -> list[TrialRecord]:
        return self.study.current_records(self.folder.place)

    def summary(self, importances: bool = False) -> dict[str, Any]:
        records = self._records()
        steps = {one.number: self.folder.live_step(one) for one in records if one.state == "running"}
        found = self.study.importances() if importances else {}
        return summarize(self.space, self.policy, records, found, steps) | {"folder": str(self.folder.path)}

    def _finish(self, signal_name: str) -> dict[str, Any]:
        """Write the page, the best configuration and the summary, and tell Optuna who was stopped."""
        if signal_name or self.failures:
            self.study.sign_off(self.folder.place)
        summary = self.summary(importances=True)
        records = self._records()
        try:
            self._write(summary, records)
        except SaveError as error:
            self.failures.append(str(error))
        if signal_name:
            return summary | {"signal": signal_name}
        if self.failures and not summary["complete"]:
            again = f"foretrain sweep --out {shlex.quote(str(self.folder.path))}"
            cause = self.failures[0].removeprefix("error: ")
            raise SweepFailed(f"{cause}; every trial is kept as it is: go on with `{again}`")
        if summary["complete"] and summary["best"] is None:
            why = next((record.reason for record in records if record.reason), "no trial came to its end")
            raise SweepFailed(f"all {len(records)} trials failed; the first: {why}")
        return summary

    def _write(self, summary: dict[str, Any], records: list[TrialRecord]) -> None:
        best = summary["best"]
        if best is not None and math.isfinite(best["final"]):
            config = self.space.config(records[best["number"]].values)
            self.folder.write(BEST, configuration.to_toml(config, comments=False, changed_only=True))
        self.folder.write(SUMMARY, json.dumps(for_json(summary), indent=1) + "\n")
        self.folder.write(PAGE, sweep_page.page(for_json(summary)))
        if summary["complete"]:
            for record in self.policy.stopped(records):
                self.study.close_stopped(record)


def _signal_name(number: int) -> str:
    """Return the name of a signal; a worker that had time to save does not tell which one it was."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, "a signal")


def _last_line(log: Path) -> str:
    """Return the last line of a worker's log that is not empty."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")


def run_sweep(path: Path | None, out: Path | None, workers: int | None, level: Level) -> dict[str, Any]:
    """Begin a sweep or go on with one, to its end."""
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: at least 1")
    folder, space = open_sweep(path, out)
    console = SweepConsole(level)
    return SweepRun(folder, space, workers or space.settings.workers, console).work()
