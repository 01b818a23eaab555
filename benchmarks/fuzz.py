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
import importlib
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import fuzz_examples
from fuzz_inputs import TARGETS
from fuzz_judge import CODES, Outcome, perform
from fuzz_maker import Target

CPU_SECONDS = 10
MEMORY = 4 * 2**30
LIBRARIES = [
    "torch._dynamo",
    "pyarrow.parquet",
    "scipy.special",
    "scipy.stats",
    "tokenizers",
    "tomlkit",
    "uvicorn",
    "safetensors.torch",
]
"""What commands load when they need it."""


def target_of(rng: random.Random) -> Target:
    return rng.choices(TARGETS, [target.weight for target in TARGETS])[0]


def start_of(seed: int, number: int) -> tuple[random.Random, Target]:
    """What decides an input: every number is another one, whatever was made before."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - no secret
    return rng, target_of(rng)


def load_everything() -> None:
    """What all processes share: the libraries, loaded once."""
    import foretrain

    for module in pkgutil.walk_packages(foretrain.__path__, "foretrain."):
        if not module.name.endswith(("triton_kernels", "__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    for name in LIBRARIES:
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
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

    def __init__(self, seed: int, good: Path, out: Path, jobs: int, wall: float, keep: bool = False) -> None:
        self.seed, self.good, self.out, self.jobs, self.wall, self.keep = seed, good, out, jobs, wall, keep
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
        self._running[child] = (number, time.monotonic())

    def _collect(self) -> None:
        child, status, used = os.wait4(-1, os.WNOHANG) if self._running else (0, 0, None)
        if not child:
            for process, (_, began) in self._running.items():
                if (late := time.monotonic() - began - self.wall) > 0:  # first it may say where it is
                    os.kill(process, signal.SIGXCPU if late < 2 else signal.SIGKILL)
            time.sleep(0.002)
            return
        number, began = self._running.pop(child)
        outcome = self._outcome(number, status)
        outcome.seconds = round(time.monotonic() - began, 2)
        outcome.cpu_seconds = round(used.ru_utime + used.ru_stime, 2)
        outcome.memory_mb = used.ru_maxrss >> 10
        self._tell(outcome)
        if not self.keep:
            shutil.rmtree(self._folder(number), ignore_errors=True)
            for suffix in (".json", ".log", ".done"):
                self._folder(number).with_suffix(suffix).unlink(missing_ok=True)

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
            file.write(json.dumps(row | {"cpu": outcome.cpu_seconds}) + "\n")

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
                    "slowest_cpu_seconds": max(one.cpu_seconds for one in mine),
                    "slowest_seconds": max(one.seconds for one in mine),
                    "largest_mb": max(one.memory_mb for one in mine),
                }
            )
    return rows


def print_table(rows: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> None:
    print(
        f"{'command':<16} {'kind':<18} {'inputs':>6} {'exit 0':>7} {1:>5} {2:>6} {3:>4} {'findings':>9} slowest     MB"
    )
    for row in rows:
        zero, one, two, three = (row["codes"].get(str(code), 0) for code in CODES)
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
    parser.add_argument("--wall", type=float, default=90, help="seconds after which one hangs; a busy machine is slow")
    parser.add_argument("--out", type=Path, required=True, help="folder for examples, work and findings")
    parser.add_argument("--target", default="", help="only inputs whose `command / kind` holds this text")
    parser.add_argument("--only", help="SEED/NUMBER: this one again; its folder is kept")
    parser.add_argument("--results", type=Path, help="folder for the dated JSON file")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a driver takes more addresses than the limit leaves
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
        numbers, run = [int(number)], Run(int(seed), good, out, 1, options.wall, keep=True)
    else:
        everything = range(options.first, options.first + options.inputs)
        numbers = [number for number in everything if options.target in start_of(options.seed, number)[1].name]
        run = Run(options.seed, good, out, options.jobs, options.wall)
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
        "limits": {"cpu_seconds": CPU_SECONDS, "seconds": options.wall, "memory_gb": MEMORY / 2**30},
        "inputs": len(outcomes),
        "findings": sum(row["findings"] for row in rows),
        **{name: max(row[name] for row in rows) for name in ("slowest_cpu_seconds", "slowest_seconds")},
        "rows": rows,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results / f"{now:%Y-%m-%d}-fuzz.json"
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target.name}")


if __name__ == "__main__":
    sys.exit(main())
