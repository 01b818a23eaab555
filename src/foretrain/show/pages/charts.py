"""Charts as SVG text: lines and points over two axes. Colours come from the page's style or from `standalone`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretrain.show.pages.drawing import marker, svg, text_at, text_width, title
from foretrain.show.pages.scales import Point, Scale, finite, fitted, thinned, tick_labels
from foretrain.show.pages.theme import CHART_STYLE, DARK, LIGHT, LOOKS, with_colours

_SPARSE = 6
_CROWD = 12
_TICK = 36
_ARROW = 24


@dataclass(frozen=True)
class Axis:
    """What is along an axis, with its unit. A bound that is None follows from the points, as do ticks not given."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] = ()

    def scale(self, values: Sequence[float], start: float, end: float) -> Scale:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        low, high = fitted([*values, *bounds], self.log)
        low = low if self.low is None else self.low
        high = high if self.high is None else self.high
        return Scale(low, high if high > low else low + 1, start, end, self.log)

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Series:
    """Points that belong together. Series of one name share a legend entry; a look is a colour, a marker and a dash."""

    name: str
    points: Sequence[tuple[object, object]]
    look: int = 0
    line: bool = True
    faint: bool = False
    tip: str = ""
    tips: Sequence[str] = ()
    labels: Sequence[str] = ()
    errors: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class Arrow:
    """A difference pointed out between two points; `text` stands beside it where it is long enough to be seen."""

    start: Point
    end: Point
    text: str
    tip: str = ""
    look: int = 0


@dataclass(frozen=True)
class _Drawn:
    """A series with the points that can be drawn; `order` leads back to tips, labels and errors."""

    series: Series
    points: list[Point] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


def plot(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    label: str,
    width: int = 760,
    height: int = 380,
    arrows: Sequence[Arrow] = (),
    limit: int = 400,
) -> str:
    """A chart of lines and points. `label` says in words what is to be seen."""
    drawn = [_drawable(one, x, y) for one in series]
    legend, top = _legend([one.series for one in drawn if one.points], width)
    top, bottom = top + 30, height - 44
    down = [point[1] for one in drawn for point in one.points if x.holds(point[0])]
    down += [bound for one in drawn for pair in _errors(one, y) for bound in pair]
    vertical = y.scale(down, bottom, top)
    labels = tick_labels(vertical.ticks(_TICK))
    left = 10 + max((text_width(text) for text in labels), default=7.0)
    across = [point[0] for one in drawn for point in one.points if x.holds(point[0])]
    horizontal = x.scale(across, left, width - 18)
    parts = [legend, _frame(horizontal, vertical, x, y)]
    if not any(one.points for one in drawn):
        parts.append(text_at((left + width) / 2, (top + bottom) / 2, "nothing to show yet", "middle"))
    # Thin lines lie below bold ones, and the second look, that of the claim, on top, right over the first.
    drawn.sort(key=lambda one: (not one.series.faint, one.series.look == 1, -one.series.look))
    lines = [_lines(one, horizontal, vertical, limit) for one in drawn]
    taken: list[Point] = []
    lines += [_arrow(arrow, horizontal, vertical, taken) for arrow in arrows]
    parts.append(_clipped("".join(lines), left, top, width - 18 - left, bottom - top))
    parts += [_marks(one, horizontal, vertical) for one in drawn]
    return svg("".join(parts), label, width, height)


def standalone(chart: str) -> str:
    """The chart as a file of its own, with colours for light and dark surroundings."""
    dark = with_colours(CHART_STYLE, DARK)
    style = f"{with_colours(CHART_STYLE, LIGHT)}@media (prefers-color-scheme: dark) {{{dark}}}\n"
    opening, rest = chart.split(">", 1)
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    backdrop = '<rect class="backdrop" width="100%" height="100%" rx="6"/>'
    return f"{opening}><style>{style}</style>{backdrop}{rest}\n"


# --- pieces that other charts use too ---------------------------------------------------------------------------------


def legend_rows(entries: Sequence[tuple[str, str]], width: int) -> tuple[str, float]:
    """Entries of (sample drawn at the origin, name), wrapped to the width; with the height that they take."""
    x, y, parts = 4.0, 14.0, []
    for sample, name in entries:
        needed = 34 + text_width(name) + 16
        if x > 4 and x + needed - 16 > width:
            x, y = 4.0, y + 20
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{sample}{text_at(34, 4, name, "name")}</g>')
        x += needed
    return "".join(parts), y + 10 if entries else 4.0


