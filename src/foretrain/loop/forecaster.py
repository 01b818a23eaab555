"""Where is this run going? The held-out loss at its end, forecast after evaluations, and how good that was at last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.engine.ahead import plan_ahead, unknown_plan
from foretrain.engine.batch import tensors_of
from foretrain.engine.engine import Engine
from foretrain.events import Event, LossForecasted, Notice, RatesPlanned
from foretrain.forecast.equivalent import ENOUGH, held_out_equivalent, thinned, with_training
from foretrain.forecast.forecasting import finished, forecast
from foretrain.forecast.history import FinishedRun, History
from foretrain.forecast.records import AnnealedPoint, LossCurve, LossForecast, Numbers, RatePlan, is_same_end
from foretrain.forecast.stored import (
    curve_from_json,
    curve_to_json,
    finished_runs,
    history_of,
    siblings_of,
)
from foretrain.persist.model_state import checksum
from foretrain.persist.stateful import Stateful

FROM = 0.1
"""Share of the run from which on its end is forecast."""
CHECKED = (0.25, 0.5, 0.75)
"""Shares of the run at which its forecasts are judged when the end is known."""
_MOST = 100
"""So many forecasts are made in a run, at the most."""
_WAY = 8
"""Places between now and the end at which the way there is told."""
_KEPT = 256
"""Points of the training loss that are kept; neighbours are averaged when there are more."""


class LossForecaster(Stateful):
    """Collects what a run shows of its loss, and forecasts its end. It never touches the device."""

    saved = ("evaluations", "training", "trained_until", "made", "last", "looked", "_planned", "_siblings", "_history")
    evaluations: list[tuple[int, float]]
    training: list[tuple[float, float]]
    """(step in the middle, mean) of stretches of the training loss."""
    made: list[tuple[int, float, float, float, int]]
    """(step, loss, low, high, step that it is for) of every forecast so far."""
    last: LossForecast | None
    """The newest one; None where the newest losses allow none."""

    def __init__(
        self, engine: Engine, annealed: Callable[[], Sequence[AnnealedPoint]], emit: Callable[[Event], None]
    ) -> None:
        """annealed: gives what annealed copies of the run have come to."""
        self.engine = engine
        self.annealed = annealed
        self.emit = emit
        self.level = engine.config.forecast.level
        self.evaluations = []
        self.training = []
        self.made = []
        self.last = None
        self.looked = False
        """Whether the runs beside this one were looked for: a run that is resumed goes by those of its beginning."""
        self.kind = ""
        self.siblings: list[LossCurve] = []
        self.history = History()
        self._plan: RatePlan | None = None
        self._told: list[float] = []
        self.trained_until = 0
        """The training loss is known up to this step."""
        self._failed = False

    # --- the beginning ------------------------------------------------------------------------------------------------

    def begin(self, kind: str, folder: Path | None) -> None:
        """Learn what kind of run this is, and look for finished ones beside it. folder: None where it has none."""
        self.kind = kind
        plan = self._tell_plan()
        if not self.looked and folder is not None:
            runs = finished_runs(folder.resolve().parent, folder.resolve())
            self.siblings = siblings_of(LossCurve(np.empty(0), np.empty(0), plan, kind=kind), runs)
            self.history = history_of(runs, kind)
        self.looked = True

    def _planned_now(self) -> RatePlan:
        """Ask for the plan."""
        total = self.engine.config.max_steps
        return plan_ahead(self.engine.rate, total, self._plan) if self.engine.has_end else unknown_plan(total)

    def _tell_plan(self) -> RatePlan:
        """Keep the plan as it is now, and tell it where it is new."""
        plan = self._planned_now()
        now = [float(plan.total_steps), *plan.steps.tolist(), *plan.multipliers.tolist()]
        if now != self._told:
            written = curve_to_json(LossCurve(np.empty(0), np.empty(0), plan))
            step, knots = self.engine.progress.global_step, (written["rate_steps"], written["rates"])
            self.emit(RatesPlanned(step, plan.total_steps, self.kind, *knots))
            self._told = now
        self._plan = plan
        return plan

    # --- what the run shows -------------------------------------------------------------------------------------------

    def trained(self, step: int, loss: float) -> None:
        """Hear the mean of the training loss since the last time."""
        middle = (min(self.trained_until, step) + step) / 2
        self.trained_until = step
        while self.training and self.training[-1][0] >= middle:  # a rollback: it is done again
            self.training.pop()
        if np.isfinite(loss) and len(self.evaluations) < ENOUGH - 1:
            self.training.append((middle, loss))
        if len(self.training) > _KEPT:
            self.training = thinned(self.training)

    def evaluated(self, loss: float) -> None:
        """Hear a held-out loss, and forecast the end where enough is known."""
        step, total = self.engine.progress.global_step, self.engine.config.max_steps
        for known in (self.evaluations, self.made):
            while known and known[-1][0] >= step:  # a rollback: it is measured again
                known.pop()
        if np.isfinite(loss):
            self.evaluations.append((step, loss))
        newest = self.made[-1][0] if self.made else -total
        if not self.engine.has_end:
            return
        if step >= total:
            self._tell_plan()
        if FROM * total <= step < total and step - newest >= total / _MOST and np.isfinite(loss):
            self._forecast(step)

    def curve(self) -> LossCurve:
        """Return the losses so far to forecast from."""
        return self._curve_of(*held_out_equivalent(self.evaluations, self.training))

    def _curve_of(self, steps: Numbers, losses: Numbers) -> LossCurve:
        plan = self._planned_now()
        now = self.engine.progress.global_step  # a rollback may have taken back what a copy was made of
        annealed = tuple(point for point in self.annealed() if point.step <= now)
        return LossCurve(steps, losses, plan, annealed, self.kind)

    # --- forecasts ----------------------------------------------------------------------------------------------------

    def _forecast(self, step: int) -> None:
        self._tell_plan()
        curve = self.curve()
        with self._never_ending_a_run():
            found = forecast(curve, self.siblings, self.level, self.history)
            self.last = found if found is not None and _tells_something(found, curve) else None
            if self.last is not None:
                self._tell(step, self.last, self._way(curve, step, self.last))

    def _tell(self, step: int, found: LossForecast, way: Sequence[tuple[int, float, float, float]]) -> None:
        self.made.append((step, found.loss, found.low, found.high, found.step))
        told = (found.loss, found.low, found.high, found.level, found.method, found.calibrated)
        self.emit(LossForecasted(step, found.step, *told, found.baselines, way))

    @contextmanager
    def _never_ending_a_run(self) -> Iterator[None]:
        """What goes wrong in a forecast is told once, and the run goes on without it."""
        try:
            yield
        except (ArithmeticError, ValueError, LookupError, np.linalg.LinAlgError) as error:
            if not self._failed:
                self.emit(Notice(f"the end of the run cannot be forecast ({type(error).__name__}: {error})"))
            self._failed = True

    def _way(self, curve: LossCurve, step: int, end: LossForecast) -> tuple[tuple[int, float, float, float], ...]:
        """Return forecasts for some steps between now and the end."""
        places = sorted({round(place) for place in np.linspace(step, end.step, _WAY + 2)[1:-1]} - {step, end.step})
        made = [forecast(curve, self.siblings, self.level, self.history, step=place) for place in places]
        found = [one for one in (*made, end) if one is not None]
        return tuple((one.step, round(one.loss, 6), round(one.low, 6), round(one.high, 6)) for one in found)

    def summary(self, as_it_was: Callable[[RatePlan], RatePlan] | None = None) -> dict[str, Any] | None:
        """Say where the run was going, and of a finished one how good its forecasts were; None without forecasts.
        as_it_was: makes of the plan what the rate was up to the end of a run that ended before it."""
        if not self.evaluations:
            return None
        plan = self._planned_now() if as_it_was is None else as_it_was(self._planned_now())
        last = self.made[-1:] if self.last is not None else []
        curve = replace(self._curve_of(*with_training(self.evaluations, self.training)), plan=plan)
        ended = self.evaluations[-1][0] >= plan.total_steps
        told = self._finished(curve) if ended else None
        return {
            "level": self.level,
            "ended": ended,
            "last": dict(zip(("step", "loss", "low", "high", "end"), last[0], strict=True)) if last else None,
            "method": None if self.last is None else self.last.method,
            "calibrated": None if self.last is None else self.last.calibrated,
            "baselines": None if self.last is None else self.last.baselines,
            "own_finished_runs": len(self.history.of_kind(self.kind)),
            "siblings": len(self.siblings),
            "checks": self._checks(self.evaluations[-1][1], plan.total_steps) if ended else [],
            "made": [list(one) for one in self.made],
            "curve": curve_to_json(curve),
            "finished": None if told is None else History([told]).to_json()["runs"][0],
        }

    def _finished(self, curve: LossCurve) -> FinishedRun | None:
        """Return what this run is worth to later forecasts: made as they were made while it went on."""
        told = None
        with self._never_ending_a_run():
            told = finished(curve, self.siblings, self.history)
            alone = finished(replace(self.curve(), plan=curve.plan), self.siblings, self.history)
            if told is not None and alone is not None and len(self.evaluations) >= ENOUGH:
                since = self.evaluations[ENOUGH - 1][0] / curve.plan.total_steps
                early = (one for one in told.residuals if one.progress < since)
                told = replace(alone, residuals=(*early, *(one for one in alone.residuals if one.progress >= since)))
        return told

    def _checks(self, truth: float, total: int) -> list[dict[str, Any]]:
        """Compare the forecasts at some shares of the run with what came; not those that were for another length."""
        found = []
        of_this_end = [one for one in self.made if is_same_end(one[-1], total)]
        for share in CHECKED:
            before = [one for one in of_this_end if one[0] <= share * total]
            if before and before[-1][0] > (share - 0.25) * total:
                step, loss, low, high, _ = before[-1]
                error = 100 * (loss - truth) / abs(truth) if truth else None
                check = {"share": share, "step": step, "loss": loss, "low": low, "high": high}
                found.append({**check, "error_percent": error, "held": low <= truth <= high})
        return found

    # --- what is saved in another form --------------------------------------------------------------------------------

    @property
    def _planned(self) -> Any:
        """The plan: a scheduler of the user's own cannot be asked for it later."""
        plan = self._plan
        return None if plan is None else [float(plan.total_steps), plan.steps.tolist(), plan.multipliers.tolist()]

    @_planned.setter
    def _planned(self, saved: Any) -> None:
        self._plan = None
        if saved is not None:
            total, steps, rates = saved
            self._plan = RatePlan(int(total), np.array(steps, dtype=np.float64), np.array(rates, dtype=np.float64))

    @property
    def _siblings(self) -> Any:
        return [curve_to_json(curve) for curve in self.siblings]

    @_siblings.setter
    def _siblings(self, saved: Any) -> None:
        self.siblings = [curve_from_json(one) for one in saved]

    @property
    def _history(self) -> Any:
        return self.history.to_json()

    @_history.setter
    def _history(self, saved: Any) -> None:
        self.history = History.from_json(saved)


