"""Numbers, tables and sentences of a report as markup. Whatever is unknown is a dash."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretrain.show.console import duration
from foretrain.show.markup import UNKNOWN
from foretrain.show.record import RunRecord
from foretrain.show.scales import finite
from foretrain.show.trouble import counted


def loss_words(value: float) -> str:
    """Four decimals; of a loss below a thousandth three digits."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.2e}".replace("e-0", "e-")


def number(value: object, form: str = "", unit: str = "") -> str:
    """Shown rounded, without a form as a loss; the number itself is in the element's value."""
    known = finite(value)
    if known is None:
        return UNKNOWN
    text = f"{known:{form}}{unit}" if form else loss_words(known)
    return f'<data value="{value}">{text.replace("-", "−")}</data>'


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f'<data value="{value}">{100 * value:.1f} %</data>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, to: int = 99) -> str:
    """Cells are markup. Columns `numbers_from` to `to` stand to the right; wide tables are moved sideways."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if numbers_from <= place < to else "" for place in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        made = (f"<{tag}{scope}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return framed(caption, line(head, "th"), body)


def framed(caption: str, head: str, body: str) -> str:
    """A table in a region that can be reached and moved with the keyboard."""
    made = f"<table><caption>{escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">{made}</div>'


def clock(seconds: float) -> str:
    """8.1 s, 4:43, 2h10m."""
    return f"{seconds:.1f}\u00a0s" if seconds < 100 else duration(seconds)


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sentence(record: RunRecord) -> str:
    """The run in one sentence, and in a second one what was critical."""
    trouble = _trouble(record)
    return f"{_came_to(record)} {trouble}" if trouble else _came_to(record)


def critical_ailments(record: RunRecord) -> list[str]:
    found = (entry.fields for entry in record.health if entry.kind == "HealthFound")
    return [str(fields.get("ailment")) for fields in found if fields.get("level") == "critical"]


def _trouble(record: RunRecord) -> str:
    ailments = critical_ailments(record)
    if not ailments:
        return ""
    rollbacks = int(finite(mapping(record.summary.get("rollbacks")).get("times")) or 0)
    back = f"; it was rolled back {'once' if rollbacks == 1 else f'{rollbacks:,} times'}" if rollbacks else ""
    return f"{counted(len(ailments), 'critical finding')}: {', '.join(dict.fromkeys(ailments))}{back}."


def _came_to(record: RunRecord) -> str:
    title = str(record.started.get("title") or record.name)
    summary = record.summary
    steps = f"{record.step:,}"
    planned = finite(record.started.get("max_steps")) or 0
    loss = finite(summary.get("final_val_loss")) if summary else _held_out(record)
    reached = "" if loss is None else f" a held-out loss of {loss_words(loss)}"
    if not reached and (last := record.last("loss")) is not None:
        reached = f" a training loss of {loss_words(last)}"
    if record.state == "running":
        at = f"{title} is at step {steps} of {planned:,.0f}"
        return f"{at}, with{reached}." if reached else f"{at}."
    seconds = finite(summary.get("seconds")) or record.seconds
    said = f"{title} came to{reached} in {steps} steps ({clock(seconds)})" if reached else f"{title} did {steps} steps"
    how = {"finished": "", "stopped early": ", where it stopped early", "interrupted": ", where it was interrupted"}
    said += how.get(record.state, f", where it {record.state}")
    audit = str(mapping(summary.get("audit")).get("sentence") or "")
    return re.sub(r"(?<![\w.])-(?=\d)", "−", f"{said}; {audit}." if audit else f"{said}.").replace(" %", "\u00a0%")


def _held_out(record: RunRecord) -> float | None:
    return finite(record.evaluations[-1].fields.get("loss")) if record.evaluations else None


def saved_time(record: RunRecord) -> tuple[str, str, str]:
    """(figure, what it rests on, how it stands) of the net time saved."""
    audit = mapping(record.summary.get("audit"))
    gain = finite(audit.get("gain_percent"))
    if not record.summary:
        so_far = record.last("gain_percent")
        if so_far is None:
            return UNKNOWN, "nothing measured yet" if record.state == "running" else "nothing measured", ""
        return number(so_far, "+.1f", " %"), "by its audits so far", ""
    if gain is None:
        return "not measured", escape(str(audit.get("sentence") or "prediction was off")), ""
    count = int(finite(audit.get("n")) or 0)
    audits = f"{count} audit{'' if count == 1 else 's'}"
    low, high = finite(audit.get("low")), finite(audit.get("high"))
    if low is None or high is None:
        return number(audit["gain_percent"], "+.1f", " %"), f"{audits}, too few for an interval", ""
    stands = "gain" if low > 0 else "slower" if high < 0 else ""
    interval = f"95 % interval {number(audit['low'], '+.1f')} to {number(audit['high'], '+.1f')}, {audits}"
    return number(audit["gain_percent"], "+.1f", " %"), interval, stands
