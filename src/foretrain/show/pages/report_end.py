"""Show where a run was going: the forecast of its end on the loss chart, all such forecasts, and how good they were."""

from __future__ import annotations

from statistics import median
from typing import Any

from foretrain.forecast.records import is_same_end
from foretrain.show.numbers import finite, is_list, mapping
from foretrain.show.pages.charts import over_run, value_of
from foretrain.show.pages.render import PageTable, number
from foretrain.show.record import Entry, RunRecord

_WIDEST = 4
"""Intervals are drawn up to so many usual widths, so that a wild first one does not flatten all others."""


def level_of(entry: Entry) -> str:
    """Write the probability of an interval: 80 %."""
    return f"{100 * (finite(entry.fields.get('level')) or 0):.0f} %"


def is_open(record: RunRecord) -> bool:
    """Tell whether the end is still to come: a finished run has it."""
    return bool(record.end_forecasts) and record.state != "finished"


def way_to_the_end(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw the newest forecast from the held-out loss that it was made of to the end of the run, with its interval."""
    if not is_open(record) or not record.evaluations:
        return []
    forecast = record.end_forecasts[-1]
    known = [one for one in record.evaluations if one.step <= forecast.step]
    if not known:
        return []
    last = known[-1]
    told = forecast.fields.get("path")
    rows = [[finite(value) for value in row] for row in told if is_list(row)] if is_list(told) else []
    start = finite(last.fields.get("loss"))
    places = [_place(record, last.step, last.seconds, (start, start, start))]
    places += [_place(record, row[0], 0.0, row[1:]) for row in rows if len(row) == 4 and row[0] is not None]
    if start is None or len(places) < 2:
        return []
    return _with_edges("forecast", "dashed", places, level_of(forecast), limit)


def _place(record: RunRecord, step: float, seconds: float, values: Any) -> Entry:
    """Make an entry of a step that may still be to come, at the pace so far."""
    pace = record.seconds / record.step if record.step > 0 else 0.0
    fields = dict(zip(("loss", "low", "high"), values, strict=True))
    return Entry("forecast", int(step), seconds or record.seconds + pace * max(0.0, step - record.step), fields)


def _with_edges(label: str, style: str, entries: list[Entry], level: str, limit: int) -> list[dict[str, Any]]:
    return [
        over_run(label, style, entries, value_of("loss"), limit),
        over_run(f"lower {level}", "edge", entries, value_of("low"), limit),
        over_run(f"upper {level}", "edge", entries, value_of("high"), limit),
    ]


def end_forecasts(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw every forecast of the end over the step at which it was made, and the end once it is known."""
    numbers = ("loss", "low", "high")
    entries = [one for one in record.end_forecasts if all(finite(one.fields.get(name)) is not None for name in numbers)]
    truth = finite(record.summary.get("final_val_loss")) if record.state == "finished" else None
    if truth is not None:  # those for another length say nothing of this end
        entries = [one for one in entries if is_same_end(finite(one.fields.get("end")) or 0, record.step)]
    if not entries:
        return []
    widest = _WIDEST * median(entry.fields["high"] - entry.fields["low"] for entry in entries)
    cut = [_cut(entry, widest) for entry in entries]
    drawn = _with_edges("forecast of the end", "dashed", cut, level_of(entries[-1]), limit)
    if truth is not None:
        ends = [Entry("end", entries[0].step, entries[0].seconds, {"loss": truth})]
        ends.append(Entry("end", record.step, record.seconds, {"loss": truth}))
        drawn.append(over_run("as it ended", "plain", ends, value_of("loss"), limit))
    return drawn


def _cut(entry: Entry, widest: float) -> Entry:
    loss, low, high = (entry.fields[name] for name in ("loss", "low", "high"))
    fields = {"loss": loss, "low": max(low, loss - widest), "high": min(high, loss + widest)}
    return Entry(entry.kind, entry.step, entry.seconds, fields)


def said_of_the_end(record: RunRecord) -> dict[str, Any]:
    """{"said", "table"}: where the run is going and how that is known; of a finished one how good it was."""
    if not record.end_forecasts:
        return {"said": "", "table": None}
    last, found = record.end_forecasts[-1], mapping(record.summary.get("loss_forecast"))
    calibrated = "calibrated by own finished runs" if last.fields.get("calibrated") else "not calibrated yet"
    said = f"{level_of(last)} intervals, {calibrated}; made by {last.fields.get('method')}."
    checks = [mapping(check) for check in found["checks"]] if is_list(found.get("checks")) else []
    if not checks or record.state != "finished":
        return {"said": said, "table": None}
    head = ["made at step", "forecast", "from", "to", "error", "interval"]
    rows = [
        [
            number(check.get("step"), ",.0f"),
            *(number(check.get(name)) for name in ("loss", "low", "high")),
            number(check.get("error_percent"), "+.2f", " %"),
            "held" if check.get("held") else "missed",
        ]
        for check in checks
    ]
    return {"said": said, "table": PageTable("Forecasts of the end, and what came", head, rows, 0)}
