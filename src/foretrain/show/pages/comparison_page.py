"""Make the page of `foretrain compare`: the verdict first, then what it rests on, down to every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.units import rate_text
from foretrain.show.numbers import finite, is_list, mapping
from foretrain.show.pages.charts import LOOKS, PHASES
from foretrain.show.pages.comparison_charts import comparison_charts
from foretrain.show.pages.comparison_runs import ComparedRuns
from foretrain.show.pages.render import Cell, Line, PageTable, Shown, number, one_file, settings_table

SCRIPTS = ("page", "charts")
_BADGES = {"gain": "gain", "slower": "slower", "one run": "caution", "incomplete": "caution"}
_TICKS = 4
"""So many numbers stand over the column of intervals, at the most: more would run into each other."""


def page(result: Mapping[str, Any]) -> str:
    """Make one HTML file of a comparison. Whatever is unknown (null, NaN) is shown as a dash."""
    runs = ComparedRuns(result)
    figures = comparison_charts(runs)
    charts = {name: figure.chart for name, figure in figures.items()}
    shared = {"runs": [], "prediction": "off"}
    data = {**charts, "shared": shared, "looks": LOOKS, "phases": PHASES}
    return one_file("comparison.html", SCRIPTS, data, **_layout(result, runs), figures=figures)


def _layout(result: Mapping[str, Any], runs: ComparedRuns) -> dict[str, Any]:
    """Return what the template shows beside the charts."""
    analysis = result["analysis"]
    verdict, settings = str(analysis["verdict"]), mapping(result["settings"])
    bounds = ratio_range([mapping(arm["speedup"]) for arm in runs.arms])
    return {
        "title": str(result["title"]),
        "verdict": verdict,
        "badge": _BADGES.get(verdict, ""),
        "sentence": str(analysis["sentence"]),
        "facts": " · ".join(fact for fact in _facts(result) if fact),
        "missing": None if result["complete"] else [str(run) for run in result["missing"]],
        "ticks": [(place(tick, bounds), f"{tick:g}×") for tick in round_factors(bounds)],
        "one": place(1.0, bounds),
        "arms": [_arm(runs, arm, bounds) for arm in runs.arms],
        "rungs": _rungs(runs.ladder),
        "looks": LOOKS,
        "lists": {name: _listed(settings.get(name)) for name in ("seeds", "budgets", "rate_factors")},
        "runs": _runs(runs),
        "config": settings_table(mapping(result["config"])),
        "environment": settings_table(mapping(result["environment"])),
        "command": str(result["command"]),
    }


def _facts(result: Mapping[str, Any]) -> list[str]:
    environment, seeds = mapping(result["environment"]), mapping(result["settings"]).get("seeds") or []
    return [
        str(result["date"] or "")[:16].replace("T", " "),
        f"commit {str(result['commit'])[:12]}" if result["commit"] else "",
        str(environment.get("device") or environment.get("gpu") or ""),
        f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}" if is_list(seeds) else "",
        f"{len(result['runs'])} runs",
    ]


def _listed(values: object) -> str:
    return ", ".join(str(value) for value in values) if is_list(values) and values else "none"


# --- intervals around 1 -----------------------------------------------------------------------------------------------


def ratio_range(ratios: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Find a range around 1 for all of them. An interval without end does not widen it: it is drawn as going on."""
    values = [1.0]
    for ratio in ratios:
        mean = finite(ratio.get("mean"))
        if mean is not None and mean > 0:
            ends = [finite(ratio.get(name)) for name in ("low", "high")]
            values += [mean, *(end for end in ends if end is not None and mean / 3 < end < mean * 3)]
    air = max(math.log(max(values) / min(values)) * 0.1, 0.02)
    return min(min(values) * math.exp(-air), 1 / 1.05), max(max(values) * math.exp(air), 1.05)


def place(value: float, bounds: tuple[float, float]) -> float:
    """Tell where a factor lies between the bounds, in percent, on a logarithmic axis."""
    low, high = bounds
    inside = min(max(value, low), high)
    return round(100 * math.log(inside / low) / math.log(high / low), 2)


def round_factors(bounds: tuple[float, float], most: int = _TICKS) -> list[float]:
    """Choose round factors, not too many, with 1 where there is room; those near the ends are left out."""
    low, high = bounds
    even = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if high / low < 3 else ()
    tried = [[round(step * n, 2) for n in range(math.ceil(low / step), math.floor(high / step) + 1)] for step in even]
    powers = [float(f"1e{exponent}") for exponent in range(-9, 10)]
    tried += [[float(f"{digit * power:.0e}") for power in powers for digit in (1, 2, 5)], powers]
    inside = ([one for one in found if low < one < high and 8 < place(one, bounds) < 92] for found in tried)
    return next((found for found in inside if len(found) <= most), [1.0])