def kind_of(engine: Engine, title: str, fingerprint: str, held_out: Sequence[Any]) -> str:
    """Say what a run is, so that others of its kind are known: by all but its rate, its schedule and its length.
    Empty where nothing tells its data from that of others."""
    parameters = sum(p.numel() for p in engine.model.parameters())
    trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    first = {str(place): tensor for place, tensor in enumerate(tensors_of(held_out[0]) if held_out else [])}
    try:
        data = checksum(first)[:12] if first else ""
    except (RuntimeError, KeyError):  # tensors of which no bits can be seen, such as sparse ones
        data = ""
    if not data and not fingerprint:
        return ""
    size = f"{parameters:,} parameters" + ("" if trained == parameters else f", {trained:,} trained")
    config = engine.config
    texts = [title, size, type(engine.optimizer).__name__, f"batch of {config.batch_size}"]
    texts += [f"grows from {config.growth.stages}"] if config.growth.stages else []
    texts += [f"averaged by {config.evaluation.ema_decay:g}"] if config.evaluation.ema_decay else []
    return "; ".join([*texts, f"data {fingerprint[:12]}", f"held out {data}"])


def _tells_something(found: LossForecast, curve: LossCurve) -> bool:
    """Return whether an interval is one that a user can do something with: not one that reaches as far above the
    highest loss seen as all losses seen lie apart."""
    highest, lowest = float(np.max(curve.losses)), float(np.min(curve.losses))
    return found.high <= highest + (highest - lowest)
