"""The console: a live progress line on a terminal, plain lines everywhere else, and the table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from foretrain.config.paths import assignments
from foretrain.config.schema import Level
from foretrain.config.units import duration, format_size, format_speed, loss_text, short
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Moved,
    PhaseChanged,
    Progress,
    RateTrial,
    Recovered,
    RunEnded,
    RunStarted,
)
from foretrain.show import narration
from foretrain.show.screen import screen
from foretrain.show.trouble import findings_in_words, rollbacks_in_words, trouble_in_words

_LINES_PER_RUN = 40
_MOVES_PER_RUN = 12
"""Lines about single moves, unless the run is verbose; all of them are in `metrics.jsonl`."""
_BAR = 10
GLOSSARY = "docs/glossary.md"


class Console:
    """Listens to a run and shows it, on standard error. Without a terminal it prints some forty plain lines per run,
    with time left.

    level: "quiet" shows what needs attention; "verbose" every event, and a line per `log.interval`. table: end with
    the table of results. clock: what the time left is measured with.
    """

    def __init__(
        self,
        console: RichConsole | None = None,
        level: Level = "normal",
        table: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or screen("stderr", wide=False)
        self.level = level
        self.table = table
        self.clock = clock
        self._bar: ProgressBar | None = None
        self._task = TaskID(0)
        self._max_steps = 0
        self._unit = "tokens"
        self._began = math.nan
        """When the first progress was told."""
        self._done = 0
        """Steps since then, those that were undone included."""
        self._step = 0
        self._next_line = 0
        self._val = math.nan
        self._moves = 0
        self._others = 0
        """Steps at other learning rates that are still to come."""
        self._paused = math.nan
        """Since when other learning rates are tried: no time of this run's steps."""
        self._trials = 0.0
        """Seconds that they took."""
        self._tried = False
        """A move was begun: from then on prediction has a place in the lines."""

    def __call__(self, event: Event) -> None:
        self._tried = self._tried or _shows_prediction(event)
        if self.level == "quiet":
            if narration.needs_attention(event):
                self._tell(event)
            return
        match event:
            case RunStarted():
                self._start(event)
            case Progress():
                self._progress(event)
            case RateTrial():
                self._trial(event)
            case RunEnded():
                self.close()
                if event.reason != "failed" and self.table:
                    self._print(f"[italic]run {event.reason}[/]")
                    self.console.print(summary_table(event.summary, self.level == "verbose"))
                    for text in closing_lines(event.summary):
                        self._print(escape(text))
            case Evaluated():
                self._val = event.loss
                if self._bar is None or self.level == "verbose":
                    self._tell(event)
            case _ if self.level == "verbose" or self._is_of_interest(event):
                self._tell(event)

    def _is_of_interest(self, event: Event) -> bool:
        """In a normal run. Every move and change of phase is said until there were enough of them."""
        match event:
            case CheckpointSaved():
                return self._bar is None
            case PhaseChanged():
                return self._tried and self._moves < _MOVES_PER_RUN
            case Moved():
                return self._moves < _MOVES_PER_RUN
        return not narration.is_detail(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Recovered) and event.at is not None and event.step < event.at:
            self._step, self._next_line = event.step, event.step  # lines go on from there
        text = narration.line(event, self.level == "verbose")
        if text is not None:
            self._print(text)
        if isinstance(event, Moved):
            self._moves += 1
            if self._moves == _MOVES_PER_RUN and self.level == "normal":
                self._print("further moves are in metrics.jsonl; --verbose shows them all")

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _start(self, event: RunStarted) -> None:
        self._max_steps = event.max_steps
        self._unit = event.unit
        self._next_line = event.step
        facts = {"model": f"{event.title}, {short(event.parameters)} parameters", **event.details}
        if event.optimizer:
            facts["optimizer"] = event.optimizer
        facts["device"] = f"{event.device}, {event.precision}"
        if "folder" in event.details:
            facts["live"] = f"foretrain watch {shlex.quote(event.details['folder'])} --open"
        width = max(len(name) for name in facts)
        for name, text in facts.items():
            self._print(f"[bold]{name:<{width}}[/]  {escape(text)}")
        if not self.console.is_interactive:
            return
        self._bar = ProgressBar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            transient=False,
        )
        self._task = self._bar.add_task("", total=event.max_steps, completed=event.step, numbers="starting ...")
        self._bar.start()

    def _progress(self, event: Progress) -> None:
        if not math.isnan(self._paused):
            self._trials += self.clock() - self._paused
            self._began += self.clock() - self._paused
            self._paused, self._others = math.nan, 0
        if math.isnan(self._began):
            self._began, self._step = self.clock(), event.step
        self._done += max(0, event.step - self._step)
        self._step = event.step
        if self._bar is not None:
            room = self.console.width - len(f"step {event.step}/{self._max_steps}") - _BAR - 2
            self._bar.update(self._task, completed=event.step, numbers=self._numbers(event, room))
        elif self.level == "verbose" or event.step >= min(self._next_line, self._max_steps):
            self._next_line = event.step + max(1, self._max_steps // _LINES_PER_RUN)
            share = 100 * event.step / max(1, self._max_steps)
            width = len(str(self._max_steps))
            self._print(f"step {event.step:>{width}}/{self._max_steps} {share:3.0f}% | {self._numbers(event)}")

    def _trial(self, event: RateTrial) -> None:
        """The first rate is tried by the run's own steps, which are shown as always."""
        if event.others:
            self._others = event.others
            self._tell(event)
            return
        if math.isnan(self._paused):
            self._paused = self.clock()
        if self._bar is not None:
            words = f"trying learning rate {event.learning_rate:.2g}, step {event.done} of {event.steps}"
            self._bar.update(self._task, numbers=words)
        elif event.done == 1:
            self._tell(event)

    def _numbers(self, event: Progress, room: int | None = None) -> str:
        """Phase, loss and time left, and of the rest what there is room for, in order of weight."""
        phase = event.phase if room is not None else f"{event.phase:<7}"
        told = self._tried or self.level == "verbose"
        loss = f"{phase} | loss {loss_text(event.loss)}" if told else f"loss {loss_text(event.loss)}"
        ends = f" | eta {self._eta(event)}"
        val = "" if math.isnan(self._val) else f" | val {loss_text(self._val)}"
        speed = f" | {format_speed(event.tokens_per_second, self._unit)}"
        rate = f" | lr {event.learning_rate:.2e}"
        forecast, moves = (_forecast(event), _moves(event)) if told else ("", "")
        parts = {"forecast": forecast, "val": val, "moves": moves, "speed": speed, "rate": rate}
        if room is not None:
            room -= len(loss) + len(ends)
            for name in ("val", "speed", "moves", "forecast", "rate"):
                if len(parts[name]) > room:
                    parts[name] = ""
                room -= len(parts[name])
        return loss + "".join(parts.values()) + ends

    def _eta(self, event: Progress) -> str:
        """By the time that steps have taken since the first progress, with all evaluations and saves between them.
        Other learning rates that are tried come on top."""
        own = max(0.0, event.seconds - self._trials)
        per_step = (self.clock() - self._began) / self._done if self._done else own / max(1, event.step)
        return duration(per_step * (self._max_steps - event.step + self._others))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _shows_prediction(event: Event) -> bool:
    """Whether from this event on something is predicted, or was in an earlier part of the run."""
    match event:
        case Moved():
            return True
        case PhaseChanged():
            return event.phase == "predict"
        case Progress():
            return event.kept + event.refused > 0 or event.phase in ("predict", "correct")
    return False


def result_line(summary: Mapping[str, Any]) -> str:
    """The end of a run in one line, for a quiet one."""
    losses = {"held-out loss": summary.get("final_val_loss"), "training loss": summary.get("final_train_loss")}
    known = [f"{name} {loss_text(loss)}" for name, loss in losses.items() if loss is not None][:1]
    if "accuracy" in summary:
        known.append(f"accuracy {summary['accuracy']:.1%}")
    if "exact_match" in summary:
        known.append(f"exact match {summary['exact_match']:.1%}")
    known.append(f"{summary['global_step']:,} steps in {duration(summary['seconds'])}")
    trouble = trouble_in_words(summary)
    return f"{summary['reason']}: {', '.join(known)}" + (f"; {trouble}" if trouble else "")


def summary_table(summary: Mapping[str, Any], verbose: bool = False) -> Table:
    """The end of a run in one table. What leaps reached comes first; what was idle is left out, unless verbose."""
    table = Table(show_header=False)
    unit = str(summary.get("unit") or "tokens")
    rows = {
        "result": (summary.get("exact") or {}).get("sentence"),
        "held-out loss": _number(summary.get("final_val_loss")),
        "best held-out loss": _number(summary.get("best_val_loss")),
        **{name: f"{value:.4g}" for name, value in (summary.get("metrics") or {}).items()},
        "training loss": _number(summary.get("final_train_loss")),
        "learning rate": _found_rate(summary.get("learning_rate")),
        "steps": _steps(summary, _tried(summary) or verbose),
        "backward passes": _passes(summary),
        unit: f"{summary['tokens']:,}",
        "training time": f"{duration(summary['seconds'])} ({summary['seconds']:.1f} s)",
        "total time": _total(summary.get("total_seconds")),
        "speed": format_speed(pace, unit) if (pace := summary.get("tokens_per_second")) else None,
        "skipped steps": str(summary["skipped_steps"]) if summary.get("skipped_steps") else None,
        "recoveries": rollbacks_in_words(summary),
        "findings": findings_in_words(summary),
        "peak GPU memory": f"{summary['peak_memory_mb']:,.0f} MB" if summary.get("peak_memory_mb") else None,
        "memory": _memory(summary.get("memory") or {}),
        "out of memory": _made_smaller(summary.get("out_of_memory") or {}),
        **_prediction(summary, verbose),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, escape(value))
    return table


def _number(value: float | None) -> str | None:
    return None if value is None else loss_text(value)


def _found_rate(found: Mapping[str, Any] | None) -> str | None:
    """Where the learning rate was `auto`."""
    return f"{found['chosen']:.3g}, the best of {len(found['tried'])} that were tried" if found else None


def _total(seconds: float | None) -> str | None:
    return None if seconds is None else f"{duration(seconds)} with start-up, evaluation and saving"


def _steps(summary: Mapping[str, Any], in_parts: bool) -> str:
    """800 = 100 warm-up + 640 full + 40 predicted + 20 correcting; of a run that only took full steps the sum."""
    words = {"warmup": "warm-up", "full": "full", "predict": "predicted", "correct": "correcting"}
    parts = [f"{count:,} {words[phase]}" for phase, count in summary["steps"].items() if count]
    total = f"{summary['global_step']:,}"
    return f"{total} = {' + '.join(parts)}" if in_parts and len(parts) > 1 else total


def _passes(summary: Mapping[str, Any]) -> str | None:
    """Of a run in which they are not the steps."""
    passes = summary["backward_passes"]
    return None if passes == summary["global_step"] else f"{passes:,}"


def _memory(phases: Mapping[str, Mapping[str, int]]) -> str | None:
    """3.1 GB peak in full, 2.0 GB in predict; or the resident memory of the process, where there is no GPU."""
    peaks = {phase: usage["peak"] for phase, usage in phases.items() if "peak" in usage}
    if peaks:
        words = [f"{format_size(peak, 1)} in {phase}" for phase, peak in peaks.items() if phase != "setup"]
        pinned = max(usage.get("pinned", 0) for usage in phases.values())
        return (
            "peak " + ", ".join(words) + (f"; {format_size(pinned, 1)} pinned on the host" if pinned else "")
            if words
            else None
        )
    resident = [usage["resident_peak"] for usage in phases.values() if "resident_peak" in usage]
    return f"the process held {format_size(max(resident), 1)} at the most" if resident else None


def _made_smaller(found: Mapping[str, Any]) -> str | None:
    """How often memory ran out, and what the run went on with."""
    if not found:
        return None
    changes = assignments(found["settings"])
    moves = f", {_times(found['failed_moves'])} in a move" if found["failed_moves"] else ""
    ended = f"; went on with {changes}" if changes else ""
    return f"{_times(found['times'])}{moves}{ended}; prediction {found['prediction']}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tried(summary: Mapping[str, Any]) -> bool:
    """Whether a move was made, whatever became of it."""
    return any((summary.get("moves") or {}).values())


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """What is said below the table: where the words are explained that it used."""
    return [f"what a move, a leap, an audit and other words mean: {GLOSSARY}"] if _tried(summary) else []


def _prediction(summary: Mapping[str, Any], verbose: bool) -> dict[str, str | None]:
    """What the summary says of prediction: nothing for a plain run, one sentence where nothing was tried."""
    audit, moves = summary.get("audit"), summary.get("moves")
    if not audit or not moves:
        return {}
    exact = bool(summary.get("exact"))
    tried = _tried(summary)
    told = {"moves": _counted(moves) if tried or verbose else None}
    if verbose or (tried and not exact):  # leaps judged by the exact loss rest on no forecast
        forecasts = [f"{horizon} steps: {_scores(values)}" for horizon, values in summary["forecast"].items()]
        error, outcomes = summary["confidence"]["calibration_error"], summary["confidence"]["outcomes"]
        told["forecasts"] = "\n".join(forecasts) or None
        told["calibration error"] = None if error is None else f"{error:.3f} ({outcomes} outcomes)"
        told["predictability"] = summary["predictability"]["verdict"]
    if not exact or verbose or audit["gain_percent"] is not None:  # else the first row says what they were worth
        told["prediction"] = str(audit["sentence"]).removeprefix("prediction was ")
    return told


def _counted(moves: Mapping[str, int]) -> str:
    """3 kept, 1 rolled back."""
    return ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in moves.items() if count) or "none"


def _scores(values: Mapping[str, Any]) -> str:
    """Of the forecasts of one horizon. Before it knows something, a predictor makes none."""
    if values.get("made") == 0:
        return f"no forecast yet (repeat {values['repeat_r2']:.2f})"
    return f"R2 {values['r2']:.2f} (repeat {values['repeat_r2']:.2f}), cosine {values['cosine']:.2f}"


def _forecast(event: Progress) -> str:
    """The smoothed loss as it is and as it was forecast a window ago."""
    if event.predicted_loss is None or event.smoothed_loss is None:
        return ""
    return f" (mean {loss_text(event.smoothed_loss)}, predicted {loss_text(event.predicted_loss)})"


def _moves(event: Progress) -> str:
    if event.confidence is None and not event.kept + event.refused:
        return ""
    percent = event.gain_percent
    gain = "" if percent is None else f", saved {percent:.0f} %" if percent > 0 else f", cost {-percent:.0f} %"
    confidence = "" if event.confidence is None else f"confidence {event.confidence:.2f}, "
    return f" | {confidence}{event.kept} kept, {event.refused} refused{gain}"
