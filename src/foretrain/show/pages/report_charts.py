"""Prepare the charts of a report: curves of every run, the ribbon of its phases, marks for moves and recoveries."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foretrain.config.paths import assignments
from foretrain.config.units import chain_in_words
from foretrain.show.numbers import finite, rounded
from foretrain.show.pages.charts import (
    RIBBON,
    Chart,
    Value,
    curves,
    frame,
    over_run,
    spans_widely,
    thinned_marks,
    value_of,
)
from foretrain.show.pages.report_end import end_forecasts, way_to_the_end
from foretrain.show.pages.report_forecasts import LOWEST, calibration_curves, horizon_curves, is_below_frame
from foretrain.show.pages.report_rates import rate_curves
from foretrain.show.record import Entry, RunRecord

POINTS = 2400
"""A curve has so many points at the most, in a page of one run."""
_ERRORS = 200
"""The interval of a forecast follows from the errors of so many before it."""
_ENOUGH = 10
_SHARE = 0.9
_PAUSE = 3
"""The curve is cut after so many entries without a forecast."""
METRICS = 4
"""So many measures of the user's own have a chart; each has a card at the top, however many there are."""
_WORTH_SEEING = ("full", "warmup", "correct", "predict")
"""Where several phases share a pixel, the one that is later in this list is shown."""


