"""The numbers behind the charts of a report, for readers who cannot see them: ends and extremes of every curve."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from foretrain.show.pages.markup import details
from foretrain.show.pages.report_text import number, table

_HEAD = ["curve", "first", "last", "lowest", "at step", "highest", "at step"]


def curve_tables(charts: Mapping[str, Any]) -> dict[str, str]:
    """Markup by the name of the section: a table per chart of curves."""
    return {f"{name}-numbers": _table(chart["runs"]) for name, chart in charts.items() if name != "shared"}


def _table(runs: list[dict[str, Any]]) -> str:
    rows = []
    for run in runs:
        for series in run["series"]:
            known = [
                (value, step)
                for value, step in zip(series["values"], series["steps"], strict=True)
                if value is not None
            ]
            name = f"{run['name']}: {series['label']}" if len(runs) > 1 else series["label"]
            low, high = min(known), max(known)
            ends = [number(value, ".5g") for value in (known[0][0], known[-1][0])]
            found = [cell for value, step in (low, high) for cell in (number(value, ".5g"), number(step, ",.0f"))]
            rows.append([escape(name), *ends, *found])
    return (
        details("The numbers behind this chart", table("Ends and extremes of every curve", _HEAD, rows)) if rows else ""
    )
