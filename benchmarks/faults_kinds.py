"""The faults of `thousand_faults.py`: what happens, and what is promised then."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faults_inject as inject
from faults_own import HARMLESS, POISONS
from faults_runs import OUT, Setup
from faults_work import Failure, Work, names_in

STOPPED = r"SIG\w+: stopped after step \d+|interrupted|stopped after step"
RESUMED = r"resumed from step \d+"


@dataclass(frozen=True)
class Kind:
    """One fault."""

    name: str
    promise: str
    happen: Callable[[Work], None]
    """Nothing where the run has come to its end already."""
    fits: Callable[[Setup], bool] = lambda setup: True
    place: int = 1
    """When it happens among several: 0 what is wrong from the beginning, 1 in mid-run, 2 what goes through to the end."""
    weight: int = 1
    """How often it is drawn, relative to others."""


KINDS: dict[str, Kind] = {}


def kind(name: str, promise: str, **options: Any) -> Callable[[Callable[[Work], None]], Callable[[Work], None]]:
    def add(happen: Callable[[Work], None]) -> Callable[[Work], None]:
        def unless_finished(work: Work) -> None:
            if not work.finished:
                happen(work)

        KINDS[name] = Kind(name, promise, unless_finished, **options)
        return happen

    return add


def is_text(setup: Setup) -> bool:
    return setup.command == "train"


def is_command(setup: Setup) -> bool:
    return setup.command != "fit"


def is_own(setup: Setup) -> bool:
    return setup.command == "fit"


# --- processes that end ----------------------------------------------------------------------------------------------


@kind("kill -9 at a step", "at most one save interval is lost; the end has the same bits", weight=3)
def _kill_at_step(work: Work) -> None:
    step = work.later_step(work.draw.random())
    work.check(work.go(inject.at_step(step, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 at a file event", "a checkpoint is whole or not there; the end has the same bits", weight=3)
def _kill_at_event(work: Work) -> None:
    number = work.left(work.reference.events, work.draw.random())
    work.check(work.go(inject.at_file_event(work.folder, number, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 inside a step", "half a step is not saved; the end has the same bits", weight=2)
def _kill_in_step(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    work.check(work.go(inject.at_operation(number, inject.send("SIGKILL"))), {137, 0})


@kind("kill -9 at a moment", "the same, wherever it is (not replayed to the microsecond)", weight=2)
def _kill_at_moment(work: Work) -> None:
    process = work.start()
    process.kill_after(work.draw.random() * work.reference.seconds)
    work.check(work.ended(process), {137, 0})


@kind("signal", "SIGTERM, SIGINT, SIGUSR1, SIGHUP: saved after the step, exit code 128 + number, it says so", weight=3)
def _signal(work: Work) -> None:
    name = work.draw.choice(["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
    code = 128 + getattr(inject.signal, name)
    step = work.later_step(work.draw.random())
    last = step >= work.setup.steps - 1
    outcome = work.check(work.go(inject.at_step(step, inject.send(name))), {code, 0} if last else {code, 0})
    if outcome.code == code:
        work.check(outcome, {code}, f"{name}: stopped after step")
        if json.loads((work.run / "summary.json").read_text("utf-8"))["reason"] != "interrupted":
            raise Failure("SILENT", "an interrupted run whose summary does not say so")


@kind("signal at a file event", "saved where there is something to save; exit code 128 + number", weight=2)
def _signal_at_event(work: Work) -> None:
    name = work.draw.choice(["SIGTERM", "SIGINT"])
    number = work.left(work.reference.events, work.draw.random())
    code = 128 + getattr(inject.signal, name)
    work.check(work.go(inject.at_file_event(work.folder, number, inject.send(name))), {code, 0})


@kind("two signals", "the second one ends it at once; the last checkpoint is whole, the end has the same bits")
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
        inject_verify(path)
    work.log = False  # what did not fit in memory and on disk may be missing


def inject_verify(path: Path) -> None:
    from foretrain.engine.checkpoint import verify
    from foretrain.errors import CheckpointError

    try:
        verify(path)
    except CheckpointError as error:
        raise Failure("LOST", str(error)) from None


@kind("disk full for a while", "a warning; what is to be logged waits; nothing is lost, the same bits", place=2)
def _full_for_a_while(work: Work) -> None:
    begins = work.later_step(0.7 * work.draw.random())
    ends = begins + 1 + int((work.setup.steps - begins - 1) * 0.8 * work.draw.random())
    limit = int(work.reference.size ** work.draw.random())
    outcome = work.go(
        inject.at_step(begins, inject.limit_files(limit)), inject.at_step(ends, inject.limit_files(-1))
    )
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


@kind("fsync fails", "a save that may not be on the disk is none; it is said, and the end has the same bits")
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
    work.check_error(outcome, {1, 2}, "Permission denied|Read-only|cannot")


# --- damaged files ---------------------------------------------------------------------------------------------------


def _damage(work: Work, path: Path) -> str:
    how = work.draw.choice(["flip", "flip", "cut", "empty", "missing", "zeroes"])
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty" or not content:
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: work.draw.randrange(len(content))])
    elif how == "zeroes":
        begin = work.draw.randrange(len(content))
        end = min(len(content), begin + 512)
        path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])
    else:
        content[work.draw.randrange(len(content))] ^= 1 << work.draw.randrange(8)
        path.write_bytes(content)
    changed = not path.is_file() or path.read_bytes() != bytes(content) or how == "flip"
    return how if changed else ""


@kind("damaged checkpoint", "named, put aside, the one before it is used; only damaged ones: an error", weight=5)
def _damaged_checkpoint(work: Work) -> None:
    work.interrupt(saved=2)
    everything = work.draw.random() < 0.2 or len(work.saved) < 2
    if not everything:
        newest = work.saved[0]
        path = work.draw.choice(names_in(newest, ["*"]))
        before = {file: file.read_bytes() for file in newest.iterdir()}
        _damage(work, path)
        if all(file.is_file() and file.read_bytes() == content for file, content in before.items()):
            return  # zeroes over zeroes
        (work.run / "summary.json").unlink(missing_ok=True)
        work.go_on(f"damaged checkpoint put aside as .*{re.escape(path.name)}", RESUMED)
        return
    kept = work.folder / "kept"
    shutil.copytree(work.run, kept)
    for folder in work.saved:
        (folder / "manifest.json").unlink()
    work.refused("no checkpoint can be used")
    shutil.rmtree(work.run)
    kept.rename(work.run)


@kind("damaged file of the run", "config.toml: refused, or the change is named; others: made anew or passed over", weight=3)
def _damaged_file(work: Work) -> None:
    work.interrupt()
    names = ["metrics.jsonl", "summary.json", "tokenizer.json", ".lock", "report.html", "trackers.json"]
    files = names_in(work.run, names)
    path = work.draw.choice(files)
    _damage(work, path)
    if path.name == "metrics.jsonl":
        work.log = False
    if path.name != "trackers.json":
        work.go_on()
        return
    outcome = work.go()
    if outcome.code:
        work.check_error(outcome, {2}, "delete it, and trackers begin new runs")
        path.unlink()


@kind("damaged config.toml", "refused in one sentence, or what it changed is named", fits=is_command)
def _damaged_config(work: Work) -> None:
    work.interrupt()
    aside, original = work.folder / "aside", work.run
    shutil.copytree(original, aside)
    path = original / "config.toml"
    before = path.read_bytes()
    _damage(work, path)
    outcome = work.go(bare=True)
    if outcome.code:
        work.check_error(outcome, {1, 2})
    elif path.read_bytes() != before and "changed since this checkpoint was saved" not in outcome.text:
        raise Failure("SILENT", f"other settings than before, and nothing is said: {outcome.text[-800:]}")
    shutil.rmtree(original)
    aside.rename(original)


@kind("damaged best weights", "whoever reads them is told; the run itself goes on, the same bits", fits=is_text)
def _damaged_best(work: Work) -> None:
    work.interrupt()
    best = sorted((work.run / "checkpoints").glob("best-step-*"))
    if not best:
        return
    _damage(work, work.draw.choice(names_in(best[-1], ["*"])))
    work.best = False
    work.go_on()


@kind("damaged data cache", "it is said, and the text is tokenised again: the same bits", fits=is_text)
def _damaged_cache(work: Work) -> None:
    work.interrupt()
    files = [path for path in (work.folder / "cache").rglob("*") if path.is_file()]
    if work.draw.random() < 0.2:
        shutil.rmtree(work.folder / "cache")
        work.go_on("tokenising")
        return
    path = work.draw.choice(sorted(files))
    before = path.read_bytes()
    _damage(work, path)
    changed = not path.is_file() or path.read_bytes() != before
    work.go_on(*(["the token cache is damaged"] if changed else []))


@kind("changed data", "refused in one sentence, nothing is touched; with the old data the same bits", fits=is_command)
def _changed_data(work: Work) -> None:
    work.interrupt()
    path = work.folder / ("words.txt" if work.setup.command == "train" else "examples.jsonl")
    before = path.read_bytes()
    if work.draw.random() < 0.3:
        path.unlink()
        work.refused("words.txt|examples.jsonl")
    else:
        text = before.decode()
        path.write_text(text.replace("alpha", "omega", 3).replace("blue", "pink", 40) + "\n", encoding="utf-8")
        work.refused("other data than")
    path.write_bytes(before)


@kind("changed base model", "refused: frozen weights are known by their checksum", fits=lambda one: one.command == "finetune")
def _changed_base(work: Work) -> None:
    work.interrupt()
    path = work.folder / "base" / "model.safetensors"
    before = path.read_bytes()
    content = bytearray(before)
    content[-3] ^= 1
    path.write_bytes(content)
    work.refused("frozen|base")
    path.write_bytes(before)


# --- folders ---------------------------------------------------------------------------------------------------------


@kind("two processes in one folder", "the second one is refused, the first one unharmed; its lock dies with it", weight=3)
def _two_processes(work: Work) -> None:
    if work.draw.random() < 0.3:  # at the same moment
        together = [work.start(bare=False) for _ in range(work.draw.choice([2, 3]))]
        outcomes = [work.ended(process) for process in together]
        if not any(outcome.code == 0 for outcome in outcomes):
            raise Failure("LOST", "; ".join(work.history))
        for outcome in outcomes:
            if outcome.code:
                work.check_error(outcome, {2}, "another run is writing there")
        return
    step = work.later_step(0.9 * work.draw.random())
    go_on = work.folder / "go-on"
    ready = work.folder / "ready"
    first = work.start(inject.at_step(step, inject.wait_for(go_on, ready)))
    try:
        while not ready.exists() and first.runs():
            inject.time.sleep(0.005)
        if not ready.exists():  # it ended before that step, early or by a leap
            work.check(work.ended(first), {0})
            return
        how = work.draw.choice(["resume", "start", "overwrite"])
        deleted = work.draw.random() < 0.2
        if deleted:
            (work.run / ".lock").unlink()
        outcome = work.go(how=how, bare=False)
        work.check_error(outcome, {2}, "another run is writing there")
    finally:
        go_on.touch()
    work.check(work.ended(first), {0})
    go_on.unlink()
    ready.unlink()


@kind("moved folder", "a run goes on under any name: the same bits", weight=2)
def _moved(work: Work) -> None:
    work.interrupt()
    new = f"elsewhere/{work.draw.choice(['a run', 'run-2', 'läuft'])}-{work.processes}"
    (work.folder / "elsewhere").mkdir(exist_ok=True)
    work.run.rename(work.folder / new)
    work.order = replace(work.order, out=new)


@kind("folder moved in mid-run", "it says so, and saves nothing under the old name; moved back it goes on")
def _moved_running(work: Work) -> None:
    step = work.later_step(0.9 * work.draw.random())
    away = work.folder / "away"
    back = work.draw.random() < 0.4
    injections = [inject.at_step(step, lambda: work.run.rename(away) and None)]
    if back:
        injections.append(inject.at_step(min(step + 5, work.setup.steps - 1), lambda: away.rename(work.run) and None))
    outcome = work.go(*injections)
    if back:
        work.check(outcome, {0})
        return
    work.check_error(outcome, {1}, "moved or deleted while the run goes on")
    if work.run.exists():
        raise Failure("OTHER WORDS", f"{work.run} was made anew: {sorted(path.name for path in work.run.iterdir())}")
    away.rename(work.run)


@kind("copied folder", "the copy and the original both go on: the same bits")
def _copied(work: Work) -> None:
    work.interrupt()
    shutil.copytree(work.run, work.folder / "copy")
    original = work.order
    work.order = replace(original, out="copy")
    work.finish()
    work.order = original


@kind("folder deleted in mid-run", "it says so, exit code 1; a new start ends with the same bits")
def _deleted(work: Work) -> None:
    step = work.later_step(0.9 * work.draw.random())
    gone = work.run if work.draw.random() < 0.5 else work.run.parent
    outcome = work.go(inject.at_step(step, lambda: shutil.rmtree(gone)))
    work.check_error(outcome, {1}, "moved or deleted while the run goes on")
    if gone.exists():
        raise Failure("OTHER WORDS", f"{gone} was made anew")
    if is_command(work.setup):
        work.check_error(work.go(bare=True), {2}, "there is no run to go on with")


@kind("folder of another version", "refused with its format or its setting named, nothing is touched", weight=3)
def _other_version(work: Work) -> None:
    work.interrupt(saved=2)
    how = work.draw.choice(["format", "newest", "setting", "state"] if is_command(work.setup) else ["format", "newest", "state"])
    kept = work.folder / "kept"
    shutil.copytree(work.run, kept)
    if how == "setting":
        path = work.run / "config.toml"
        path.write_text("of_another_version = 3\n" + path.read_text("utf-8"), encoding="utf-8")
        work.refused("of_another_version", bare=True)
    elif how == "state":
        (work.run / "summary.json").unlink(missing_ok=True)
        for folder in work.saved:
            _drop_from_state(work, folder)
        outcome = work.go()
        if outcome.code:
            work.check_error(outcome, {2}, "checkpoint")
    else:
        number = work.draw.choice([0, 2, 99])
        for folder in work.saved if how == "format" else work.saved[:1]:
            manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
            (folder / "manifest.json").write_text(json.dumps(manifest | {"format": number}), encoding="utf-8")
        if how == "format":
            work.refused(f"has format {number}; this version reads format 1")
        else:
            work.check(work.go(), {0, 2}, f"has format {number}; this version reads format 1")
    shutil.rmtree(work.run)
    kept.rename(work.run)


def _drop_from_state(work: Work, folder: Path) -> None:
    """As a version left it that did not know this part yet."""
    path = folder / "state.json"
    content = json.loads(path.read_text("utf-8"))
    part = content["state"]
    if work.draw.random() < 0.7:
        part = part[work.draw.choice(sorted(name for name, value in part.items() if isinstance(value, dict) and value))]
    if part and not any(name.startswith("$") for name in part):
        del part[work.draw.choice(sorted(part))]
    path.write_text(json.dumps(content), encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    text = path.read_bytes()
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


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


@kind("failing tracker", "it is told once that the tracker is off; the same bits", fits=lambda one: one.name == "tracker", place=2)
def _tracker(work: Work) -> None:
    outcome = work.go(inject.failing_tracker(work.draw.randrange(1, 60)))
    if outcome.code:
        work.check_error(outcome, {2}, "tensorboard: it cannot begin")
    else:
        work.check(outcome, {0}, "tracker tensorboard failed and is off")


@kind("failing listener", "it is told once, and hears nothing more; the same bits", place=2)
def _listener(work: Work) -> None:
    work.check(work.go(inject.failing_callback(work.draw.randrange(2, 30))), {0})


@kind("report that cannot be written", "it is told; the run ends well, the same bits", place=2)
def _report(work: Work) -> None:
    (work.run / "report.html").unlink(missing_ok=True)
    (work.run / "report.html").mkdir(parents=True)
    outcome = work.check(work.go(), {0}, "report.html")
    (work.run / "report.html").rmdir()


@kind("loader that raises once", "the error comes out, nothing else is harmed; resumed, the same bits",
      fits=lambda one: is_own(one) and one.parts is not None and one.parts.__name__ in ("bowl", "regression"))
def _loader(work: Work) -> None:
    process = work.start(inject.broken_batch(work.draw.randrange(2, 40)))
    outcome = work.ended(process, raw=True)
    if outcome.code:
        work.check(outcome, {1}, "OSError: the data could not be read")


# --- numbers and memory ----------------------------------------------------------------------------------------------


@kind("out of memory", "exit code 3, it says where and what to change, and is saved; resumed, the same bits", weight=3)
def _out_of_memory(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    outcome = work.go(inject.at_operation(number, inject.run_out_of_memory, is_command(work.setup)))
    if outcome.code:
        work.check_error(outcome, {3}, "(?i)out of memory")
    elif "out of memory" not in outcome.text.lower() and "tries again" not in outcome.text:
        work.words.append("not reached")


@kind("out of memory, retried", "the run goes on by itself in smaller parts, and says so; its loss is as good", place=2)
def _retried(work: Work) -> None:
    number = work.left(work.reference.operations, work.draw.random())
    settings = {"memory.on_out_of_memory": "retry"}
    work.order = replace(work.order, settings=work.order.settings | settings)
    outcome = work.go(inject.at_operation(number, inject.run_out_of_memory, is_command(work.setup)), bare=False)
    if outcome.code:
        work.check_error(outcome, {3}, "(?i)out of memory")
    work.bits = False


@kind("not finite", "the batch is skipped; three in a row: back to a healthy snapshot; the same bits every time", place=0, weight=3)
def _not_finite(work: Work) -> None:
    first = work.draw.randrange(2, int(0.8 * work.setup.steps))
    count = work.draw.choice([1, 1, 2, 3, 4, 6])
    work.always.append(inject.not_finite(frozenset(range(first, first + count))))
    _as_reference(work, "not finite|NaN|rolled back|skipped")


@kind("poisoned predictor", "it is caught and told once; the run goes on plain, and ends well", place=0, weight=3,
      fits=lambda one: one.factor is not None)
def _poisoned(work: Work) -> None:
    poison = work.draw.choice(POISONS)
    since = work.draw.choice([0, 0, 3, 6])
    work.order = replace(work.order, poison=(poison, since))
    if poison in HARMLESS:
        return
    if poison in ("gives NaN", "writes into what it is given", "raises in reset", "leaves a raising state"):
        _as_reference(work)
        return
    _as_reference(work, "predictor")


def _as_reference(work: Work, *words: str) -> None:
    """The end that this run has with nothing else wrong is what is compared with."""
    from faults_runs import digest

    other = replace(work.order, out="undisturbed")
    before, work.order = work.order, other
    work.check(work.go(how="start", bare=False), {0}, *words)
    work.expected = digest(work.run)
    work.order = before


def forget(folder: Path) -> None:
    """Of an item that kept its promises nothing stays."""
    inject.set_modes(folder, 0o755, 0o644)
    shutil.rmtree(folder, ignore_errors=True)
