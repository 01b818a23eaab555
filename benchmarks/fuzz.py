"""Fuzzing: thousands of spoilt inputs for every command and every kind of file. None may end in a traceback or a hang.

    python benchmarks/fuzz.py --inputs 10000 --seed 0 --jobs 2 --out FOLDER    # about 40 minutes on two cores
    python benchmarks/fuzz.py --only 0/123 --out FOLDER                        # one of them again, with all it prints

Each input is made from the seed and its number alone (`fuzz_inputs.py`) and runs in a process of its own, with
10 seconds of CPU and 4 GB of memory. What is asked of every one:

  - exit code 0, 1, 2 or 3; no traceback, no panic of a library, no raw warning, no end by a signal
  - exit codes 1, 2 and 3 with one line that begins with `error:`, the last one; what goes before it is short
  - no character of a file that steers a terminal reaches standard error
  - no file is changed but those that the command is there to write

FOLDER/findings.jsonl gets every breach as it comes. The table at the end counts by command and kind; exit code 1 if
there was any breach. `--results` writes the table as a dated JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import fuzz_examples
from fuzz_inputs import TARGETS
from fuzz_maker import Input, Maker, Target

CPU_SECONDS = 10
WALL_SECONDS = 90
"""For a process that waits for something; on a busy machine the others wait for a core."""
MEMORY = 4 * 2**30
MOST_LINES = 12
"""On standard error before an error."""
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_RAW = ("Traceback (most recent call last)", "panicked at", "Warning: ", "Fatal Python error", "Exception ignored")
_REFUSABLE = (0, 1, 2, 3)


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
    cpu: float = 0.0
    memory_mb: int = 0

    @property
    def signature(self) -> str:
        """Breaches with one cause have the same."""
        frames = re.findall(r'File ".*?(foretrain/[^"]*)", line (\d+), in (\w+)', self.err)
        last = [line for line in self.err.strip().splitlines() if line.strip()][-1:] or [""]
        place = ":".join(frames[-1][:2]) if frames else ""
        what = self.problems[0].partition(":")[0] if self.problems else ""
        return f"{what} | {place} | {last[0][:120] if place else ''}"


def target_of(rng: random.Random) -> Target:
    return rng.choices(TARGETS, [target.weight for target in TARGETS])[0]


def start_of(seed: int, number: int) -> tuple[random.Random, Target]:
    """What decides an input: every number is another one, whatever was made before."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - no secret
    return rng, target_of(rng)


# --- one input --------------------------------------------------------------------------------------------------------


def perform(target: Target, rng: random.Random, good: Path, folder: Path, name: str = "") -> Outcome:
    """Make an input in a folder, which becomes the current one, hand it to the program and judge what comes of it."""
    from foretrain.cli import main

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
            browser.open(found[0], timeout=WALL_SECONDS).read()
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
                what = hashlib.sha256(Path(path).read_bytes()).hexdigest()
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
    if outcome.code not in _REFUSABLE:
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
    elif outcome.command != "generate" and (found := _STEERING.search(outcome.out)):
        problems.append(f"steering character: {found[0]!r} on standard output")
    if max(map(len, lines)) > 2200 and "raw error" not in str(problems):
        problems.append("long line: on standard error")
    if "--json" in given.arguments and outcome.code in (0, 2) and not problems:
        problems += _json_problem(outcome.out)
    return problems


def _json_problem(out: str) -> list[str]:
    if not out:
        return []  # a flag of another command, or behind `--`
    try:
        json.loads(out)
    except ValueError:
        return [] if not out.startswith(("{", "[")) else ["no JSON: the document cannot be read"]
    return []


# --- many, each in a process of its own -------------------------------------------------------------------------------


