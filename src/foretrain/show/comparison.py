"""Show a comparison on the console: progress while it runs, a table at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from foretrain import events
from foretrain.config.schema import Level
from foretrain.config.units import duration, loss_text
from foretrain.show import narration
from foretrain.show.screen import screen


class ComparisonConsole:
    """One bar over all runs; plain lines where there is no terminal.

    level: "quiet" shows runs that failed, and no others; "verbose" also what happens in each.
    """

    def __init__(
        self, console: Console | None = None, level: Level = "normal", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._left = 0
        self._place = ""
        self._console = console or screen("stderr")
        self._level = level
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left about"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            transient=True,
            speed_estimate_period=300,
        )
        self._live = self._console.is_interactive and level != "quiet"
        self._bar = self._progress.add_task("comparing", total=None)
        self._done = 0
        self._run_steps = 0
        if self._live:
            self._progress.start()

    def planned(self, steps_left: int, runs: tuple[int, int]) -> None:
        done, total = runs
        if not self._place and self._level != "quiet":
            already = f", {done} of them done before" if done else ""
            self.say(f"about {total} runs{already}; {steps_left:,} steps to do")
        self._left, self._place = steps_left, f"run {done + 1} of about {total}: "
        self._progress.update(self._bar, total=self._done + steps_left, completed=self._done)

    def begins(self, spec: Any) -> None:
        self._run_steps = spec.max_steps
        self._progress.update(self._bar, description=self._place + _name(spec))

    def happens(self, event: events.Event) -> None:
        if isinstance(event, events.Progress):
            self._progress.update(self._bar, completed=self._done + min(event.step, self._run_steps))
        elif self._level == "verbose" and (text := narration.line(event, verbose=True)) is not None:
            self._console.print(f"  {text}", soft_wrap=True)

    def ended(self, spec: Any, result: Mapping[str, Any]) -> None:
        self._done += self._run_steps
        self._left = max(0, self._left - self._run_steps)
        if self._level == "quiet" and result["loss"] is not None:
            return
        outcome = f"failed: {result['failed']}" if result["loss"] is None else f"loss {loss_text(result['loss'])}"
        seconds = "" if result["loss"] is None else f", {result['seconds']:.1f} s"
        left = (self._clock() - self._started) / max(1, self._done) * self._left
        more = f"; about {duration(left)} left" if self._left and not self._live else ""  # else the bar says it
        self.say(f"{self._place}{_name(spec)}: {outcome}{seconds}{more}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live:
            self._progress.stop()


def _name(spec: Any) -> str:
    return f"{spec.arm}, rate x {spec.rate_factor:g}, {spec.max_steps} steps, seed {spec.seed}"


def print_comparison(result: Mapping[str, Any], page: str, console: Console | None = None) -> None:
    """Print the verdict, then every arm in a row."""
    console = console or screen()
    analysis = result["analysis"]
    console.print(f"\n[bold]{escape(analysis['sentence'])}[/bold]")
    console.print(_arms(analysis["arms"], wide=console.width >= 110))
    if analysis["ladder"]:
        console.print(_ladder(analysis["ladder"]))
    notes: dict[str, list[str]] = {}
    for arm in analysis["arms"]:
        if arm["note"]:
            notes.setdefault(arm["note"], []).append(arm["label"])
    for note, labels in notes.items():
        console.print(f"{'; '.join(labels)}: {note}", style="dim", markup=False)
    if not result["complete"]:
        console.print(f"At least {len(result['missing'])} runs are still to do.")
    console.print(f"page: {page}", markup=False, soft_wrap=True)


def _arms(arms: list[dict[str, Any]], wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("arm", no_wrap=True)
    more = ("passes", "detectable") if wide else ()
    for heading in ("rate", "seeds", "loss", "seconds", "speed-up to equal loss", *more):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        same = arm.get("identical")
        seen = None if same else arm["smallest_detectable"]
        extra = (f"{arm['backward_passes_mean']:,.0f}", "" if seen is None else f"{seen - 1:.1%}")
        table.add_row(
            escape(arm["label"]),
            f"{arm['learning_rate']:.3g}",
            str(arm["n"]),
            _with_deviation(arm["loss_mean"], arm["loss_deviation"]) if wide else loss_text(arm["loss_mean"]),
            f"{arm['seconds_mean']:.1f}",
            "identical" if same else _ratio(arm["speedup"]),
            *(extra if wide else ()),
        )
    return table


def _ladder(rungs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="ladder", title_justify="left")
    table.add_column("rung")
    for heading in ("seeds", "held-out loss", "seconds", "over the rung below", "all together"):
        table.add_column(heading, justify="right")
    for rung in rungs:
        table.add_row(
            rung["rung"],
            str(rung["n"]),
            loss_text(rung["loss_mean"]),
            f"{rung['seconds_mean']:.1f}",
            _ratio(rung["speedup"]),
            f"{rung['cumulative']:.2f}x",
        )
    return table


def _with_deviation(mean: float, deviation: float | None) -> str:
    return loss_text(mean) if deviation is None else f"{loss_text(mean)} ± {deviation:.2g}"


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    text = f"{ratio['mean']:.3f}x"
    return text if ratio["low"] is None else f"{text} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
