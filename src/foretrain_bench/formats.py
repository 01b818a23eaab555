"""Reads benchmark results: our own files, plain JSON, pytest-benchmark's JSON and Criterion's console text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.persist.files import from_json

FORMAT = "foretrain bench 1"
KNOWN = "known are files of `foretrain bench run`, plain JSON {name: [median of each process]}, pytest-benchmark's JSON"
_LONGEST = 1e100
_MOST_SAMPLES = 500
"""A longer list of one process is reduced to its median, which it settles anyway."""
_SECONDS = {"ps": 1e-12, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"^(?P<name>.*?)\s*time:\s+\[\S+ \S+ (?P<middle>[0-9.]+) (?P<unit>[pnuµμm]?s) \S+ \S+\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass
class Results:
    """Benchmarks of one side: for each the samples of each process."""

    source: str
    benchmarks: dict[str, list[list[float]]] = field(default_factory=dict)
    seconds: bool = True
    """Whether the numbers are seconds; else their unit is not known."""
    date: datetime | None = None
    """When they were made, as far as the file says."""
    commit: str | None = None
    together: str | None = None
    """Equal in two files that were measured interleaved."""

    def add(self, name: str, samples: list[float]) -> None:
        self.benchmarks.setdefault(name, []).append(samples)


def read(path: Path) -> Results:
    """Read a file, or a folder of files whose processes are taken together."""
    if path.is_dir():
        parts = [_read_file(file) for file in sorted(path.iterdir()) if file.is_file() and not _hidden(file)]
        if not parts:
            raise InputError(f"{path}: the folder holds no result file; give a file, or a folder with some")
        whole = Results(str(path), seconds=parts[0].seconds, date=parts[0].date, commit=parts[0].commit)
        for part in parts:
            if part.seconds != whole.seconds:
                raise InputError(f"{path}: some files are in seconds and some without a unit; keep one kind together")
            for name, processes in part.benchmarks.items():
                whole.benchmarks.setdefault(name, []).extend(processes)
        return whole
    return _read_file(path)


def _hidden(file: Path) -> bool:
    return file.name.startswith(".")


def _read_file(path: Path) -> Results:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file; give a result file, `foretrain bench run --out FILE` writes one"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: this is not text; {KNOWN} and Criterion's console text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    results = Results(str(path))
    if text.lstrip()[:1] in ("{", "["):
        _read_json(results, text)
    else:
        _read_criterion(results, text)
    if not results.benchmarks:
        raise InputError(f"{path}: there is no benchmark in it; {KNOWN} and Criterion's console text")
    for name, processes in results.benchmarks.items():
        results.benchmarks[name] = [_checked(path, name, samples) for samples in processes]
        if not processes:
            raise InputError(f"{path}: {name!r} has no numbers; give the median of each process")
    return results


def _checked(path: Path, name: str, samples: Any) -> list[float]:
    """Check that values are finite and above zero, or a ratio of them would mean nothing."""
    if not isinstance(samples, list):
        raise InputError(f"{path}: {name!r} holds {samples!r}; give the times of each process as a list")
    for value in samples:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= _LONGEST:
            raise InputError(f"{path}: {name!r} holds {value!r}; times are finite numbers above zero")
    if not samples:
        raise InputError(f"{path}: {name!r} has a process without samples; remove it or measure it again")
    numbers = sorted(float(value) for value in samples)
    if len(numbers) > _MOST_SAMPLES:
        return [(numbers[(len(numbers) - 1) // 2] + numbers[len(numbers) // 2]) / 2]
    return [float(value) for value in samples]


def _read_json(results: Results, text: str) -> None:
    try:
        content = from_json(text)
    except ValueError as error:
        where = str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}: {error.msg}"
        raise InputError(f"{results.source}: not valid JSON ({where}); was it written completely?") from None
    if not isinstance(content, dict):
        raise InputError(f"{results.source}: a JSON object is needed, not a list; {KNOWN}")
    if str(content.get("format", "")).startswith("foretrain bench"):
        _read_own(results, content)
    elif isinstance(content.get("benchmarks"), list):
        _read_pytest(results, content)
    else:
        _read_plain(results, content)


def _read_own(results: Results, content: Mapping[str, Any]) -> None:
    if content["format"] != FORMAT:
        raise InputError(
            f"{results.source}: written by another version ({content['format']!r}); this one reads {FORMAT!r}"
        )
    try:
        for name, benchmark in content["benchmarks"].items():
            for process in benchmark["processes"]:
                results.add(name, list(process["samples"]))
        results.date = _date(content.get("date"))
        results.commit, results.together = content.get("commit"), content.get("together")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{results.source}: damaged ({error!r} in `benchmarks`); measure it again") from None


def _read_pytest(results: Results, content: Mapping[str, Any]) -> None:
    """One file is one process, unless a name comes up again."""
    try:
        for benchmark in content["benchmarks"]:
            statistics = benchmark["stats"]
            results.add(
                benchmark.get("fullname") or benchmark["name"], statistics.get("data") or [statistics["median"]]
            )
        results.commit = (content.get("commit_info") or {}).get("id")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{results.source}: no pytest-benchmark file ({error!r} is missing); {KNOWN}") from None
    results.date = _date(content.get("datetime"))


def _read_plain(results: Results, content: Mapping[str, Any]) -> None:
    results.seconds = False
    for name, values in content.items():
        if not isinstance(values, list):
            raise InputError(f"{results.source}: {name!r} is no list of numbers; {KNOWN}")
        results.benchmarks[name] = []
        for value in values:
            results.add(name, value if isinstance(value, list) else [value])


def _read_criterion(results: Results, text: str) -> None:
    """`name   time:   [low middle high]`; a long name stands on the line before. Changes in percent have no unit."""
    before = ""
    for line in _COLOURS.sub("", text).splitlines():
        found = _TIME.match(line)
        if found:
            name = found["name"].strip() or before
            if name:
                results.add(name, [float(found["middle"]) * _SECONDS[found["unit"]]])
        if line.strip():
            before = line.strip()


def _date(text: Any) -> datetime | None:
    try:
        date = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def date_of(results: Results) -> datetime:
    """Return when it was measured: as the file says, else as its name says, else when it was last written."""
    if results.date is not None:
        return results.date
    path = Path(results.source)
    found = _DAY.search(path.name)
    date = _date(found[0]) if found else None
    return date or datetime.fromtimestamp(path.stat().st_mtime, UTC)
