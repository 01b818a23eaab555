"""The charts of a comparison, each with the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from foretrain.show.pages.charts import Arrow, Axis, Series, plot
from foretrain.show.pages.comparison_runs import Comparison, Run, cell, mean, run_name
from foretrain.show.pages.markup import details, figure, table
from foretrain.show.pages.row_charts import PHASES, Ratio, Strip, ratios, strips, verdict_of
from foretrain.show.pages.scales import finite, fitted, rate, thinned

_FULL = (1040, 380)
_HALF = (500, 380)
_TABLE_ROWS = 25
_POINTS = 8000  # of all lines of a chart together, so that a page of many runs stays small


# --- loss against time ------------------------------------------------------------------------------------------------


def curve_figures(comparison: Comparison) -> str:
    """Held-out loss against time: all of it, and the last part enlarged, where the arms differ."""
    runs = comparison.shown_runs()
    times = [time for run in runs for point in run["curve"] if (time := finite(point[1])) is not None]
    losses = [loss for run in runs for point in run["curve"] if (loss := finite(point[2])) is not None]
    log = bool(losses) and min(losses) > 0 and max(losses) > 2.5 * min(losses)
    scale = ", log scale" if log else ""
    lead = "Each arm at its best learning rate, each seed a thin line. The time holds all costs of prediction."
    whole = _curves(comparison, runs, "The whole run", f"{comparison.loss[:-1]}{scale})", 0.0, log)
    start = 0.6 * max(times, default=1.0)
    training = f"training{comparison.loss.removeprefix('held-out')[:-1]}{scale})"
    told = [run for run in runs if run["training"]]
    if told and sum(time >= start for time in times) < 3 * len(runs):  # too few evaluations for a line
        second, more = _curves(comparison, runs, "Training loss", training, 0.0, log, "training"), ""
    else:
        second, more = _curves(comparison, runs, "The last 40 %, enlarged", comparison.loss, start, False), ""
        if told:
            chart = _curves(comparison, runs, "", training, 0.0, log, "training", _FULL)
            more = details("Training loss against time", chart)
    heading = "<h2>Held-out loss against time</h2>"
    return f'{heading}<p class="lead">{lead}</p><div class="pair">{whole}{second}</div>{more}'


def _curves(
    comparison: Comparison,
    runs: Sequence[Run],
    title: str,
    loss: str,
    start: float,
    log: bool,
    key: str = "curve",
    widths: tuple[int, int] = _HALF,
) -> str:
    series, rows = [], []
    limit = max(100, min(400, _POINTS // max(len(runs), 1)))
    for run in runs:
        read = [(finite(point[1]), finite(point[2])) for point in run[key]]
        known = [(x, y) for x, y in read if x is not None and y is not None]
        before = max(0, sum(x < start for x, _ in known) - 1)  # one point more, for the line to come in from the side
        points = thinned(known[before:], limit)
        series.append(Series(run["label"], points, comparison.look(run["arm"]), faint=True, tip=run_name(run)))
        rows += [[escape(run_name(run)), f"{x:.1f}", f"{y:.4f}"] for x, y in thinned(points, _TABLE_ROWS) if x >= start]

    def draw(width: int) -> str:
        label = f"{loss} against training time in seconds, a line for each of {len(runs)} runs. {title}"
        x, y = Axis("training time (seconds)", low=start), Axis(loss, log=log)
        return plot(
            series, x, y, label=label, width=width, height=360, limit=limit if width > widths[1] else limit // 2
        )

    return figure(draw, widths, title, "", table(["run", "seconds", "loss"], rows))


# --- final loss -------------------------------------------------------------------------------------------------------


def budget_figure(comparison: Comparison) -> str:
    """Plain's final loss at each budget over the seconds it took, and where the other arms ended."""
    ends, arrows = _ends(comparison), _arrows(comparison)
    plain = [
        ["plain", point["seed"], point["max_steps"], point["seconds"], point["loss"]]
        for point in comparison.budget_curve
    ]
    others = [run for run in comparison.shown_runs() if run["arm"] != "plain"]
    rows = plain + [[run["label"], run["seed"], run["steps"], run["seconds"], run["loss"]] for run in others]
    data = table(
        ["arm", "seed", "steps", "seconds", "final loss"],
        [[escape(str(row[0])), *(cell(value) for value in row[1:])] for row in rows],
    )

    def chart(title: str, x: Axis, y: Axis, pointed: Sequence[Arrow] = ()) -> str:
        label = f"{title}: final held-out loss against training time in seconds, plain at its budgets and other arms"
        series = [*_plain_curve(comparison, steps_told=not pointed), *ends]
        return figure(lambda wide: plot(series, x, y, label=label, width=wide, arrows=pointed), _HALF, title, "", data)

    time, loss = Axis("training time of the whole run (seconds, log scale)", log=True), Axis(f"final {comparison.loss}")
    made = chart("All budgets", time, loss)
    across = [point[0] for arrow in arrows for point in (arrow.start, arrow.end)]
    across += [value for one in ends for point in one.points if (value := finite(point[0])) is not None]
    down = [value for one in ends for point in one.points if (value := finite(point[1])) is not None]
    if across and down:
        left, right = fitted(across, log=True, margin=0.2)
        low, high = fitted(down, margin=0.12)
        time, loss = replace(time, low=left, high=right), replace(loss, low=low, high=high)
        made = f'<div class="pair">{made}{chart("Where the arms ended, enlarged", time, loss, arrows)}</div>'
    lead = (
        "Plain with its complete schedule at each budget, and where each other arm ended. Left of plain's line is "
        "faster for the same loss; right of it, slower. The arrows lead to plain's time for that loss: their length "
        "is the speed-up."
    )
    return f'<h2>Final loss against budget</h2><p class="lead">{lead}</p>{made}'


