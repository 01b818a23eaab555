"""The figures at the top of a report: what prediction was worth, where it was measured, and a card for each number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape, unescape

from foretrain.events import in_words
from foretrain.show.console import short
from foretrain.show.pages.markup import UNKNOWN
from foretrain.show.pages.report_text import clock, held_out_loss, mapping, number, percent, signs, training_loss
from foretrain.show.pages.scales import finite
from foretrain.show.record import RunRecord
from foretrain.show.trouble import counted

_LENGTHS = ((7, ""), (9, " long"), (11, " longer"))
"""The most characters of a figure in a card for each size of letters, in the widest font that there may be."""


# --- what prediction was worth ----------------------------------------------------------------------------------------


def worth(record: RunRecord) -> str:
    """The largest card: only where something was measured that can be said."""
    known = _exact(record) or _audited(record)
    if known is None:
        return ""
    name, figure, text, style = known
    return (
        f'<dl class="cards"><div class="card first {style}"><div><dt>{name}</dt><dd class="figure">{figure}</dd></div>'
        f'<dd class="told">{text}</dd></div></dl>'
    )


def _exact(record: RunRecord) -> tuple[str, str, str, str] | None:
    """(name, figure, sentence, style) where moves were judged by the exact loss and kept."""
    exact = mapping(record.summary.get("exact"))
    sentence = str(exact.get("sentence") or "")
    if not sentence:
        return None
    text = escape(signs(f"{sentence[:1].upper()}{sentence[1:]}"))
    text = text if text.endswith(".") else f"{text}."
    worth = finite(exact.get("trend_steps")) or 0
    if worth < 1:
        return "Loss reached", number(exact.get("loss")), text, ""
    digit = 10 ** max(0, len(f"{worth:.0f}") - 2)  # two digits are known of it, at the most
    figure = (
        f'<data value="{exact["trend_steps"]}">{worth // digit * digit:,.0f}</data> <span class="unit">steps</span>'
    )
    return "Worth of the leaps", figure, text, "gain"


def _audited(record: RunRecord) -> tuple[str, str, str, str] | None:
    """The same of the net time saved, where it was measured."""
    audit = mapping(record.summary.get("audit"))
    if not record.summary:
        so_far = record.last("gain_percent")
        told = "Of the time to this loss, by its own audits so far."
        return None if so_far is None else ("Net time saved", number(so_far, "+.1f", " %"), told, "")
    if finite(audit.get("gain_percent")) is None:
        return None
    sentence = escape(signs(str(audit.get("sentence") or "")))
    told = f"{sentence[:1].upper()}{sentence[1:]}. " if sentence else ""
    if "interval" not in sentence:
        told += f'<span class="small">{_interval(audit)}</span>'
    return "Net time saved", number(audit["gain_percent"], "+.1f", " %"), told, _stands(audit)


def _interval(audit: Mapping[str, object]) -> str:
    audits = counted(int(finite(audit.get("n")) or 0), "audit")
    if finite(audit.get("low")) is None or finite(audit.get("high")) is None:
        return f"{audits}, too few for an interval"
    return f"95 % interval {number(audit['low'], '+.1f')} to {number(audit['high'], '+.1f')}, {audits}"


def _stands(audit: Mapping[str, object]) -> str:
    low, high = finite(audit.get("low")), finite(audit.get("high"))
    if low is None or high is None:
        return ""
    return "gain" if low > 0 else "slower" if high < 0 else ""


def worth_in_short(record: RunRecord) -> str:
    """For a cell of a table."""
    if exact := _exact(record):
        return exact[1]
    audited = _audited(record)
    below = _interval(mapping(record.summary.get("audit"))) if record.summary else "so far"
    return UNKNOWN if audited is None else f'{audited[1]}<div class="small">{below}</div>'


# --- the other cards -------------------------------------------------------------------------------------------------


def cards(record: RunRecord) -> str:
    known = [*_quality(record), *_effort(record)]
    made = "".join(
        f'<div class="card"><dt>{name}</dt><dd class="figure{_length(figure)}">{figure}</dd>'
        f'<dd class="small">{below}</dd></div>'
        for name, figure, below in known
    )
    return f'<dl class="cards">{made}</dl>'


def _quality(record: RunRecord) -> list[tuple[str, str, str]]:
    summary, held_out, best = record.summary, held_out_loss(record), finite(record.summary.get("best_val_loss"))
    of_tokens = record.started.get("unit") == "tokens"
    cards = []
    if held_out is not None:
        notes = [f"best {number(summary['best_val_loss'])}"] if best is not None and best != held_out else []
        notes += [_perplexity(held_out)] if of_tokens and held_out < 20 else []
        given = summary.get("final_val_loss") if summary else held_out
        cards.append(("Held-out loss", number(given), ", ".join(notes)))
    training = training_loss(record)
    alone = of_tokens and held_out is None and training is not None and training < 20
    below = _perplexity(training) if alone and training is not None else ""
    cards.append(("Training loss", number(training), below))
    for name, words in (("accuracy", "Right answers"), ("exact_match", "Exact answers")):
        if (share := finite(summary.get(name))) is not None:
            cards.append((words, percent(share), f"of {finite(summary.get('answered')) or 0:,.0f} held-out questions"))
    cards += [(escape(f"{name[:1].upper()}{name[1:]}"), number(value), "held out") for name, value in metrics(record)]
    return cards


def _perplexity(loss: float) -> str:
    value = math.exp(loss)
    return f"perplexity {value:,.0f}" if value >= 1000 else f"perplexity {value:.4g}"


def metrics(record: RunRecord) -> list[tuple[str, float]]:
    """Of the last evaluation, in the order in which they were given."""
    last = mapping(record.evaluations[-1].fields.get("metrics")) if record.evaluations else {}
    return [(str(name), known) for name, value in last.items() if (known := finite(value)) is not None]


def _effort(record: RunRecord) -> list[tuple[str, str, str]]:
    summary = record.summary
    seconds = summary.get("seconds") if summary else record.seconds
    known, total = finite(seconds), finite(summary.get("total_seconds"))
    time = UNKNOWN if known is None else f'<data value="{seconds}">{clock(known)}</data>'
    cards = [
        ("Steps", number(record.step, ",.0f"), _steps(record)),
        ("Time", time, "" if total is None else f"{clock(total)} with start-up, evaluation and saving"),
    ]
    if pace := finite(speed(record)):
        cards.append(("Speed", f'<data value="{pace}">{short(pace)}</data>', escape(f"{record.unit} per second")))
    if memory := _memory(record):
        cards.append(memory)
    return cards


def speed(record: RunRecord) -> object:
    return record.summary.get("tokens_per_second") if record.summary else record.last("tokens_per_second")


def _memory(record: RunRecord) -> tuple[str, str, str] | None:
    """The most that was held, on the GPU where there is one."""
    told = [entry.fields for entry in record.memory] + list(mapping(record.summary.get("memory")).values())
    for name, words in (("peak", "on the GPU, at most"), ("resident_peak", "of the process, at most")):
        known = [value for fields in told if (value := finite(mapping(fields).get(name)))]
        if known:
            return "Memory", f'<data value="{max(known):.0f}">{in_words(max(known))}</data>', words
    return None


def _length(figure: str) -> str:
    """The class of a figure that is too long for its card in large letters."""
    characters = len(unescape(re.sub(r"<span.*</span>|<[^>]*>", "", figure)))
    return next((style for most, style in _LENGTHS if characters <= most), " longest")


def _steps(record: RunRecord) -> str:
    if not record.summary:
        planned = finite(record.started.get("max_steps"))
        return f"of {planned:,.0f}" if planned else ""
    if not record.tried:
        return ""
    words = {"warmup": "warm-up", "full": "full", "predict": "predicted", "correct": "correcting"}
    counts = {phase: finite(count) or 0 for phase, count in mapping(record.summary.get("steps")).items()}
    return escape(", ".join(f"{count:,.0f} {words.get(phase, phase)}" for phase, count in counts.items() if count))


def moves(record: RunRecord) -> tuple[int, str]:
    """(how many were kept, how many had another fate in words)."""
    counts = {str(name).replace("_", " "): count for name, count in mapping(record.summary.get("moves")).items()}
    if not record.summary:
        verdicts = [str(entry.fields.get("verdict")) for entry in record.of_kind("Moved")]
        counts = {name: verdicts.count(name) for name in ("kept", "shrunk", "refused", "rolled back")}
    kept = sum(int(finite(counts.get(name)) or 0) for name in ("kept", "shrunk"))
    others = [f"{count} {name}" for name, count in counts.items() if name != "kept" and finite(count) != 0]
    return kept, ", ".join(others)