def bottom_axis(scale: Scale, top: float, bottom: float, axis: Axis) -> str:
    """Vertical gridlines with their values below, and what they are."""
    ticks = axis.ticks or scale.ticks(78)
    parts = []
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        x = scale(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(text_at(x, bottom + 17, text, "middle"))
    parts.append(text_at((scale.start + scale.end) / 2, bottom + 37, axis.label, "middle"))
    return "".join(parts)


# --- pieces of a plot -------------------------------------------------------------------------------------------------


def _drawable(series: Series, x: Axis, y: Axis) -> _Drawn:
    drawn = _Drawn(replace(series, look=series.look % LOOKS))
    for place, (across, up) in enumerate(series.points):
        point = finite(across), finite(up)
        if point[0] is None or point[1] is None or (x.log and point[0] <= 0) or (y.log and point[1] <= 0):
            continue
        drawn.points.append((point[0], point[1]))
        drawn.order.append(place)
    return drawn


def _clipped(content: str, left: float, top: float, width: float, height: float) -> str:
    """Cut off at the frame, by a picture in the picture: a clip path would need a name that is unique in the page."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    view = f'viewBox="{left:.1f} {top:.1f} {width:.1f} {height:.1f}"'
    return f'<svg x="{left:.1f}" y="{top:.1f}" {size} {view}>{content}</svg>'


def _errors(drawn: _Drawn, y: Axis) -> list[tuple[float, float]]:
    pairs = [drawn.series.errors[place] for place in drawn.order] if drawn.series.errors else []
    return [pair for pair in pairs if pair is not None and (not y.log or pair[0] > 0)]


def _legend(series: Sequence[Series], width: int) -> tuple[str, float]:
    entries: dict[str, str] = {}
    for one in series:
        if one.name and one.name not in entries:
            line = '<path class="curve" d="M0 0H28"/>' if one.line else ""
            entries[one.name] = f'<g class="s{one.look}">{line}{marker(one.look, 14, 0)}</g>'
    return legend_rows([(sample, name) for name, sample in entries.items()], width)


def _frame(horizontal: Scale, vertical: Scale, x: Axis, y: Axis) -> str:
    ticks = y.ticks or vertical.ticks(_TICK)
    parts = [bottom_axis(horizontal, vertical.end, vertical.start, x)]
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        place = vertical(tick)
        parts.append(f'<path class="grid" d="M{horizontal.start:.1f} {place:.1f}H{horizontal.end:.1f}"/>')
        parts.append(text_at(horizontal.start - 7, place + 4, text, "end"))
    parts.append(text_at(4, vertical.end - 12, y.label))
    corner = f"M{horizontal.start:.1f} {vertical.end:.1f}V{vertical.start:.1f}H{horizontal.end:.1f}"
    return "".join(parts) + f'<path class="axis" d="{corner}"/>'


def _lines(drawn: _Drawn, horizontal: Scale, vertical: Scale, limit: int) -> str:
    if not drawn.series.line or len(drawn.points) < 2:
        return ""
    points = thinned(drawn.points, limit)
    path = "M" + "L".join(f"{horizontal(x):.1f} {vertical(y):.1f}" for x, y in points)
    style = "curve faint" if drawn.series.faint else "curve"
    tip = title(drawn.series.tip or drawn.series.name)
    return f'<g class="s{drawn.series.look}"><path class="{style}" d="{path}">{tip}</path></g>'


def _marks(drawn: _Drawn, horizontal: Scale, vertical: Scale) -> str:
    """A mark for every point; on a long line only a few, enough to tell it from the others without colour."""
    series = drawn.series
    places = [place for place, (x, y) in enumerate(drawn.points) if horizontal.holds(x) and vertical.holds(y)]
    if series.line and len(places) > _CROWD:
        shift = 0.2 + series.look / LOOKS / 2
        places = [places[int(len(places) * (part + shift) / _SPARSE)] for part in range(_SPARSE)]
    parts = []
    for place in places:
        (x, y), source = drawn.points[place], drawn.order[place]
        tip = series.tips[source] if series.tips else f"{series.tip or series.name}: {x:.4g}, {y:.5g}"
        across, down = horizontal(x), vertical(y)
        error = series.errors[source] if series.errors else None
        if error is not None:
            ends = vertical.clipped(error[0]), vertical.clipped(error[1])
            caps = "".join(f"M{across - 4:.1f} {end:.1f}h8" for end in ends)
            parts.append(f'<path class="whisker" d="M{across:.1f} {ends[0]:.1f}V{ends[1]:.1f}{caps}"/>')
        size = 2.8 if series.faint else 4.6
        parts.append(marker(series.look, across, down, size, "hollow" if series.faint else "mark", tip))
        if series.labels:
            place_at = (across - 7, down + 17, "end") if across > 0.85 * horizontal.end else (across + 7, down - 9, "")
            parts.append(text_at(*place_at[:2], series.labels[source], place_at[2]))
    return f'<g class="s{series.look}">{"".join(parts)}</g>' if parts else ""


def _arrow(arrow: Arrow, horizontal: Scale, vertical: Scale, taken: list[Point]) -> str:
    """`taken` holds the places of texts so far; a text that would cover one goes above it."""
    start = horizontal.clipped(arrow.start[0]), vertical.clipped(arrow.start[1])
    end = horizontal.clipped(arrow.end[0]), vertical.clipped(arrow.end[1])
    length = math.dist(start, end)
    if length < 1:
        return ""
    x, y = (end[0] - start[0]) / length * 6, (end[1] - start[1]) / length * 6
    head = f"M{end[0] - x - y / 2:.1f} {end[1] - y + x / 2:.1f}L{end[0]:.1f} {end[1]:.1f}"
    head += f"L{end[0] - x + y / 2:.1f} {end[1] - y - x / 2:.1f}"
    line = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    style = "name" if end[0] > start[0] else "name end"
    text = ""
    if length >= _ARROW and arrow.text:
        place = end[0] + x, end[1] - 6
        while any(
            abs(place[0] - other[0]) < text_width(arrow.text) and abs(place[1] - other[1]) < 13 for other in taken
        ):
            place = place[0], place[1] - 13
        taken.append(place)
        text = text_at(*place, arrow.text, style)
    path = f'<path class="whisker" d="{line}{head}">{title(arrow.tip or arrow.text)}</path>'
    return f'<g class="s{arrow.look % LOOKS}">{path}</g>{text}'
