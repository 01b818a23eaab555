"""Runs the benchmarks: every group in processes of its own, both versions interleaved A B B A, all in one file."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import foretrain
from foretrain import environment
from foretrain.errors import ForetrainError, InputError
from foretrain_bench import worker
from foretrain_bench.formats import FORMAT
from foretrain_bench.hotpaths import BENCHMARKS

_MOST_SECONDS = 900
"""The most that one process may take."""

Progress = Callable[[int, int, str], None]
"""(processes done, of how many, what is next)"""


@dataclass(frozen=True, slots=True)
class Version:
    """A foretrain to be timed."""

    label: str
    """`this`, or what `--against` names, without the folders above it."""
    python: str
    source: Path | None
    """Folder that holds the package; None: what `python` has installed."""


@dataclass(frozen=True, slots=True)
class TimingPlan:
    names: tuple[str, ...]
    processes: int
    device: str = "cpu"
    threads: int = 1

    def groups(self) -> list[list[str]]:
        """Return the names that are timed together in one process."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(BENCHMARKS[name].group, []).append(name)
        return list(groups.values())


@dataclass
class TimedVersion:
    """All processes of one version."""

    version: Version
    processes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Processes of each benchmark, in the order of time."""
    failures: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


def choose(pattern: str | None) -> tuple[str, ...]:
    """Choose benchmarks whose name holds the text or fits the pattern; commas separate several."""
    if pattern is None:
        return tuple(BENCHMARKS)
    wanted = [part.strip() for part in pattern.split(",") if part.strip()]
    names = tuple(name for name in BENCHMARKS if any(part in name or fnmatch.fnmatch(name, part) for part in wanted))
    if not names:
        raise InputError(f"--only {pattern}: no benchmark has such a name; there are: {', '.join(BENCHMARKS)}")
    return names


def this_version() -> Version:
    return Version("this", sys.executable, Path(foretrain.__file__).resolve().parents[1])


def other_version(path: Path) -> Version:
    """Find what `--against` names: a checkout, its source folder, or the Python of an environment that has foretrain
    installed."""
    for source in (path, path / "src"):
        if (source / "foretrain" / "__init__.py").is_file():
            return Version(path.resolve().name, sys.executable, source.resolve())
    if path.is_file() and os.access(path, os.X_OK):
        return Version(path.name, str(path.absolute()), None)
    raise InputError(
        f"--against {path}: neither a folder with foretrain's source (`foretrain/__init__.py` or `src/foretrain`) nor "
        "a Python program; `git worktree add ../old TAG` makes such a folder"
    )


def run(plan: TimingPlan, versions: Sequence[Version], progress: Progress) -> list[TimedVersion]:
    """Run rounds over all groups; within each the versions take turns, A B then B A.

    What fails in one version is not timed again in any.
    """
    measured = [TimedVersion(version) for version in versions]
    groups = plan.groups()
    total, done = plan.processes * len(groups) * len(versions), 0
    for turn in range(plan.processes):
        for group in groups:
            for one in measured if turn % 2 == 0 else reversed(measured):
                failed = {name for other in measured for name in other.failures}
                names = [name for name in group if name not in failed]
                if names:
                    progress(done, total, f"{names[0]}{' ...' if len(names) > 1 else ''}")
                    _take(one, names, _time(one.version, names, plan))
                done += 1
        for one in measured:
            if not one.processes:
                reasons = "; ".join(sorted(set(one.failures.values())))
                raise ForetrainError(f"no benchmark could be timed in {one.version.label!r}: {reasons}")
    progress(done, total, "done")
    return measured


def _take(measured: TimedVersion, names: Sequence[str], result: dict[str, Any]) -> None:
    """A benchmark that failed once is left out: its other processes would be a chosen few."""
    measured.environment = result.get("environment") or measured.environment
    for name in names:
        process = result["benchmarks"][name]
        if "error" in process:
            measured.failures[name] = process["error"]
            measured.processes.pop(name, None)
        elif name not in measured.failures:
            measured.processes.setdefault(name, []).append(process)


def _time(version: Version, names: Sequence[str], plan: TimingPlan) -> dict[str, Any]:
    """Time benchmarks in one process. A failure is a result as well."""
    order = json.dumps({"names": list(names), "device": plan.device, "threads": plan.threads})
    command = [version.python, "-P", str(Path(worker.__file__).resolve()), order]
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "MKL_NUM_THREADS": str(plan.threads)}
    environment.pop("PYTHONPATH", None)
    if version.source is not None:
        environment["PYTHONPATH"] = str(version.source)
    try:
        answer = subprocess.run(  # noqa: S603 - our own worker
            command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return _failed(names, f"took more than {_MOST_SECONDS} seconds")
    except OSError as error:
        raise InputError(f"--against {version.label}: cannot be started ({error.strerror})") from None
    for line in answer.stdout.splitlines():
        if line.startswith(worker.MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(worker.MARK))
            return result
    lines = answer.stderr.strip().splitlines() or [f"ended with code {answer.returncode}"]
    return _failed(names, lines[-1])


def _failed(names: Sequence[str], reason: str) -> dict[str, Any]:
    return {"benchmarks": {name: {"error": reason} for name in names}}


# --- the record ------------------------------------------------------------------------------------------------------


def record(measured: TimedVersion, plan: TimingPlan, command: str, together: str | None = None) -> dict[str, Any]:
    """Make the result file: how it was made, and every sample. No names of people, machines or folders."""
    return {
        "format": FORMAT,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "version": measured.version.label,
        "commit": environment.commit_of(measured.version.source),
        "together": together,
        "environment": measured.environment,
        "unit": "seconds",
        "benchmarks": {
            name: {"description": BENCHMARKS[name].description, **summary(processes), "processes": processes}
            for name, processes in ((name, measured.processes.get(name)) for name in plan.names)
            if processes
        },
        "failures": measured.failures,
    }


def new_token() -> str:
    """Marks files that were measured interleaved."""
    return uuid.uuid4().hex[:12]


def summary(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return per-process medians and what may have disturbed them."""
    medians = [float(np.median(process["samples"])) for process in processes]
    loads = [load for process in processes for load in process["load"] if load is not None]
    return {
        "median": float(np.median(medians)),
        "process_medians": medians,
        "outlier_share": round(float(np.mean([outlier_share(process["samples"]) for process in processes])), 4),
        "drift_percent": drift_percent(medians),
        "load": max(loads) if loads else None,
    }


def outlier_share(samples: Sequence[float]) -> float:
    """Return the share of samples beyond Tukey's fences: 1.5 quartile distances outside the quartiles."""
    low, high = np.quantile(samples, [0.25, 0.75])
    fence = 1.5 * (high - low)
    return float(np.mean([sample < low - fence or sample > high + fence for sample in samples]))


def drift_percent(medians: Sequence[float]) -> float | None:
    """Compare the later half of the processes with the earlier; None for fewer than four."""
    if len(medians) < 4:
        return None
    half = len(medians) // 2
    return round(100 * math.expm1(math.log(float(np.median(medians[-half:])) / float(np.median(medians[:half])))), 2)
