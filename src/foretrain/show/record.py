"""Read a run from its log: curves, decisions, phases. Lines come one by one, so that a run can be read as it goes."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.persist.files import from_json
from foretrain.show.numbers import finite

Fields = Mapping[str, Any]
STEPS = {"warmup": "warm-up", "full": "full", "predict": "predicted", "correct": "correcting"}
"""Steps of a phase are called so."""
LayerMeasures = Mapping[str, Mapping[str, float | None]]
"""It holds the measures of every layer, by their names."""
MEASURES = {
    "gradient_to_weight": "gradient/weight ratio",
    "update_to_weight": "update/weight ratio",
    "gradient_norm": "gradient norm",
}
"""These are measured of a layer; a page offers them in this order."""
_NUMBERS = (
    *("loss", "gradient_norm", "learning_rate", "tokens_per_second"),
    *("predicted_loss", "smoothed_loss", "confidence", "gain_percent"),
)
"""These are kept of a progress entry, with the phase: a long run has hundreds of thousands of entries."""
_PLACES = {name: place for place, name in enumerate(_NUMBERS)}


class _Shown(Mapping[str, Any]):
    """It holds the fields of a progress entry in half the memory of a dict. Numbers that cannot be drawn are None."""

    __slots__ = ("_blocks", "_numbers", "_phase")

    def __init__(self, fields: Fields) -> None:
        known = (finite(fields.get(name)) for name in _NUMBERS)
        self._numbers = array("d", [math.nan if number is None else number for number in known])
        self._phase = sys.intern(str(fields["phase"])) if "phase" in fields else None
        blocks = fields.get("blocks")
        self._blocks = {sys.intern(str(name)): finite(value) for name, value in blocks.items()} if blocks else None

    def __getitem__(self, name: str) -> Any:
        if name == "phase" and self._phase is not None:
            return self._phase
        if name == "blocks" and self._blocks is not None:
            return self._blocks
        number = self._numbers[_PLACES[name]]
        return None if math.isnan(number) else number

    def __iter__(self) -> Iterator[str]:
        more = (("phase", self._phase), ("blocks", self._blocks))
        return iter((*_NUMBERS, *(name for name, value in more if value is not None)))

    def __len__(self) -> int:
        return len(_NUMBERS) + (self._phase is not None) + (self._blocks is not None)


@dataclass(frozen=True, slots=True)
class Entry:
    """It is an event with the time of the run at which it came."""

    kind: str
    step: int
    seconds: float
    fields: Fields


@dataclass
class RunRecord:
    """What is known of a run. Steps that were done again after a kill are not in it twice; steps that a rollback took
    back are in `undone`."""

    name: str
    folder: str = ""
    started: Fields = field(default_factory=dict)
    ended: Fields | None = None
    summary: Fields = field(default_factory=dict)
    """It is there when a run has ended, and empty while it goes on and after a failure."""
    config: Fields = field(default_factory=dict)
    """It is asked for where there is no summary."""
    progress: list[Entry] = field(default_factory=list)
    undone: list[Entry] = field(default_factory=list)
    evaluations: list[Entry] = field(default_factory=list)
    decisions: list[Entry] = field(default_factory=list)
    """They are moves, changes of phase, recoveries, learning rates tried, resumptions and warnings, in their order."""
    end_forecasts: list[Entry] = field(default_factory=list)
    """They say where the run would end, as it was forecast on the way."""
    planned: Fields = field(default_factory=dict)
    """It is what the learning rate was to do, and of which kind the run is."""
    told_end: float | None = None
    """So many steps it will have, as far as it knows: where it goes by `max_time` or `until_loss`."""
    told_left: float | None = None
    """So many seconds are left of it, as it says itself."""
    memory: list[Entry] = field(default_factory=list)
    health: list[Entry] = field(default_factory=list)
    _saved: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _reached: int = 0
    """The log is at this step."""
    _told_until: int = 0
    """The log told nothing of later steps."""

    @property
    def unit(self) -> str:
        """Tell what the run counts as it goes through the data."""
        return str(self.started.get("unit") or self.summary.get("unit") or "tokens")

    def take(self, line: str | bytes) -> None:
        """Read one line of `metrics.jsonl`. What cannot be read is left out: another version may have written it."""
        try:
            fields = from_json(line, parse_constant=lambda _: None)
        except ValueError:
            return
        if isinstance(fields, dict) and isinstance(fields.get("event"), str):
            self._take(fields["event"], fields)

    def _take(self, kind: str, fields: Fields) -> None:
        step = int(finite(fields.get("step")) or 0)
        self._told_until = max(self._told_until, step)
        entry = Entry(kind, step, self._now(step), fields)
        match kind:
            case "RunStarted":
                if step == 0:
                    self._forget()
                self.started, self.ended, self.summary, self._reached = fields, None, {}, step
            case "Progress":
                entry = Entry(kind, step, finite(fields.get("seconds")) or entry.seconds, _Shown(fields))
                self._set_clock(max(entry.seconds, self.seconds))
                self._went_back(step)
                self.progress.append(entry)
                self.told_end, self.told_left = (finite(fields.get(name)) for name in ("planned_end", "seconds_left"))
                self._reached = self._told_until = step
            case "Evaluated":
                while self.evaluations and self.evaluations[-1].step >= step:
                    self.evaluations.pop()
                self.evaluations.append(entry)
            case "LossForecasted":
                while self.end_forecasts and self.end_forecasts[-1].step >= step:
                    self.end_forecasts.pop()
                self.end_forecasts.append(entry)
            case "RatesPlanned":
                self.planned = fields
            case "CheckpointSaved":
                self._saved[step] = tuple(len(entries) for entries in self._lists())
            case "Resumed":
                again = max(0, self._told_until - step)
                self._resume(step)
                self._reached = self._told_until = step
                self.decisions.append(Entry(kind, step, self._now(step), {**fields, "done_again": again}))
            case (
                "PhaseChanged"
                | "Moved"
                | "Grown"
                | "Recovered"
                | "Tuned"
                | "Planned"
                | "RateTried"
                | "Annealed"
                | "Notice"
                | "CheckpointRejected"
            ):
                if kind == "Notice":
                    entry = Entry(kind, self.step, self._now(self.step), fields)
                elif fields.get("action") == "roll_back":  # it tells where to, and is shown where from
                    at = finite(fields.get("at")) or (self.progress[-1].step if self.progress else 0)
                    entry = Entry(kind, max(step, int(at)), entry.seconds, fields)
                self.decisions.append(entry)
            case "MemoryUsed":
                self.memory.append(entry)
            case "RunEnded":
                self.ended = fields
            case "HealthFound":
                self.health.append(entry)
            case "HealthMeasured":
                look = {"layers": layer_measures(fields.get("layers"))}
                self.health.append(Entry(kind, step, entry.seconds, {**fields, **look}))

    # --- where the run stands -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        if self.ended is not None:
            return int(finite(self.ended.get("step")) or 0)
        return max(self._reached, self.progress[-1].step if self.progress else 0)

    @property
    def planned_steps(self) -> float:
        """Tell how many steps the run is to have, as far as is known by now; 0 where it is not."""
        return self.told_end or finite(self.started.get("max_steps")) or 0.0

    @property
    def seconds(self) -> float:
        return self.progress[-1].seconds if self.progress else 0.0

    @property
    def state(self) -> str:
        """ "running", or how it ended: "finished", "interrupted", "paused", "stopped early", "failed"."""
        return "running" if self.ended is None else str(self.ended.get("reason"))

    @property
    def tried(self) -> bool:
        """Tell whether a predicted move was made, whatever became of it."""
        counts = self.summary.get("moves")
        known = counts.values() if isinstance(counts, Mapping) else ()
        return any(finite(count) for count in known) or any(entry.kind == "Moved" for entry in self.decisions)

    @property
    def predicts(self) -> bool:
        """Tell whether prediction was on at all."""
        return self.tried or self.summary.get("moves") is not None or self.last("confidence") is not None

    def of_kind(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.decisions if entry.kind in kinds]

    def last(self, name: str) -> float | None:
        """Find the newest number of this name among the progress entries."""
        return next(
            (value for one in reversed(self.progress) if (value := finite(one.fields.get(name))) is not None), None
        )

    def phases(self) -> list[Entry]:
        """List the changes of phase, beginning with the first phase."""
        first = str(self.progress[0].fields.get("phase", "full")) if self.progress else "full"
        return [Entry("PhaseChanged", 0, 0.0, {"phase": first, "reason": ""}), *self.of_kind("PhaseChanged")]

    def _now(self, step: int) -> float:
        """Guess the time at a step after the last progress, by the pace so far. It never goes back."""
        told = self.decisions[-1].seconds if self.decisions else 0.0
        if not self.progress:
            return told
        last = self.progress[-1]
        pace = last.seconds / last.step if last.step > 0 else 0.0
        return max(told, last.seconds + pace * max(0, min(step - last.step, last.step)))

    def _set_clock(self, seconds: float) -> None:
        """Correct the guesses after a reading of the clock: none since the last reading may be later than this one."""
        for entries in (self.evaluations, self.end_forecasts, self.decisions, self.memory, self.health):
            for place in range(len(entries) - 1, -1, -1):
                if entries[place].seconds <= seconds:
                    break
                entries[place] = replace(entries[place], seconds=seconds)

    # --- going back ---------------------------------------------------------------------------------------------------

    def _lists(self) -> tuple[list[Entry], ...]:
        lists = (self.progress, self.undone, self.evaluations, self.end_forecasts, self.decisions)
        return *lists, self.memory, self.health

    def _forget(self) -> None:
        for entries in self._lists():
            entries.clear()
        self._saved.clear()
        self._told_until = 0

    def _went_back(self, step: int) -> None:
        """Follow a rollback: the entries that lie ahead of this step now were undone."""
        while self.progress and self.progress[-1].step >= step:
            self.undone.append(self.progress.pop())

    def _resume(self, step: int) -> None:
        """Follow a resumption: what came after the checkpoint is done again."""
        lengths = self._saved.get(step)
        for place, entries in enumerate(self._lists()):
            if lengths is not None:
                del entries[lengths[place] :]
            else:
                entries[:] = [entry for entry in entries if entry.step <= step]


def layer_measures(layers: object) -> LayerMeasures:
    """Read the `layers` of a look at a model; whatever is no number is None."""
    if not isinstance(layers, Mapping):
        return {}
    known = {str(name): measures for name, measures in layers.items() if isinstance(measures, Mapping)}
    return {name: {one: finite(measures.get(one)) for one in MEASURES} for name, measures in known.items()}
