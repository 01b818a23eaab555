"""How well the end of a run is forecast from its beginning: public runs, families held out from each other.

Cold: nothing is known but the run's own losses and its plan of rates. Sibling: one finished run of the same kind with
the same plan, drawn at random; kind: with another plan; unknown: the plan is hidden. Intervals of a family are made
from the errors on the other families only; own: from the errors on ten finished runs, of the same kind or of others.

python benchmarks/forecast_runs.py --data ../shared/data --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forecast_curves import CUTS, PublicRun, load
from forecast_table import CUTS as TABLE_CUTS
from forecast_table import Tried, quantiles, tries, write
from foretrain.forecast import intervals, law
from foretrain.forecast.forecasting import FEWEST, forecast
from foretrain.forecast.history import CALIBRATED_FROM, FinishedRun, Residual
from foretrain.forecast.law import LawPrior
from foretrain.forecast.points import cleaned, tail

TO_ZERO = ("fmnist_2c2d", "svhn_wrn164")
"""Training losses that go to 0: shares of them say nothing. They count for intervals, not for errors."""
LEVEL = 0.8
OWN_PREFIX = LawPrior(drop_spread=10.0, exponent_spread=10.0)
METHODS = (
    "last value", "power law", "log-linear tail", "multi-power law, own losses", "unknown", "cold", "kind", "sibling"
)  # fmt: skip
LANGUAGE_MODELS = ("track_1_short", "track_2_medium", "track_3_optimization", "multipowerlaw")


def baselines(run: PublicRun, cut: float) -> dict[str, float]:
    """Return what simpler rules say of the end."""
    seen, end = run.seen(cut), run.curve.plan.total_steps
    steps, losses = cleaned(seen, skipped=0.1)
    found = {"log-linear tail": float(losses[-1]) + tail(steps, losses).move(float(steps[-1]), end)}
    fitted = law.fit(seen, OWN_PREFIX)
    if fitted is not None:
        found["multi-power law, own losses"] = fitted.loss_at(run.curve.plan, end)
    return found


def errors(tried: Sequence[Tried]) -> dict[tuple[str, str, float], list[float]]:
    """Return errors in percent by method, family and cut."""
    found: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for one in tried:
        if one.cut not in CUTS or one.run.group.startswith(TO_ZERO):
            continue
        said = {one.setting: one.point.loss}
        if one.setting == "cold":
            said |= one.point.baselines | baselines(one.run, one.cut)
        for method, loss in said.items():
            found[method, one.run.family, one.cut].append(100 * abs(loss / one.run.final - 1))
    return found


def coverage(tried: Sequence[Tried]) -> dict[tuple[str, str, float], list[tuple[bool, float]]]:
    """Return whether intervals from other families hold the end, and their width in percent."""
    found: dict[tuple[str, str, float], list[tuple[bool, float]]] = defaultdict(list)
    shipped = intervals.QUANTILES
    try:
        for family in sorted({one.run.family for one in tried}):
            others = quantiles([one for one in tried if one.run.family != family])
            intervals.QUANTILES = {key: tuple(values) for key, values in others.items()}
            for one in tried:
                if one.run.family == family and one.cut in CUTS:
                    low, high, _ = intervals.around(one.point.loss, one.point.situation, LEVEL)
                    width = 100 * (high - low) / abs(one.point.loss)
                    found[one.setting, family, one.cut].append((low <= one.run.final <= high, width))
    finally:
        intervals.QUANTILES = shipped
    return found


def own_coverage(tried: Sequence[Tried]) -> dict[tuple[str, str, float], list[tuple[bool, float]]]:
    """Return whether intervals by the errors on ten finished runs hold the end, and their width in percent: of runs of
    the same kind, and of runs of other families. All runs are forecast cold; the ten are drawn by a fixed seed."""
    draw = np.random.default_rng(0)
    cold = [one for one in tried if one.setting == "cold" and not one.run.group.startswith(TO_ZERO)]
    residuals: dict[int, list[Residual]] = defaultdict(list)
    runs = {id(one.run): one.run for one in cold}
    for one in cold:
        told = one.point.situation
        residuals[id(one.run)].append(Residual(told.progress, told.phase == "falling", told.way, one.error))
    found: dict[tuple[str, str, float], list[tuple[bool, float]]] = defaultdict(list)
    for one in cold:
        if one.cut not in CUTS:
            continue
        mine = (one.run.family, one.run.curve.kind)
        of_kind = [key for key, run in runs.items() if (run.family, run.curve.kind) == mine and run is not one.run]
        others = [key for key, run in runs.items() if run.family != one.run.family]
        for setting, keys in (("its kind", of_kind), ("other families", others)):
            if len(of_kind) < CALIBRATED_FROM:
                continue
            drawn = draw.choice(len(keys), CALIBRATED_FROM, replace=False)
            own = [FinishedRun("", tuple(residuals[keys[place]])) for place in drawn]
            low, high, calibrated = intervals.around(one.point.loss, one.point.situation, LEVEL, own)
            if calibrated:
                width = 100 * (high - low) / abs(one.point.loss)
                found[setting, one.run.family, one.cut].append((low <= one.run.final <= high, width))
    return found


def cpu_milliseconds(runs: Sequence[PublicRun]) -> float:
    """Return the CPU time of one forecast."""
    seen = [run.seen(0.5) for run in runs[::8]]
    began = time.process_time()
    for curve in seen:
        forecast(curve)
    return 1000 * (time.process_time() - began) / len(seen)


def without_a_forecast(runs: Sequence[PublicRun]) -> dict[str, list[int]]:
    """Return by family how many forecasts a user would not have been given, though losses enough were seen, and how
    many were asked for; nothing else known."""
    found: dict[str, list[int]] = {}
    for run in runs:
        for cut in CUTS:
            seen = run.seen(cut)
            if len(cleaned(seen, skipped=0.1)[0]) < FEWEST:
                continue
            counts = found.setdefault(run.family, [0, 0])
            counts[0] += forecast(seen, level=LEVEL) is None
            counts[1] += 1
    return found


def show_errors(wrong: dict[tuple[str, str, float], list[float]], families: Sequence[str]) -> list[list[object]]:
    """Print the table of errors; return its rows."""
    rows: list[list[object]] = []
    print("\nmedian error of the final loss in percent (90th percentile)\n")
    print("| method | cut | " + " | ".join(families) + " | mean of the LM families | LM runs pooled |")
    print("|---" * (len(families) + 4) + "|")
    for method in METHODS:
        for cut in CUTS:
            cells, medians, pooled = [], [], []
            for family in families:
                values = wrong.get((method, family, cut), [])
                if not values:
                    cells.append("-")
                    continue
                middle, far = float(np.median(values)), float(np.percentile(values, 90))
                cells.append(f"{middle:.2f} ({far:.1f})")
                rows.append([method, family, cut, len(values), round(middle, 3), round(far, 2)])
                if family in LANGUAGE_MODELS:
                    medians.append(middle)
                    pooled += values
            cells += [f"{np.mean(medians):.2f}", f"{np.median(pooled):.2f}"]
            print(f"| {method} | {cut:.0%} | {' | '.join(cells)} |")
    return rows


def show_intervals(
    held: dict[tuple[str, str, float], list[tuple[bool, float]]],
    families: Sequence[str],
    settings: Sequence[str],
    origin: str,
) -> list[list[object]]:
    """Print how many ends lie inside their intervals; return the rows."""
    rows: list[list[object]] = []
    print(f"\nshare of ends inside 80 % intervals from {origin}, in percent (median width in percent)\n")
    print("| setting | cut | " + " | ".join(families) + " | mean of families | runs pooled |")
    print("|---" * (len(families) + 4) + "|")
    for setting in settings:
        all_shares, all_values = [], []
        for cut in CUTS:
            cells, shares, inside = [], [], []
            for family in families:
                values = held.get((setting, family, cut), [])
                if not values:
                    cells.append("-")
                    continue
                share, width = 100 * float(np.mean([v[0] for v in values])), float(np.median([v[1] for v in values]))
                rows.append([setting, family, cut, len(values), round(share, 1), round(width, 2)])
                cells.append(f"{share:.0f} ({width:.1f})")
                shares.append(share)
                inside += [v[0] for v in values]
            if not shares:
                continue
            cells += [f"{np.mean(shares):.0f}", f"{100 * np.mean(inside):.0f}"]
            print(f"| {setting} | {cut:.0%} | {' | '.join(cells)} |")
            all_shares += shares
            all_values += inside
        print(
            f"| {setting} | all |{' |' * len(families)} {np.mean(all_shares):.0f} | {100 * np.mean(all_values):.0f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="write src/foretrain/forecast/table.py, too")
    arguments = parser.parse_args()
    runs = load(arguments.data)
    tried = list(tries(runs, TABLE_CUTS))
    if arguments.table:
        write(tried)
    families = list(dict.fromkeys(run.family for run in runs))
    rows = show_errors(errors(tried), families)
    told = ("cold", "kind", "sibling", "unknown")
    inside = show_intervals(coverage(tried), families, told, "other families")
    own = show_intervals(own_coverage(tried), families, ("its kind", "other families"), "ten finished runs")
    silent = without_a_forecast(runs)
    print(f"\nno forecast, of all that were asked for: {silent}")
    spent = cpu_milliseconds(runs)
    print(f"\n{spent:.1f} ms of CPU time per forecast")
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
        result = {
            "command": "python benchmarks/forecast_runs.py --data ../shared/data",
            "commit": commit.stdout.strip(),
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "runs": {family: sum(run.family == family for run in runs) for family in families},
            "errors: method, family, cut, runs, median %, 90th percentile %": [json.dumps(row) for row in rows],
            "intervals: setting, family, cut, runs, inside %, median width %": [json.dumps(row) for row in inside],
            "own: intervals from ten finished runs, family, cut, runs, inside %, median width %": [
                json.dumps(row) for row in own
            ],
            "no forecast: family, [silent, asked for]": silent,
            "cpu_milliseconds_per_forecast": round(spent, 2),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
