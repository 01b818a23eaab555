"""Prepare what charts are drawn from, short series of numbers; `assets/charts.js` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foretrain.show.numbers import finite, rounded
from foretrain.show.record import Entry

Chart = dict[str, Any]
"""{"runs": [{"name", "series": [...]}, ...]} with what is known of its axes: see `assets/charts.js`."""
Value = Callable[[Entry], float | None]
RIBBON = 400
"""A ribbon of phases has so many stretches at the most: more could not be told apart."""
_MARKS = 700
"""If a run has more marks, those of a kind that lie together are shown as one."""
_WIDE = 50
"""A logarithmic axis shows more from this factor on; chosen: less than two powers of ten need none."""
PHASES = {"warmup": "warm-up", "full": "full", "correct": "correct", "predict": "predict"}
MARKS = {
    "kept": "move kept",
    "shrunk": "shrunk",
    "refused": "refused",
    "rolled back": "rolled back",
    "recovery": "recovery",
    "not finite": "loss not finite",
    "resumed": "resumed",
}
LOOKS = (
    {"dash": (), "shape": "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0 -1 0Z"},
    {"dash": (11, 2), "shape": "M0 -1.3L1.3 0L0 1.3L-1.3 0Z"},
    {"dash": (7, 3), "shape": "M-.9 -.9H.9V.9H-.9Z"},
    {"dash": (2, 3), "shape": "M0 -1.2L1.2 .9H-1.2Z"},
    {"dash": (9, 3, 2, 3), "shape": "M0 1.2L1.2 -.9H-1.2Z"},
    {"dash": (12, 4), "shape": "M-.4 -1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z"},
    {"dash": (4, 2), "shape": "M-1.2 0L.9 -1.2V1.2Z"},
    {"dash": (1, 3), "shape": "M1.2 0L-.9 -1.2V1.2Z"},
)
"""Arms of a comparison are told apart without colours by the dash of a line, and by its mark (an SVG path)."""


def places_to_keep(values: Sequence[float | None], limit: int) -> list[int]:
    """Keep at most `limit` places: both ends, and of every stretch the lowest, the highest and a missing one."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    buckets = max(1, (limit - 2) // 3)
    kept = {0, count - 1}
    for bucket in range(buckets):
        stretch = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [place for place in stretch if values[place] is not None]
        if known:
            kept.add(min(known, key=lambda place: values[place] or 0.0))
            kept.add(max(known, key=lambda place: values[place] or 0.0))
        if len(known) < len(stretch):
            kept.add(next(place for place in stretch if values[place] is None))
    return sorted(kept)


def points(label: str, style: str, known: Iterable[tuple[float, float | None]], **more: Any) -> dict[str, Any]:
    """Make a series over an axis of its own, in the order of that axis."""
    places = sorted(known, key=lambda point: point[0])
    x, values = [rounded(at) for at, _ in places], [rounded(value) for _, value in places]
    return {"label": label, "style": style, "x": x, "values": values, **more}


def over_run(label: str, style: str, entries: Sequence[Entry], value: Value, limit: int) -> dict[str, Any]:
    """Make a series over the run, steps and time, of at most `limit` points."""
    values = [value(entry) for entry in entries]
    if all(number is None for number in values):
        entries, values = [], []
    kept = places_to_keep(values, limit)
    return {
        "label": label,
        "style": style,
        "steps": [entries[place].step for place in kept],
        "seconds": [rounded(entries[place].seconds) for place in kept],
        "values": [rounded(values[place]) for place in kept],
    }


def value_of(name: str) -> Value:
    return lambda entry: finite(entry.fields.get(name))


def curves(runs: Sequence[Mapping[str, Any]], *styles: str) -> list[list[float]]:
    """List the numbers of every curve that is drawn in one of these styles."""
    found = (one["values"] for run in runs for one in run["series"] if one["style"] in styles)
    return [[value for value in values if value is not None] for values in found]


def spans_widely(curves: Sequence[Sequence[float]]) -> bool:
    """Whether a logarithmic axis shows more: the values span more than a factor of 50, a few wild ones left aside, and
    none is below 0. One that is exactly 0 does not count: it has no place on such an axis."""
    known = [[value for value in curve if value] for curve in curves]
    begins = [curve[: math.ceil(len(curve) / 50)] for curve in known]
    first = max((value for part in begins for value in part), default=0.0)
    rest = sorted(value for curve in known for value in curve[math.ceil(len(curve) / 50) :])
    high = first
    if rest:
        usual = rest[int(len(rest) * 0.98)]
        high = max(first, usual * 10 if 0 < usual * 100 < rest[-1] else rest[-1])
    low = min((value for curve in known for value in curve), default=0.0)
    return low > 0 and high / low > _WIDE


def frame(curves: Sequence[Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Choose what a chart of forecasts shows on either axis, by what came: {} for nothing."""
    values = [value for curve in curves for value in curve]
    if not values:
        return {}
    low, high = min(values), max(values)
    air = 0.4 * (high - low) or 0.2 * abs(high) or 1.0
    made = {"linear": (low - air, high + air)}
    if above := [value for value in values if value > 0]:
        factor = max((high / min(above)) ** 0.25, 1.2)
        made["log"] = (min(above) / factor, high * factor)
    return made


def thinned_marks(found: Sequence[tuple[float, float | int | None, str, str]], end: float) -> list[list[Any]]:
    """[place, second, kind, words, count] of marks up to `end`: where there are too many to be seen, one of each kind
    in a stretch, with how many it stands for."""
    width = max(end, 1e-9) / (_MARKS / 6) if len(found) > _MARKS else 0.0
    kept: dict[tuple[str, int], list[Any]] = {}
    for place, (at, second, kind, words) in enumerate(found):
        key = (kind, int(at / width) if width else place)
        if key in kept:
            kept[key][4] += 1
        else:
            kept[key] = [rounded(at), rounded(second), kind, words, 1]
    return list(kept.values())


def key(phases: Iterable[str], marks: Iterable[str]) -> list[dict[str, Any]]:
    """Say what the colours of phases and the signs of marks mean, for the lists below a chart."""
    signs = {
        "phase": ("Phases, the ribbon of the chart", [(f"phase {name}", PHASES[name]) for name in phases]),
        "marks": ("Marks of the chart", [(f"mark {name.replace(' ', '-')}", MARKS[name]) for name in marks]),
    }
    return [{"what": what, "label": label, "items": items} for what, (label, items) in signs.items() if items]