def _arrows(comparison: Comparison) -> list[Arrow]:
    """From where an arm ended to where plain reaches the same loss."""
    arrows = []
    for arm in comparison.arms:
        factor = finite((arm["speedup"] or {}).get("mean")) if arm["arm"] != "plain" else None
        seconds, loss = finite(arm["seconds_mean"]), finite(arm["loss_mean"])
        if factor is not None and seconds is not None and loss is not None and factor * seconds > 0:
            told = f"{arm['label']}: plain needs {seconds * factor:.1f} s for this loss, {factor:.3f} times as long"
            look = comparison.look(arm["arm"])
            arrows.append(Arrow((seconds, loss), (seconds * factor, loss), f"{factor:.3f}×", told, look))
    return arrows


def _plain_curve(comparison: Comparison, steps_told: bool) -> list[Series]:
    curve, series, means = comparison.budget_curve, [], []
    seeds = dict.fromkeys(point["seed"] for point in curve)
    for seed in seeds:
        points = sorted((point for point in curve if point["seed"] == seed), key=lambda point: point["max_steps"] or 0)
        tips = [f"plain, seed {seed}, {_plain_text(point)}" for point in points]
        places = [(point["seconds"], point["loss"]) for point in points]
        series.append(Series("", places, 0, faint=True, tip=f"plain, seed {seed}", tips=tips))
    labels = []
    for steps in sorted({steps for point in curve if (steps := finite(point["max_steps"])) is not None}):
        here = [point for point in curve if finite(point["max_steps"]) == steps]
        # A budget that not all seeds have would bend the line towards the seeds that do.
        if len({point["seed"] for point in here if finite(point["loss"]) is not None}) == len(seeds):
            means.append((mean([point["seconds"] for point in here]), mean([point["loss"] for point in here])))
            labels.append(f"{steps:,.0f} steps")
    tips = [f"plain, {text}, mean" for text in labels]
    return [*series, Series("plain, at each budget", means, 0, tips=tips, labels=labels if steps_told else ())]


def _plain_text(point: Mapping[str, Any]) -> str:
    seconds, loss = finite(point["seconds"]), finite(point["loss"])
    known = seconds is not None and loss is not None
    return f"{point['max_steps']} steps: {seconds:.1f} s, loss {loss:.4f}" if known else f"{point['max_steps']} steps"


def _ends(comparison: Comparison) -> list[Series]:
    """Where the runs of the other arms ended, and their means with the deviation between seeds."""
    series = []
    for arm in comparison.arms:
        if arm["arm"] == "plain":
            continue
        look, label = comparison.look(arm["arm"]), str(arm["label"])
        runs = [run for run in comparison.shown_runs() if run["arm"] == arm["arm"]]
        tips = [f"{run_name(run)}: {cell(run['seconds'])} s, loss {cell(run['loss'])}" for run in runs]
        ends = [(run["seconds"], run["loss"]) for run in runs]
        series.append(Series("", ends, look, line=False, faint=True, tips=tips))
        loss, deviation = finite(arm["loss_mean"]), finite(arm["loss_deviation"])
        error = (loss - deviation, loss + deviation) if loss is not None and deviation else None
        told = f"{label}, mean of {cell(arm['n'])}: loss {cell(loss)} ± {cell(deviation, '.2g')}"
        series.append(Series(label, [(arm["seconds_mean"], loss)], look, line=False, tips=[told], errors=[error]))
    return series


