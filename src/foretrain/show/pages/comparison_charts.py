"""Prepare the charts of a comparison, each with the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.config.units import rate_text
from foretrain.show.numbers import finite, rounded
from foretrain.show.pages.charts import MARKS, PHASES, RIBBON, Chart, key, places_to_keep, points, thinned_marks
from foretrain.show.pages.comparison_runs import ComparedRun, ComparedRuns, run_name
from foretrain.show.pages.render import PageTable, number

Point = tuple[float, float]
_TABLE_ROWS = 25
"""A curve has so many rows in the table behind its chart."""
_POINTS = 8000
"""All lines of a chart together have so many points, so that a page of many runs stays small."""
_LAST = 0.6
"""The part of the curves that is enlarged begins at this share: the arms differ at the end, if at all."""
_ROW = 46
"""A row of phases is so high, as in `assets/charts.js`."""


@dataclass(frozen=True)
class PageFigure:
    """It is a chart with its title, what it shows in words, and the numbers behind it."""

    chart: Chart
    table: PageTable
    label: str
    title: str = ""
    height: int = 380
    key: Sequence[Mapping[str, Any]] = ()


def comparison_charts(runs: ComparedRuns) -> dict[str, PageFigure]:
    """Make every chart by its name; those that have nothing to say are left out."""
    made = _curves(runs) | _budgets(runs)
    if runs.sweep:
        made["sweep"] = _sweep(runs)
    if (phases := _phases(runs)) is not None:
        made["strips"] = phases
    return made


# --- loss against time ------------------------------------------------------------------------------------------------


def _curves(runs: ComparedRuns) -> dict[str, PageFigure]:
    """Held-out loss against time: all of it, and the last part enlarged, or the training loss where the evaluations
    are too few for a line."""
    shown = runs.shown_runs()
    known = [point for run in shown for point in _read(run["curve"])]
    losses = [loss for _, loss in known]
    log = bool(losses) and min(losses) > 0 and max(losses) > 2.5 * min(losses)
    start = _LAST * max((time for time, _ in known), default=1.0)
    made = {"curve": _curve(runs, "The whole run", "curve", log=log)}
    few = sum(time >= start for time, _ in known) < 3 * len(shown)
    trained = any(run["training"] for run in shown)
    if not (trained and few):
        made["enlarged"] = _curve(runs, "The last 40 %, enlarged", "curve", start)
    if trained:
        made["training"] = _curve(runs, "Training loss", "training", log=log)
    return made


def _read(curve: Sequence[Sequence[object]]) -> list[Point]:
    """Read (seconds, loss) of every [step, seconds, loss] that is known."""
    read = [(finite(point[1]), finite(point[2])) for point in curve]
    return [(x, y) for x, y in read if x is not None and y is not None]


def _curve(runs: ComparedRuns, title: str, which: str, start: float = 0.0, log: bool = False) -> PageFigure:
    groups, rows, count = [], [], len(runs.shown_runs())
    limit = max(100, min(400, _POINTS // max(count, 1)))
    for look, label, own in runs.shown_arms():
        series = []
        for place, run in enumerate(own):
            known = _read(run[which])
            before = max(0, sum(x < start for x, _ in known) - 1)  # one more, for the line to come in from the side
            line = _thinned(known[before:], limit)
            series.append(points(run_name(run), "seed", line, listed=not place))
            told = _thinned([point for point in line if point[0] >= start], _TABLE_ROWS)
            rows += [[run_name(run), number(x, ".1f"), number(y, ".4f")] for x, y in told]
        groups.append({"name": label, "look": look, "series": [one for one in series if one["values"]]})
    kind = "training" if which == "training" else "held-out"
    unit = f"{kind} loss ({runs.unit}{', log scale' if log else ''})"
    x = {"label": "training time (seconds)", "low": start}
    chart = {"runs": groups, "grouped": True, "x": x, "unit": unit, "log": log}
    words = f"{unit} against training time in seconds, a line for each of {count} runs. {title}."
    return PageFigure(chart, PageTable("", ["run", "seconds", "loss"], rows), words, title)


def _thinned(known: Sequence[Point], limit: int) -> list[Point]:
    return [known[place] for place in places_to_keep([value for _, value in known], limit)]


# --- final loss -------------------------------------------------------------------------------------------------------


def _budgets(runs: ComparedRuns) -> dict[str, PageFigure]:
    """Plain's final loss at each budget over the seconds it took, and where the other arms ended; and those ends
    enlarged, with arrows to where plain reaches the same loss."""
    rows = [[point[name] for name in ("max_steps", "seconds", "loss")] for point in runs.budget_curve]
    names = [["plain", point["seed"]] for point in runs.budget_curve]
    others = [run for run in runs.shown_runs() if run["arm"] != "plain"]
    rows += [[run[name] for name in ("steps", "seconds", "loss")] for run in others]
    names += [[str(run["label"]), run["seed"]] for run in others]
    forms = (",.0f", ".1f", ".4f")
    cells = [
        [name, number(seed, ".0f"), *(number(value, form) for value, form in zip(row, forms, strict=True))]
        for (name, seed), row in zip(names, rows, strict=True)
    ]
    data = PageTable("", ["arm", "seed", "steps", "seconds", "final loss"], cells)
    ends, arrows = _ends(runs), _arrows(runs)
    label = "final held-out loss against training time in seconds, plain at its budgets and the other arms."

    def figure(title: str, more: Chart, steps_told: bool) -> PageFigure:
        groups = [{"name": "plain, at each budget", "look": 0, "series": _plain(runs, steps_told)}, *ends]
        x = {"label": "training time of the whole run (seconds, log scale)", "log": True, **more.pop("x", {})}
        chart = {"runs": groups, "grouped": True, "x": x, "unit": f"final held-out loss ({runs.unit})", **more}
        return PageFigure(chart, data, f"{title}: {label}", title)

    errors = [end for group in ends for one in group["series"] for pair in one["errors"] if pair for end in pair]
    reach = {"reach": [min(errors), max(errors)]} if errors else {}
    made = {"budget": figure("All budgets", reach, True)}
    across = [x for group in ends for one in group["series"] for x in one["x"]]
    across += [x for arrow in arrows for x, _ in (arrow["start"], arrow["end"])]
    down = [y for group in ends for one in group["series"] for y in one["values"] if y is not None]
    if across and down:
        wide, tall = max((max(across) / min(across)) ** 0.2, 1.02), 0.12 * (max(down) - min(down)) or 0.01
        near = {"low": min(across) / wide, "high": max(across) * wide}
        frame = {"x": near, "low": min(down) - tall, "high": max(down) + tall, "arrows": arrows}
        made["ends"] = figure("Where the arms ended, enlarged", frame, False)
    return made


def _plain(runs: ComparedRuns, steps_told: bool) -> list[dict[str, Any]]:
    """Draw a faint line for each seed of plain over its budgets, and a line through their means."""
    curve = [point for point in runs.budget_curve if (finite(point["seconds"]) or 0) > 0]
    seeds, series, means = dict.fromkeys(point["seed"] for point in curve), [], {}
    for seed in seeds:
        own = sorted((point for point in curve if point["seed"] == seed), key=lambda point: point["seconds"])
        tips = [f"plain, seed {seed}, {_told(point)}" for point in own]
        line = [(point["seconds"], finite(point["loss"])) for point in own]
        series.append(points(f"plain, seed {seed}", "seed", line, tips=tips))
    for steps in sorted({steps for point in curve if (steps := finite(point["max_steps"])) is not None}):
        here = [point for point in curve if finite(point["max_steps"]) == steps]
        # A budget that not all seeds have would bend the line towards the seeds that do.
        if len({point["seed"] for point in here if finite(point["loss"]) is not None}) == len(seeds):
            losses = [point["loss"] for point in here if finite(point["loss"]) is not None]
            where = sum(point["seconds"] for point in here) / len(here)
            means[where] = (sum(losses) / len(losses), f"{steps:,.0f} steps")
    known = sorted(means.items())
    tips = [f"plain, {steps}, mean: {where:.1f} s, loss {loss:.4f}" for where, (loss, steps) in known]
    labels = [steps for _, (_, steps) in known] if steps_told else []
    line = [(where, loss) for where, (loss, _) in known]
    return [*series, points("plain, mean", "mean", line, tips=tips, labels=labels, listed=True)]


def _told(point: Mapping[str, Any]) -> str:
    seconds, loss = finite(point["seconds"]), finite(point["loss"])
    known = seconds is not None and loss is not None
    return f"{point['max_steps']} steps: {seconds:.1f} s, loss {loss:.4f}" if known else f"{point['max_steps']} steps"


def _ends(runs: ComparedRuns) -> list[dict[str, Any]]:
    """Draw where the runs of the other arms ended, and their means with the deviation between seeds."""
    groups = []
    shown = {str(own[0]["arm"]): own for _, _, own in runs.shown_arms()}
    for arm in runs.arms:
        seconds, loss = finite(arm["seconds_mean"]), finite(arm["loss_mean"])
        if arm["arm"] == "plain" or seconds is None or seconds <= 0 or loss is None:
            continue
        look, label, deviation = runs.look(arm["arm"]), str(arm["label"]), finite(arm["loss_deviation"])
        series = []
        for run in shown.get(str(arm["arm"]), ()):
            end = finite(run["seconds"]), finite(run["loss"])
            if end[0] is not None and end[0] > 0 and end[1] is not None:
                tip = f"{run_name(run)}: {end[0]:.1f} s, loss {end[1]:.4f}"
                series.append(points(run_name(run), "ends", [(end[0], end[1])], tips=[tip], errors=[None]))
        error = [rounded(loss - deviation), rounded(loss + deviation)] if deviation else None
        spread = "" if deviation is None else f" ± {deviation:.2g}"
        tip = f"{label}, mean of {finite(arm['n']) or 0:.0f}: {seconds:.1f} s, loss {loss:.4f}{spread}"
        series.append(points(f"{label}, mean", "end", [(seconds, loss)], tips=[tip], errors=[error], listed=True))
        groups.append({"name": label, "look": look, "series": series})
    return groups


def _arrows(runs: ComparedRuns) -> list[dict[str, Any]]:
    """Draw arrows from where an arm ended to where plain reaches the same loss."""
    arrows = []
    for arm in runs.arms:
        factor = finite((arm["speedup"] or {}).get("mean")) if arm["arm"] != "plain" else None
        seconds, loss = finite(arm["seconds_mean"]), finite(arm["loss_mean"])
        if factor is not None and seconds is not None and loss is not None and seconds > 0 and factor * seconds > 0:
            there = [rounded(seconds * factor), rounded(loss)]
            text, look = f"{factor:.3f}×", runs.look(arm["arm"])
            arrows.append({"start": [rounded(seconds), rounded(loss)], "end": there, "text": text, "look": look})
    return arrows


def _sweep(runs: ComparedRuns) -> PageFigure:
    """Draw the final loss of each arm at each learning rate: the seeds as points, a line through their means."""
    groups, rows = [], []
    known = [point for point in runs.sweep if (finite(point["learning_rate"]) or 0) > 0]
    ticks = sorted({float(point["learning_rate"]) for point in known})[:9]
    for arm in sorted(dict.fromkeys(point["arm"] for point in known), key=runs.look):
        own = [point for point in known if point["arm"] == arm]
        label, means, tips = str(own[0]["label"]), [], []
        for rate in sorted({float(point["learning_rate"]) for point in own}):
            losses = [loss for p in own if p["learning_rate"] == rate and (loss := finite(p["loss"])) is not None]
            if losses:
                means.append((rate, sum(losses) / len(losses)))
                tips.append(f"{label}, rate {rate_text(rate)}, mean: {means[-1][1]:.4f}")
        series = []
        for seed in dict.fromkeys(point["seed"] for point in own):
            line = [(float(p["learning_rate"]), finite(p["loss"])) for p in own if p["seed"] == seed]
            told = [
                f"{label}, seed {seed}, rate {rate_text(x)}: {y:.4f}" if y is not None else "" for x, y in sorted(line)
            ]
            series.append(points(f"{label}, seed {seed}", "ends", line, tips=told))
        series.append(points(f"{label}, mean", "mean", means, tips=tips, listed=True))
        groups.append({"name": label, "look": runs.look(arm), "series": series})
        forms = {"seed": ".0f", "learning_rate": "g", "loss": ".4f"}
        rows += [[label, *(number(point[name], form) for name, form in forms.items())] for point in own]
    x = {"label": "learning rate (per step, log scale)", "log": True, "ticks": ticks}
    chart = {"runs": groups, "grouped": True, "x": x, "unit": f"final held-out loss ({runs.unit})"}
    words = "Final held-out loss against learning rate, a line for each arm, a point for each seed."
    return PageFigure(chart, PageTable("", ["arm", "seed", "learning rate", "final loss"], rows), words)


# --- phases -----------------------------------------------------------------------------------------------------------


def _phases(runs: ComparedRuns) -> PageFigure | None:
    """Draw what each run with prediction did, over time."""
    shown = [run for run in runs.shown_runs() if _predicts(run) and run["phases"]]
    if not shown:
        return None
    strips, rows, found = [], [], set()
    for run in shown:
        bands = [
            (start, end, str(phase).lower())
            for first, last, phase, *_ in run["phases"]
            if (start := finite(first)) is not None
            and (end := finite(last)) is not None
            and str(phase).lower() in PHASES
        ]
        moves = [
            (when, when, verdict, f"step {step}, {when:.1f} s: move {verdict}")
            for step, time, said, *_ in run["moves"]
            if (when := finite(time)) is not None and (verdict := str(said).replace("_", " ")) in MARKS
        ]
        spent = {phase: [end - start for start, end, band in bands if band == phase] for phase in PHASES}
        counts = {verdict: sum(kind == verdict for _, _, kind, _ in moves) for verdict in MARKS}
        last = max((end for _, end, _ in bands), default=0.0)
        strips.append(
            {
                "name": run_name(run),
                "end": rounded(last),
                "phases": condensed(bands, last),
                "marks": thinned_marks(moves, last),
                "spent": {
                    phase: f"{sum(times):.3g} s in all, {'once' if len(times) == 1 else f'{len(times)} times'}"
                    for phase, times in spent.items()
                    if times
                },
            }
        )
        found |= {verdict for verdict, count in counts.items() if count}
        numbers = [number(sum(times), ".2f") for times in spent.values()]
        fates = (counts["kept"] + counts["shrunk"], counts["refused"], counts["rolled back"])
        rows.append([run_name(run), *numbers, *(str(count) for count in fates)])
    head = ["run", *(f"{name} (s)" for name in PHASES.values()), "kept", "refused", "rolled back"]
    words = f"Phases of {len(shown)} runs over training time in seconds, with the moves kept, refused and rolled back."
    chart = {"runs": [], "grouped": True, "x": {"label": "training time (seconds)", "low": 0}, "strips": strips}
    signs = key(PHASES, [name for name in MARKS if name in found])
    return PageFigure(chart, PageTable("", head, rows), words, height=_ROW * len(strips) + 64, key=signs)


def condensed(bands: Sequence[tuple[float, float, str]], last: float) -> list[list[Any]]:
    """[start, end, phase, share] of every band. Where there are too many to be seen, equal stretches, each with its
    boldest phase and the share of the time that this had."""
    if len(bands) <= RIBBON or last <= 0:
        return [[rounded(start), rounded(end), phase, 1] for start, end, phase in bands]
    width, order = last / RIBBON, list(PHASES)
    shares: list[dict[str, float]] = [{} for _ in range(RIBBON)]
    for start, end, phase in bands:
        for cell in range(max(0, int(start / width)), min(RIBBON, math.ceil(end / width))):
            inside = max(0.0, min(end, (cell + 1) * width) - max(start, cell * width))
            shares[cell][phase] = shares[cell].get(phase, 0.0) + inside
    made = []
    for cell, found in enumerate(shares):
        if found:
            phase = max(found, key=order.index)
            share = round(min(1.0, found[phase] / width), 2)
            made.append([rounded(cell * width), rounded((cell + 1) * width), phase, share])
    return made


def _predicts(run: ComparedRun) -> bool:
    bold = any(phase in ("predict", "correct") for _, _, phase, *_ in run["phases"])
    return str(run["arm"]).startswith("hybrid") or bold or bool(run["moves"])
