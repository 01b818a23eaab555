"""Show a sweep on the console: a table while it goes on, a line for each news where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foretrain.config.schema import Level
from foretrain.config.units import duration, loss_text
from foretrain.show.screen import screen

_ROWS = 20
"""So many trials are shown while a sweep goes on, at the most: those at work and the best ones."""
_ORDER = {"running": 0, "finished": 1, "paused": 2, "stopped": 2, "new": 3, "failed": 4}
_STYLES = {"running": "bold", "finished": "green", "failed": "red", "paused": "dim", "stopped": "dim"}


class SweepConsole:
    """A live table on a terminal; else one line per trial and rung. level: "quiet" shows what goes wrong only."""

    def __init__(
        self, level: Level = "normal", console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or screen("stderr")
        self._level = level
        self._clock = clock
        self._begun: tuple[float, float] | None = None
        self._told: dict[int, tuple[str, int]] = {}
        self._live: Live | None = None
        if self._console.is_interactive and level != "quiet":
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self, summary: Mapping[str, Any]) -> None:
        """Show how the sweep stands."""
        left = self._time_left(summary)
        if self._live is not None:
            head = Text(f"{head_line(summary)}{f'; about {duration(left)} left' if left else ''}")
            self._live.update(Group(head, trial_table(summary, _ROWS)), refresh=True)
        for trial in summary["trials"]:
            news = ("paused" if trial["state"] == "stopped" else trial["state"], trial["rung"])
            if self._told.get(trial["number"]) == news or trial["state"] == "new":
                continue
            known, self._told[trial["number"]] = trial["number"] in self._told, news
            if self._live is None and self._level != "quiet" and (known or trial["state"] != "running"):
                time_left = f"; about {duration(left)} left" if left and trial["state"] != "running" else ""
                self.say(f"{news_line(trial, summary['rungs'])}{time_left}")

    def _time_left(self, summary: Mapping[str, Any]) -> float | None:
        """Reckon the time left from what this call has seen done."""
        done = work_done(summary)
        if self._begun is None:
            self._begun = (self._clock(), done)
        since, more = self._clock() - self._begun[0], done - self._begun[1]
        left = summary["runs_planned"] - done
        return since / more * left if more > 0.01 and left > 0 and not summary["complete"] else None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def work_done(summary: Mapping[str, Any]) -> float:
    """Return what was done so far in whole runs, with the steps of the trials that are at work."""
    return float(sum(_share(trial) for trial in summary["trials"]))


def _share(trial: Mapping[str, Any]) -> float:
    total = trial["total_steps"]
    return max(trial["cost"], trial["step"] / total) if total else 0.0


def head_line(summary: Mapping[str, Any]) -> str:
    """Say how far the sweep is in one line."""
    trials = summary["trials"]
    count: dict[str, int] = {}
    for trial in trials:
        count[trial["state"]] = count.get(trial["state"], 0) + 1
    states = ", ".join(f"{number} {state}" for state, number in count.items())
    best = summary["best"]
    told = "" if best is None else f"; best so far {loss_text(best['final'])} ({best['label']})"
    of = f"{len(trials)} of {summary['planned_trials']} trials: {states or 'none yet'}"
    return f"{of}; {work_done(summary):.1f} of about {summary['runs_planned']:.1f} runs{told}"


def news_line(trial: Mapping[str, Any], rungs: list[float]) -> str:
    """Say in one line what has become of a trial."""
    name = f"trial {trial['number']} ({trial['label']})"
    state = trial["state"]
    if state == "finished":
        lot = " (audited)" if trial["audited"] else ""
        return f"{name}: finished at {loss_text(trial['final'])}{lot}"
    if state == "failed":
        return f"{name}: failed: {trial['reason']}"
    if state == "running":
        return f"{name}: goes on from {rung_text(rungs[trial['rung']])}" if trial["rung"] >= 0 else f"{name}: begins"
    return f"{name}: {score_text(trial)} at {rung_text(rungs[trial['rung']])}; {trial['reason']}"


def rung_text(share: float) -> str:
    """Write the share of a run that a rung is at."""
    return f"{100 * share:.3g} %"


def score_text(trial: Mapping[str, Any]) -> str:
    """Write a score with its interval."""
    if trial["final"] is not None:
        return loss_text(trial["final"])
    if trial["score"] is None:
        return "-"
    low, high = trial["low"], trial["high"]
    interval = "" if low is None or high is None else f" [{loss_text(low)}, {loss_text(high)}]"
    return f"{loss_text(trial['score'])}{interval}"


def trial_table(summary: Mapping[str, Any], most: int | None = None) -> Table:
    """Lay out the trials, those at work first, then the best."""

    def rank(trial: Mapping[str, Any]) -> tuple[int, int, float]:
        guess = trial["final"] if trial["final"] is not None else trial["score"]
        return _ORDER.get(trial["state"], 3), -trial["rung"], guess if guess is not None else float("inf")

    trials = sorted(summary["trials"], key=rank)
    best = summary["best"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, side in (
        ("trial", "right"),
        ("settings", "left"),
        ("done", "right"),
        (r"score \[last loss between]", "left"),
    ):
        table.add_column(heading, justify=side, no_wrap=heading in ("trial", "done"))  # type: ignore[arg-type]
    table.add_column("state", no_wrap=True)
    table.add_column("why")
    for trial in trials[:most]:
        mark = "*" if best is not None and trial["number"] == best["number"] else ""
        table.add_row(
            f"{mark}{trial['number']}",
            escape(trial["label"]),
            f"{trial['step'] / trial['total_steps']:.0%}" if trial["total_steps"] else "-",
            escape(score_text(trial)),
            trial["state"],
            escape(trial["reason"]),
            style=_STYLES.get(trial["state"]),
        )
    if most is not None and len(trials) > most:
        table.add_row("", f"and {len(trials) - most} more")
    return table


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """Say what a sweep has found, what it cost and what stopping may have missed."""
    best = summary["best"]
    lines = []
    if best is not None:
        lines.append(f"best: trial {best['number']}, held-out loss {loss_text(best['final'])} ({best['label']})")
    paid, whole, audit = summary["runs_paid"], summary["runs_of_all"], summary["runs_of_audit"]
    trials = f"{whole} trial{'' if whole == 1 else 's'}"
    if paid > 0 and summary["complete"]:
        lines.append(
            f"cost: {paid:.1f} runs for {trials}, {whole / paid:.1f}x less than all of them in full "
            f"(without the audit {whole / max(paid - audit, 1e-9):.1f}x)"
        )
    elif paid > 0:
        lines.append(f"cost so far: {paid:.1f} runs for {trials}")
    if summary["regret"] is not None:
        lines.append(regret_line(summary["regret"]))
    return lines


def regret_line(regret: Mapping[str, Any]) -> str:
    """Say what the audit has shown."""
    if not regret["stopped"]:
        return "regret: none, no trial was stopped"
    if not regret["audited"]:
        return f"regret: unknown, none of the {regret['stopped']} stopped trials was audited ([sweep] audit_share)"
    better = f"{regret['better']} of {regret['audited']} audited trials ended below the best of those never passed over"
    by = f", the best by {regret['by']:.1%}" if regret["better"] else ""
    unseen = regret["stopped"] - regret["audited"]
    if not unseen:
        return f"regret: {better}{by}; every trial that was passed over was audited"
    everybody = f"all {regret['stopped']} ({unseen} stopped, {regret['audited']} audited)"
    most = f"at most {regret['share_at_most']:.0%} of {everybody} would have"
    return f"regret: {better}{by}; {most} ({regret['level']:.0%} confidence)"
