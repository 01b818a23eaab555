"""Runs as far as their files tell of them: run folders of ours, and other tools' logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foretrain.config import ScheduleConfig
from foretrain.config.kinds import MOST
from foretrain.engine import schedule
from foretrain.engine.ahead import shortened_plan, unknown_plan
from foretrain.errors import InputError
from foretrain.forecast.history import History
from foretrain.forecast.logged import ColumnNames, LoggedLosses, read_losses
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.forecast.stored import finished_runs, history_of, siblings_of
from foretrain.show.follow import read_runs
from foretrain.show.numbers import finite, is_list
from foretrain.show.record import Entry, RunRecord

Shape = Literal["wsd", "cosine", "linear", "constant"]
_FINISHED = 0.99
"""A log that reaches so far is one of a finished run."""
_PLACES = 513


@dataclass(frozen=True)
class ForecastRequest:
    """What somebody says of the runs that files cannot say."""

    columns: ColumnNames = field(default_factory=ColumnNames)
    total_steps: int | None = None
    shape: Shape | None = None
    decay_share: float | None = None
    at: float | None = None
    """Pretend that only this share of the run had been seen."""
    siblings: tuple[Path, ...] = ()
    level: float = 0.8

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.total_steps is not None and not 1 <= self.total_steps <= MOST:
            raise InputError(f"--total-steps {self.total_steps}: a run has 1 to {MOST:,} steps")
        for name, share in (("--at", self.at), ("--decay-share", self.decay_share), ("--level", self.level)):
            if share is not None and not 0 < share < 1:
                raise InputError(f"{name} {share:g}: a share between 0 and 1, such as 0.5")
        if self.decay_share is not None and self.shape != "wsd":
            raise InputError("--decay-share says how long the decay of --schedule wsd is; give both")


@dataclass(frozen=True)
class SeenRun:
    """A run as far as its files tell of it."""

    name: str
    curve: LossCurve
    training: tuple[tuple[float, float], ...] = ()
    own: bool = False
    """It is a run folder of ours, among others of ours."""
    finished: bool = False
    losses_of: str = "held-out loss"
    siblings: tuple[LossCurve, ...] = ()
    history: History = field(default_factory=History)
    notes: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        """Return the last loss; of training losses, which vary from batch to batch, the mean of the last ones."""
        last = 1 if self.losses_of == "held-out loss" else max(1, len(self.curve.losses) // 100)
        return float(np.mean(self.curve.losses[-last:]))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_run(path: Path, request: ForecastRequest) -> SeenRun:
    """Read a run folder of ours, or a log of another tool."""
    folder = path.parent if path.name == "metrics.jsonl" else path
    if (folder / "metrics.jsonl").is_file():
        (record,) = read_runs([folder])
        if record.started:
            return _own(folder, record, request)
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder")
    return _foreign(path, read_losses(path, request.columns), request)


def _own(folder: Path, record: RunRecord, request: ForecastRequest) -> SeenRun:
    told = finite(record.planned.get("total_steps")) or finite(record.started.get("max_steps")) or 0
    total = request.total_steps or _checked(folder, told)
    points = _points(record.evaluations)
    _check_points(folder, "held-out losses", points, "the run has measured none yet; see evaluation.interval")
    told_rates = ((entry.step, finite(entry.fields.get("learning_rate"))) for entry in record.progress)
    rates = [(step, rate) for step, rate in told_rates if rate is not None]
    plan = _chosen_plan(request, total) or _told_plan(record, total) or _logged_plan(rates, total, points[-1][0])
    curve = _curve(points, plan, str(record.planned.get("kind") or ""), _annealed(record))
    runs = finished_runs(folder.resolve().parent, folder.resolve())
    return SeenRun(
        record.name,
        curve,
        tuple(_points(_centred(record.progress))),
        own=True,
        finished=points[-1][0] >= _FINISHED * total,
        siblings=tuple(siblings_of(curve, runs)),
        history=history_of(runs, curve.kind),
        notes=_notes(plan),
    )


def _points(entries: Sequence[Entry]) -> list[tuple[float, float]]:
    known = ((float(entry.step), finite(entry.fields.get("loss"))) for entry in entries)
    return [(step, loss) for step, loss in known if loss is not None]


def _centred(entries: Sequence[Entry]) -> list[Entry]:
    """Put each mean of the training loss into the middle of the steps that it is of."""
    befores = [0, *(entry.step for entry in entries[:-1])]
    return [replace(entry, step=(before + entry.step) // 2) for before, entry in zip(befores, entries, strict=True)]


def _annealed(record: RunRecord) -> tuple[AnnealedPoint, ...]:
    found = []
    for entry in record.of_kind("Annealed"):
        numbers = [finite(entry.fields.get(name)) for name in ("step", "steps", "loss", "before")]
        match numbers:
            case [float() as step, float() as steps, float() as loss, float() as before]:
                found.append(AnnealedPoint(int(step), int(steps), loss, before))
    return tuple(found)


def _foreign(path: Path, found: LoggedLosses, request: ForecastRequest) -> SeenRun:
    what = f"losses in {found.column!r}"
    if found.ends_broken:
        raise InputError(f"{path}: the last of the {what} is not a number; a run that has diverged has no forecast")
    broken = f"{found.broken} are not numbers; " if found.broken else ""
    _check_points(path, what, found.points, f"{broken}name another column with --loss, or with --step one that rises")
    last = found.points[-1][0]
    told = found.total_steps or (last if request.at is not None else 0)
    if not request.total_steps and not told:
        raise InputError(
            f"{path}: it does not say how long the run is; give --total-steps N, or for a finished run --at 0.5, which "
            "forecasts its end from its first half"
        )
    total = request.total_steps or _checked(path, told)
    if last > total:
        raise InputError(f"{path}: it goes on to step {last:,.0f}, beyond --total-steps {total}")
    plan = _chosen_plan(request, total) or _logged_plan(found.rates, total, last)
    return SeenRun(
        path.name or str(path),
        _curve(found.points, plan),
        finished=last >= _FINISHED * total,
        losses_of="held-out loss" if found.held_out else f"{found.column} (training)",
        notes=_notes(plan),
    )


def _checked(path: Path, total: float) -> int:
    if not 1 <= total <= MOST:
        raise InputError(f"{path}: it speaks of {total:g} steps; give the length of the run with --total-steps N")
    return int(total)


def _check_points(path: Path, what: str, points: Sequence[tuple[float, float]], advice: str) -> None:
    if len(points) < 2:
        many = "no" if not points else f"one point, at step {points[0][0]:,.0f}, is all that is left of the"
        raise InputError(f"{path}: {many} {what}; {advice}")


def _curve(
    points: Sequence[tuple[float, float]], plan: RatePlan, kind: str = "", annealed: tuple[AnnealedPoint, ...] = ()
) -> LossCurve:
    steps, losses = (np.array([point[place] for point in points]) for place in (0, 1))
    return LossCurve(steps, losses, plan, annealed, kind)


# --- plans ------------------------------------------------------------------------------------------------------------


def _chosen_plan(request: ForecastRequest, total: int) -> RatePlan | None:
    """Return the plan that somebody named; its warm-up is that of our own runs."""
    if request.shape is None:
        return None
    settings: dict[str, Any] = {"type": "wsd" if request.shape == "linear" else request.shape}
    if request.shape == "linear":
        settings["stable_steps"] = 0
    if request.decay_share is not None:
        settings["decay_steps"] = max(1, round(request.decay_share * total))
    rate = schedule.build(ScheduleConfig(**settings), 1.0, total)
    places = np.unique(np.linspace(0, total, _PLACES).round())
    return shortened_plan(total, places, np.array([rate(int(place)) for place in places]))


def _told_plan(record: RunRecord, total: int) -> RatePlan | None:
    """Return the plan that the run has told of; None where it has told none, or one of another length."""
    steps, rates = record.planned.get("steps"), record.planned.get("rates")
    if not is_list(steps) or not is_list(rates) or finite(record.planned.get("total_steps")) != total:
        return None
    numbers = [(finite(at), finite(rate)) for at, rate in zip(steps, rates, strict=False)]
    known = [(at, rate) for at, rate in numbers if at is not None and rate is not None and 0 <= rate <= 1]
    if len(known) < len(steps) or any(later[0] <= one[0] for one, later in pairwise(known)):
        return None
    return RatePlan(total, *(np.array([pair[place] for pair in known]) for place in (0, 1)))


def _logged_plan(rates: Sequence[tuple[float, float]], total: int, last: float) -> RatePlan:
    """Return what the logged rates were, where they go on to the end; else nobody knows what is to come."""
    steps, numbers = (np.array([pair[place] for pair in rates], dtype=np.float64) for place in (0, 1))
    if len(steps) < 2 or steps[-1] < _FINISHED * total or last < _FINISHED * total:
        return unknown_plan(total)
    places = np.unique(np.linspace(0, total, _PLACES).round())
    return shortened_plan(total, places, np.interp(places, steps, numbers))


def _notes(plan: RatePlan) -> tuple[str, ...]:
    if plan.known:
        return ()
    return ("what the learning rate will do is not known: name it with --schedule, and the interval becomes narrower",)
