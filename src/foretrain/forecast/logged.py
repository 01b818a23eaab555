"""Read losses that other tools have logged: JSON lines, JSON, CSV and TensorBoard's event files.

Nobody says what the columns are called, so they are guessed from what trainers usually write; who knows better names
them. A run that was resumed tells steps twice: what came later counts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.forecast.event_files import is_event_file, scalars
from foretrain.persist.files import from_json

_LARGEST_FILE = 2**30
_LONGEST_LINE = 2**20
_LARGEST_STEP = 2**53
"""Beyond it steps cannot be told apart as numbers."""
_STEPS = ("step", "global_step", "steps", "iteration", "iter", "it", "train_step", "trainer_global_step", "tick")
_HELD_OUT = r"(val|valid|validation|eval|evaluation|test|dev|held_out|heldout)"
_LOSSES = (rf"{_HELD_OUT}_loss", rf"loss_{_HELD_OUT}", rf".*_{_HELD_OUT}_loss", rf"{_HELD_OUT}_.*loss")
_TRAINING = (r"loss", r"(train|training)_loss", r"loss_(train|training)", r".*_(train|training)_loss", r".*_loss")
_RATES = (r"lr", r"learning_rate", r".*_lr", r".*_learning_rate", r"lr_.*", r"learning_rate_.*")
_LENGTHS = ("max_steps", "total_steps")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ColumnNames:
    """The columns that somebody named; empty: they are guessed."""

    step: str = ""
    loss: str = ""
    rate: str = ""


@dataclass
class LoggedLosses:
    """What a file tells of a run."""

    column: str
    """What the losses are called there."""
    points: list[tuple[float, float]] = field(default_factory=list)
    """(step, loss), steps rising."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    total_steps: int | None = None
    broken: int = 0
    """So many losses were no numbers, and are left out."""
    ends_broken: bool = False
    """The last loss was no number."""

    @property
    def held_out(self) -> bool:
        """Tell whether the name says that the losses are of held-out data."""
        return re.search(rf"(^|_){_HELD_OUT}(_|$)", _plain(self.column)) is not None


def read_losses(path: Path, names: ColumnNames | None = None) -> LoggedLosses:
    """Read the losses of a file. Raises InputError that says what is missing, and what there is instead."""
    names = names or ColumnNames()
    try:
        if path.is_dir():
            return _of_events(path, _event_files(path), names)
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"{path}: larger than 1 GiB; write out the held-out losses alone")
        if is_event_file(path):
            return _of_events(path, [path], names)
        return _of_rows(path, _rows(path), names)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _event_files(folder: Path) -> list[Path]:
    """List the event files of a folder in the order of their names, which tell when they were begun."""
    found = sorted(path for path in folder.iterdir() if "tfevents" in path.name and path.is_file())
    if not found:
        raise InputError(
            f"{folder}: neither a run folder (it holds no metrics.jsonl) nor one of TensorBoard's; name a file"
        )
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, whichever way they are written."""
    with path.open("rb") as file:
        head = file.read(4096)
    if b"\0" in head:
        raise InputError(f"{path}: a binary file; JSON lines, CSV and TensorBoard's event files can be read")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"[":
        return _of_document(path)
    if text[:1] == b"{":
        first = text.partition(b"\n")[0]
        return _of_lines(path) if first.rstrip().endswith(b"}") else _of_document(path)
    return _of_csv(path)


def _of_lines(path: Path) -> Iterator[Row]:
    """Yield the object of every line; the last one may be cut off, and lines that are no objects say nothing."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                row = from_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _of_document(path: Path) -> Iterator[Row]:
    """Yield the rows of one JSON document: a list, or the `log_history` that Hugging Face's trainer keeps."""
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        lines = list(_of_lines(path))  # a first line that is very long
        if not lines:
            raise InputError(f"{path}: no JSON that can be read ({error})") from None
        found = lines
    if isinstance(found, dict):
        yield {name: found[name] for name in _LENGTHS if name in found}
        found = found.get("log_history", [found])
    for row in found if isinstance(found, list) else []:
        if isinstance(row, dict):
            yield row