def sweep_figure(comparison: Comparison) -> str:
    """The final loss of each arm at each learning rate: the seeds as points, a line through their means."""
    if not comparison.sweep:
        return ""
    series, rows = [], []
    ticks = sorted({value for point in comparison.sweep if (value := finite(point["learning_rate"])) and value > 0})[:9]
    for arm in sorted(dict.fromkeys(point["arm"] for point in comparison.sweep), key=comparison.look):
        points = [point for point in comparison.sweep if point["arm"] == arm]
        label, look = str(points[0]["label"]), comparison.look(arm)
        rates = sorted({value for point in points if (value := finite(point["learning_rate"])) is not None})
        means = [(value, mean([p["loss"] for p in points if finite(p["learning_rate"]) == value])) for value in rates]
        tips = [f"{label}, rate {rate(value)}, mean" for value in rates]
        seeds = [f"{run_name(point)}, rate {point['learning_rate']}: {cell(point['loss'])}" for point in points]
        ends = [(point["learning_rate"], point["loss"]) for point in points]
        series.append(Series("", ends, look, line=False, faint=True, tips=seeds))
        series.append(Series(label, means, look, tips=tips))
        rows += [[escape(label), cell(p["seed"], "g"), cell(p["learning_rate"], "g"), cell(p["loss"])] for p in points]

    def draw(width: int) -> str:
        label = "Final held-out loss against learning rate, a line for each arm, a point for each seed"
        x = Axis("learning rate (per step, log scale)", log=True, ticks=ticks)
        y = Axis(f"final {comparison.loss}")
        return plot(series, x, y, label=label, width=width, height=360)

    lead = (
        "Was each arm tuned as hard as the other? The lowest point of each line should not lie at an end of the sweep."
    )
    data = table(["arm", "seed", "learning rate", "final loss"], rows)
    return f'<h2>Final loss against learning rate</h2><p class="lead">{lead}</p>{figure(draw, _FULL, "", "", data)}'


# --- phases and ladder ------------------------------------------------------------------------------------------------


def phases_figure(comparison: Comparison) -> str:
    """What each run with prediction did, over time."""
    runs = [run for run in comparison.shown_runs() if _predicts(run) and run["phases"]]
    if not runs:
        return ""
    rows = []
    strip_rows = []
    for run in runs:
        bands = [
            (start, end, str(phase).lower())
            for first, last, phase, *_ in run["phases"]
            if (start := finite(first)) is not None and (end := finite(last)) is not None
        ]
        marks = [
            (when, verdict_of(str(verdict)), f"step {step}, {when:.1f} s: move {str(verdict).replace('_', ' ')}")
            for step, time, verdict, *_ in run["moves"]
            if (when := finite(time)) is not None
        ]
        strip_rows.append(Strip(run_name(run), bands, marks))
        spent = [sum(end - start for start, end, band in bands if band == phase) for phase in PHASES]
        moves = [str(sum(verdict == kind for _, kind, _ in marks)) for verdict in ("kept", "refused", "undone")]
        rows.append([escape(run_name(run)), *(f"{seconds:.2f}" for seconds in spent), *moves])

    def draw(width: int) -> str:
        label = (
            f"Phases of {len(runs)} runs over training time in seconds, with the moves kept, refused and rolled back"
        )
        return strips(strip_rows, Axis("training time (seconds)", low=0.0), label=label, width=width)

    head = ["run", *(f"{name} (s)" for name, _ in PHASES.values()), "kept", "refused", "rolled back"]
    lead = "The phases of each run with prediction, and what became of its moves. A taller band is a bolder phase."
    return f'<h2>What the runs did</h2><p class="lead">{lead}</p>{figure(draw, _FULL, "", "", table(head, rows))}'


def _predicts(run: Run) -> bool:
    bold = any(phase in ("predict", "correct") for _, _, phase, *_ in run["phases"])
    return str(run["arm"]).startswith("hybrid") or bold or bool(run["moves"])


def ladder_figure(comparison: Comparison) -> str:
    """Bars of the speed-up of each rung over the first."""
    rows = []
    for rung in comparison.ladder:
        factor = finite(rung["cumulative"])
        rows.append(Ratio(str(rung["rung"]), factor, text="–" if factor is None else f"{factor:.2f}×", look=2))

    def draw(width: int) -> str:
        label = "Speed-up of each rung of the ladder over the first: " + ", ".join(f"{r.name} {r.text}" for r in rows)
        return ratios(rows, "speed-up over the first rung (factor, log scale)", label=label, width=width, bars=True)

    data = table(["rung", "over the first rung"], [[escape(row.name), row.text] for row in rows])
    return figure(draw, _FULL, "", "", data)
