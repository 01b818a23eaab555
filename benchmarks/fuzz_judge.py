"""Hands one spoilt input to the program and judges what comes of it; `fuzz.py` does so with many."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuzz_maker import Input, Maker, Target

MOST_LINES = 12
"""On standard error before an error."""
PATIENCE = 60.0
"""Seconds that a page may take."""
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_RAW = ("Traceback (most recent call last)", "panicked at", "Warning: ", "Fatal Python error", "Exception ignored")
CODES = (0, 1, 2, 3)


@dataclass
class Outcome:
    """What came of one input."""

    name: str
    command: str
    kind: str
    arguments: list[str] = field(default_factory=list)
    code: int | None = None
    """None: it did not end by itself."""
    problems: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    memory_mb: int = 0

    @property
    def signature(self) -> str:
        """Breaches with one cause have the same."""
        frames = re.findall(r'File ".*?(foretrain/[^"]*)", line (\d+), in (\w+)', self.err)
        last = [line for line in self.err.strip().splitlines() if line.strip()][-1:] or [""]
        place = ":".join(frames[-1][:2]) if frames else ""
        what = self.problems[0].partition(":")[0] if self.problems else ""
        return f"{what} | {place} | {last[0][:120] if place else ''}"


def perform(target: Target, rng: random.Random, good: Path, folder: Path, name: str = "") -> Outcome:
    """Make an input in a folder, which becomes the current one, hand it to the program and judge what comes of it."""
    from foretrain.cli.app import main

    outcome = Outcome(name, target.command, target.kind)
    home = folder / "home"
    home.mkdir(parents=True)
    with contextlib.chdir(folder), _environment(home):
        given = target.make(Maker(rng, good))
        given.arguments = [_as_typed(text) for text in given.arguments]
        outcome.arguments = given.arguments
        _note(folder, outcome)
        before = snapshot(folder)
        visitor = _Visitor()
        with _streams(given.stdin) as (out, err):
            with visitor.waiting_for(out) if given.serves else contextlib.nullcontext():
                outcome.code = _call(main, given.arguments)
            outcome.out, outcome.err = out(), err()
        after = snapshot(folder)
    changed = _changed(before, after, (*given.writes, "home/.cache"))
    outcome.problems = [*judge(given, outcome), *changed, *visitor.problems]
    return outcome


def _as_typed(text: str) -> str:
    """What a shell can hand on: no zero byte, and only such halves of characters as stand for bytes."""
    try:
        return os.fsdecode(os.fsencode(text.replace("\0", "")))
    except UnicodeEncodeError:
        return text.replace("\0", "").encode("utf-8", "replace").decode()


def _note(folder: Path, outcome: Outcome) -> None:
    """For whoever finds this folder without an outcome."""
    (folder.parent / f"{folder.name}.json").write_text(json.dumps(asdict(outcome)))


def _call(main: Any, arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - that is what is looked for
        traceback.print_exc()
        return 1
    return 0


class _Visitor:
    """Opens the page that a program serves, once its address is printed, and then presses Ctrl-C."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._ended = threading.Event()

    @contextlib.contextmanager
    def waiting_for(self, out: Any) -> Iterator[None]:
        visit = threading.Thread(target=self._visit, args=(out,))
        visit.start()
        try:
            yield
        finally:
            self._ended.set()
            visit.join()

    def _visit(self, out: Any) -> None:
        while not (found := re.search(r"http://[^\s\"]+", out())):
            if self._ended.wait(0.01):
                return
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        try:
            browser.open(found[0], timeout=PATIENCE).read()
        except OSError as error:
            self.problems.append(f"page: {error}")
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def _environment(home: Path) -> Iterator[None]:
    changed = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    removed = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")
    before = dict(os.environ)
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[Any, Any]]:
    """Standard streams as a shell gives them, to be read afterwards."""
    raw = io.BytesIO(), io.BytesIO()
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    sys.stdout, sys.stderr = (io.TextIOWrapper(stream, encoding="utf-8", write_through=True) for stream in raw)
    sys.stderr.reconfigure(errors="backslashreplace")
    try:
        yield tuple(lambda stream=stream: stream.getvalue().decode("utf-8", "replace") for stream in raw)
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def snapshot(folder: Path) -> dict[str, str]:
    """What lies in a folder: a word on each file, link and folder."""
    found: dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)  # noqa: PTH118 - names that are not UTF-8
            if os.path.islink(path):  # noqa: PTH114
                what = f"link {os.readlink(path)}"  # noqa: PTH115
            elif os.path.isdir(path):  # noqa: PTH112
                what = "folder"
            else:
                try:
                    what = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                except OSError as error:  # its owner may not read it
                    what = str(error.errno)
            found[os.path.relpath(path, folder)] = what
    return found


def _changed(before: dict[str, str], after: dict[str, str], writes: Sequence[str]) -> list[str]:
    problems = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and not any(
            name == path or name.startswith(f"{path}/") for path in writes
        ):
            what = "made" if name not in before else "deleted" if name not in after else "changed"
            if not any(path.startswith(f"{name}/") for path in writes):
                problems.append(f"{what} a file: {name}")
    return problems


def judge(given: Input, outcome: Outcome) -> list[str]:
    """What is wrong with how the program answered."""
    told = outcome.err if outcome.command == "generate" else outcome.out + outcome.err  # a model may say anything
    problems = [f"raw error: {sign}" for sign in _RAW if sign in told]
    if outcome.code not in CODES:
        problems.append(f"exit code: {outcome.code}")
    lines = outcome.err.rstrip("\n").split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    may_say_no = outcome.code == 1 and outcome.arguments[:1] in (["bench"], ["doctor"])
    if outcome.code and not problems and not may_say_no:
        if len(errors) != 1 or lines[-1] != errors[0]:
            problems.append(f"not one error line: {len(errors)}")
        if outcome.code == 2 and len(lines) > MOST_LINES:
            problems.append(f"many lines: {len(lines)}")
    if outcome.code == 3 and outcome.kind not in ("--set", "configuration", "arguments"):
        problems.append("out of memory: what a file says was taken for granted")
    if found := _STEERING.search(outcome.err.replace("\r\n", "\n")):
        problems.append(f"steering character: {found[0]!r} on standard error")
    elif outcome.command != "generate" and (found := _STEERING.search(_without_names(given, outcome.out))):
        problems.append(f"steering character: {found[0]!r} on standard output")
    if max(map(len, lines)) > 2200 and "raw error" not in str(problems):
        problems.append("long line: on standard error")
    if "--json" in given.arguments and outcome.code in (0, 2) and not problems:
        problems += _json_problem(outcome.out)
    return problems


def _without_names(given: Input, out: str) -> str:
    """Standard output is no terminal here: a program that reads it gets the names that it gave as they are."""
    for text in given.arguments:
        if _STEERING.search(text):
            out = out.replace(text, "")
    return out


def _json_problem(out: str) -> list[str]:
    if not out:
        return []  # a flag of another command, or behind `--`
    try:
        json.loads(out)
    except ValueError:
        return [] if not out.startswith(("{", "[")) else ["no JSON: the document cannot be read"]
    return []
