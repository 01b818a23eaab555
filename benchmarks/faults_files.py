"""Faults of files and folders: what happens to them between two processes, or under one, and what is promised then."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import faults_inject as inject
from faults_kinds import is_command, is_text, kind
from faults_work import Failure, Work, names_in

RESUMED = r"resumed from step \d+"


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


@kind(
    "damaged file of the run",
    "log, summary, page, lock: made anew, gone on with or passed over; the same bits",
    weight=3,
)
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
        work.refused("other data than|the tokenizer's vocabulary")
    path.write_bytes(before)


@kind(
    "changed base model",
    "refused: frozen weights are known by their checksum",
    fits=lambda one: one.command == "finetune",
)
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


@kind(
    "two processes in one folder", "the second one is refused, the first one unharmed; its lock dies with it", weight=3
)
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


@kind("folder moved in mid-run", "it says so, and saves nothing under the old name; moved back it goes on", waits=True)
def _moved_running(work: Work) -> None:
    step = work.later_step(0.9 * work.draw.random())
    away = work.folder / "away"
    back = work.draw.random() < 0.4
    injections = [inject.at_step(step, lambda: work.run.rename(away) and None)]
    if back:
        injections.append(inject.at_step(min(step + 5, work.setup.steps - 1), lambda: away.rename(work.run) and None))
    outcome = work.go(*injections)
    if back or not outcome.fired:  # an early stop may come first
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


@kind("folder deleted in mid-run", "it says so, exit code 1; a new start ends with the same bits", waits=True)
def _deleted(work: Work) -> None:
    step = work.later_step(0.9 * work.draw.random())
    gone = work.run if work.draw.random() < 0.5 else work.run.parent
    outcome = work.go(inject.at_step(step, lambda: shutil.rmtree(gone)))
    if not outcome.fired:
        work.check(outcome, {0})
        return
    work.check_error(outcome, {1}, "moved or deleted while the run goes on")
    if gone.exists():
        raise Failure("OTHER WORDS", f"{gone} was made anew")
    if is_command(work.setup):
        work.check_error(work.go(bare=True), {2}, "there is no run to go on with")


@kind("folder of another version", "refused with its format or its setting named, nothing is touched", weight=3)
def _other_version(work: Work) -> None:
    work.interrupt(saved=2)
    how = work.draw.choice(
        ["format", "newest", "setting", "state"] if is_command(work.setup) else ["format", "newest", "state"]
    )
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
        number = work.draw.choice([0, 1, 3, 99])
        for folder in work.saved if how == "format" else work.saved[:1]:
            manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
            (folder / "manifest.json").write_text(json.dumps(manifest | {"format": number}), encoding="utf-8")
        if how == "format":
            work.refused(f"(format {number}, this one reads format 2)")
        else:
            work.check(work.go(), {0, 2}, f"(format {number}, this one reads format 2)")
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
