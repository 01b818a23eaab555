"""Health of a run as far as its log and summary tell it: gradient norms per layer over time, and findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from foretrain.show.downsample import rounded
from foretrain.show.record import Entry, RunRecord
from foretrain.show.scales import finite

_COLUMNS = 160
_ROWS = 160
_BESIDE = ("gradient_norms", "gradient_norm", "gradients", "gradient", "norms")


def heat_map(record: RunRecord) -> dict[str, Any] | None:
    """{"steps", "layers", "values"}: a row per layer, a column per look; the highest of those that share a cell."""
    looks = [(entry.step, norms) for entry in record.health if (norms := layer_norms(entry.fields))]
    if not looks:
        return None
    layers = list(dict.fromkeys(name for _, norms in looks for name in norms))
    columns = _parts(len(looks), _COLUMNS)
    rows = _parts(len(layers), _ROWS)
    values = [
        [
            rounded(_highest(looks[place][1].get(layers[layer]) for place in column for layer in row), 3)
            for column in columns
        ]
        for row in rows
    ]
    names = [layers[row[0]] if len(row) == 1 else f"{layers[row[0]]} … {layers[row[-1]]}" for row in rows]
    return {
        "name": record.name,
        "steps": [looks[column[0]][0] for column in columns],
        "layers": names,
        "values": values,
    }


def extremes(record: RunRecord) -> list[tuple[str, float | None, float | None, float | None]]:
    """(layer, lowest, highest, last gradient norm) for every layer."""
    looks = [norms for entry in record.health if (norms := layer_norms(entry.fields))]
    rows = []
    for layer in dict.fromkeys(name for norms in looks for name in norms):
        known = [value for norms in looks if (value := norms.get(layer)) is not None]
        rows.append((layer, min(known, default=None), max(known, default=None), looks[-1].get(layer)))
    return rows


def layer_norms(fields: Mapping[str, Any]) -> dict[str, float | None]:
    """Gradient norm per layer, from `layers`: {name: norm}, {name: {"gradient_norm": norm}}, a list of such with
    their names, or names alone with the norms beside them."""
    layers = fields.get("layers")
    if isinstance(layers, Mapping):
        return {str(name): _norm(value) for name, value in layers.items()}
    if not _is_list(layers):
        return {}
    named = [one for one in layers if isinstance(one, Mapping)]
    if named:
        return {str(one.get("name") or one.get("layer")): _norm(one) for one in named}
    beside = next((fields[name] for name in _BESIDE if _is_list(fields.get(name))), ())
    return {str(layer): finite(value) for layer, value in zip(layers, beside, strict=False)}


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _norm(value: object) -> float | None:
    if isinstance(value, Mapping):
        return next((finite(value[name]) for name in _BESIDE if name in value), None)
    return finite(value)


def _parts(count: int, limit: int) -> list[range]:
    parts = min(count, limit)
    return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def _highest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(record: RunRecord) -> list[dict[str, Any]]:
    """What was found, each once with its first and last step and how often: level, step, place, text, advice."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry, fields in _told(record):
        one = _finding(fields)
        key = (one["title"] or re.sub(r"[0-9.]+", "#", one["text"]), one["place"], one["advice"])
        known = found.setdefault(key, one | {"first": entry, "times": 0})
        known.update(one, last=entry, times=known["times"] + 1)
    order = {"critical": 0, "warning": 1}
    return sorted(found.values(), key=lambda one: (order.get(one["level"], 2), one["first"] or 0))


def _told(record: RunRecord) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    for entry in record.health:
        listed = entry.fields.get("findings")
        if _is_list(listed):
            yield from ((entry.step, one) for one in listed if isinstance(one, Mapping))
        elif "layers" not in entry.fields:
            yield entry.step, entry.fields
    for entry in record.decisions:
        if entry.kind == "Recovered" and entry.fields.get("advice"):
            yield entry.step, {"level": "advice", "meaning": entry.fields.get("text")}
        elif entry.kind == "Notice" and entry.fields.get("level") == "warning":
            yield _step_of(entry), {"level": "warning", "meaning": entry.fields.get("message")}
    health = record.summary.get("health")
    listed = health.get("findings") if isinstance(health, Mapping) else health
    if _is_list(listed) and not record.health:
        yield from ((None, one) for one in listed if isinstance(one, Mapping))


def _step_of(entry: Entry) -> int | None:
    return entry.step or None


def _finding(fields: Mapping[str, Any]) -> dict[str, Any]:
    def text(*names: str) -> str:
        return next((str(fields[name]) for name in names if fields.get(name) not in (None, "")), "")

    return {
        "level": text("level", "severity") or "warning",
        "title": text("title", "ailment", "kind", "name"),
        "measure": text("measure"),
        "value": finite(fields.get("value")),
        "healthy": text("healthy"),
        "place": "" if (place := text("layer", "place", "where")) == "run" else place,
        "text": text("meaning", "text", "message"),
        "advice": change_words(fields.get("change")) or text("advice", "setting"),
    }


def change_words(change: object) -> str:
    """The settings to change, as `--set` takes them."""
    if not isinstance(change, Mapping):
        return ""
    return ", ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in change.items()
    )
