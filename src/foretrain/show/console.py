"""The console: a live progress line on a terminal, plain lines everywhere else, and the table at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from foretrain.events import (
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    Progress,
    Resumed,
    RunEnded,
    RunStarted,
)

_LINES_PER_RUN = 40


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}:{seconds % 60:02d}"


class Console:
    """Listens to a run and shows it. Without a terminal it prints some forty plain lines per run, with time left."""

    def __init__(self, console: RichConsole | None = None) -> None:
        self.console = console or RichConsole(stderr=True, highlight=False)
        self._bar: ProgressBar | None = None
        self._task = TaskID(0)
        self._max_steps = 0
        self._first: tuple[int, float] | None = None
        self._next_line = 0
        self._val = math.nan
        self._folder: str | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case Progress():
                self._progress(event)
            case Evaluated():
                self._val = event.loss
                if self._bar is None:
                    best = " (best so far)" if event.best else ""
                    self._print(f"step {event.step}: held-out loss {event.loss:.4f}{best}")
            case CheckpointSaved():
                if self._bar is None:
                    self._print(f"step {event.step}: saved {escape(event.path)} ({event.megabytes:.1f} MB)")
            case CheckpointRejected():
                self._print(f"[yellow]damaged checkpoint put aside as {escape(event.path)}:[/] {escape(event.reason)}")
            case Resumed():
                self._print(f"resumed from step {event.step} ({escape(event.path)})")
            case Notice():
                text = escape(event.message)
                self._print(f"[yellow]warning:[/] {text}" if event.level == "warning" else text)
            case RunEnded():
                self.close()
                if event.reason != "failed":
                    self.console.print(summary_table(event.summary, event.reason, self._folder))

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _start(self, event: RunStarted) -> None:
        self._max_steps = event.max_steps
        self._folder = event.details.get("folder")
        self._next_line = event.step
        facts = {"model": f"{event.title}, {short(event.parameters)} parameters", **event.details}
        facts["device"] = f"{event.device}, {event.precision}"
        width = max(len(name) for name in facts)
        for name, text in facts.items():
            self._print(f"[bold]{name:<{width}}[/]  {escape(text)}")
        if not self.console.is_terminal:
            return
        self._bar = ProgressBar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=False,
        )
        self._task = self._bar.add_task("", total=event.max_steps, completed=event.step, numbers="starting ...")
        self._bar.start()

    def _progress(self, event: Progress) -> None:
        if self._first is None:
            self._first = (event.step, event.seconds)
        val = "" if math.isnan(self._val) else f" | val {self._val:.4f}"
        numbers = f"loss {event.loss:.4f}{val} | {short(event.tokens_per_second)} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=event.step, numbers=f"{numbers} | eta {self._eta(event)}")
            return
        if event.step < self._next_line and event.step < self._max_steps:
            return
        self._next_line = event.step + max(1, self._max_steps // _LINES_PER_RUN)
        share = 100 * event.step / max(1, self._max_steps)
        width = len(str(self._max_steps))
        self._print(
            f"step {event.step:>{width}}/{self._max_steps} {share:3.0f}% | {numbers} | lr {event.learning_rate:.2e} | "
            f"eta {self._eta(event)}"
        )

    def _eta(self, event: Progress) -> str:
        first_step, first_seconds = self._first or (event.step, event.seconds)
        if event.step == first_step:
            per_step = event.seconds / max(1, event.step)
        else:
            per_step = (event.seconds - first_seconds) / (event.step - first_step)
        return duration(per_step * (self._max_steps - event.step))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def summary_table(summary: Mapping[str, Any], reason: str, folder: str | None = None) -> Table:
    """The end of a run in one table."""
    table = Table(title=f"run {reason}", show_header=False, title_justify="left")
    rows = {
        "held-out loss": _number(summary.get("final_val_loss")),
        "best held-out loss": _number(summary.get("best_val_loss")),
        "training loss": _number(summary.get("final_train_loss")),
        "steps": f"{summary['steps']:,}",
        "tokens": f"{summary['tokens']:,}",
        "training time": f"{duration(summary['seconds'])} ({summary['seconds']:.1f} s)",
        "speed": f"{short(summary['tokens_per_second'])} tok/s" if summary.get("tokens_per_second") else None,
        "skipped steps": str(summary["skipped_steps"]) if summary.get("skipped_steps") else None,
        "peak GPU memory": f"{summary['peak_memory_mb']:,.0f} MB" if summary.get("peak_memory_mb") else None,
        "run folder": folder,
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, escape(value))
    return table


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
