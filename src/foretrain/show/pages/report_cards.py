"""Prepare the figures at the top of a report: what prediction was worth, and a card for each number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from foretrain.config.units import clock, counted, format_size, short
from foretrain.show.numbers import finite, mapping
from foretrain.show.pages.render import Cell, Line, Shown, joined, number, percent, sentence
from foretrain.show.pages.report_end import is_open, level_of
from foretrain.show.record import STEPS, RunRecord

_LENGTHS = ((7, ""), (9, "long"), (11, "longer"))
"""A figure in a card has so many characters at the most for each size of letters, in the widest font."""


@dataclass(frozen=True)
class Card:
    """It has a number with its name, and what is said below it; the first card has a sentence beside it."""

    name: str
    figure: Shown
    small: Line = ()
    told: str = ""
    style: str = ""

    @property
    def length(self) -> str:
        """Return the class of a figure that is too long for its card in large letters."""
        text = self.figure.text if isinstance(self.figure, Cell) else str(self.figure or "–")
        return next((style for most, style in _LENGTHS if len(text) <= most), "longest")


# --- what prediction was worth ----------------------------------------------------------------------------------------


def worth(record: RunRecord) -> Card | None:
    """Make the largest card, only where something was measured that can be said."""
    return _exact(record) or _audited(record)


def _exact(record: RunRecord) -> Card | None:
    """Tell what the moves were worth that were judged by the exact loss and kept."""
    exact = mapping(record.summary.get("exact"))
    told = sentence(exact.get("sentence"))
    if not told:
        return None
    told = told if told.endswith(".") else f"{told}."
    steps = finite(exact.get("trend_steps")) or 0
    if steps < 1:
        return Card("Loss reached", number(exact.get("loss")), told=told)
    digit = 10 ** max(0, len(f"{steps:.0f}") - 2)  # two digits are known of it, at the most
    figure = Cell(f"{steps // digit * digit:,.0f}", exact["trend_steps"], unit="steps")
    return Card("Worth of the leaps", figure, told=told, style="gain")


def _audited(record: RunRecord) -> Card | None:
    """Tell the net time saved, where audits measured it."""
    if not record.summary:
        so_far = record.last("gain_percent")
        told = "Of the time to this loss, by its own audits so far."
        return None if so_far is None else Card("Net time saved", number(so_far, "+.1f", " %"), told=told)
    audit = mapping(record.summary.get("audit"))
    if finite(audit.get("gain_percent")) is None:
        return None
    told = sentence(audit.get("sentence"))
    small = () if "interval" in told else _interval(audit)
    told = f"{told}. " if told else ""
    return Card("Net time saved", number(audit["gain_percent"], "+.1f", " %"), small, told, _stands(audit))


def _interval(audit: Mapping[str, object]) -> Line:
    audits = counted(int(finite(audit.get("n")) or 0), "audit")
    low, high = number(audit.get("low"), "+.1f"), number(audit.get("high"), "+.1f")
    if low is None or high is None:
        return [f"{audits}, too few for an interval"]
    return ["95 % interval ", low, " to ", high, f", {audits}"]


def _stands(audit: Mapping[str, object]) -> str:
    low, high = finite(audit.get("low")), finite(audit.get("high"))
    if low is None or high is None:
        return ""
    return "gain" if low > 0 else "slower" if high < 0 else ""


def worth_in_short(record: RunRecord) -> Shown:
    """Say it for a cell of a table."""
    if exact := _exact(record):
        return exact.figure
    audited = _audited(record)
    if audited is None or not isinstance(audited.figure, Cell):
        return None
    small = _interval(mapping(record.summary.get("audit"))) if record.summary else ["so far"]
    return Cell(audited.figure.text, audited.figure.value, small=small)


# --- the other cards -------------------------------------------------------------------------------------------------


def cards(record: RunRecord) -> list[Card]:
    return [*_quality(record), *_effort(record)]


def held_out_loss(record: RunRecord) -> float | None:
    """Return the last one, or that of the summary where the run has ended."""
    if record.summary:
        return finite(record.summary.get("final_val_loss"))
    return finite(record.evaluations[-1].fields.get("loss")) if record.evaluations else None


def training_loss(record: RunRecord) -> float | None:
    known = finite(record.summary.get("final_train_loss"))
    return record.last("loss") if known is None else known


def _quality(record: RunRecord) -> list[Card]:
    summary, held_out, best = record.summary, held_out_loss(record), finite(record.summary.get("best_val_loss"))
    of_tokens = record.started.get("unit") == "tokens"
    made = []
    if held_out is not None:
        notes: list[Line] = [["best ", number(summary["best_val_loss"])]] if best not in (None, held_out) else []
        notes += [[_perplexity(held_out)]] if of_tokens and held_out < 20 else []
        given = summary.get("final_val_loss") if summary else held_out
        made.append(Card("Held-out loss", number(given), joined(notes)))
    if is_open(record):
        last = record.end_forecasts[-1]
        low, high = (number(last.fields.get(name)) for name in ("low", "high"))
        interval: Line = [f"{level_of(last)} interval ", low, " to ", high]
        made.append(Card("Forecast of the end", number(last.fields.get("loss")), interval))
    training = training_loss(record)
    alone = of_tokens and held_out is None and training is not None and training < 20
    below = [_perplexity(training)] if alone and training is not None else []
    made.append(Card("Training loss", number(training), below))
    for name, words in (("accuracy", "Right answers"), ("exact_match", "Exact answers")):
        if finite(summary.get(name)) is not None:
            asked = f"of {finite(summary.get('answered')) or 0:,.0f} held-out questions"
            made.append(Card(words, percent(summary[name]), [asked]))
    made += [Card(f"{name[:1].upper()}{name[1:]}", number(value), ["held out"]) for name, value in metrics(record)]
    return made


def _perplexity(loss: float) -> str:
    value = math.exp(loss)
    return f"perplexity {value:,.0f}" if value >= 1000 else f"perplexity {value:.4g}"


def metrics(record: RunRecord) -> list[tuple[str, float]]:
    """List the user's own measures at the last evaluation, in the order in which they were given."""
    last = mapping(record.evaluations[-1].fields.get("metrics")) if record.evaluations else {}
    return [(str(name), known) for name, value in last.items() if (known := finite(value)) is not None]


