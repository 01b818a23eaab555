"""Forecast public runs at many moments, and make src/foretrain/forecast/table.py of how wrong that was.

Each family counts as much as any other. The quantiles are stretched by INFLATION, chosen so that 80 % intervals made
from other families hold 75 to 85 % of the ends of a family that they do not know (benchmarks/forecast_runs.py, whose
--table writes it).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forecast_curves import PublicRun
from foretrain.forecast import intervals, plans
from foretrain.forecast.forecasting import PointForecast, point_forecast
from foretrain.forecast.records import LossCurve, RatePlan

CUTS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.75, 0.9)
INFLATION = {"law": 1.75, "unknown": 1.5, "drop": 1.5, "transfer": 1.5}
_FARTHEST = 30.0
TARGET = Path(__file__).parent.parent / "src" / "foretrain" / "forecast" / "table.py"


@dataclass(frozen=True)
class Tried:
    """One forecast of a public run, and how wrong it was."""

    run: PublicRun
    setting: str
    """cold, unknown (rate hidden), sibling (finished, the same plan), or kind (finished, another plan)."""
    cut: float
    point: PointForecast

    @property
    def error(self) -> float:
        return intervals.normalised(self.run.final, self.point.loss, self.point.situation)


def siblings_of(run: PublicRun, runs: Sequence[PublicRun]) -> tuple[list[PublicRun], list[PublicRun]]:
    """Return finished runs of the same kind with the same plan of rates, and with another plan."""
    alike = [
        other
        for other in runs
        if other is not run
        and other.family == run.family
        and (other.group if run.family == "multipowerlaw" else other.curve.kind)
        == (run.group if run.family == "multipowerlaw" else run.curve.kind)
    ]
    same = [other for other in alike if plans.same_shape(run.curve.plan, other.curve.plan)]
    kind = [other for other in runs if other is not run and other.family == run.family and other not in same]
    falling = [other for other in kind if other.curve.kind == run.curve.kind and plans.decays(other.curve.plan)]
    return same, falling if plans.decays(run.curve.plan) else []


def tries(runs: Sequence[PublicRun], cuts: Sequence[float]) -> Iterator[Tried]:
    """Forecast every run at every cut in every setting that it allows; siblings are drawn by a fixed seed."""
    draw = np.random.default_rng(0)
    for run in runs:
        plan = run.curve.plan
        hidden = RatePlan(plan.total_steps, np.empty(0), np.empty(0))
        same, kind = siblings_of(run, runs)
        for cut in cuts:
            seen = run.seen(cut)
            settings: list[tuple[str, LossCurve, tuple[LossCurve, ...]]] = [("cold", seen, ())]
            settings.append(("unknown", dataclasses.replace(seen, plan=hidden), ()))
            settings += [("sibling", seen, (same[draw.integers(len(same))].curve,))] if same else []
            settings += [("kind", seen, (kind[draw.integers(len(kind))].curve,))] if kind else []
            for setting, curve, siblings in settings:
                with np.errstate(all="ignore"):
                    point = point_forecast(curve, siblings, None, plan.total_steps, curve.plan)
                if point is not None:
                    yield Tried(run, setting, cut, point)


def quantiles(tried: Sequence[Tried]) -> dict[tuple[str, str, int], list[float]]:
    """Return the quantiles of errors by way, phase and progress, families weighing the same."""
    found: dict[tuple[str, str, int], list[Tried]] = {}
    for one in tried:
        situation = one.point.situation
        for phase in {situation.phase, "any"}:
            found.setdefault((situation.way, phase, intervals.bin_of(situation.progress)), []).append(one)
    table = {}
    for key, ones in sorted(found.items()):
        counts = Counter(one.run.family for one in ones)
        if key[1] != "any" and (len(counts) < 2 or len(ones) < 20):
            continue
        errors, weights = (
            np.array(x) for x in zip(*sorted((o.error, 1 / counts[o.run.family]) for o in ones), strict=True)
        )
        places = (np.cumsum(weights) - weights / 2) / weights.sum()
        values = np.interp(intervals.PROBABILITIES, places, np.clip(errors, -_FARTHEST, _FARTHEST)) * INFLATION[key[0]]
        table[key] = [round(float(value), 2) for value in values]
    return table


def write(tried: Sequence[Tried]) -> None:
    """Write the table."""
    table = quantiles(tried)
    lines = [
        '"""How wrong forecasts of public runs were: benchmarks/forecast_runs.py --table writes this file."""',
        "",
        "from __future__ import annotations",
        "",
        "QUANTILES: dict[tuple[str, str, int], tuple[float, ...]] = {",
        *(f'    ("{way}", "{phase}", {place}): {tuple(row)},' for (way, phase, place), row in table.items()),
        "}",
        '"""Errors in units of their own, by way, phase (or any) and progress, at `intervals.PROBABILITIES`."""',
        "",
    ]  # fmt: skip
    TARGET.write_text("\n".join(lines), encoding="utf-8")
