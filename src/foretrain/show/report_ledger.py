"""The ledger of a run: every decision with its reason, in the order in which they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretrain.show.record import Entry, RunRecord
from foretrain.show.report_charts import move_words, recovery_words
from foretrain.show.report_health import change_words
from foretrain.show.report_text import clock, framed, loss_words, number
from foretrain.show.scales import finite, rate

ROWS = 4000
"""In a page; the others are in `metrics.jsonl`."""
SHOWN = 100
"""At first, and more when asked for; also how many are sent together to a page that is live."""
_FILTERS = {"all": "everything", "move": "moves", "phase": "phases", "recovery": "recoveries"}
_ORDERS = {"first": "oldest first", "last": "newest first"}
_KINDS = {"Moved": "move", "PhaseChanged": "phase"}
_HEAD = ("step", "time", "decision", "loss before", "loss after", "confidence", "worth", "reason")
_EXTRA = ("loss before", "loss after", "confidence", "worth")
"""What a narrow screen has no room for."""


def ledger_rows(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The ledger as data: {"ledger": counts, "rows/0": [[kind, markup], ...], "rows/1": ...}. Rows that are known stay
    where they are when others come, so that a live page is sent the last ones only."""
    entries = [(record.name, entry) for record in records for entry in record.decisions]
    kept = _most_telling(entries)
    several = len(records) > 1
    rows = [[_kind(entry), _row(name if several else "", entry)] for name, entry in kept]
    blocks = {f"rows/{start // SHOWN}": rows[start : start + SHOWN] for start in range(0, len(rows), SHOWN)}
    order = "last" if any(record.state == "running" for record in records) else "first"
    told = {"rows": len(rows), "left": len(entries) - len(rows), "order": order, "several": several, "shown": SHOWN}
    return {"ledger": told, **blocks}


def ledger(data: Mapping[str, Any]) -> str:
    """The table with its first rows; the page's script shows the others, chosen and ordered as the reader likes."""
    told = data["ledger"]
    rows = [row for name, block in data.items() if name.startswith("rows/") for row in block]
    rows = rows[:SHOWN] if told["order"] == "first" else rows[: -SHOWN - 1 : -1]
    names = ("run", *_HEAD) if told["several"] else _HEAD
    head = "".join(f'<th scope="col"{_number(name)}>{name}</th>' for name in names)
    choices = _choice("show", _FILTERS, "all", "Which decisions are shown")
    choices += _choice("order", _ORDERS, str(told["order"]), "In which order")
    body = "".join(markup for _, markup in rows)
    more = '<p class="more"><span data-count role="status"></span></p>'
    made = framed("Every decision with its reason", f"<tr>{head}</tr>", body)
    return f'<div class="controls"><div class="choices">{choices}</div></div>{made}{more}'


def _choice(name: str, texts: Mapping[str, str], chosen: str, label: str) -> str:
    buttons = "".join(
        f'<button type="button" data-{name}="{kind}" aria-pressed="{str(kind == chosen).lower()}">{text}</button>'
        for kind, text in texts.items()
    )
    return f'<div class="choose" role="group" aria-label="{label}">{buttons}</div>'


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


def _kind(entry: Entry) -> str:
    return _KINDS.get(entry.kind, "recovery")


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
    decision, reason = _said(entry)
    numbers = f'<td class="extra" colspan="{len(_EXTRA)}"></td>'
    if entry.kind == "Moved":
        cells = [number(fields.get(name), ".5g") for name in ("anchor", "loss")]
        cells += [number(fields.get("confidence"), ".2f"), number(fields.get("worth_steps"), "+,.0f")]
        numbers = "".join(f'<td class="number extra">{cell}</td>' for cell in cells)
    first = f'<td class="run">{escape(run)}</td>' if run else ""
    place = f'<td class="number">{entry.step:,}</td><td class="number">{clock(entry.seconds)}</td>'
    return (
        f'<tr>{first}{place}<td class="decision">{decision}</td>{numbers}<td class="reason">{escape(reason)}</td></tr>'
    )


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
            action = "advice" if fields.get("advice") else recovery_words(entry)
            return f'<i class="mark recovery" aria-hidden="true"></i>{escape(action)}', str(fields.get("text", ""))
        case "Tuned":
            words = change_words(fields.get("change"))
            return f'<i class="mark recovery" aria-hidden="true"></i>tuned: {escape(words)}', str(
                fields.get("ailment", "")
            )
        case "RateTried":
            tried, loss = finite(fields.get("learning_rate")) or 0.0, finite(fields.get("loss"))
            best = ", the best so far" if fields.get("best") else ""
            reached = "no number" if loss is None else f"held-out loss {loss_words(loss)}"
            return f"learning rate {rate(tried)} tried", f"{reached} after {fields.get('steps')} steps{best}"
        case "Resumed":
            return "resumed", "went on from a checkpoint; what came after it was done again"
        case "CheckpointRejected":
            return "checkpoint put aside", str(fields.get("reason", ""))
    return escape(str(fields.get("level", "note"))), str(fields.get("message", ""))