def charts(records: Sequence[RunRecord]) -> dict[str, Chart]:
    """Make the data of every chart by its name: per run its series, phases and marks."""
    limit = max(300, POINTS // len(records))
    drawn: dict[str, tuple[Callable[[RunRecord, int], list[dict[str, Any]]], Chart]] = {
        "loss": (_loss, {"unit": "loss", "chosen": True, "marks": True}),
        "end": (end_forecasts, {"unit": "loss", "optional": True}),
        "rate": (_rate, {"low": 0}),
        "gradient": (_gradient, {"log": True}),
        "forecast": (_forecast, {"unit": "loss", "chosen": True}),
        "confidence": (_confidence, {"low": 0, "high": 1}),
        "speed": (_speed, {"low": 0}),
        "horizons": (horizon_curves, {"x": {"label": "steps ahead"}, "high": 1, "optional": True}),
        "calibration": (
            calibration_curves,
            {
                "x": {"label": "confidence before the outcome", "low": 0, "high": 1},
                "unit": "share that turned out well",
                "low": 0,
                "high": 1,
                "optional": True,
            },
        ),
    }
    drawn["rates"] = (
        rate_curves,
        {"x": {"label": "learning rate (log scale)", "log": True}, "unit": "held-out loss", "optional": True},
    )
    drawn["blocks"] = (_blocks, {"unit": "mean square", "log": True, "optional": True})
    named = _metric_names(records)
    for place in range(METRICS):
        name = named[place] if place < len(named) else None
        drawn[f"metric-{place}"] = (_metric(name), {"optional": True, "title": name or ""})
    made: dict[str, Chart] = {}
    for name, (series, look) in drawn.items():
        runs = [
            {"name": record.name, "series": [one for one in series(record, limit) if one["values"]]}
            for record in records
        ]
        made[name] = {**look, "runs": runs}
    for name in ("loss", *(f"metric-{place}" for place in range(METRICS))):
        made[name]["log"] = spans_widely(curves(made[name]["runs"], "thin", "bold"))
    tried = {rate for run in made["rates"]["runs"] for one in run["series"][:1] for rate in one["x"]}
    made["rates"]["x"] = {**made["rates"]["x"], "ticks": sorted(tried)[:9]}
    made["forecast"]["frame"] = frame(curves(made["forecast"]["runs"], "plain"))
    made["speed"]["unit"] = next((one["label"] for run in made["speed"]["runs"] for one in run["series"]), "")
    below = any(is_below_frame(record) for record in records)
    made["horizons"] |= {"low": LOWEST} if below else {}
    edge = "; below −1 on the edge" if below else ""
    made["horizons"]["unit"] = f"R² (1: exact, 0: no better than standing still{edge})"
    for run in [run for run in made["calibration"]["runs"] if run["series"]][1:]:
        del run["series"][0]  # one diagonal is enough
    return made | {"shared": {"runs": [_shared(record) for record in records], "prediction": prediction(records)}}


def prediction(records: Sequence[RunRecord]) -> str:
    """How far the runs of a page used prediction: "tried", "idle" (on, but nothing was tried) or "off"."""
    if any(record.tried for record in records):
        return "tried"
    return "idle" if any(record.predicts for record in records) else "off"


def _loss(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    undone = sorted(record.undone, key=lambda entry: (entry.step, entry.seconds))
    return [
        over_run("training", "thin", record.progress, value_of("loss"), limit),
        over_run("taken back", "dots", undone, value_of("loss"), limit // 4),
        over_run("held out", "bold", record.evaluations, value_of("loss"), limit),
        *way_to_the_end(record, limit),
    ]


def _forecasts(record: RunRecord) -> list[Entry]:
    """List the entries where something was forecast and came, with one gap where there was nothing for a while."""
    found: list[Entry] = []
    missing: list[Entry] = []
    before: float | None = None
    for entry in record.progress:
        predicted, mean = finite(entry.fields.get("predicted_loss")), finite(entry.fields.get("smoothed_loss"))
        stale = mean == before and entry.fields.get("phase") in ("predict", "correct")  # a chain has no new mean
        before = mean
        if predicted is None or mean is None or stale:
            missing.append(entry)
            continue
        if found and len(missing) > _PAUSE:
            found.append(Entry("gap", missing[0].step, missing[0].seconds, {}))
        found.append(entry)
        missing.clear()
    return found


def _forecast(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw predicted against actual, with the interval that the errors before each forecast would have given it."""
    entries = _forecasts(record)
    past: deque[float] = deque(maxlen=_ERRORS)
    edges: list[Entry] = []
    for entry in entries:
        predicted, actual = finite(entry.fields.get("predicted_loss")), finite(entry.fields.get("smoothed_loss"))
        if predicted is None or actual is None:
            edges.append(entry)
            continue
        if len(past) >= _ENOUGH:
            half = sorted(past)[math.ceil(_SHARE * len(past)) - 1] * abs(predicted)
            bounds = {"low": predicted - half, "high": predicted + half}
            edges.append(Entry("edge", entry.step, entry.seconds, bounds))
        past.append(abs(predicted - actual) / max(abs(predicted), 1e-12))
    return [
        over_run("mean loss", "plain", entries, value_of("smoothed_loss"), limit),
        over_run("predicted", "dashed", entries, value_of("predicted_loss"), limit),
        over_run("lower 90 %", "edge", edges, value_of("low"), limit),
        over_run("upper 90 %", "edge", edges, value_of("high"), limit),
    ]


def _confidence(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    return [over_run("confidence", "plain", record.progress, value_of("confidence"), limit)]


def _rate(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    return [over_run("learning rate", "plain", record.progress, value_of("learning_rate"), limit)]


def _gradient(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    return [over_run("gradient norm", "plain", record.progress, value_of("gradient_norm"), limit)]


def _blocks(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw one curve per block of residuals, each in a colour of its own."""

    def value(name: str) -> Value:
        return lambda entry: finite((entry.fields.get("blocks") or {}).get(name))

    names = dict.fromkeys(name for entry in record.progress for name in entry.fields.get("blocks") or ())
    drawn = (over_run(name, "plain", record.progress, value(name), limit) for name in names)
    return [{**one, "place": place} for place, one in enumerate(drawn)]


def _metric_names(records: Sequence[RunRecord]) -> list[str]:
    """List their names in the order in which they came."""
    told = (entry.fields.get("metrics") for record in records for entry in record.evaluations)
    return list(dict.fromkeys(str(name) for found in told if isinstance(found, Mapping) for name in found))


def _metric(name: str | None) -> Callable[[RunRecord, int], list[dict[str, Any]]]:
    def value(entry: Entry) -> float | None:
        found = entry.fields.get("metrics")
        return finite(found.get(name)) if isinstance(found, Mapping) else None

    return lambda record, limit: [over_run(name, "bold", record.evaluations, value, limit)] if name else []


def _speed(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    named = "tokens_per_second" if record.last("tokens_per_second") else "steps_per_second"
    if named == "tokens_per_second":
        return [over_run(f"{record.unit} per second", "plain", record.progress, value_of(named), limit)]
    return [over_run("steps per second", "plain", _paces(record), value_of(named), limit)]


def _paces(record: RunRecord) -> list[Entry]:
    """Reckon steps per second, for data without tokens."""
    found = []
    for before, after in zip(record.progress, record.progress[1:], strict=False):
        if after.seconds > before.seconds:
            pace = (after.step - before.step) / (after.seconds - before.seconds)
            found.append(Entry("pace", after.step, after.seconds, {"steps_per_second": pace}))
    return found


# --- ribbon and marks, shared by all charts of a run ------------------------------------------------------------------


def _shared(record: RunRecord) -> dict[str, Any]:
    return {"name": record.name, "phases": ribbon(record), "marks": marks(record)}


def ribbon(record: RunRecord) -> list[list[Any]]:
    """[first step, first second, phase, share] of every stretch, and where the last ends. Where there are too many to
    be seen, equal stretches, each with the phase that is most worth seeing and the share of the steps it had."""
    changes = record.phases()
    end = max(record.step, changes[-1].step, 1)
    seconds = max(record.seconds, changes[-1].seconds)
    named = [(change.step, change.seconds, _phase(change)) for change in changes]
    kept: list[list[Any]] = []
    for step, second, phase, share in _merged(named, end) if len(named) > RIBBON else [(*one, 1) for one in named]:
        if not kept or kept[-1][2:] != [phase, share]:
            kept.append([step, rounded(second), phase, share])
    return [*kept, [end, rounded(seconds), "end", 1]]


def _phase(change: Entry) -> str:
    phase = str(change.fields.get("phase"))
    return phase if phase in _WORTH_SEEING else "full"


def _merged(changes: list[tuple[int, float, str]], end: int) -> Iterator[tuple[int, float, str, float]]:
    """Yield stretches of the same length. A phase without a step of its own, as a leap is, still has a share."""
    found: list[dict[str, float]] = [{} for _ in range(RIBBON)]
    begins = [(place * end // RIBBON, 0.0) for place in range(RIBBON)]
    ends = [*(step for step, _, _ in changes[1:]), end]
    for (step, second, phase), until in zip(changes, ends, strict=True):
        first, last = (min(RIBBON - 1, at * RIBBON // end) for at in (step, max(step, until - 1)))
        for place in range(first, last + 1):
            low, high = place * end / RIBBON, (place + 1) * end / RIBBON
            shared = max(0.0, min(until, high) - max(step, low))
            found[place][phase] = found[place].get(phase, 0.0) + shared
            if place > first or not begins[place][1]:
                begins[place] = (begins[place][0], second)
    for (step, second), shares in zip(begins, found, strict=True):
        if shares:
            phase = max(shares, key=_WORTH_SEEING.index)
            yield step, second, phase, round(shares[phase] / sum(shares.values()), 2) if sum(shares.values()) else 1.0


def marks(record: RunRecord) -> list[list[Any]]:
    """List [step, second, kind, words, count] of everything that is marked above the curves."""
    found: list[tuple[Entry, str, str]] = []
    for entry in record.decisions:
        if entry.kind == "Moved":
            found.append((entry, str(entry.fields.get("verdict")), move_words(entry)))
        elif entry.kind == "Recovered":
            found.append((entry, "recovery", recovery_words(entry)))
        elif entry.kind == "Grown":
            found.append((entry, growth_mark(entry), growth_words(entry)))
        elif entry.kind == "Tuned":
            found.append((entry, "recovery", f"tuned: {assignments(entry.fields.get('change'))}"))
        elif entry.kind == "Planned":
            found.append((entry, "resumed", str(entry.fields.get("text"))))
        elif entry.kind == "Resumed":
            found.append((entry, "resumed", "went on from a checkpoint"))
    broken = [entry for entry in [*record.progress, *record.undone] if finite(entry.fields.get("loss")) is None]
    found += [(entry, "not finite", "the loss was not finite") for entry in broken]
    found.sort(key=lambda one: one[0].step)
    return thinned_marks([(entry.step, entry.seconds, kind, words) for entry, kind, words in found], record.step)


def growth_mark(entry: Entry) -> str:
    """Tell which mark of a move stands for what became of a growth."""
    return {"undone": "rolled back", "refused": "refused"}.get(str(entry.fields.get("verdict")), "kept")


def growth_words(entry: Entry) -> str:
    """Write: growth to 12 of 12 blocks: kept."""
    fields = entry.fields
    return f"growth to {fields.get('layers')} of {fields.get('of')} blocks: {fields.get('verdict')}"


def move_words(entry: Entry) -> str:
    horizon, verdict = finite(entry.fields.get("horizon")) or 0, entry.fields.get("verdict")
    if entry.fields.get("chained"):
        audited = "audited " if entry.fields.get("audited") else ""
        return f"{audited}{chain_in_words(round(horizon), str(entry.fields.get('leaps') or ''))}: {verdict}"
    how = "audited move" if entry.fields.get("audited") else "move"
    return f"{how}, {horizon:,.0f} steps ahead: {verdict}"


def recovery_words(entry: Entry) -> str:
    words = str(entry.fields.get("action", "")).replace("_", " ")
    back = finite(entry.fields.get("step")) if words == "roll back" else None
    return words if back is None else f"{words} to step {back:,.0f}"
