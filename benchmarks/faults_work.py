"""One item of `thousand_faults.py` at work: a run in a folder of its own, what happens to it, and what is checked."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults_ends import Reference, digest
from faults_inject import Injection, at_step, send, set_modes
from faults_runs import Order, Outcome, Process
from faults_setups import Setup, write_inputs
from foretrain.persist.checkpoint import CheckpointStore

FAILURES = ("LOST", "DIFFERS", "SILENT", "TRACEBACK", "HUNG", "OTHER WORDS", "NOT JUDGED")
"""The last one: what came of it could not even be looked at."""
_RAW = "Traceback (most recent call last)"
_ALARM = 128 + 14


class Failure(Exception):
    """A promise was not kept. verdict: one of FAILURES."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


class Work:
    """A run that faults happen to."""

    def __init__(self, setup: Setup, reference: Reference, folder: Path, base: Path, draw: random.Random) -> None:
        self.setup, self.reference, self.draw = setup, reference, draw
        self.folder, self.base = folder.resolve(), base
        self.order = Order(setup, self.folder)
        self.always: list[Injection] = []
        """In every process of this item."""
        self.expected, self.loss = reference.digest, reference.loss
        self.compared: tuple[str, ...] = ()
        """Only these parts of the end, if any are named."""
        self.log = self.best = True
        """They are part of what is compared."""
        self.bits = True
        """The end is to be compared at all."""
        self.words: list[str] = []
        """What was seen that is promised."""
        self.history: list[str] = []
        self.happened: list[str] = []
        """Names of the faults that really were there: what waits for a moment that never comes is none."""
        self.fired = False
        self.processes = 0
        shutil.rmtree(self.folder, ignore_errors=True)
        write_inputs(setup, self.folder, base)

    # --- where it stands ---------------------------------------------------------------------------------------------

    @property
    def run(self) -> Path:
        return self.folder / self.order.out

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.run / "checkpoints")

    @property
    def saved(self) -> list[Path]:
        """Newest first."""
        return [path for _, path in self.store.steps()]

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        return next((step for step, _ in self.store.steps()), 0)

    def later_step(self, share: float) -> int:
        """Between the newest checkpoint and the end."""
        return self.step + int(share * (self.setup.steps - self.step))

    def left(self, total: int, share: float) -> int:
        """As many of what a whole run has `total` of, in a run that goes on from here."""
        return 1 + int(share * total * (1 - self.step / self.setup.steps))

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, *injections: Injection, **changes: Any) -> Process:
        order = replace(self.order, **changes)
        if order.how == "resume" and "bare" not in changes:
            order = replace(order, bare=(self.run / "config.toml").is_file() and self.draw.random() < 0.5)
        self.processes += 1
        return Process(order, [*self.always, *injections])

    def go(self, *injections: Injection, **changes: Any) -> Outcome:
        """One process to its end."""
        return self.ended(self.start(*injections, **changes))

    def ended(self, process: Process, raw: bool = False) -> Outcome:
        """raw: a traceback may be seen."""
        outcome = process.wait()
        self.fired = self.fired or outcome.fired
        self.history.append(f"{outcome.code}: {outcome.last[:300]}")
        if outcome.code == _ALARM:
            raise Failure("HUNG", outcome.text[-1000:])
        if _RAW in outcome.text and not raw:
            raise Failure("TRACEBACK", outcome.text[outcome.text.index(_RAW) :][-2500:])
        return outcome

    @property
    def finished(self) -> bool:
        """There is nothing left to disturb."""
        path = self.run / "summary.json"
        try:
            return json.loads(path.read_text("utf-8"))["reason"] != "interrupted"
        except (OSError, ValueError, KeyError):
            return False

    def go_on(self, *words: str) -> None:
        """Resume for a while: the words must be said; then it is killed, or comes to its end."""
        step = self.later_step(2 * self.draw.random()) + 1
        self.check(self.go(at_step(step, send("SIGKILL"))), {0, 137}, *words)

    def interrupt(self, share: float = 0.8, saved: int = 1) -> None:
        """Make sure that there is a run which was killed, with so many checkpoints."""
        if len(self.saved) >= saved or self.finished:
            return
        needed = saved * int(self.setup.settings.get("checkpoint.interval", 8)) + 2
        step = max(needed, self.later_step(share))
        self.check(self.go(at_step(step, send("SIGKILL"))), {137, 0})

    # --- checks ------------------------------------------------------------------------------------------------------

    def check(self, outcome: Outcome, codes: set[int], *words: str) -> Outcome:
        """The exit code is one of these, and these words (patterns) were said."""
        if outcome.code not in codes:
            verdict = "SILENT" if outcome.code == 0 else "OTHER WORDS"
            raise Failure(verdict, f"exit code {outcome.code}, not {sorted(codes)}: {outcome.text[-1500:]}")
        for pattern in words:
            found = re.search(pattern, outcome.text)
            if found is None:
                raise Failure("SILENT", f"nothing like {pattern!r} was said: {outcome.text[-1500:]}")
            line = next(line for line in outcome.text.splitlines() if re.search(pattern, line) or "\n" in pattern)
            self.words.append(line.strip()[:300])
        return outcome

    def check_error(self, outcome: Outcome, codes: set[int], *words: str) -> Outcome:
        """It ended with one sentence."""
        self.check(outcome, codes, *words)
        errors = [line for line in outcome.text.splitlines() if line.startswith("error: ")]
        if len(errors) != 1:
            raise Failure("OTHER WORDS", f"{len(errors)} lines say what is wrong: {outcome.text[-1500:]}")
        if not words:
            self.words.append(errors[0][:300])
        return outcome

    def refused(self, *words: str, **changes: Any) -> Outcome:
        """A process that must not go on: exit code 2, one sentence, and nothing in the folder is touched."""
        before = self.content()
        outcome = self.check_error(self.go(**changes), {2}, *words)
        after = self.content()
        if before != after:
            touched = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            raise Failure("OTHER WORDS", f"refused, but it touched {touched}: {outcome.text[-500:]}")
        return outcome

    def content(self) -> dict[str, str]:
        """Of all files of the run, but for what a kill left half written and what trackers begin with."""
        found = {}
        for path in sorted(self.run.rglob("*")):
            if any(part.startswith((".tmp-", ".old-", "tensorboard")) for part in path.parts):
                continue
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(self.run))] = hashlib.sha256(content).hexdigest()
        return found

    def finish(self) -> None:
        """Resume, as often as a user would, and compare the end."""
        for _ in range(3):
            outcome = self.go()
            if outcome.code == 0:
                break
        else:
            raise Failure("LOST", "\n".join(self.history[-4:]))
        self.compare()

    def compare(self) -> None:
        """The end with that of the undisturbed run."""
        summary = json.loads((self.run / "summary.json").read_text("utf-8"))
        if summary["reason"] not in ("finished", "stopped early"):
            raise Failure("LOST", f"the run ended as {summary['reason']!r}")
        if left := [path.name for path in self.run.rglob(".tmp-*")]:
            raise Failure("OTHER WORDS", f"left behind: {left}")
        if not self.bits:
            return
        found, expected = digest(self.run, self.log, self.best), self.expected
        if not self.log:
            expected = {name: value for name, value in expected.items() if name != "metrics.jsonl"}
        if not self.best:
            expected = {name: value for name, value in expected.items() if not name.startswith("best-")}
        names = self.compared or tuple(found.keys() | expected.keys())
        if not self.best:
            names = tuple(name for name in names if name != "summary.json")
        different = sorted(name for name in names if found.get(name) != expected.get(name))
        if different:
            raise Failure("DIFFERS", f"{', '.join(different)} of step {self.step}; {'; '.join(self.history)}")


def names_in(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of these patterns, sorted."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def forget(folder: Path) -> None:
    """Of an item that kept its promises nothing stays."""
    set_modes(folder, 0o755, 0o644)
    shutil.rmtree(folder, ignore_errors=True)
