"""Show a run on the console: a live progress line on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar

from foretrain.config.schema import Level
from foretrain.config.units import duration, format_speed, interval_text, loss_text, short
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Grown,
    LossForecasted,
    Moved,
    PhaseChanged,
    Progress,
    RateTrial,
    Recovered,
    RunEnded,
    RunStarted,
)
from foretrain.show import narration
from foretrain.show.remaining import Costs, after_growth, weighed
from foretrain.show.screen import screen
from foretrain.show.summary import closing_lines, summary_table

_LINES_PER_RUN = 40
_MOVES_PER_RUN = 12
"""So many moves are told, unless the run is verbose; all of them are in `metrics.jsonl`."""
_BAR = 10
_NEWEST = 0.2
"""The time left goes by this share of the run, the newest. Chosen: it holds some evaluations, as the rest will."""
_STALE = 0.02
"""A forecast of the end that is older than this share of the run when a loss is measured is not shown any more: the
newer losses allow none."""


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
        self._done = 0.0
        """The steps that were done since the first progress have cost so much; those that were undone count."""
        self._pace: deque[tuple[float, float]] = deque()
        """(what was done, when) of the newest part of the run, the oldest first. Trials of other rates take no time."""
        self._costs: Costs = ()
        self._estimated = ""
        """A mark before the number of steps, where that is an estimate."""
        self._step = 0
        self._next_line = 0
        self._val = math.nan
        self._end = ""
        """Where the run is going, as it was forecast last, ..."""
        self._end_told = 0
        """... which was at this step."""
        self._moves = 0
        self._others = 0
        """So many steps at other learning rates are still to come."""
        self._paused = math.nan
        """Other learning rates are tried since this time, which does not count for this run's steps."""
        self._trials = 0.0
        """They took so many seconds."""
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
                if event.step - self._end_told > _STALE * self._max_steps:  # a new one is told after this
                    self._end = ""
                if self._bar is None or self.level == "verbose":
                    self._tell(event)
            case LossForecasted():
                self._end = f" | end {interval_text(event.loss, event.low, event.high)}"
                self._end_told = event.step
                if self.level == "verbose":
                    self._tell(event)
            case _ if self.level == "verbose" or self._is_of_interest(event):
                self._tell(event)

    def _is_of_interest(self, event: Event) -> bool:
        """Tell whether a normal run says it. Moves and changes of phase are said until there were enough of them."""
        match event:
            case CheckpointSaved():
                return self._bar is None
            case PhaseChanged():
                return self._tried and self._moves < _MOVES_PER_RUN
            case Moved():
                return self._moves < _MOVES_PER_RUN
        return not narration.is_detail(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Grown):
            self._costs = after_growth(self._costs, event.step, event.verdict, event.cost)
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
        self._costs = event.costs
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
            TextColumn("step {task.completed}/{task.fields[total_words]}"),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            transient=False,
        )
        self._task = self._bar.add_task(
            "",
            total=event.max_steps or None,
            completed=event.step,
            numbers="starting ...",
            total_words=self._total,
        )
        self._bar.start()

    @property
    def _total(self) -> str:
        """Return how many steps there are, with a mark where that is an estimate."""
        return f"{self._estimated}{self._max_steps}" if self._max_steps else "?"

    def _progress(self, event: Progress) -> None:
        if not math.isnan(self._paused):
            self._trials += self.clock() - self._paused
            self._paused, self._others = math.nan, 0
        if not self._pace:
            self._step = event.step
        self._done += weighed(self._costs, self._step, event.step)
        self._step = event.step
        self._pace.append((self._done, self.clock() - self._trials))
        newest = _NEWEST * weighed(self._costs, 0, self._max_steps)
        while len(self._pace) > 2 and self._done - self._pace[1][0] >= newest:
            self._pace.popleft()
        if event.planned_end is not None:
            self._max_steps, self._estimated = event.planned_end, "~"
        total = self._total
        if self._bar is not None:
            room = self.console.width - len(f"step {event.step}/{total}") - _BAR - 2
            numbers = self._numbers(event, room)
            self._bar.update(
                self._task, total=self._max_steps or None, completed=event.step, numbers=numbers, total_words=total
            )
        elif self.level == "verbose" or event.step >= min(self._next_line, self._max_steps or self._next_line):
            self._next_line = event.step + max(1, self._max_steps // _LINES_PER_RUN)
            share = 100 * event.step / max(1, self._max_steps)
            width = len(str(self._max_steps))
            done = f" {min(share, 100):3.0f}%" if self._max_steps else ""
            self._print(f"step {event.step:>{width}}/{total}{done} | {escape(self._numbers(event))}")

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
        """Write phase, loss and time left, and as much of the rest as there is room for, the weightiest first."""
        phase = event.phase if room is not None else f"{event.phase:<7}"
        told = self._tried or self.level == "verbose"
        loss = f"{phase} | loss {loss_text(event.loss)}" if told else f"loss {loss_text(event.loss)}"
        ends = f" | eta {self._eta(event)}" if self._max_steps else ""
        val = "" if math.isnan(self._val) else f" | val {loss_text(self._val)}"
        speed = f" | {format_speed(event.tokens_per_second, self._unit)}"
        rate = f" | lr {event.learning_rate:.2e}"
        forecast, moves = (_forecast(event), _moves(event)) if told else ("", "")
        parts = {"forecast": forecast, "val": val, "end": self._end, "moves": moves, "speed": speed, "rate": rate}
        if room is not None:
            room -= len(loss) + len(ends)
            for name in ("val", "end", "speed", "moves", "forecast", "rate"):
                if len(parts[name]) > room:
                    parts[name] = ""
                room -= len(parts[name])
        return loss + "".join(parts.values()) + ends

    def _eta(self, event: Progress) -> str:
        """By the time that the newest steps have taken, with all evaluations and saves between them: a machine that has
        become slower is noticed. Other learning rates that are tried come on top."""
        if event.seconds_left is not None:  # the run knows: it goes by the clock, or by a forecast
            return duration(event.seconds_left) + _between(event)
        own, now = max(0.0, event.seconds - self._trials), event.step
        so_far = weighed(self._costs, 0, max(1, now))
        (before, began), (done, ended) = (self._pace[0], self._pace[-1]) if self._pace else ((0.0, 0.0), (0.0, 0.0))
        per_cost = (ended - began) / (done - before) if done > before else own / so_far
        others = weighed(self._costs, now, now + self._others)
        return duration(per_cost * (weighed(self._costs, now, self._max_steps) + others))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _shows_prediction(event: Event) -> bool:
    """Tell whether something is predicted from this event on, or was in an earlier part of the run."""
    match event:
        case Moved():
            return True
        case PhaseChanged():
            return event.phase == "predict"
        case Progress():
            return event.kept + event.refused > 0 or event.phase in ("predict", "correct")
    return False


def _between(event: Progress) -> str:
    """Write the interval in which a target is met, as factors of the steps that are left."""
    known = event.planned_end, event.earliest_end, event.latest_end
    match known:
        case int(end), int(earliest), int(latest) if event.seconds_left is not None and end > event.step:
            per_step = event.seconds_left / (end - event.step)
            low, high = (duration(max(0, one - event.step) * per_step) for one in (earliest, latest))
            return f" ({low} to {high})"
    return ""


def _forecast(event: Progress) -> str:
    """Write the smoothed loss as it is, and as it was forecast a window ago."""
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
