"""Charts with a row for each thing: ratios with their intervals around 1, and the phases of runs over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretrain.show.pages.charts import Axis, bottom_axis, legend_rows
from foretrain.show.pages.drawing import marker, svg, text_at, text_width, title
from foretrain.show.pages.scales import Scale, fitted, tick_labels
from foretrain.show.pages.theme import LOOKS

_NARROW = 520
# A phase is told by the height of its band as well as by its colour.
PHASES = {"warmup": ("warm-up", 0.35), "full": ("full", 0.55), "correct": ("correct", 0.8), "predict": ("predict", 1.0)}
_VERDICTS = (("kept", "move kept"), ("refused", "move refused"), ("undone", "move rolled back"))


@dataclass(frozen=True)
class Ratio:
    """A factor with its interval. What is None is not drawn."""

    name: str
    mean: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    look: int = 0


@dataclass(frozen=True)
class Strip:
    """A run: bands of (start, end, phase) and marks of (when, verdict, what to say of it)."""

    name: str
    bands: Sequence[tuple[float, float, str]]
    marks: Sequence[tuple[float, str, str]] = ()


def ratio_range(ratios: Iterable[Ratio]) -> tuple[float, float]:
    """A range around 1 for all of them. An interval without end does not widen it: it is drawn as going on."""
    values = [1.0]
    for ratio in ratios:
        if ratio.mean is not None and ratio.mean > 0:
            values.append(ratio.mean)
            values += [b for b in (ratio.low, ratio.high) if b is not None and ratio.mean / 3 < b < ratio.mean * 3]
    low, high = fitted(values, log=True, margin=0.1)
    return min(low, 1 / 1.05), max(high, 1.05)


def ratios(rows: Sequence[Ratio], axis: str, *, label: str, width: int = 760, bars: bool = False) -> str:
    """Each factor with its interval on a logarithmic axis, with a line at 1; as bars from 1 where asked for."""
    left, right, tall, first = _columns([row.name for row in rows], width, [row.text for row in rows])
    bottom = first + tall * len(rows)
    scale = Scale(*ratio_range(rows), left, right, log=True)
    parts = [bottom_axis(scale, 8, bottom, Axis(axis, log=True)), _line_at_one(scale, 8, bottom)]
    for place, row in enumerate(rows):
        middle = first + tall * (place + 1) - 15
        parts.append(_row_name(row.name, left, middle, width))
        if bars and row.mean:
            start, end = sorted((scale(1.0), scale.clipped(row.mean)))
            size = f'x="{start:.1f}" y="{middle - 8:.1f}" width="{max(end - start, 1):.1f}" height="16"'
            parts.append(f'<g class="s{row.look % LOOKS}"><rect class="bar" {size}>{title(_told(row))}</rect></g>')
        parts.append(_interval(row, scale, middle, dot=not bars))
        parts.append(text_at(width - 4, middle + 4, row.text, "end name"))
    return svg("".join(parts), label, width, bottom + 46)


def interval_cell(ratio: Ratio, bounds: tuple[float, float], width: int = 220) -> str:
    """One row of a forest plot, for a cell of a table."""
    scale = Scale(*bounds, 6, width - 6, log=True)
    # Longer than the cell, which cuts it off: over the rows of a table it makes one line.
    content = _line_at_one(scale, -100, 130) + _interval(ratio, scale, 15, dot=True)
    return svg(content, _told(ratio), width, 30)


def interval_axis(bounds: tuple[float, float], width: int = 220) -> str:
    """The axis over a column of such cells."""
    scale = Scale(*bounds, 6, width - 6, log=True)
    ticks = [tick for tick in scale.ticks(34) if 18 < scale(tick) < width - 18]
    labels = [f"{text}×" for text in tick_labels(ticks)]
    texts = "".join(text_at(scale(t), 12, text, "middle") for t, text in zip(ticks, labels, strict=True))
    lines = "".join(f"M{scale(tick):.1f} 17v5" for tick in ticks)
    axis = f'<path class="axis" d="M6 22H{width - 6}{lines}"/>'
    return svg(texts + axis, "speed-up, factor, log scale", width, 23)


def strips(rows: Sequence[Strip], axis: Axis, *, label: str, width: int = 760) -> str:
    """The phases of each run as bands over time, with a mark for every move."""
    legend, top = legend_rows([(_band_sample(p), PHASES[p][0]) for p in PHASES] + _mark_samples(), width)
    left, right, tall, first = _columns([row.name for row in rows], width, [])
    first += top
    bottom = first + tall * len(rows)
    scale = axis.scale([time for row in rows for start, end, _ in row.bands for time in (start, end)], left, right)
    parts = [legend, bottom_axis(scale, top + 4, bottom, axis)]
    for place, row in enumerate(rows):
        floor = first + tall * (place + 1) - 6
        parts.append(_row_name(row.name, left, floor - 7, width))
        parts += [_bands(row, phase, scale, floor) for phase in PHASES]
        seen = set()
        for when, verdict, tip in row.marks:
            x = scale.clipped(when)
            if (round(x), verdict) not in seen:  # a run of thousands of moves must not make a page of megabytes
                seen.add((round(x), verdict))
                parts.append(_verdict_mark(verdict, x, floor - 23, tip))
    return svg("".join(parts), label, width, bottom + 46)


def verdict_of(text: str) -> str:
    """The mark for a verdict in the words of the log; a shrunk move was kept in part."""
    lower = text.lower()
    if "roll" in lower or "undo" in lower or "restor" in lower:
        return "undone"
    return "refused" if "refus" in lower or "reject" in lower else "kept"


def _columns(names: Sequence[str], width: int, texts: Sequence[str]) -> tuple[float, float, float, float]:
    """Left and right end of the drawing, height of a row, top of the first; names go above rows on a narrow chart."""
    room = max((text_width(text) for text in texts), default=0) + 16
    if width < _NARROW:
        return 10, width - max(room, 14), 58, 4
    return max((text_width(name) for name in names), default=0) + 16, width - max(room, 18), 36, 10


def _row_name(name: str, left: float, middle: float, width: int) -> str:
    return (
        text_at(4, middle - 28, name, "name") if width < _NARROW else text_at(left - 12, middle + 4, name, "end name")
    )


def _line_at_one(scale: Scale, top: float, bottom: float) -> str:
    return f'<path class="one" d="M{scale(1.0):.1f} {top:g}V{bottom:g}"/>'


def _interval(ratio: Ratio, scale: Scale, middle: float, dot: bool) -> str:
    if ratio.mean is None or ratio.mean <= 0:
        return ""
    parts = []
    if ratio.low is not None or ratio.high is not None:
        low, high = ratio.low or 0.0, math.inf if ratio.high is None else ratio.high
        start, end = scale.clipped(low), scale.clipped(high)
        start_end = (
            f"m5 -4l-5 4l5 4M{start:.1f} {middle:g}" if low < scale.low else f"m0 -4v8m0 -4M{start:.1f} {middle:g}"
        )
        end_end = "m-5 -4l5 4l-5 4" if high > scale.high else "m0 -4v8"
        parts.append(f'<path class="whisker" d="M{start:.1f} {middle:g}{start_end}H{end:.1f}{end_end}"/>')
    if dot:
        parts.append(marker(ratio.look, scale.clipped(ratio.mean), middle, 4.4, tip=_told(ratio)))
    return f'<g class="s{ratio.look % LOOKS}">{"".join(parts)}</g>'


def _told(ratio: Ratio) -> str:
    if ratio.mean is None:
        return f"{ratio.name}: unknown"
    interval = "" if ratio.low is None or ratio.high is None else f", 95 % interval {ratio.low:.3g} to {ratio.high:.3g}"
    return f"{ratio.name}: {ratio.mean:.3g}×{interval}"


def _bands(row: Strip, phase: str, scale: Scale, floor: float) -> str:
    """All bands of one phase as one shape. Half a pixel is the grain, so that any run makes a short shape."""
    name, share = PHASES[phase]
    stretches = [(start, end) for start, end, band in row.bands if band == phase]
    if not stretches:
        return ""
    places = {(round(2 * scale.clipped(start)) / 2, round(2 * scale.clipped(end)) / 2) for start, end in stretches}
    tall = 16 * share
    path = "".join(
        f"M{start:g} {floor:.1f}v-{tall:g}h{max(end - start, 1.5):g}v{tall:g}z" for start, end in sorted(places)
    )
    total = sum(end - start for start, end in stretches)
    times = "once" if len(stretches) == 1 else f"{len(stretches)} times"
    return f'<path class="{phase}" d="{path}">{title(f"{row.name}, {name}: {total:.3g} s, {times}")}</path>'


def _verdict_mark(verdict: str, x: float, y: float, tip: str) -> str:
    if verdict == "undone":
        return f'<path class="undone" d="M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m-7 0l7 -7">{title(tip)}</path>'
    return marker(4 if verdict == "kept" else 0, x, y, 3.6, verdict, tip)


def _band_sample(phase: str) -> str:
    tall = 16 * PHASES[phase][1]
    return f'<path class="{phase}" d="M6 8v-{tall:g}h22v{tall:g}z"/>'


def _mark_samples() -> list[tuple[str, str]]:
    return [(_verdict_mark(verdict, 20, 0, ""), name) for verdict, name in _VERDICTS]
