"""Faults of processes: how they end, what the disk, the clock, memory and the user's own code do to them, and what is
promised then."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import faults_inject as inject
from faults_ends import digest
from faults_kinds import is_command, is_own, kind
from faults_own import POISONS, regression
from faults_runs import Outcome
from faults_work import Failure, Work
from foretrain.errors import CheckpointError
from foretrain.persist.checkpoint import verify

# --- processes that end ----------------------------------------------------------------------------------------------


@kind("kill -9 at a step", "at most one save interval is lost; the end has the same bits", waits=True, weight=3)
def _kill_at_step(work: Work) -> None:
    step = work.later_step(work.draw.random())
    work.check(work.go(inject.at_step(step, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 at a file event", "a checkpoint is whole or not there; the end has the same bits", waits=True, weight=3)
def _kill_at_event(work: Work) -> None:
    number = work.left(work.reference.events, work.draw.random())
    work.check(work.go(inject.at_file_event(work.folder, number, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 inside a step", "half a step is not saved; the end has the same bits", waits=True, weight=2)
def _kill_in_step(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    work.check(work.go(inject.at_operation(number, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 at a moment", "the same, wherever it is (not replayed to the microsecond)", waits=True, weight=2)
def _kill_at_moment(work: Work) -> None:
    process = work.start()
    process.kill_after(work.draw.random() * work.reference.seconds)
    work.check(work.ended(process), {137, 0})


@kind(
    "signal",
    "SIGTERM, SIGINT, SIGUSR1, SIGHUP: saved after the step, exit code 128 + number, it says so",
    waits=True,
    weight=3,
)
def _signal(work: Work) -> None:
    name = work.draw.choice(["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
    code = 128 + getattr(inject.signal, name)
    step = work.later_step(work.draw.random())
    outcome = work.check(work.go(inject.at_step(step, inject.send(name))), {code, 0})
    if outcome.code == 0 and step < work.setup.steps - 12 and work.reference.reason == "finished":
        raise Failure("SILENT", f"{name} before step {step + 1} was not obeyed")
    if outcome.code == code:
        work.check(outcome, {code}, f"{name}: stopped after step")
        if json.loads((work.run / "summary.json").read_text("utf-8"))["reason"] != "interrupted":
            raise Failure("SILENT", "an interrupted run whose summary does not say so")


@kind("signal at a file event", "saved where there is something to save; exit code 128 + number", waits=True, weight=2)
def _signal_at_event(work: Work) -> None:
    name = work.draw.choice(["SIGTERM", "SIGINT"])
    number = work.left(work.reference.events, work.draw.random())
    code = 128 + getattr(inject.signal, name)
    work.check(work.go(inject.at_file_event(work.folder, number, inject.send(name))), {code, 0})


@kind(
    "two signals", "the second one ends it at once; the last checkpoint is whole, the end has the same bits", waits=True
)
def _two_signals(work: Work) -> None:
    names = work.draw.choice([("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGINT")])
    step = work.later_step(work.draw.random())
    codes = {128 + getattr(inject.signal, name) for name in names} | {0}
    process = work.start(inject.at_step(step, inject.send(*names)))
    work.check(work.ended(process, raw=work.setup.command == "fit"), codes)


# --- disks -----------------------------------------------------------------------------------------------------------


@kind("full disk", "it goes on where it can; else one sentence, exit code 1 or 2; older checkpoints stay", weight=2)
def _full_disk(work: Work) -> None:
    limit = int(work.reference.size ** work.draw.random())
    outcome = work.go(lambda stack: inject.limit_files(limit)())
    if outcome.code:
        work.check_error(outcome, {1, 2})
    for path in work.saved:
        _verify(path)
    work.log = False  # what did not fit in memory and on disk may be missing


def _verify(path: Path) -> None:
    try:
        verify(path)
    except CheckpointError as error:
        raise Failure("LOST", str(error)) from None


@kind(
    "disk full for a while",
    "a warning; what is to be logged waits; nothing is lost, the same bits",
    waits=True,
    place=2,
)
def _full_for_a_while(work: Work) -> None:
    begins = work.later_step(0.7 * work.draw.random())
    ends = begins + 1 + int((work.setup.steps - begins - 1) * 0.8 * work.draw.random())
    limit = int(work.reference.size ** work.draw.random())
    outcome = work.go(inject.at_step(begins, inject.limit_files(limit)), inject.at_step(ends, inject.limit_files(-1)))
    work.check(outcome, {0})


@kind("full disk under its own output", "what is printed is cut off, exit code 1; the run itself ends well", place=2)
def _full_output(work: Work) -> None:
    (work.folder / "printed.txt").write_text("x" * 4096, encoding="utf-8")
    step = work.later_step(0.9 * work.draw.random())
    end = work.setup.steps - 1
    if work.draw.random() < 0.5:  # the run itself has room, its output has not
        work.check(work.go(inject.output_to(Path("/dev/full"))), {0, 1})
        if not (work.run / "summary.json").is_file():
            raise Failure("LOST", "the run did not come to its end")
        return
    injections = [inject.output_to(work.folder / "printed.txt"), inject.at_step(step, inject.limit_files(4096))]
    work.check(work.go(*injections, inject.at_step(end, inject.limit_files(-1))), {0, 1})


@kind(
    "fsync fails", "a save that may not be on the disk is none; it is said, and the end has the same bits", waits=True
)
def _failing_sync(work: Work) -> None:
    how = work.draw.choice(["ENOSPC", "EIO"])
    number = work.left(max(1, work.reference.events // 4), work.draw.random())
    outcome = work.go(inject.failing_sync(number, how))
    if outcome.code:
        work.check_error(outcome, {1, 2}, r"No space left|Input/output error|cannot")


@kind("read-only folder", "refused, or told at the last save; nothing is changed; it goes on when it may", weight=2)
def _read_only(work: Work) -> None:
    if work.draw.random() < 0.5:
        work.interrupt()
        inject.set_modes(work.run, 0o555, 0o444)
        before = work.content()
        try:
            outcome = work.go(lambda stack: inject.drop_capabilities())
        finally:
            inject.set_modes(work.run, 0o755, 0o644)
        work.check_error(outcome, {1, 2}, "Permission denied|Read-only|cannot write")
        if work.content() != before:
            raise Failure("OTHER WORDS", "what could not be written has changed")
        return
    step = work.later_step(0.9 * work.draw.random())
    try:
        outcome = work.go(inject.at_step(step, inject.write_protect(work.run)))
    finally:
        inject.set_modes(work.run, 0o755, 0o644)
    if outcome.fired:  # an early stop may come first
        work.check_error(outcome, {1, 2}, "Permission denied|Read-only|cannot")


# --- what goes on around it ------------------------------------------------------------------------------------------


@kind("clock jump", "clocks decide nothing: the same bits", weight=2, place=2)
def _clock(work: Work) -> None:
    day = 86400.0
    jumps = {
        work.later_step(work.draw.random()): work.draw.choice([-1, 1]) * work.draw.choice([3600, 30 * day, 4000 * day])
        for _ in range(work.draw.choice([1, 2]))
    }
    if work.saved:
        then = work.draw.choice([0.0, 1e9, 4e9])
        for path in work.folder.rglob("*"):
            os.utime(path, (then, then))
    work.check(work.go(inject.clock(jumps, work.draw.choice([0.0, 7200.0]))), {0})


@kind("nobody reads the output", "a closed pipe or standard output ends nothing: the same bits", place=2)
def _no_output(work: Work) -> None:
    work.check(work.go(inject.no_output(work.draw.choice(["pipe", "closed"]))), {0})


@kind(
    "failing tracker",
    "it is told once that the tracker is off; the same bits",
    waits=True,
    fits=lambda one: one.name == "tracker",
    place=2,
)
def _tracker(work: Work) -> None:
    outcome = work.go(inject.failing_tracker(work.draw.randrange(1, 60)))
    if outcome.code:
        work.check_error(outcome, {2}, "tensorboard: it cannot begin")
    else:
        work.check(outcome, {0}, "tracker tensorboard failed and is off")


@kind("failing listener", "it is told once, and hears nothing more; the same bits", waits=True, place=2)
def _listener(work: Work) -> None:
    work.check(work.go(inject.failing_callback(work.draw.randrange(2, 30))), {0})


@kind("report that cannot be written", "it is told; the run ends well, the same bits", place=2)
def _report(work: Work) -> None:
    (work.run / "report.html").unlink(missing_ok=True)
    (work.run / "report.html").mkdir(parents=True)
    work.check(work.go(), {0}, "report.html")
    (work.run / "report.html").rmdir()


@kind(
    "loader that raises once",
    "the error comes out, nothing else is harmed; resumed, the same bits",
    waits=True,
    fits=lambda one: is_own(one) and one.parts is not None and one.parts.__name__ in ("bowl", "regression"),
)
def _loader(work: Work) -> None:
    process = work.start(inject.broken_batch(work.draw.randrange(2, 40)))
    outcome = work.ended(process, raw=True)
    if outcome.code:
        work.check(outcome, {1}, "OSError: the data could not be read")


# --- numbers and memory ----------------------------------------------------------------------------------------------


@kind(
    "out of memory",
    "exit code 3, it says where and what to change, and is saved; resumed, the same bits",
    waits=True,
    weight=3,
)
def _out_of_memory(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    outcome = work.go(inject.at_operation(number, inject.run_out_of_memory, is_command(work.setup)))
    if outcome.code:
        work.check_error(outcome, {3}, "(?i)out of memory")


@kind(
    "out of memory, retried",
    "the run goes on by itself in smaller parts, and says so; its loss is as good",
    waits=True,
    place=2,
    fits=lambda one: is_command(one) or one.parts is regression,
)
def _retried(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    settings = {"memory.on_out_of_memory": "retry"}
    work.order = replace(work.order, settings=work.order.settings | settings)
    outcome = work.go(inject.at_operation(number, inject.run_out_of_memory, is_command(work.setup)), bare=False)
    if outcome.code:  # outside of the run's steps
        work.check_error(outcome, {3}, "(?i)out of memory")
        work.check(work.go(), {0})
    elif told := re.search("(?i).*out of memory.*", outcome.text):
        work.words.append(told[0].strip()[:300])
        work.bits = False  # sums of smaller parts are rounded in another way
    loss = json.loads((work.run / "summary.json").read_text("utf-8"))["final_val_loss"]
    if not loss <= 1.25 * work.loss + 1e-3:
        raise Failure("DIFFERS", f"the held-out loss is {loss}, not {work.loss}")


@kind(
    "not finite",
    "the batch is skipped; three in a row: back to a healthy snapshot; the same bits every time",
    waits=True,
    place=0,
    weight=3,
)
def _not_finite(work: Work) -> None:
    first = work.draw.randrange(2, int(0.8 * work.setup.steps))
    count = work.draw.choice([1, 1, 2, 3, 4, 6])
    work.always.append(inject.not_finite(frozenset(range(first, first + count))))
    outcome = _as_reference(work)
    if outcome.spoiled:  # leaps of a chain are steps of another kind
        work.fired = True
        work.check(outcome, {0}, "not finite|NaN|rolled back|skipped")


@kind(
    "poisoned predictor",
    "it is caught and told once; the run goes on plain, and ends well",
    place=0,
    weight=3,
    fits=lambda one: one.factor is not None,
)
def _poisoned(work: Work) -> None:
    poison = work.draw.choice(POISONS)
    since = work.draw.choice([0, 0, 3, 6])
    work.order = replace(work.order, poison=(poison, since))
    outcome = _as_reference(work)
    said = re.search(r"(?i).*(predictor|scripted).*", outcome.text.partition("┌")[0])
    if said is None and poison not in QUIET and work.expected != work.reference.digest:
        raise Failure("SILENT", f"{poison}: nothing is said, and the run is another: {outcome.text[-1500:]}")
    work.words.append(f"{poison}: {said[0].strip()[:300] if said else 'harmless'}")
    if since == 0 and poison in USELESS:
        _same_as_plain(work)


QUIET = ("gives NaN", "writes into what it is given", "raises in reset", "leaves a raising state")
"""Poisons that need not be told: forecasts that are no numbers are refused, and others are met on a resume only."""
USELESS = ("raises in forecast", "gives None", "gives text", "gives wrong shapes", "gives NaN")
"""With these there is no forecast at all: the run is the plain loop."""


def _same_as_plain(work: Work) -> None:
    before = work.order
    work.order = replace(before, out="plain", settings={"hybrid.mode": "off"})
    work.check(work.go(how="start", bare=False), {0})
    plain, work.order = digest(work.run), before
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        if plain.get(name) != work.expected.get(name):  # there is none where the optimizer keeps nothing
            raise Failure("DIFFERS", f"{name} is not that of the plain loop, though nothing could be forecast")


def _as_reference(work: Work, *words: str) -> Outcome:
    """The end that this run has with nothing else wrong is what is compared with."""
    other = replace(work.order, out="undisturbed")
    before, work.order = work.order, other
    outcome = work.check(work.go(how="start", bare=False), {0}, *words)
    work.expected = digest(work.run)
    work.loss = json.loads((work.run / "summary.json").read_text("utf-8"))["final_val_loss"]
    work.order = before
    return outcome
