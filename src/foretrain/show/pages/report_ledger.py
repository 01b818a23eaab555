"""Make the ledger of a run: every decision with its reason, in the order in which they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.paths import assignments
from foretrain.config.units import clock, counted, loss_text, rate_text
from foretrain.show.numbers import finite
from foretrain.show.pages.report_charts import growth_mark, growth_words, move_words, recovery_words
from foretrain.show.record import Entry, RunRecord

ROWS = 4000
"""A page has so many rows at the most; the others are in `metrics.jsonl`."""
SHOWN = 100
"""So many rows are shown at first, and more when asked for; a live page is sent so many together."""
_FIRST = {"step": "number", "time": "number", "decision": "decision"}
_OF_MOVES = {
    "loss before": "number extra",
    "loss after": "number extra",
    "confidence": "number extra",
    "worth": "number extra",
}
"""Columns have names and classes; a narrow screen has no room for what is extra."""
_LAST = {"reason": "reason"}


def ledger_rows(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The ledger as data: {"ledger": counts and columns, "rows/0": [[kind, mark, text of every cell], ...], "rows/1":
    ...}. Rows that are known stay where they are when others come: a live page is sent the last ones only."""
    entries = [(record.name, entry) for record in records for entry in record.decisions]
    kept = _most_telling(entries)
    several = len(records) > 1
    moves = _OF_MOVES if any(entry.kind == "Moved" for _, entry in entries) else {}
    rows = [_row(entry, [name] if several else [], bool(moves)) for name, entry in kept]
    blocks = {f"rows/{start // SHOWN}": rows[start : start + SHOWN] for start in range(0, len(rows), SHOWN)}
    order = "last" if any(record.state == "running" for record in records) else "first"
    columns = ({"run": "run"} if several else {}) | _FIRST | moves | _LAST
    told = {"rows": len(rows), "left": len(entries) - len(rows), "order": order, "shown": SHOWN}
    return {"ledger": {**told, "columns": columns}, **blocks}


def first_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Choose the rows that the page shows before its script runs; then the reader chooses and orders them."""
    rows = [row for name, block in data.items() if name.startswith("rows/") for row in block]
    return rows[:SHOWN] if data["ledger"]["order"] == "first" else rows[: -SHOWN - 1 : -1]


def _most_telling(entries: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """All where there is room; else what went wrong first, then moves, then changes of phase: every second of them,
    every fourth, and so on."""
    ranked: list[list[int]] = [[], [], []]
    for place, (_, entry) in enumerate(entries):
        went_well = entry.kind == "Moved" and entry.fields.get("verdict") in ("kept", "shrunk")
        ranked[2 if entry.kind == "PhaseChanged" else 1 if went_well else 0].append(place)
    chosen: list[int] = []
    for places in ranked:
        stride = 1
        while -(-len(places) // stride) > ROWS - len(chosen) and stride < len(places):
            stride *= 2
        chosen += places[::stride][: ROWS - len(chosen)]
    return [entries[place] for place in sorted(chosen)]


def _row(entry: Entry, first: list[str], moves: bool) -> list[str]:
    """Make the texts of a row. moves: there are columns for the numbers of moves."""
    fields = entry.fields
    mark, decision, reason = _said(entry)
    numbers = [""] * len(_OF_MOVES) if moves else []
    if entry.kind == "Moved":
        forms = {"anchor": "", "loss": "", "confidence": ".2f", "worth_steps": "+,.0f"}
        known = [(finite(fields.get(name)), form) for name, form in forms.items()]
        texts = ["–" if value is None else f"{value:{form}}" if form else loss_text(value) for value, form in known]
        numbers = [text.replace("-", "−") for text in texts]
    kind = {"Moved": "move", "PhaseChanged": "phase"}.get(entry.kind, "recovery")
    return [
        kind,
        mark,
        *first,
        f"{entry.step:,}",
        clock(entry.seconds).replace(" ", "\u00a0"),
        decision,
        *numbers,
        reason,
    ]


def _said(entry: Entry) -> tuple[str, str, str]:
    """Return (class of its mark, decision, reason)."""
    fields = entry.fields
    match entry.kind:
        case "Moved":
            verdict = str(fields.get("verdict")).replace(" ", "-")
            return f"mark {verdict}", move_words(entry), str(fields.get("reason", ""))
        case "PhaseChanged":
            phase = str(fields.get("phase"))
            return f"phase {phase}", phase.upper(), str(fields.get("reason", ""))
        case "Recovered":
            return "mark recovery", recovery_words(entry), str(fields.get("text", ""))
        case "Grown":
            mark = growth_mark(entry).replace(" ", "-")
            return f"mark {mark}", growth_words(entry), str(fields.get("reason", ""))
        case "Planned":
            return "", f"target: {fields.get('what')}", str(fields.get("text", ""))
        case "Tuned":
            words = assignments(fields.get("change"))
            return "mark recovery", f"tuned: {words}", str(fields.get("ailment", ""))
        case "RateTried":
            tried, loss = finite(fields.get("learning_rate")) or 0.0, finite(fields.get("loss"))
            best = ", the best so far" if fields.get("best") else ""
            reached = "no number" if loss is None else f"held-out loss {loss_text(loss)}"
            return "", f"learning rate {rate_text(tried)} tried", f"{reached} after {fields.get('steps')} steps{best}"
        case "Annealed":
            loss, before = finite(fields.get("loss")), finite(fields.get("before"))
            losses = " -> ".join("no number" if one is None else loss_text(one) for one in (before, loss))
            return "", f"copy annealed over {fields.get('steps')} steps", f"held-out loss {losses}; the run goes on"
        case "Resumed":
            again = int(finite(fields.get("done_again")) or 0)
            told = f"; {counted(again, 'step')} after it {'was' if again == 1 else 'were'} done again" if again else ""
            return "", "resumed", f"went on from a checkpoint{told}"
        case "CheckpointRejected":
            return "", "checkpoint put aside", str(fields.get("reason", ""))
    level = str(fields.get("level", "note"))
    return "", "note" if level == "info" else level, str(fields.get("message", ""))
