"""Mutation check: break what README and docs promise, one line at a time, and see whether a test notices.

    python benchmarks/mutants.py --jobs 2                # all of mutants.txt, about 40 minutes on two cores
    python benchmarks/mutants.py --only checkpoint       # those whose file, area or promise holds this text
    python benchmarks/mutants.py --random 100 --seed 1   # drawn changes of core modules

Each mutant is a text of one file of the package, what to put in its place, the promise that this breaks, and the tests
that have to notice. The working tree is only read: every worker has a copy of it, changes one file there, and runs
the tests in a process of their own. A test that fails, an import that fails and a hang (`--timeout`) kill a mutant.

First all tests are run as they are; where one of a mutant's own fails already, the mutant is void and not counted. A
text that is not found exactly once is stale. The results are written as they come: the same command goes on with
what is missing or was changed since. Exit code 1: fewer than 95 % killed, or a stale mutant.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import gc
import hashlib
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.txt")
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
ENOUGH = 0.95
_LONGEST = 2000
VERDICTS = ("killed", "timeout", "survived", "void", "stale")
_NO_TESTS = 5
"""Exit code of pytest."""
_LIBRARIES = (
    *("torch", "torch._dynamo", "numpy", "scipy.special", "safetensors.torch", "tokenizers", "pydantic", "cyclopts"),
    *("rich", "tomlkit", "pytest", "hypothesis", "starlette", "uvicorn"),
)
_QUIETLY = (
    "-q",
    "--tb=line",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
"""The last, because plugins of pytest are among what is loaded already."""


@dataclass(frozen=True)
class Mutant:
    """A change that has to be noticed."""

    area: str
    file: str
    """Below `src/foretrain`, or below `src`."""
    before: str
    after: str
    promise: str
    tests: tuple[str, ...]
    """Files or tests below `tests`."""
    harmless: str = ""
    """Why no test can notice it; empty: one must."""

    def changed(self, text: str) -> str:
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Project:
    """What is mutated. package: where the files of mutants are; libraries: what its tests load, loaded once."""

    root: Path
    package: str = "src/foretrain"
    libraries: tuple[str, ...] = _LIBRARIES

    def source(self, mutant: Mutant) -> Path:
        return self.path(mutant.file)

    def path(self, file: str) -> Path:
        """Return where a file of the package or of the packages beside it is."""
        package = self.root / self.package
        beside = package.parent / file
        return beside if beside.is_file() else package / file

    def stale(self, mutant: Mutant) -> str:
        """What is wrong with an entry of the list; empty: nothing."""
        path = self.source(mutant)
        if not path.is_file():
            return "there is no such file"
        text = path.read_text(encoding="utf-8")
        if (count := text.count(mutant.before)) != 1:
            return f"its text is found {count} times"
        if mutant.before == mutant.after:
            return "it changes nothing"
        try:
            ast.parse(mutant.changed(text) if path.suffix == ".py" else "")
        except SyntaxError as error:
            return f"it makes no Python: {error.msg}"
        missing = [test for test in mutant.tests if not self.has(test)]
        return f"there is no test {missing[0]}" if missing or not mutant.tests else ""

    def has(self, test: str) -> bool:
        file, *_, name = [*test.split("::"), ""] if "::" not in test else test.split("::")
        path = self.root / "tests" / file
        return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))

    def key(self, mutant: Mutant) -> str:
        """Changes with the file, with the mutant and with its tests."""
        digest = hashlib.sha256(repr((mutant.file, mutant.before, mutant.after, mutant.tests)).encode())
        for path in (self.source(mutant), *(self.root / "tests" / test.partition("::")[0] for test in mutant.tests)):
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()[:16]


# --- one process for each test run -----------------------------------------------------------------------------------


class Warm:
    """Runs pytest in forks of one process that has the large libraries loaded: most of a short test run is imports.

    Nothing of the package itself is loaded there."""

    def __init__(self, output: Path, libraries: Sequence[str]) -> None:
        self.output = output
        settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", **os.environ}
        command = [sys.executable, __file__, "--serve", ",".join(libraries)]
        self.process = subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, order: dict[str, Any]) -> tuple[int | None, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**order, "output": str(self.output)}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs tests has ended with code {self.process.wait()}")
        code = json.loads(answer)
        return code, self.output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        self.process.communicate()


def serve(libraries: Sequence[str]) -> int:
    """The warm process: a line with an order, a line with an exit code."""
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")  # what tests print goes elsewhere
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            _be_pytest(order)
        answers.write(json.dumps(_wait(child, order["timeout"])) + "\n")
        answers.flush()
    return 0


def _be_pytest(order: dict[str, Any]) -> None:
    """In the fork: as `python -m pytest` in the copy."""
    code = 3
    try:
        os.setsid()
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.chdir(order["root"])
        os.environ["PYTHONPATH"] = os.pathsep.join([order["package"], *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.path[:] = [order["root"], order["package"], *(path for path in sys.path if path != order["package"])]
        import pytest

        code = int(pytest.main(order["arguments"]))
    except BaseException:  # noqa: BLE001 - it is told, and counts as a failure
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _wait(child: int, timeout: float) -> int | None:
    """Its exit code; None where it took longer. Whatever it has started ends with it."""
    deadline, ended = time.monotonic() + timeout, (0, 0)
    while not ended[0] and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        if not ended[0]:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended[0]:
        return os.waitstatus_to_exitcode(ended[1])
    os.kill(child, signal.SIGKILL)  # in case that it has no group of its own yet
    os.waitpid(child, 0)
    return None


# --- one copy --------------------------------------------------------------------------------------------------------


class Copy:
    """The project in a folder of its own, where files are changed."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.project = Project(folder, project.package)
        self.warm = Warm(folder.with_name(f"{folder.name}.txt"), project.libraries)
        for name in COPIED:
            source = project.root / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.is_file():
                shutil.copy(source, folder / name)

    @contextlib.contextmanager
    def with_change(self, mutant: Mutant) -> Iterator[None]:
        path = self.project.source(mutant)
        text = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.changed(text))
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Compiled forms go: they are told by time and size, which may be the same."""
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """(exit code, what it printed); None: it did not end in time."""
        root = self.project.root
        options = [*_QUIETLY, f"--basetemp={root}-tests", *arguments]  # workers would clear away each other's folders
        package = str((root / self.project.package).parent)
        return self.warm.run({"root": str(root), "package": package, "arguments": options, "timeout": timeout})

    def baseline(self, file: str, tests: Sequence[str], timeout: float) -> list[str]:
        """Of the tests of a file, as they are, those that fail; the file itself where it cannot be run."""
        code, printed = self.pytest(["-rfE", *(f"tests/{test}" for test in tests)], timeout)
        failed = [line.split()[1] for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        names = sorted({name.partition("[")[0].removeprefix("tests/") for name in failed})
        if code in (0, 1) and (names or code == 0):
            return names
        sys.stderr.write(f"{file}: {printed[-2000:]}\n")
        return [file]

    def judge(self, mutant: Mutant, timeout: float) -> dict[str, Any]:
        began = time.monotonic()
        with self.with_change(mutant):
            code, printed = self.pytest(["-x", *(f"tests/{test}" for test in mutant.tests)], timeout)
        lines = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        by = lines[0].split(" - ")[0].partition(" ")[2] if lines else printed.strip().rpartition("\n")[2]
        if code is None:
            verdict = "timeout"
        elif code == 0:
            verdict = "survived"
        else:
            verdict = "void" if code == _NO_TESTS else "killed"
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - began, 1)}


# --- all of them -----------------------------------------------------------------------------------------------------


class Results:
    """A JSON file with a row per mutant, written anew with each of them."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self.path = path
        self.head = head
        self.rows: dict[str, dict[str, Any]] = {}
        self.known: dict[str, dict[str, Any]] = {}
        """Rows of an earlier call."""
        if path is not None and path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.known = {row["key"]: row for row in content["rows"]}

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        rows = [*self.rows.values(), *(row for key, row in self.known.items() if key not in self.rows)]
        temporary = self.path.with_name(f".tmp-{self.path.name}")
        temporary.write_text(json.dumps({**self.head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def check(
    project: Project,
    mutants: Sequence[Mutant],
    results: Results,
    jobs: int = 1,
    timeout: float = 300.0,
    tell: Callable[[str], None] = lambda _: None,
    baseline: bool = True,
) -> list[dict[str, Any]]:
    """A row per mutant, in their order. Those that are known are not tried again."""
    keys = {mutant: project.key(mutant) for mutant in mutants}
    waiting: list[Mutant] = []
    for mutant in mutants:
        if reason := project.stale(mutant):
            results.add(keys[mutant], _row(mutant, keys[mutant], {"verdict": "stale", "by": reason, "seconds": 0.0}))
        elif results.known.get(keys[mutant], {}).get("verdict", "void") in ("void", "stale"):
            waiting.append(mutant)
        else:
            results.add(keys[mutant], results.known[keys[mutant]])
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(min(jobs, max(1, len(waiting)))):
            copies.put(Copy(project, Path(folder) / f"copy-{number}"))

        def borrowed(work: Callable[[Copy], Any]) -> Any:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        first = waiting if baseline else []
        broken = _baseline(first, lambda *one: pool.submit(borrowed, lambda copy: copy.baseline(*one, 4 * timeout)))
        if broken:
            tell(f"tests that fail as they are: {', '.join(broken)}")
        futures: dict[concurrent.futures.Future[Any], Mutant] = {}
        for mutant in waiting:
            if void := [name for name in broken if any(_holds(test, name) for test in mutant.tests)]:
                found = {"verdict": "void", "by": f"fails without it: {void[0]}", "seconds": 0.0}
                results.add(keys[mutant], _row(mutant, keys[mutant], found))
            else:
                work = pool.submit(borrowed, lambda copy, mutant=mutant: copy.judge(mutant, timeout))
                futures[work] = mutant
        for count, future in enumerate(concurrent.futures.as_completed(futures), start=1):
            mutant = futures[future]
            row = _row(mutant, keys[mutant], future.result())
            results.add(keys[mutant], row)
            tell(f"{count}/{len(futures)} {row['verdict']:<8} {mutant.file}: {mutant.promise} ({row['by']})")
        while not copies.empty():
            copies.get().warm.close()
    return [results.rows[keys[mutant]] for mutant in mutants]


def _baseline(mutants: Sequence[Mutant], start: Callable[..., concurrent.futures.Future[Any]]) -> list[str]:
    """Tests that fail without any change. Every file is run once, with what is wanted of it."""
    wanted: dict[str, set[str]] = {}
    for test in {test for mutant in mutants for test in mutant.tests}:
        wanted.setdefault(test.partition("::")[0], set()).add(test)
    futures = [start(file, [file] if file in tests else sorted(tests)) for file, tests in wanted.items()]
    return sorted(name for future in futures for name in future.result())


def _holds(test: str, failed: str) -> bool:
    """Whether the failed test is among those that `test` names; a file that cannot be run fails as a whole."""
    return failed == test or failed.startswith(f"{test}::") or test.startswith(f"{failed}::")


def _row(mutant: Mutant, key: str, found: dict[str, Any]) -> dict[str, Any]:
    shown = {name: getattr(mutant, name) for name in ("area", "file", "promise", "before", "after", "harmless")}
    texts = {name: shown[name] if len(shown[name]) < _LONGEST else "" for name in ("before", "after")}  # else a file
    return {"key": key, **shown, **texts, **found}


# --- what is said ----------------------------------------------------------------------------------------------------


def share_killed(rows: Sequence[dict[str, Any]]) -> float:
    counts = Counter(row["verdict"] for row in rows)
    killed = counts["killed"] + counts["timeout"]
    return killed / max(1, killed + counts["survived"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: an area per line, then the survivors by name."""
    lines = ["| area | mutants | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * (1 + len(VERDICTS))]
    for area in [*dict.fromkeys(row["area"] for row in rows), "all"]:
        some = [row for row in rows if area in (row["area"], "all")]
        counts = Counter(row["verdict"] for row in some)
        lines.append(f"| {area} | {len(some)} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |")
    for verdict in ("survived", "void", "stale"):
        for row in (row for row in rows if row["verdict"] == verdict):
            why = row["harmless"] or ("" if verdict == "survived" else row["by"])
            change = f" [{_short(row['before'])} -> {_short(row['after'])}]" if row["before"] else ""
            lines.append(f"{verdict}: {row['file']}: {row['promise']}{change}" + (f": {why}" if why else ""))
    return "\n".join(lines)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def listed() -> list[Mutant]:
    """The mutants of mutants.txt, which says how it is to be read."""
    area, found = "", []
    for block in LIST.read_text(encoding="utf-8").strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("#"):
            continue
        if lines[0].startswith("== "):
            area = lines[0].removeprefix("== ")
            continue
        file, _, promise = lines[0].partition(": ")
        tests, *harmless = [line.strip() for line in lines[1:] if line.startswith("  ")]
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        reason = harmless[0].removeprefix("harmless: ") if harmless else ""
        found.append(Mutant(area, file, before, after, promise, tuple(tests.split()), reason))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time (default: 2)")
    parser.add_argument("--only", default="", help="those whose file, area or promise holds this text")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a mutant counts as killed")
    parser.add_argument("--no-baseline", action="store_true", help="take for granted that all tests pass as they are")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many drawn changes, instead of the list")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn ones (default: 1)")
    today = f"{datetime.now().astimezone():%Y-%m-%d}"
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/DATE-mutants.json)")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve.split(","))
    sys.path.insert(0, str(Path(__file__).parent))
    project = Project(ROOT)
    kind = "random-mutants" if options.random else "mutants"
    if options.random:
        from mutants_random import drawn

        found = drawn(project, options.random, options.seed)
        mutants = [Mutant(*words, (tests,)) for *words, tests in found]
    else:
        mutants = listed()
    mutants = [one for one in mutants if options.only.lower() in f"{one.file} {one.area} {one.promise}".lower()]
    out = options.out or LIST.parent / "results" / f"{today}-{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(out, {"benchmark": kind, "command": f"python benchmarks/mutants.py {' '.join(sys.argv[1:])}"})
    tell = partial(print, flush=True)
    rows = check(project, mutants, results, options.jobs, options.timeout, tell, not options.no_baseline)
    share = share_killed(rows)
    results.head["killed_share"] = round(share, 4)
    results.head["counts"] = dict(Counter(row["verdict"] for row in rows))
    results.write()
    print(table(rows))
    print(f"{share:.1%} killed; every mutant is in {out.name}")
    stale = any(row["verdict"] == "stale" for row in rows)
    return 0 if options.random or (share >= ENOUGH and not stale) else 1


if __name__ == "__main__":
    sys.exit(main())