def _effort(record: RunRecord) -> list[Card]:
    summary = record.summary
    seconds = summary.get("seconds") if summary else record.seconds
    known, total = finite(seconds), finite(summary.get("total_seconds"))
    more = [] if total is None else [f"{clock(total)} with start-up, evaluation and saving"]
    made = [
        Card("Steps", number(record.step, ",.0f"), [_steps(record)]),
        Card("Time", None if known is None else time_cell(known, seconds), more),
    ]
    if pace := finite(speed(record)):
        made.append(Card("Speed", Cell(short(pace), pace), [f"{record.unit} per second"]))
    if memory := _memory(record):
        made.append(memory)
    return made


def time_cell(seconds: float, given: object = None) -> Cell:
    """Write a time that never stands on two lines."""
    return Cell(clock(seconds).replace(" ", "\u00a0"), given)


def speed(record: RunRecord) -> object:
    return record.summary.get("tokens_per_second") if record.summary else record.last("tokens_per_second")


def _memory(record: RunRecord) -> Card | None:
    """Tell the most memory that was held, on the GPU where there is one."""
    told = [entry.fields for entry in record.memory] + list(mapping(record.summary.get("memory")).values())
    for name, words in (("peak", "on the GPU, at most"), ("resident_peak", "of the process, at most")):
        known = [value for fields in told if (value := finite(mapping(fields).get(name)))]
        if known:
            return Card("Memory", Cell(format_size(max(known), 1), f"{max(known):.0f}"), [words])
    return None


def _steps(record: RunRecord) -> str:
    if not record.summary:
        planned = record.planned_steps
        return f"of {planned:,.0f}" if planned else ""
    if not record.tried:
        return ""
    counts = {phase: finite(count) or 0 for phase, count in mapping(record.summary.get("steps")).items()}
    return ", ".join(f"{count:,.0f} {STEPS.get(phase, phase)}" for phase, count in counts.items() if count)


def moves(record: RunRecord) -> tuple[int, str]:
    """Return (how many were kept, how many had another fate in words)."""
    counts = {str(name).replace("_", " "): count for name, count in mapping(record.summary.get("moves")).items()}
    if not record.summary:
        verdicts = [str(entry.fields.get("verdict")) for entry in record.of_kind("Moved")]
        counts = {name: verdicts.count(name) for name in ("kept", "shrunk", "refused", "rolled back")}
    kept = sum(int(finite(counts.get(name)) or 0) for name in ("kept", "shrunk"))
    others = [f"{count} {name}" for name, count in counts.items() if name != "kept" and finite(count) != 0]
    return kept, ", ".join(others)