def _of_csv(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline(_LONGEST_LINE)
            file.seek(0)
            delimiter = max(",;\t", key=head.count)
            for row in csv.DictReader(file, delimiter=delimiter):
                yield {str(name): _number(value) for name, value in row.items() if isinstance(value, str) and value}
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path}: neither JSON lines nor CSV in UTF-8, and no event file of TensorBoard") from None


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# --- columns ----------------------------------------------------------------------------------------------------------


def _of_rows(path: Path, rows: Iterable[Row], names: ColumnNames) -> LoggedLosses:
    """Choose the columns by what the whole file has: an evaluation may come after thousands of training losses."""
    table = [_numbers(row) for row in rows]
    known = list(dict.fromkeys(name for row in table for name in row))
    if not known:
        raise InputError(f"{path}: no numbers in it; JSON lines, CSV and TensorBoard's event files can be read")
    step = _chosen(path, "--step", names.step, known, _STEPS)
    loss = _chosen(path, "--loss", names.loss, known, (*_LOSSES, *_TRAINING))
    rate = _chosen(path, "--rate", names.rate, known, _RATES, needed=False)
    found = LoggedLosses(loss)
    for row in table:
        at = row.get(step)
        found.total_steps = next((int(row[name]) for name in _LENGTHS if _is_count(row.get(name))), found.total_steps)
        if at is not None and 0 <= at <= _LARGEST_STEP:
            _take(found, at, row.get(loss), row.get(rate) if rate else None)
    return found


def _numbers(row: Row) -> dict[str, float]:
    """Keep the numbers of a row, also those that stand one level deeper, as in {"eval": {"loss": 2}}."""
    kept: dict[str, float] = {}
    for name, value in row.items():
        inner = {f"{name}/{one}": deeper for one, deeper in value.items()} if isinstance(value, dict) else {name: value}
        for one, number in inner.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                kept[one] = _as_float(number)
            elif isinstance(number, str) and number.strip().lower() in ("nan", "inf", "-inf", "infinity"):
                kept[one] = math.nan
    return kept


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _is_count(value: float | None) -> bool:
    return value is not None and 1 <= value <= _LARGEST_STEP


def _chosen(path: Path, option: str, named: str, known: list[str], usual: Iterable[str], needed: bool = True) -> str:
    """Return the column that was named, or the first that is called as usual; empty if none is needed."""
    if named:
        if named in known:
            return named
        raise InputError(f"{path}: no column of numbers is called {named!r} ({option}); there are: {_listed(known)}")
    plain = {_plain(name): name for name in reversed(known)}
    for form in usual:
        if found := next((name for short, name in plain.items() if re.fullmatch(form, short)), None):
            return found
    if not needed:
        return ""
    what = {"--step": "of steps", "--loss": "of losses"}[option]
    raise InputError(f"{path}: no column {what} was found among {_listed(known)}; name it with {option}")


def _plain(name: str) -> str:
    """Write a name in small letters, with one kind of separator; of `run-3 - eval/loss` what follows the run."""
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(" - ")[2].lower()).strip("_")


def _listed(known: list[str]) -> str:
    return ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")


def _take(found: LoggedLosses, step: float, loss: float | None, rate: float | None) -> None:
    """Add what a row tells. What is told of a step again was done again, with all that follows it."""
    if loss is not None:
        while found.points and found.points[-1][0] >= step:
            found.points.pop()
        found.ends_broken = not math.isfinite(loss)
        if found.ends_broken:
            found.broken += 1
        else:
            found.points.append((step, loss))
    if rate is not None and math.isfinite(rate) and rate >= 0:
        while found.rates and found.rates[-1][0] >= step:
            found.rates.pop()
        found.rates.append((step, rate))


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def _of_events(path: Path, files: list[Path], names: ColumnNames) -> LoggedLosses:
    told = [scalar for file in files for scalar in scalars(file)]
    known = list(dict.fromkeys(tag for _, tag, _ in told))
    if not known:
        raise InputError(f"{path}: no scalars in it")
    loss = _chosen(path, "--loss", names.loss, known, (*_LOSSES, *_TRAINING))
    rate = _chosen(path, "--rate", names.rate, known, _RATES, needed=False)
    found = LoggedLosses(loss)
    for step, tag, value in told:
        if step > _LARGEST_STEP:
            continue
        _take(found, step, value if tag == loss else None, value if tag == rate else None)
    return found
