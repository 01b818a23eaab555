"""What a run leaves in its `summary.json` for later forecasts, and how it is found again among the runs beside it.

There is no file of its own that could be damaged or fall behind: the folders of finished runs are the history. Whatever
lies among them that is no such run, or damaged, is passed over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.forecast.forecasting import TRANSFER, finished
from foretrain.forecast.history import FinishedRun, History
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.persist.files import from_json

SUMMARY_KEY = "loss_forecast"
"""Under this name a summary holds the record."""
_FOLDERS = 200
"""So many folders are looked into, the newest first, ..."""
_LARGEST = 2**22
"""... unless their summary has more bytes than this."""
_SIBLINGS = 4
_AGAIN = 20
"""So many of the newest runs may be forecast once more, each in some 20 ms."""
_SHAPE = np.linspace(0.0, 1.0, 33)
_ALIKE = 0.1
"""Two schedules have one shape where their multipliers differ by less than this anywhere."""


@dataclass(frozen=True)
class StoredRun:
    """One finished run as its summary tells it."""

    folder: str
    curve: LossCurve
    finished: FinishedRun | None


def curve_to_json(curve: LossCurve) -> dict[str, Any]:
    """Write a curve in plain values."""
    return {
        "kind": curve.kind,
        "total_steps": curve.plan.total_steps,
        "rate_steps": _rounded(curve.plan.steps),
        "rates": _rounded(curve.plan.multipliers),
        "steps": _rounded(curve.steps),
        "losses": _rounded(curve.losses),
        "annealed": [[point.step, point.steps, point.loss, point.before] for point in curve.annealed],
    }


def curve_from_json(values: Mapping[str, Any]) -> LossCurve:
    """Read what `curve_to_json` wrote. Raises ValueError where that is not what is there."""
    try:
        steps, losses, at, rates = (
            np.asarray(values[name], dtype=np.float64) for name in ("steps", "losses", "rate_steps", "rates")
        )
        points = tuple(
            AnnealedPoint(int(one[0]), int(one[1]), float(one[2]), float(one[3])) for one in values["annealed"]
        )
        plan = RatePlan(int(values["total_steps"]), at, rates)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no curve: {error}") from None
    same = steps.ndim == at.ndim == 1 and steps.shape == losses.shape and at.shape == rates.shape
    finite = all(bool(np.isfinite(one).all()) for one in (steps, losses, at, rates))
    if not same or not finite or not len(steps) or plan.total_steps < 1 or bool((np.diff(steps) <= 0).any()):
        raise ValueError("no curve: its numbers do not belong together")
    return LossCurve(steps, losses, plan, points, str(values.get("kind", "")))


def _rounded(numbers: np.ndarray[Any, Any]) -> list[float]:
    return [float(f"{number:.7g}") for number in numbers]


def run_from_summary(values: object, folder: str = "") -> StoredRun | None:
    """Read the record in a summary; None for one that has none, or of a run that did not come to its end."""
    if not isinstance(values, Mapping) or values.get("reason") != "finished":
        return None
    record = values.get(SUMMARY_KEY)
    curve = record.get("curve") if isinstance(record, Mapping) else None
    if not isinstance(curve, Mapping) or not isinstance(record, Mapping):
        return None
    try:
        read = curve_from_json(curve)
    except ValueError:
        return None
    told = History.from_json({"runs": [record.get("finished")]}).runs
    return StoredRun(folder, read, told[0] if told else None)


def summaries(parent: Path, own: Path | None = None) -> Iterator[tuple[str, object]]:
    """Read the summaries of the runs in a folder, the newest first: (folder of the run, what it says). own: the folder
    of the run that asks. Whatever is no regular file, too large or no JSON is passed over."""
    newest = nlargest(_FOLDERS, _written(parent, own))
    for _, summary in newest:
        try:
            with summary.open("rb") as file:
                yield str(summary.parent), from_json(file.read(_LARGEST + 1))
        except (OSError, ValueError):
            continue


def _written(parent: Path, own: Path | None) -> Iterator[tuple[int, Path]]:
    """Yield when each summary was written, and where it lies."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            try:
                if not entry.is_dir() or Path(entry.path) == own:
                    continue
                summary = Path(entry.path) / "summary.json"
                told = summary.lstat()
            except (OSError, ValueError):
                continue
            if 0 < told.st_size <= _LARGEST and stat.S_ISREG(told.st_mode):
                yield told.st_mtime_ns, summary


def finished_runs(parent: Path, own: Path | None = None) -> list[StoredRun]:
    """Find the finished runs in a folder, oldest first. own: the folder of the run that asks."""
    runs = [run_from_summary(values, folder) for folder, values in summaries(parent, own)]
    return [run for run in reversed(runs) if run is not None]


def siblings_of(curve: LossCurve, runs: list[StoredRun]) -> list[LossCurve]:
    """Return the newest runs of this kind whose schedule has the same shape."""
    alike = [run.curve for run in runs if curve.kind and run.curve.kind == curve.kind and _one_shape(curve, run.curve)]
    return alike[-_SIBLINGS:]


def history_of(runs: list[StoredRun], kind: str) -> History:
    """Return what the finished runs of this kind say of later forecasts. Those that had no finished run beside them,
    as the first one, are forecast once more from the others, as all later ones are."""
    told = []
    alike = [run for run in runs if kind and run.curve.kind == kind]
    for place, run in enumerate(alike):
        known = run.finished
        if (
            known is not None
            and len(alike) - place <= _AGAIN
            and not any(r.method == TRANSFER for r in known.residuals)
        ):
            others = siblings_of(run.curve, [other for other in alike if other is not run])
            known = (_once_more(run.curve, others) if others else None) or known
        told += [known] if known is not None else []
    return History(told)


def _once_more(curve: LossCurve, others: list[LossCurve]) -> FinishedRun | None:
    """Forecast a finished run as if the others had been there; None where its numbers, from a file, allow none."""
    with suppress(ArithmeticError, ValueError, LookupError, np.linalg.LinAlgError), np.errstate(all="ignore"):
        return finished(curve, others)
    return None


def _one_shape(one: LossCurve, other: LossCurve) -> bool:
    if one.plan.known != other.plan.known:
        return False
    first, second = (curve.plan.at(_SHAPE * curve.plan.total_steps) for curve in (one, other))
    return bool(np.abs(first - second).max() < _ALIKE)
