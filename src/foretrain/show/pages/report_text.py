"""Numbers, tables and sentences of a report as markup. Whatever is unknown is a dash."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretrain.show import numbers
from foretrain.show.numbers import loss_text
from foretrain.show.pages.markup import UNKNOWN
from foretrain.show.pages.scales import finite
from foretrain.show.record import RunRecord


def number(value: object, form: str = "", unit: str = "") -> str:
    """Shown rounded, without a form as a loss; the number itself is in the element's value."""
    known = finite(value)
    if known is None:
        return UNKNOWN
    text = f"{known:{form}}{unit}" if form else loss_text(known)
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
    """8.1 s, 4:43, 2h10m; never on two lines."""
    return numbers.clock(seconds).replace(" ", "\u00a0")


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def held_out_loss(record: RunRecord) -> float | None:
    """The last one; of a run that has ended the one that it was summed up with."""
    if record.summary:
        return finite(record.summary.get("final_val_loss"))
    return finite(record.evaluations[-1].fields.get("loss")) if record.evaluations else None


def training_loss(record: RunRecord) -> float | None:
    known = finite(record.summary.get("final_train_loss"))
    return record.last("loss") if known is None else known


def signs(text: str) -> str:
    """With a true minus before numbers, and no line end between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:s|%)(?!\w))", "\u00a0", re.sub(r"(?<![\w.])-(?=\d)", "−", text))
