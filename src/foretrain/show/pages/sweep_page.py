"""Make the page of `foretrain sweep`: the result first, then curves, what was expected, who was stopped and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.units import loss_text
from foretrain.show.numbers import finite, rounded
from foretrain.show.pages.charts import LOOKS, PHASES, points
from foretrain.show.pages.comparison_charts import PageFigure
from foretrain.show.pages.render import Cell, PageTable, Shown, number, one_file, sentence
from foretrain.show.sweep import head_line, regret_line, result_lines, rung_text

SCRIPTS = ("page", "charts")
_GROUPS = ("the best", "finished", "audited", "stopped", "failed")
_MOST_SETTINGS = 4
"""So many settings have a chart of their own, the most important ones."""
_EARLY = 0.05
"""Losses before this share of a run are left out of the picture: they would flatten all others."""

Trial = Mapping[str, Any]


def page(summary: Mapping[str, Any]) -> str:
    """Make one HTML file of a sweep. Whatever is unknown is shown as a dash."""
    figures = _figures(summary)
    charts = {name: figure.chart for name, figure in figures.items()}
    data = {**charts, "shared": {"runs": [], "prediction": "off"}, "looks": LOOKS, "phases": PHASES}
    return one_file("sweep.html", SCRIPTS, data, **_layout(summary), figures=figures)


def _layout(summary: Mapping[str, Any]) -> dict[str, Any]:
    lines = result_lines(summary)
    regret = summary["regret"]
    return {
        "title": f"Sweep {summary['folder']}",
        "verdict": "complete" if summary["complete"] else "not complete",
        "badge": "gain" if summary["complete"] else "caution",
        "sentence": sentence(lines[0]) if lines else "no trial has come to its end yet",
        "facts": [sentence(line) for line in (*lines[1:2], *([] if summary["complete"] else [head_line(summary)]))],
        "regret": None if regret is None else sentence(regret_line(regret).removeprefix("regret: ")),
        "importances": _importances(summary),
        "trials": _trials(summary),
        "space": PageTable(
            "",
            ["setting", "values"],
            [[Cell(n, code=True), Cell(t, code=True)] for n, t in summary["space"].items()],
            2,
        ),
        "settings": PageTable(
            "",
            ["[sweep]", "value"],
            [[Cell(name, code=True), Cell(str(value), code=True)] for name, value in summary["settings"].items()],
            2,
        ),
    }


def _group(trial: Trial, best: Trial | None) -> int:
    """Return which of the groups a trial belongs to."""
    if best is not None and trial["number"] == best["number"]:
        return 0
    if trial["state"] == "failed":
        return 4
    if trial["audited"]:
        return 2
    return 1 if trial["state"] == "finished" else 3


# --- charts ----------------------------------------------------------------------------------------------------------


def _figures(summary: Mapping[str, Any]) -> dict[str, PageFigure]:
    made = {"curves": _curves(summary), "expected": _expected(summary)}
    numeric = [name for name in _ordered(summary) if _is_numeric(summary, name)]
    return made | {f"setting-{place}": _setting(summary, name) for place, name in enumerate(numeric[:_MOST_SETTINGS])}


def _grouped(summary: Mapping[str, Any], series: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"name": _GROUPS[group], "look": group, "series": list(series[group])} for group in sorted(series)]


def _curves(summary: Mapping[str, Any]) -> PageFigure:
    """Draw all held-out losses, and the annealed copies beside them."""
    series: dict[int, list[dict[str, Any]]] = {}
    rows: list[list[Shown]] = []
    for trial in summary["trials"]:
        group = series.setdefault(_group(trial, summary["best"]), [])
        known = [(step, loss) for step, loss in trial["losses"] if finite(loss) is not None]
        late = [point for point in known if point[0] >= _EARLY * (trial["total_steps"] or 1)]
        if late:
            group.append(points(_name(trial), "seed", late, listed=not group))
        rows += [[str(trial["number"]), number(step, ",.0f"), number(loss, ".4f")] for step, loss in known]
    chart = {
        "runs": _grouped(summary, {group: made for group, made in series.items() if made}),
        "grouped": True,
        "x": {"label": "steps", "low": 0},
        "unit": "held-out loss",
    }
    words = (
        f"Held-out losses of {len(summary['trials'])} trials against steps; where a line ends, the trial was paused."
    )
    return PageFigure(chart, PageTable("", ["trial", "step", "loss"], rows), words, "Held-out losses")


def _expected(summary: Mapping[str, Any]) -> PageFigure:
    """Draw the score of each trial at its last rung with its interval, and the last losses."""
    series: dict[int, list[dict[str, Any]]] = {}
    rows: list[list[Shown]] = []
    ends: list[float] = []
    for trial in summary["trials"]:
        guess = finite(trial["final"] if trial["final"] is not None else trial["score"])
        if guess is None:
            continue
        low, high = (None, None) if trial["final"] is not None else (finite(trial["low"]), finite(trial["high"]))
        error = None if low is None or high is None else [low, high]
        ends += [guess, *(error or [])]
        share = 100 * trial["step"] / (trial["total_steps"] or 1)
        interval = "" if error is None else f" [{loss_text(error[0])}, {loss_text(error[1])}]"
        tip = f"{_name(trial)}: {loss_text(guess)}{interval}"
        group = series.setdefault(_group(trial, summary["best"]), [])
        group.append(
            points(
                _name(trial),
                "ends",
                [(share, guess)],
                tips=[tip],
                errors=[error and [rounded(end) for end in error]],
                listed=not group,
            )
        )
        rows.append([str(trial["number"]), number(share, ".3g"), number(guess, ".4f"), number(low), number(high)])
    chart: dict[str, Any] = {
        "runs": _grouped(summary, series),
        "grouped": True,
        "x": {"label": "share of the run that was done (%)", "low": 0, "high": 105},
        "unit": "score, last loss",
    }
    if ends:
        chart["reach"] = [min(ends), max(ends)]
    words = "The score of each trial where it was left, with the interval for its last loss; finished ones at 100 %."
    head = ["trial", "done (%)", "score or last loss", "low", "high"]
    return PageFigure(chart, PageTable("", head, rows), words, "What was expected of each")


def _setting(summary: Mapping[str, Any], name: str) -> PageFigure:
    """Draw the last loss, or the score in place of it, against one setting."""
    series: dict[int, list[dict[str, Any]]] = {}
    rows: list[list[Shown]] = []
    known = [trial for trial in summary["trials"] if finite(trial["values"].get(name)) is not None]
    values = [float(trial["values"][name]) for trial in known]
    log = min(values) > 0 and max(values) / min(values) >= 8
    for trial, value in zip(known, values, strict=True):
        guess = finite(trial["final"] if trial["final"] is not None else trial["score"])
        if guess is None:
            continue
        group = series.setdefault(_group(trial, summary["best"]), [])
        tip = f"{_name(trial)}: {loss_text(guess)}"
        group.append(points(_name(trial), "ends", [(value, guess)], tips=[tip], errors=[None], listed=not group))
        rows.append([str(trial["number"]), number(value, "g"), number(guess, ".4f")])
    x = {"label": f"{name}{' (log scale)' if log else ''}", "log": log}
    chart = {"runs": _grouped(summary, series), "grouped": True, "x": x, "unit": "score, last loss"}
    words = f"Last losses and scores against {name}."
    return PageFigure(chart, PageTable("", ["trial", name, "score or last loss"], rows), words, name, 300)


def _is_numeric(summary: Mapping[str, Any], name: str) -> bool:
    values = [trial["values"].get(name) for trial in summary["trials"]]
    told = {value for value in values if finite(value) is not None and not isinstance(value, bool)}
    return len(told) > 1 and all(finite(value) is not None for value in values if value is not None)


def _name(trial: Trial) -> str:
    return f"trial {trial['number']} ({trial['label']})"


# --- tables ----------------------------------------------------------------------------------------------------------


def _ordered(summary: Mapping[str, Any]) -> list[str]:
    """Return the settings, the most important ones first."""
    told = summary["importances"]
    return sorted(summary["space"], key=lambda name: -(finite(told.get(name)) or 0.0))


def _importances(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = [(name, finite(summary["importances"].get(name))) for name in _ordered(summary)]
    return [{"name": name, "share": f"{100 * value:.0f}"} for name, value in found if value is not None]


def _trials(summary: Mapping[str, Any]) -> PageTable:
    """List every trial, best first, with what became of it and why."""

    def order(trial: Trial) -> tuple[bool, float]:
        guess = finite(trial["final"] if trial["final"] is not None else trial["score"])
        return trial["final"] is None, math.inf if guess is None else guess

    rows: list[list[Shown]] = []
    for trial in sorted(summary["trials"], key=order):
        low, high = number(trial["low"]), number(trial["high"])
        interval = [f"{low.text} to {high.text}"] if low is not None and high is not None else []
        done = f"{100 * trial['step'] / trial['total_steps']:.0f} %" if trial["total_steps"] else "–"
        rung = trial["rung"]
        at = f"at {rung_text(summary['rungs'][rung])}" if 0 <= rung < len(summary["rungs"]) else ""
        told = number(
            trial["score"],
            small=[", ".join([*interval, *([f"{trial['method']} {at}".strip()] if trial["method"] else [])])],
        )
        number_cell = Cell(str(trial["number"]), small=["the best"] if _group(trial, summary["best"]) == 0 else ())
        rows.append([number_cell, trial["label"], trial["state"], done, told, number(trial["final"]), trial["reason"]])
    head = ["trial", "settings", "state", "done", "score, interval", "last loss", "why"]
    return PageTable("Every trial", head, rows, 3, 6)
