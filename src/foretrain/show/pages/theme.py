"""Colours in both themes and the style of charts. The series colours stay apart under the common colour blindnesses."""

from __future__ import annotations

import re

LIGHT = {
    "page": "#fafaf8",
    "surface": "#ffffff",
    "ink": "#1b1f26",
    "muted": "#5a6372",
    "line": "#c9ced6",
    "grid": "#e8eaee",
    "series-0": "#4a5260",
    "series-1": "#d55e00",
    "series-2": "#0072b2",
    "series-3": "#29633f",
    "series-4": "#5b1b35",
    "series-5": "#b2814b",
    "series-6": "#af7cf2",
    "series-7": "#34a0c2",
    "phase-warmup": "#cfd4dc",
    "phase-full": "#9fc3e3",
    "phase-correct": "#e0b13c",
    "phase-predict": "#d55e00",
    "good": "#00734f",
    "bad": "#b23c00",
    "caution": "#8a6100",
}

DARK = {
    "page": "#101319",
    "surface": "#171b22",
    "ink": "#e7eaf0",
    "muted": "#9aa4b4",
    "line": "#3d4552",
    "grid": "#272d37",
    "series-0": "#c3cad6",
    "series-1": "#ff8a3d",
    "series-2": "#58aef0",
    "series-3": "#9eeec9",
    "series-4": "#f01c79",
    "series-5": "#f4daa2",
    "series-6": "#8a86fc",
    "series-7": "#308f8f",
    "phase-warmup": "#4a5363",
    "phase-full": "#3f6f9c",
    "phase-correct": "#d9ad3f",
    "phase-predict": "#ff8a3d",
    "good": "#4bd3a2",
    "bad": "#ff8f5c",
    "caution": "#e3bb45",
}

LOOKS = 8
DASHES = ("", "11 2", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 3")

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif'

CHART_STYLE = (
    f"""
.chart {{ font: 12.5px {FONT}; font-variant-numeric: tabular-nums; }}
.chart text {{ fill: var(--muted); paint-order: stroke; stroke: var(--surface); stroke-width: 3px; }}
.chart .strong {{ fill: var(--ink); font-weight: 600; }}
.chart .name {{ fill: var(--ink); }}
.chart .end {{ text-anchor: end; }}
.chart .middle {{ text-anchor: middle; }}
.chart .grid {{ stroke: var(--grid); stroke-width: 1; fill: none; }}
.chart .axis {{ stroke: var(--line); stroke-width: 1; fill: none; }}
.chart .one {{ stroke: var(--muted); stroke-width: 1; stroke-dasharray: 3 2; fill: none; }}
.chart .curve {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: butt; }}
.chart .faint {{ stroke-width: 1.2; opacity: .75; }}
.chart .whisker {{ fill: none; stroke-width: 1.6; }}
.chart .mark {{ stroke: var(--surface); stroke-width: 1; }}
.chart .hollow {{ fill: var(--surface); stroke-width: 1.4; }}
.chart .bar {{ opacity: .85; }}
.chart .backdrop {{ fill: var(--surface); }}
.chart .kept {{ fill: var(--ink); }}
.chart .refused, .chart .undone {{ fill: var(--surface); stroke: var(--ink); stroke-width: 1.3; }}
.chart .undone {{ fill: none; stroke-width: 1.7; }}
"""
    + "".join(
        f".chart .s{look} .curve, .chart .s{look} .whisker {{ stroke: var(--series-{look}); }}\n"
        f".chart .s{look} .hollow {{ stroke: var(--series-{look}); }}\n"
        f".chart .s{look} .mark, .chart .s{look} .bar {{ fill: var(--series-{look}); }}\n"
        + (f".chart .s{look} .curve {{ stroke-dasharray: {DASHES[look]}; }}\n" if DASHES[look] else "")
        for look in range(LOOKS)
    )
    + "".join(
        f".chart .{phase} {{ fill: var(--phase-{phase}); }}\n" for phase in ("warmup", "full", "correct", "predict")
    )
)


def variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def with_colours(style: str, colours: dict[str, str]) -> str:
    """The style with every variable replaced by its colour, for programs that draw SVG and know no variables."""
    return re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: colours[found[1]], style)
