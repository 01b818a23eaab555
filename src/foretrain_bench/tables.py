"""How benchmark results are shown: progress, tables, and the JSON of a comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from foretrain.config.schema import Level
from foretrain.config.units import duration
from foretrain.show.screen import screen
from foretrain_bench.formats import Results
from foretrain_bench.history import BenchmarkSeries, sparkline
from foretrain_bench.verdict import FEWEST, MOST_RUNS, BenchmarkVerdict

_LINES = 20
_COLOURS = {"regressed": "red", "improved": "green", "equivalent": "default", "inconclusive": "yellow"}


def time_in_words(value: float, seconds: bool = True) -> str:
    """Write 0.00123 as 1.230 ms; a number of unknown unit stays as it is."""
    if not seconds:
        return f"{value:.4g}"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if value >= size or unit == "ns":
            return f"{value / size:.4g} {unit}"
    raise AssertionError


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


class TimingProgress:
    """A bar on a terminal, some twenty plain lines elsewhere; both with the time left. Use as a context manager.

    level: "quiet" shows nothing, "verbose" a line for every process.
    """

    def __init__(self, console: Console | None = None, level: Level = "normal") -> None:
        self.console = console or screen("stderr")
        self.level = level
        self.bar: ProgressBar | None = None
        self.started = time.monotonic()
        if self.console.is_interactive and level != "quiet":
            left = TimeRemainingColumn(compact=True)
            self.bar = ProgressBar(
                TextColumn("process"), MofNCompleteColumn(), BarColumn(20), TextColumn("eta"), left,
                TextColumn("{task.description}"), console=self.console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> TimingProgress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self.level == "quiet":
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, description=what)
        due = done % max(1, total // _LINES) == 0 or done == total
        if self.level == "verbose" or (due and self.bar is None):
            left = (time.monotonic() - self.started) / done * (total - done) if done else None
            eta = f" | eta {duration(left)}" if left else ""
            self.console.print(f"process {done}/{total} | {what}{eta}", soft_wrap=True)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def run_table(record: Mapping[str, Any]) -> Table:
    """Return what one version took."""
    table = _table(
        f"median over {_counts(record)} processes",
        ["benchmark"],
        ["median", "fastest", "slowest", "outliers", "drift"],
    )
    for name, benchmark in record["benchmarks"].items():
        medians, drift = benchmark["process_medians"], benchmark["drift_percent"]
        words = [time_in_words(value) for value in (benchmark["median"], min(medians), max(medians))]
        outliers = f"{100 * benchmark['outlier_share']:.0f} %"
        table.add_row(escape(name), *words, outliers, "" if drift is None else f"{drift:+.1f} %")
    return table


def _counts(record: Mapping[str, Any]) -> str:
    counts = sorted({len(benchmark["processes"]) for benchmark in record["benchmarks"].values()})
    return " or ".join(str(count) for count in counts)


def comparison_table(
    verdicts: Mapping[str, BenchmarkVerdict], seconds: bool, a: str, b: str, width: int = 120
) -> Table:
    """Narrow terminals get the verdict and the interval before all else."""
    medians, delta = (["A", "B"], ["delta"]) if width >= 100 else ([], [])
    table = _table(f"A = {a}\nB = {b}", ["benchmark"], [*medians, "B / A", "95 % interval", *delta])
    table.add_column("verdict", no_wrap=True, min_width=len("inconclusive"))
    table.add_column("needed" if width < 100 else "runs needed", justify="right")
    for name, verdict in verdicts.items():
        low, high = verdict.interval
        needed = "" if verdict.runs_needed is None else f"{verdict.runs_needed}"
        if verdict.runs_needed == MOST_RUNS:
            needed += " or more"
        table.add_row(
            escape(name),
            *(time_in_words(median, seconds) for median in verdict.medians if medians),
            percent(verdict.ratio),
            f"{percent(low)} .. {percent(high)}",
            *(f"{100 * math.expm1(verdict.delta):.1f} %" for _ in delta),
            f"[{_COLOURS[verdict.verdict]}]{verdict.verdict}[/]",
            needed,
        )
    return table


def comparison_line(verdicts: Mapping[str, BenchmarkVerdict]) -> str:
    """Say it in one line: 2 of 12 benchmarks regressed: full step, forecast."""
    worse = [name for name, verdict in verdicts.items() if verdict.verdict == "regressed"]
    names = f": {', '.join(worse)}" if worse else ""
    return f"{len(worse)} of {len(verdicts)} benchmarks regressed{names}"


def comparison_json(verdicts: Mapping[str, BenchmarkVerdict]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "verdict": verdict.verdict,
            "ratio": verdict.ratio,
            "low": verdict.interval[0],
            "high": verdict.interval[1],
            "runs_needed": verdict.runs_needed,
        }
        for name, verdict in verdicts.items()
    }


def comparison_notes(a: Results, b: Results, verdicts: Mapping[str, BenchmarkVerdict]) -> list[str]:
    """Return what a reader must know besides the table."""
    notes = []
    for one, other in ((a, b), (b, a)):
        alone = [name for name in one.benchmarks if name not in other.benchmarks]
        if alone:
            notes.append(f"only in {Path(one.source).name}, not compared: {', '.join(alone)}")
    few = [name for name, verdict in verdicts.items() if min(verdict.processes) < FEWEST]
    if few:
        notes.append(f"fewer than {FEWEST} processes on a side settle nothing: {', '.join(few)}")
    if a.together is None or a.together != b.together:
        notes.append(
            "the two sides were not measured interleaved, so a change of the machine between them looks like a change "
            "of the code; `foretrain bench run --against` interleaves"
        )
    return notes


def history_table(history: Mapping[str, BenchmarkSeries]) -> Table:
    table = _table("by date, oldest first", ["benchmark", "history"], ["first", "last"])
    table.add_column("steps")
    for name, series in history.items():
        ends = (time_in_words(series.medians[0], series.seconds), time_in_words(series.medians[-1], series.seconds))
        steps = [f"{percent(step.ratio)} between {step.before} and {step.after}" for step in series.steps]
        table.add_row(escape(name), sparkline(series.medians), *ends, escape("\n".join(steps)) or "none")
    return table


def history_json(history: Mapping[str, BenchmarkSeries]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "files": list(series.files),
            "dates": [date.isoformat() for date in series.dates],
            "medians": list(series.medians),
            "steps": [
                {"before": s.before, "after": s.after, "ratio": s.ratio, "probability": s.probability}
                for s in series.steps
            ],
        }
        for name, series in history.items()
    }
