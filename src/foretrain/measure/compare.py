"""`foretrain compare`: is it faster to the same loss than the plain loop, tuned as hard, on the same machine?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from foretrain import environment
from foretrain.config import Config, to_mapping
from foretrain.engine.precision import choose_device
from foretrain.errors import ConfigError, InputError
from foretrain.events import Event
from foretrain.measure import stored
from foretrain.measure.analysis import analyse
from foretrain.measure.plan import ComparisonPlan, Options, Result
from foretrain.measure.runs import Spec, carry_out, check_pairing
from foretrain.measure.tasks import Task
from foretrain.persist.files import explain_failed_write, make_folder, write_atomic

FORMAT = 1
PAGE = "report.html"


class Watcher(Protocol):
    """Told how a comparison goes on. `ComparisonConsole` is one."""

    def planned(self, steps_left: int, runs: tuple[int, int]) -> None:
        """Optimizer steps still to do, and how many runs are done of how many, as far as known."""

    def begins(self, spec: Spec) -> None: ...

    def happens(self, event: Event) -> None: ...

    def ended(self, spec: Spec, result: Result) -> None: ...


class ComparisonRunner:
    """A folder with one file per finished run. Whatever is there is not run again."""

    def __init__(self, task: Task, base: Config, options: Options, folder: Path) -> None:
        if base.epochs is not None:
            raise ConfigError("a comparison counts in steps: set max_steps instead of epochs")
        if base.max_time is not None or base.until_loss is not None:
            raise ConfigError("a comparison counts in steps: leave max_time and until_loss out, and set max_steps")
        self.task = task
        self.base = base
        self.folder = folder
        self._runs = folder / "runs"
        self._results: dict[str, Result] = {}
        self._keys: dict[str, str] = {}
        self.plan = ComparisonPlan(base, options, self.find)
        self._claim_folder(options)

    def _claim_folder(self, options: Options) -> None:
        """A folder belongs to one configuration; more seeds, rates, budgets or arms may be asked for later."""
        mine = {"format": FORMAT, "config": to_mapping(self.base), "data": self.task.fingerprint}
        head = self.folder / "comparison.json"
        if head.is_file():
            there = stored.read(head)
            if {key: there.get(key) for key in mine} != mine:
                raise InputError(
                    f"{self.folder} holds a comparison of another configuration or other data; name another folder "
                    "with --out"
                )
        try:
            make_folder(self._runs)
            write_atomic(head, json.dumps(mine | {"options": asdict(options)}, indent=1) + "\n")
        except OSError as error:
            cause, advice = explain_failed_write(error)
            raise InputError(
                f"--out {self.folder}: cannot be written: {cause}. {advice}, or name another one"
            ) from error

    def _key(self, spec: Spec) -> str:
        text = repr(spec)
        if text not in self._keys:
            self._keys[text] = spec.key(self.base, self.task.fingerprint)
        return self._keys[text]

    def find(self, spec: Spec) -> Result | None:
        key = self._key(spec)
        if key not in self._results:
            path = self._runs / f"{key}.json"
            if not path.is_file():
                return None
            self._results[key] = stored.read_result(path)
        return self._results[key]

    def run(self, watcher: Watcher | None = None, minutes: float | None = None) -> bool:
        """Carry out what is missing; False when the time was up first."""
        started, warmed = time.monotonic(), set[str]()
        while specs := self.plan.next():
            for spec in specs:
                if minutes is not None and time.monotonic() - started > 60 * minutes:
                    return False
                if self.find(spec) is not None:  # another arm's run a moment ago was this one, too
                    continue
                if watcher is not None:
                    watcher.planned(self.plan.steps_left(), self.counted())
                    watcher.begins(spec)
                result = carry_out(self.task, spec, self.base, warmed, watcher.happens if watcher else None)
                check_pairing([*self._results.values(), result])
                self.keep(spec, result)
                if watcher is not None:
                    watcher.ended(spec, result)
        return True

    def counted(self) -> tuple[int, int]:
        """Count the runs that are done, and all of them. One run may serve several arms."""
        found = {self._key(spec): self.find(spec) is not None for spec in self.plan.specs()}
        return sum(found.values()), len(found) + self.plan.unknown_runs()

    def keep(self, spec: Spec, result: Result) -> None:
        key = self._key(spec)
        write_atomic(self._runs / f"{key}.json", json.dumps(result) + "\n")
        self._results[key] = result

    def result(self, command: str = "") -> dict[str, Any]:
        """Return every raw number and what follows from them."""
        plan = self.plan
        specs: dict[str, Spec] = {}
        for spec in plan.specs():  # one run may serve several arms; the plain loop's stay its own
            specs.setdefault(self._key(spec), spec)
        runs = [
            dict(result) | {"arm": spec.arm, "label": spec.arm, "budget": spec.max_steps / self.base.max_steps}
            for spec in specs.values()
            if (result := self.find(spec)) is not None
        ]
        check_pairing(runs)
        missing = [_words(spec) for spec in specs.values() if self.find(spec) is None]
        return {
            "format": FORMAT,
            "title": self.task.title,
            "command": command,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "commit": environment.commit_of(Path(__file__).parents[2]),
            "environment": environment.describe(str(choose_device(self.base.device))),
            "config": to_mapping(self.base),
            "settings": {
                "seeds": plan.seeds,
                "rate_factors": plan.rates(),
                "budgets": list(plan.options.budgets),
                "steps": self.base.max_steps,
            },
            "complete": not missing and not plan.next(),
            "missing": missing,
            "runs": runs,
            "analysis": analyse(plan),
        }

    def write(self, result: dict[str, Any]) -> Path:
        """Write result.json with every number and report.html to look at; return the page's path."""
        from foretrain.show.pages.comparison_page import page

        write_atomic(self.folder / "result.json", json.dumps(result) + "\n")
        target = self.folder / PAGE
        write_atomic(target, page(result))
        return target


def compare(
    task: Task,
    config: Config,
    folder: str | Path,
    options: Options | None = None,
    *,
    minutes: float | None = None,
    watcher: Watcher | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Compare `config` with the plain loop and return the result, which is also in `folder` (result.json, report.html).

    A run that is already in the folder is not run again, so several short calls add up to one comparison.
    """
    comparison = ComparisonRunner(task, config, options or Options(), Path(folder))
    try:
        comparison.run(watcher, minutes)
    finally:  # also after Ctrl-C: what is there is shown
        result = comparison.result(command)
        comparison.write(result)
    return result


def _words(spec: Spec) -> str:
    return f"{spec.arm}, learning rate x {spec.rate_factor:g}, {spec.max_steps} steps, seed {spec.seed}"
