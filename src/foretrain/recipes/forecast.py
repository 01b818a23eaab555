"""Where runs are going: forecasts of the loss at their end, and tests of such forecasts on finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretrain.config.units import counted
from foretrain.errors import InputError
from foretrain.forecast.equivalent import held_out_equivalent
from foretrain.forecast.forecasting import FEWEST, forecast
from foretrain.forecast.records import LossForecast
from foretrain.loop.forecaster import CHECKED
from foretrain.persist.files import user_path
from foretrain.recipes.seen import ForecastRequest, SeenRun, read_run


@dataclass(frozen=True)
class EndForecast:
    """What was forecast of a run, and what came where that is known."""

    run: SeenRun
    seen: int
    """Steps that the forecast knows of."""
    made: LossForecast
    truth: float | None

    @property
    def error_percent(self) -> float | None:
        return None if not self.truth else 100 * (self.made.loss - self.truth) / abs(self.truth)

    @property
    def held(self) -> bool | None:
        return None if self.truth is None else self.made.low <= self.truth <= self.made.high

    @property
    def notes(self) -> list[str]:
        """Return what a reader of the forecast should know."""
        notes = [*self.run.notes]
        if self.run.losses_of != "held-out loss":
            notes.append(f"these are losses of {self.run.losses_of}")
        if self.run.own and not self.made.calibrated:
            runs = counted(len(self.run.history.runs), "finished run")
            notes.append(
                "the interval is not calibrated by own runs: it takes ten of its kind that were forecast in the same "
                f"way (found beside it: {runs} of its kind)"
            )
        return notes

    def as_dict(self) -> dict[str, Any]:
        made = self.made
        return {
            "run": self.run.name,
            "losses": self.run.losses_of,
            "seen_steps": self.seen,
            "total_steps": made.step,
            "loss": made.loss,
            "low": made.low,
            "high": made.high,
            "level": made.level,
            "method": made.method,
            "calibrated": made.calibrated,
            "baselines": made.baselines,
            "truth": self.truth,
            "error_percent": self.error_percent,
            "held": self.held,
            "notes": self.notes,
        }


def forecast_runs(paths: Sequence[Path], request: ForecastRequest) -> list[EndForecast]:
    """Forecast the end of every run, the lowest first. A finished one is forecast as if a quarter, a half and three
    quarters of it had been seen, unless `at` says which share."""
    request.check()
    whole = replace(request, at=0.5, total_steps=None)  # a log of a sibling ends where the sibling ended
    given = [read_run(user_path(path), whole).curve for path in request.siblings]
    made: list[EndForecast] = []
    for path in paths:
        run = read_run(user_path(path), request)
        run = replace(run, siblings=(*run.siblings, *given))
        shares = [request.at] if request.at is not None else list(CHECKED) if run.finished else [None]
        made += _each(path, run, shares, request.level)
    return made if len(paths) == 1 else sorted(made, key=lambda one: one.made.loss)


def _each(path: Path, run: SeenRun, shares: Sequence[float | None], level: float) -> list[EndForecast]:
    """Forecast from each share; one that allows no forecast is told in a note, unless there is no other."""
    made: list[EndForecast] = []
    refused: list[InputError] = []
    for share in shares:
        try:
            made.append(_forecast(path, run, share, level))
        except InputError as error:
            refused.append(error)
    if not made:
        raise refused[0]
    told = replace(run, notes=(*run.notes, *(str(error) for error in refused)))
    return [replace(one, run=told) for one in made]


def _forecast(path: Path, run: SeenRun, share: float | None, level: float) -> EndForecast:
    """Forecast the end from what was seen up to a share of the run; None: from all of it."""
    curve, total = run.curve, run.curve.plan.total_steps
    cut = total * share if share is not None else float("inf")
    evaluations = [(float(at), float(loss)) for at, loss in zip(curve.steps, curve.losses, strict=True) if at <= cut]
    steps, losses = held_out_equivalent(evaluations, run.training)
    annealed = tuple(point for point in curve.annealed if point.step + point.steps <= cut)
    part = replace(curve, steps=steps, losses=losses, annealed=annealed)
    made = forecast(part, run.siblings, level, run.history)
    if made is None:
        upto = "" if share is None else f" up to {share:.0%} of the run"
        if len(steps) <= FEWEST:
            raise InputError(f"{path}: {len(steps)} losses{upto} are too few for a forecast")
        raise InputError(
            f"{path}: its losses{upto} allow no forecast: they diverge, or fall so far that the end could be anywhere"
        )
    truth = run.end if run.finished and share is not None else None
    return EndForecast(run, int(steps[-1]), made, truth)