def interval(ratio: Mapping[str, Any], bounds: tuple[float, float]) -> dict[str, Any] | None:
    """Tell where a factor and its interval lie between the bounds, and what there is to say of it; None if unknown."""
    mean, low, high = (finite(ratio.get(name)) for name in ("mean", "low", "high"))
    if mean is None or mean <= 0:
        return None
    told = f"{mean:.3g}×"
    if low is None and high is None:
        return {"mean": place(mean, bounds), "told": told, "span": None}
    if low is not None and high is not None:
        told += f", 95 % interval {low:.3g} to {high:.3g}"
    start, end = low or 0.0, math.inf if high is None else high
    left = place(start, bounds)
    open_ends = [name for name, is_open in (("open-low", start < bounds[0]), ("open-high", end > bounds[1])) if is_open]
    span = {"left": left, "width": round(place(end, bounds) - left, 2), "style": " ".join(open_ends)}
    return {"mean": place(mean, bounds), "told": told, "span": span}


# --- tables -----------------------------------------------------------------------------------------------------------


def _with_interval(value: object, form: str, unit: str = "") -> Cell | None:
    """Show a mean with its interval below, which is left out where there is none."""
    parts = mapping(value)
    low, high = number(parts.get("low"), form), number(parts.get("high"), form)
    small: Line = () if low is None or high is None else [f"({low.text} to {high.text})"]
    return number(parts.get("mean"), form, unit, small)


def _rate(value: object) -> Shown:
    known = finite(value)
    return None if known is None else Cell(rate_text(known), value)


def _arm(runs: ComparedRuns, arm: Mapping[str, Any], bounds: tuple[float, float]) -> dict[str, Any]:
    speedup: Shown = _with_interval(arm["speedup"], ".3f", "×")
    if arm["arm"] == "plain" and speedup is None:
        speedup = "1"
    if arm.get("identical"):
        speedup = Cell("identical", small=[speedup])
    deviation = finite(arm["loss_deviation"])
    loss, difference = number(arm["loss_mean"], ".4f"), _with_interval(arm["loss_difference"], "+.4f")
    if loss is not None:
        spread = "" if deviation is None else f" ± {deviation:.4f}"
        small: Line = [difference] if difference is not None and arm["arm"] != "plain" else ()
        loss = Cell(loss.text + spread, loss.value, small=small)
    return {
        "label": str(arm["label"]),
        "look": runs.look(arm["arm"]),
        "about": [str(arm[name]) for name in ("meaning", "note") if arm.get(name)],
        "claim": arm["arm"] == "hybrid",
        "interval": interval(mapping(arm["speedup"]), bounds),
        "cells": [
            speedup,
            loss,
            number(arm["seconds_mean"], ".1f"),
            number(arm["backward_passes_mean"], ",.0f"),
            _rate(arm["learning_rate"]),
            number(arm["n"], ",.0f"),
            number(arm["smallest_detectable"], ".3f", "×"),
        ],
    }


def _rungs(ladder: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describe each rung, with a bar from 1 to its speed-up over the first."""
    bounds = ratio_range([{"mean": rung["cumulative"]} for rung in ladder])
    made = []
    for rung in ladder:
        factor = finite(rung["cumulative"])
        ends = sorted((place(1.0, bounds), place(factor, bounds))) if factor is not None and factor > 0 else None
        cells: list[Shown] = [
            number(rung["loss_mean"], ".4f"),
            number(rung["seconds_mean"], ".1f"),
            _with_interval(rung["speedup"], ".2f", "×"),
            number(rung["n"], ",.0f"),
        ]
        made.append(
            {
                "name": str(rung["rung"]),
                "note": str(rung["note"] or ""),
                "setting": str(rung["setting"]),
                "cells": cells,
                "factor": number(factor, ".2f", "×"),
                "bar": None if ends is None else {"left": ends[0], "width": round(ends[1] - ends[0], 2)},
            }
        )
    return made


def _runs(runs: ComparedRuns) -> PageTable:
    """List every run with all its numbers."""
    head = ["arm", "seed", "learning rate", "budget", "steps", "final loss", "time (s)", "backward passes", "tokens"]
    counts = ("backward_passes", "tokens", "probe_tokens", "kept", "refused", "rolled_back")
    rows = [
        [
            Cell(str(run["label"]), small=[str(run["failed"])] if run["failed"] else ()),
            number(run["seed"], ".0f"),
            _rate(run["learning_rate"]),
            number(run["budget"], "g"),
            number(run["steps"], ",.0f"),
            number(run["loss"], ".4f"),
            number(run["seconds"], ".1f"),
            *(number(run[name], ",.0f") for name in counts),
            str(run["started"] or "")[:19].replace("T", " "),
        ]
        for run in runs.runs
    ]
    return PageTable("", [*head, "probe tokens", "kept", "refused", "rolled back", "started"], rows)
