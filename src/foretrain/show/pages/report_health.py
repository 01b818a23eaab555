"""Show the health of a run: the measures of every layer over time, and what was found."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from foretrain.config.paths import assignments
from foretrain.show.numbers import finite, rounded
from foretrain.show.pages.render import PageTable, number
from foretrain.show.record import MEASURES, Entry, LayerMeasures, RunRecord

_ROWS = 160


def heat_map(record: RunRecord, columns: int) -> dict[str, Any] | None:
    """{"name", "steps", "layers", "measures"}: for every measure a row per layer and a column per look. Of looks or
    layers that share a cell the one is shown that is farthest from what is usual for its layer, high or low."""
    looks = [(entry.step, found) for entry in record.health if (found := _look(entry))]
    if not looks:
        return None
    layers = list(dict.fromkeys(name for _, found in looks for name in found))
    across, down = _parts(len(looks), columns), _parts(len(layers), _ROWS)
    measures = {}
    for measure, words in MEASURES.items():
        table = [[found.get(layer, {}).get(measure) for _, found in looks] for layer in layers]
        if any(value is not None for row in table for value in row):
            measures[words] = _shrunk(table, down, across)
    names = [layers[row[0]] if len(row) == 1 else f"{layers[row[0]]} … {layers[row[-1]]}" for row in down]
    return {
        "name": record.name,
        "steps": [looks[column[0]][0] for column in across],
        "layers": names,
        "measures": measures,
    }


def _look(entry: Entry) -> LayerMeasures:
    found: LayerMeasures = entry.fields.get("layers") or {}
    return found


def _shrunk(table: list[list[float | None]], down: list[range], across: list[range]) -> list[list[float | int | None]]:
    usual = [_usual(row) for row in table]

    def shown(layers: range, looks: range) -> float | int | None:
        if len(layers) == len(looks) == 1:
            return rounded(table[layers[0]][looks[0]], 3)
        cells = [
            (value, usual[layer]) for layer in layers for look in looks if (value := table[layer][look]) is not None
        ]
        return rounded(max(cells, key=lambda cell: _distance(*cell))[0], 3) if cells else None

    return [[shown(layers, looks) for looks in across] for layers in down]


def _usual(row: list[float | None]) -> float:
    known = sorted(value for value in row if value is not None and value > 0)
    return known[len(known) // 2] if known else 1.0


def _distance(value: float, usual: float) -> float:
    """Tell how many times more or less than usual it is; 0 is as far as can be."""
    return abs(math.log(value / usual)) if value > 0 and value / usual > 0 else math.inf


def layer_table(record: RunRecord) -> PageTable | None:
    """List the lowest, highest and last number of every measure, for every layer."""
    looks = [found for entry in record.health if (found := _look(entry))]
    rows = []
    for layer in dict.fromkeys(name for found in looks for name in found):
        numbers: list[float | None] = []
        for measure in MEASURES:
            known = [value for found in looks if (value := found.get(layer, {}).get(measure)) is not None]
            last = looks[-1].get(layer, {}).get(measure)
            numbers += [min(known, default=None), max(known, default=None), last]
        rows.append([layer, *(number(value, ".3g") for value in numbers)])
    if not rows:
        return None
    head = [f"{measure}, {which}" for measure in MEASURES.values() for which in ("lowest", "highest", "last")]
    return PageTable("Lowest, highest and last of every layer", ["layer", *head], rows)


def _parts(count: int, limit: int) -> list[range]:
    parts = min(count, limit)
    return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(record: RunRecord) -> list[dict[str, Any]]:
    """List what was found, each finding once with its first and last step and how often it came."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry, fields in _told(record):
        one = _finding(fields)
        key = (one["title"] or re.sub(r"[0-9.]+", "#", one["text"]), one["place"], one["advice"])
        known = found.setdefault(key, one | {"first": entry, "times": 0})
        known.update(one, last=entry, times=known["times"] + 1)
    order = {"critical": 0, "warning": 1}
    return sorted(found.values(), key=lambda one: (order.get(one["level"], 2), one["first"] or 0))


def _told(record: RunRecord) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    """Yield findings, and warnings of any other kind."""
    for entry in record.health:
        if entry.kind == "HealthFound":
            yield entry.step, entry.fields
    for entry in record.of_kind("Notice"):
        if entry.fields.get("level") == "warning":
            yield entry.step or None, {"level": "warning", "meaning": entry.fields.get("message")}


def _finding(fields: Mapping[str, Any]) -> dict[str, Any]:
    def text(name: str) -> str:
        return "" if fields.get(name) is None else str(fields[name])

    return {
        "level": text("level"),
        "title": text("ailment"),
        "measure": text("measure"),
        "value": finite(fields.get("value")),
        "healthy": text("healthy"),
        "place": "" if (place := text("place")) == "run" else place,
        "text": text("meaning"),
        "advice": assignments(fields.get("change")),
    }