def load_everything() -> None:
    """What all processes share: the libraries, loaded once."""
    import foretrain

    for module in pkgutil.walk_packages(foretrain.__path__, "foretrain."):
        if not module.name.endswith(("triton_kernels", "__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    for name in (
        "torch._dynamo",
        "pyarrow.parquet",
        "scipy.special",
        "scipy.stats",
        "tokenizers",
        "tomlkit",
        "uvicorn",
        "safetensors.torch",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def in_child(work: Any) -> int:
    """Fork; the child does its work and ends. The process number."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the parent is told by the exit code and the text
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def child_work(seed: int, number: int, good: Path, folder: Path) -> None:
    """One input, with limits on time and memory; its outcome is left beside the folder."""
    log = os.open(folder.with_suffix(".log"), os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGXCPU, log, all_threads=True, chain=True)
    rng, target = start_of(seed, number)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    outcome = perform(target, rng, good, folder, f"{seed}/{number}")
    printed = folder.with_suffix(".log").read_text(errors="replace")
    if printed:
        outcome.err += printed
        outcome.problems.append("past Python: something was printed around sys.stderr")
    folder.with_suffix(".done").write_text(json.dumps(asdict(outcome)))


class Run:
    """Many inputs, some at once."""

    def __init__(self, seed: int, good: Path, out: Path, jobs: int, keep: bool = False) -> None:
        self.seed, self.good, self.out, self.jobs, self.keep = seed, good, out, jobs, keep
        self.work = out / "work"
        self.findings = out / "findings.jsonl"
        self.log_file = out / "inputs.jsonl"
        self.outcomes: list[Outcome] = []
        self._running: dict[int, tuple[int, float]] = {}

    def all(self, numbers: Sequence[int]) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        waiting = list(reversed(numbers))
        while waiting or self._running:
            while waiting and len(self._running) < self.jobs:
                self._start(waiting.pop())
            self._collect()

    def _folder(self, number: int) -> Path:
        return self.work / str(number)

    def _start(self, number: int) -> None:
        folder = self._folder(number)
        child = in_child(lambda: child_work(self.seed, number, self.good, folder))
        self._running[child] = (number, time.monotonic() + WALL_SECONDS)

    def _collect(self) -> None:
        child, status, used = os.wait4(-1, os.WNOHANG) if self._running else (0, 0, None)
        if not child:
            for process, (_, end) in self._running.items():
                if time.monotonic() > end:
                    os.kill(process, signal.SIGXCPU if time.monotonic() < end + 2 else signal.SIGKILL)
            time.sleep(0.002)
            return
        number, _ = self._running.pop(child)
        outcome = self._outcome(number, status)
        outcome.cpu = round(used.ru_utime + used.ru_stime, 2)
        outcome.memory_mb = used.ru_maxrss >> 10
        self._tell(outcome)
        if not self.keep:
            for path in self.work.glob(f"{number}*"):
                if path.name.split(".")[0] == str(number):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _outcome(self, number: int, status: int) -> Outcome:
        folder = self._folder(number)
        done, begun, log = (folder.with_suffix(suffix) for suffix in (".done", ".json", ".log"))
        if done.is_file():
            return Outcome(**json.loads(done.read_text()))
        _, target = start_of(self.seed, number)
        made = Outcome(**json.loads(begun.read_text())) if begun.is_file() else None
        outcome = made or Outcome(f"{self.seed}/{number}", target.command, target.kind)
        outcome.err = log.read_text(errors="replace") if log.is_file() else ""
        signalled = os.WIFSIGNALED(status)
        what = (
            signal.Signals(os.WTERMSIG(status)).name if signalled else f"exit code {os.waitstatus_to_exitcode(status)}"
        )
        hang = what in ("SIGXCPU", "SIGKILL")
        outcome.problems = [f"hang: {what}" if hang else f"died: {what}" if made else f"no input was made: {what}"]
        return outcome

    def log(self, outcome: Outcome) -> None:
        """One line for every input: what it was and what was said of it."""
        said = (outcome.err.strip().splitlines() or [""])[-1][:300]
        row = {
            "name": outcome.name,
            "target": f"{outcome.command} / {outcome.kind}",
            "code": outcome.code,
            "said": said,
        }
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"cpu": outcome.cpu}) + "\n")

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.problems:
            row = asdict(outcome) | {"signature": outcome.signature}
            row |= {"arguments": [text[:500] for text in outcome.arguments]}
            row |= {"err": outcome.err[-6000:], "out": outcome.out[-1000:]}
            with self.findings.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.log(outcome)
        if not outcome.problems and not self.keep:  # ten thousand of them would fill the memory
            outcome.out = outcome.err = ""
        if len(self.outcomes) % 500 == 0:
            print(
                f"{len(self.outcomes):,} inputs, {sum(bool(one.problems) for one in self.outcomes)} findings",
                flush=True,
            )


# --- the table --------------------------------------------------------------------------------------------------------


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for target in TARGETS:
        mine = [one for one in outcomes if (one.command, one.kind) == (target.command, target.kind)]
        if mine:
            codes = Counter("none" if one.code is None else str(one.code) for one in mine)
            rows.append(
                {
                    "command": target.command,
                    "kind": target.kind,
                    "inputs": len(mine),
                    "codes": dict(sorted(codes.items())),
                    "findings": sum(bool(one.problems) for one in mine),
                    "slowest_cpu_seconds": max(one.cpu for one in mine),
                    "largest_mb": max(one.memory_mb for one in mine),
                }
            )
    return rows


def print_table(rows: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> None:
    print(
        f"{'command':<16} {'kind':<18} {'inputs':>6} {'exit 0':>7} {1:>5} {2:>6} {3:>4} {'findings':>9} slowest     MB"
    )
    for row in rows:
        zero, one, two, three = (row["codes"].get(str(code), 0) for code in _REFUSABLE)
        counts = f"{row['inputs']:>6} {zero:>7} {one:>5} {two:>6} {three:>4} {row['findings']:>9}"
        most = f"{row['slowest_cpu_seconds']:>5.1f} s {row['largest_mb']:>6}"
        print(f"{row['command']:<16} {row['kind']:<18} {counts} {most}")
    found = Counter(one.signature for one in outcomes if one.problems)
    for signature, count in found.most_common():
        first = next(one.name for one in outcomes if one.problems and one.signature == signature)
        print(f"{count:>5} x {first:<10} {signature}")
    print(f"{len(outcomes):,} inputs, {sum(found.values())} findings")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="inputs at the same time (default: 1)")
    parser.add_argument("--out", type=Path, required=True, help="folder for examples, work and findings")
    parser.add_argument("--target", default="", help="only inputs whose `command / kind` holds this text")
    parser.add_argument("--only", help="SEED/NUMBER: this one again; its folder is kept")
    parser.add_argument("--results", type=Path, help="folder for the dated JSON file")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    load_everything()
    good = out / "good"
    if not (good / "comparison" / "result.json").is_file():
        shutil.rmtree(good, ignore_errors=True)
        _, status = os.waitpid(in_child(lambda: fuzz_examples.build(good)), 0)  # threads of torch stay in there
        if status:
            print("the examples could not be made")
            return 2
    if options.only:
        seed, _, number = options.only.partition("/")
        numbers, run = [int(number)], Run(int(seed), good, out, 1, keep=True)
    else:
        everything = range(options.first, options.first + options.inputs)
        numbers = [number for number in everything if options.target in start_of(options.seed, number)[1].name]
        run = Run(options.seed, good, out, options.jobs)
    run.all(numbers)
    if options.only:
        print(json.dumps(asdict(run.outcomes[0]) | {"out": "", "err": ""}, indent=1))
        print(run.outcomes[0].out, run.outcomes[0].err, sep="\n")
        return int(bool(run.outcomes[0].problems))
    rows = rows_of(run.outcomes)
    print_table(rows, run.outcomes)
    if options.results:
        _write_results(options, rows, run.outcomes)
    return int(any(row["findings"] for row in rows))


def _write_results(options: argparse.Namespace, rows: list[dict[str, Any]], outcomes: Sequence[Outcome]) -> None:
    from foretrain import environment

    now = datetime.now().astimezone()
    content = {
        "benchmark": "fuzzing",
        "command": f"python benchmarks/fuzz.py --inputs {options.inputs} --seed {options.seed} --jobs {options.jobs}",
        "date": now.isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "limits": {"cpu_seconds": CPU_SECONDS, "memory_gb": MEMORY / 2**30},
        "inputs": len(outcomes),
        "findings": sum(row["findings"] for row in rows),
        "slowest_cpu_seconds": max(row["slowest_cpu_seconds"] for row in rows),
        "rows": rows,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results / f"{now:%Y-%m-%d}-fuzz.json"
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target.name}")


if __name__ == "__main__":
    sys.exit(main())
