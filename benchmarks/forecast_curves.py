"""Public loss curves, as curves that foretrain can forecast: ../shared/data/curves and its README.

A family holds runs that were made by the same people in the same way; families are held out from each other. A group
is one recipe within a family: of each the first few runs are used, so that one that was run forty times counts little.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrain.forecast.records import LossCurve, RatePlan

CUTS = (0.1, 0.25, 0.5, 0.75)
_PER_GROUP = 6
_FEWEST_LOSSES = 13
"""Runs of the speed-run tracks with fewer held-out losses have almost none in their first quarter."""


@dataclass(frozen=True)
class PublicRun:
    """One finished public run."""

    family: str
    group: str
    name: str
    curve: LossCurve

    @property
    def final(self) -> float:
        return float(self.curve.losses[-1])

    def seen(self, share: float) -> LossCurve:
        """Return what was known after this share of the run."""
        kept = self.curve.steps <= share * self.curve.plan.total_steps
        return LossCurve(self.curve.steps[kept], self.curve.losses[kept], self.curve.plan, kind=self.curve.kind)


def load(data: Path) -> list[PublicRun]:
    """Read all families; nothing is chosen by how well it can be forecast."""
    folder = data / "curves"
    return [*_speed_runs(folder), *_multi_power_law(folder), *_deepobs(folder), *_taskset(folder)]


def _plan(total: float, knots: list[list[float]]) -> RatePlan:
    steps, values = np.array(knots, dtype=np.float64).T
    return RatePlan(int(total), steps, values / values.max())


def _speed_runs(folder: Path) -> Iterator[PublicRun]:
    """Yield the tracks of modded-nanogpt, each a family, where the plan of the rate was recognised."""
    losses: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (folder / "modded_nanogpt" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            losses[row["run_id"]].append((float(row["step"]), float(row["val_loss"])))
    taken: Counter[str] = Counter()
    with (folder / "modded_nanogpt" / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            points = np.array(sorted(dict(losses[row["run_id"]]).items()))
            total = float(row["total_steps"] or 0)
            usable = row["complete"] == "1" and row["lr_knots"] and len(points) >= _FEWEST_LOSSES
            if not usable or points[-1, 0] < 0.995 * total or taken[row["group"]] >= _PER_GROUP:
                continue
            taken[row["group"]] += 1
            plan = _plan(points[-1, 0], json.loads(row["lr_knots"]))
            family = row["group"].split("/")[0]
            yield PublicRun(
                family, row["group"], row["run_id"], LossCurve(points[:, 0], points[:, 1], plan, kind=family)
            )


def _multi_power_law(folder: Path) -> Iterator[PublicRun]:
    """Yield three sizes under nine schedules; their logs begin after the warm-up of 2,160 steps."""
    points: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with (folder / "multipowerlaw" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            points[row["run_id"]].append((float(row["step"]), float(row["lr"]), float(row["loss"])))
    for name, rows in points.items():
        steps, rates, losses = np.array(sorted(rows)).T
        knots = [[0.0, 0.0], [min(2160.0, steps[0] - 1), rates.max()], *np.stack([steps, rates], axis=1).tolist()]
        size, schedule = name.removeprefix("mpl_").split("_", 1)
        yield PublicRun("multipowerlaw", schedule, name, LossCurve(steps, losses, _plan(steps[-1], knots), kind=size))


def _deepobs(folder: Path) -> Iterator[PublicRun]:
    """Yield training losses at constant rates: of each problem and optimizer the six rates that end lowest."""
    found: dict[str, list[tuple[float, PublicRun]]] = defaultdict(list)
    with gzip.open(folder / "deepobs" / "curves.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            losses = np.array(
                [np.nan if x is None else x for x in json.loads(row["train_losses_per_epoch"])], dtype=float
            )
            if len(losses) < _FEWEST_LOSSES or not np.all(np.isfinite(losses)) or losses[-1] <= 0:
                continue
            steps = np.arange(len(losses), dtype=np.float64)
            plan = RatePlan(len(losses) - 1, np.array([0.0, len(losses) - 1.0]), np.ones(2))
            group = f"{row['problem']}/{row['optimizer']}"
            curve = LossCurve(steps, losses, plan, kind=row["problem"])
            found[group].append((losses[-1], PublicRun("deepobs", group, row["run_id"], curve)))
    for runs in found.values():
        yield from (run for _, run in sorted(runs, key=lambda pair: pair[0])[:_PER_GROUP])


def _taskset(folder: Path) -> Iterator[PublicRun]:
    """Yield the held-out losses of the twelve configurations that end lowest of each of twelve text tasks."""
    horizon = 10_000
    found: dict[str, list[tuple[float, PublicRun]]] = defaultdict(list)
    with gzip.open(folder / "taskset" / "curves.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            losses = np.array([float(row[f"valid_{index}"] or "nan") for index in range(51)])
            if not np.all(np.isfinite(losses)):
                continue
            steps = np.linspace(0, horizon, 51)
            rate = np.maximum(1 - float(row["hp_linear_decay"]) * steps, 0) * np.exp(
                -float(row["hp_exponential_decay"]) * steps
            )
            plan = _plan(horizon, np.stack([steps, rate], axis=1).tolist())
            curve = LossCurve(steps, losses, plan, kind=row["task"])
            found[row["task"]].append((losses[-10:].mean(), PublicRun("taskset", row["task"], row["config"], curve)))
    for runs in found.values():
        yield from (run for _, run in sorted(runs, key=lambda pair: pair[0])[: 2 * _PER_GROUP])
