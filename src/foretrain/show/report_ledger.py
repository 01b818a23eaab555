"""The ledger of a run: every decision with its reason, in the order in which they were made."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from foretrain.show.record import Entry, RunRecord
from foretrain.show.report_charts import move_words
from foretrain.show.report_health import change_words
from foretrain.show.report_text import clock, framed, number
from foretrain.show.scales import finite, rate

ROWS = 1500
"""In a page; the others are in `metrics.jsonl`."""
_FILTERS = {"all": "everything", "move": "moves", "phase": "phases", "recovery": "recoveries"}
_KINDS = {"Moved": "move", "PhaseChanged": "phase"}
_HEAD = ("step", "time", "decision", "loss before", "loss after", "confidence", "worth", "reason")
_EXTRA = ("loss before", "loss after", "confidence", "worth")
"""What a narrow screen has no room for."""


def ledger(records: Sequence[RunRecord]) -> str:
    """The rows of all runs, with their names where there are several."""
    entries = [(record.name, entry) for record in records for entry in record.decisions]
    kept = _most_telling(entries)
    several = len(records) > 1
    head = "".join(f'<th scope="col"{_number(name)}>{name}</th>' for name in (("run", *_HEAD) if several else _HEAD))
    body = "".join(_row(name if several else "", entry) for name, entry in kept)
    if not body:
        return "<p>No decision was made yet.</p>"
    buttons = "".join(
        f'<button type="button" data-show="{kind}" aria-pressed="{str(kind == "all").lower()}">{text}</button>'
        for kind, text in _FILTERS.items()
    )
    left = len(entries) - len(kept)
    note = f'<p class="small">{left:,} changes of phase and kept moves more are in metrics.jsonl.</p>' if left else ""
    choose = f'<div class="choose" role="group" aria-label="Which decisions are shown">{buttons}</div>'
    return f"{choose}{framed('Every decision with its reason', f'<tr>{head}</tr>', body)}{note}"


def _most_telling(entries: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """All where there is room; else what went wrong first, then moves, then changes of phase, evenly spread."""
    if len(entries) <= ROWS:
        return entries
    ranked: list[list[int]] = [[], [], []]
    for place, (_, entry) in enumerate(entries):
        went_well = entry.kind == "Moved" and entry.fields.get("verdict") in ("kept", "shrunk")
        ranked[2 if entry.kind == "PhaseChanged" else 1 if went_well else 0].append(place)
    chosen: list[int] = []
    for places in ranked:
        room = min(ROWS - len(chosen), len(places))
        chosen += [places[number * len(places) // room] for number in range(room)]
    return [entries[place] for place in sorted(chosen)]


def _number(name: str) -> str:
    return (
        ""
        if name in ("run", "decision", "reason")
        else ' class="number extra"'
        if name in _EXTRA
        else ' class="number"'
    )


def _row(run: str, entry: Entry) -> str:
    fields = entry.fields
    kind = _KINDS.get(entry.kind, "recovery")
    decision, reason = _said(entry)
    if entry.kind == "Moved":
        losses = [number(fields.get(name), ".5g") for name in ("anchor", "loss")]
        cells = [*losses, number(fields.get("confidence"), ".2f"), number(fields.get("worth_steps"), "+,.0f")]
    else:
        cells = [""] * len(_EXTRA)
    first = f'<td class="run">{escape(run)}</td>' if run else ""
    numbers = "".join(f'<td class="number extra">{cell}</td>' for cell in cells)
    place = f'<td class="number">{entry.step:,}</td><td class="number">{clock(entry.seconds)}</td>'
    return f'<tr class="{kind}">{first}{place}<td>{decision}</td>{numbers}<td class="reason">{escape(reason)}</td></tr>'


def _said(entry: Entry) -> tuple[str, str]:
    """(decision as markup, reason)."""
    fields = entry.fields
    match entry.kind:
        case "Moved":
            verdict = str(fields.get("verdict"))
            mark = f'<i class="mark {escape(verdict.replace(" ", "-"))}" aria-hidden="true"></i>'
            return f"{mark}{escape(move_words(entry))}", str(fields.get("reason", ""))
        case "PhaseChanged":
            phase = str(fields.get("phase"))
            return f'<i class="phase {escape(phase)}" aria-hidden="true"></i>{escape(phase.upper())}', str(
                fields.get("reason", "")
            )
        case "Recovered":
            action = "advice" if fields.get("advice") else str(fields.get("action", "")).replace("_", " ")
            return f'<i class="mark recovery" aria-hidden="true"></i>{escape(action)}', str(fields.get("text", ""))
        case "Tuned":
            words = change_words(fields.get("change"))
            return f'<i class="mark recovery" aria-hidden="true"></i>tuned: {escape(words)}', str(
                fields.get("ailment", "")
            )
        case "RateTried":
            tried, loss = finite(fields.get("learning_rate")) or 0.0, finite(fields.get("loss"))
            best = ", the best so far" if fields.get("best") else ""
            reached = "no number" if loss is None else f"held-out loss {loss:.4f}"
            return f"learning rate {rate(tried)} tried", f"{reached} after {fields.get('steps')} steps{best}"
        case "Resumed":
            return "resumed", "went on from a checkpoint; what came after it was done again"
        case "CheckpointRejected":
            return "checkpoint put aside", str(fields.get("reason", ""))
    return escape(str(fields.get("level", "note"))), str(fields.get("message", ""))
