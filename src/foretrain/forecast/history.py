"""What own finished runs say of later forecasts: how wrong they were, and how much their losses fell with the rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CALIBRATED_FROM = 10
"""Finished runs of a kind from which on an interval of another such run is called calibrated."""


@dataclass(frozen=True)
class Residual:
    """One forecast of a run that has finished since, and how wrong it was."""

    progress: float
    """Share of the run that was seen."""
    decaying: bool
    """The rate had begun to fall."""
    method: str
    error: float
    """(truth - forecast) in units of the forecast's own guess of its error."""


@dataclass(frozen=True)
class FinishedRun:
    """What is kept of one finished run."""

    kind: str
    residuals: tuple[Residual, ...]
    drop: float | None = None
    """The drop of its law as a share of its last loss; None where its rate did not fall."""
    exponent: float | None = None


@dataclass
class History:
    """Own finished runs, oldest first."""

    runs: list[FinishedRun] = field(default_factory=list)

    def add(self, run: FinishedRun) -> None:
        self.runs.append(run)

    def of_kind(self, kind: str) -> list[FinishedRun]:
        """Return the runs of this kind; none for the empty kind, of which nothing is known."""
        return [run for run in self.runs if kind and run.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "runs": [
                {
                    "kind": run.kind,
                    "drop": run.drop,
                    "exponent": run.exponent,
                    "residuals": [[r.progress, r.decaying, r.method, r.error] for r in run.residuals],
                }
                for run in self.runs
            ]
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> History:
        """Read what `to_json` gave; entries that make no sense are left out."""
        runs = values.get("runs", [])
        read = (_finished(entry) for entry in runs) if isinstance(runs, list) else ()
        return cls([run for run in read if run is not None])


def _finished(entry: Any) -> FinishedRun | None:
    if not isinstance(entry, Mapping):
        return None
    residuals = entry.get("residuals")
    found = tuple(_residuals(residuals)) if isinstance(residuals, list) else ()
    return FinishedRun(str(entry.get("kind", "")), found, _number(entry.get("drop")), _number(entry.get("exponent")))


def _residuals(entries: Iterable[Any]) -> Iterable[Residual]:
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            continue
        progress, error = _number(entry[0]), _number(entry[3])
        if progress is not None and error is not None:
            yield Residual(progress, bool(entry[1]), str(entry[2]), error)


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None
