"""The parts of a report that are text: what the run came to, its decisions, forecasts, resources, findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape, unescape

from foretrain.events import in_words
from foretrain.show.console import short
from foretrain.show.looks import MEASURES
from foretrain.show.markup import UNKNOWN, details, settings_table
from foretrain.show.record import RunRecord
from foretrain.show.report_forecasts import calibration, horizons
from foretrain.show.report_health import extremes, findings
from foretrain.show.report_text import (
    clock,
    critical_ailments,
    loss_words,
    mapping,
    number,
    percent,
    saved_time,
    sentence,
    table,
)
from foretrain.show.scales import finite

_BADGES = {"finished": "gain", "stopped early": "gain", "failed": "slower", "interrupted": "caution"}
_LENGTHS = ((6, ""), (8, " long"), (10, " longer"))
"""The most characters of a figure in a card for each size of letters, in the widest font that there may be."""
Records = Sequence[RunRecord]


def sections(records: Records) -> dict[str, str]:
    """Markup of every text section by its name."""
    return {
        "lead": _lead(records),
        "horizons": _each(records, horizons),
        "calibration": _each(records, calibration),
        "layers": _each(records, _layers),
        "resources": _each(records, _resources),
        "findings": _each(records, _findings),
        "setup": _each(records, _setup),
    }


def _each(records: Records, section: Callable[[RunRecord], str]) -> str:
    """The section of every run, under its name where there are several."""
    if len(records) == 1:
        return section(records[0])
    made = [(record.name, section(record)) for record in records]
    return "".join(f"<h3>{escape(name)}</h3>{content}" for name, content in made if content)


# --- what it came to --------------------------------------------------------------------------------------------------


def _lead(records: Records) -> str:
    if len(records) == 1:
        record = records[0]
        look, state = _BADGES.get(record.state, ""), record.state
        if critical_ailments(record):
            look, state = look if look == "slower" else "caution", f"{state}, with critical findings"
        badge = f'<span class="badge {look}">{escape(state)}</span>'
        return (
            f'{badge}<p class="verdict">{escape(sentence(record))}</p>{_facts(record)}{_cards(record)}{_warned(record)}'
        )
    losses = [(loss, record.name) for record in records if (loss := _final_loss(record)) is not None]
    best = f" The lowest held-out loss, {loss_words(min(losses)[0])}, is that of {min(losses)[1]}." if losses else ""
    return f'<p class="verdict">{len(records)} runs.{escape(best)}</p>{_overview(records)}'


def _final_loss(record: RunRecord) -> float | None:
    known = finite(record.summary.get("final_val_loss"))
    if known is None and record.evaluations:
        known = finite(record.evaluations[-1].fields.get("loss"))
    return known


def _facts(record: RunRecord) -> str:
    started = record.started
    parameters = finite(started.get("parameters"))
    facts = [
        f"{short(parameters)} parameters" if parameters else "",
        str(started.get("optimizer") or ""),
        ", ".join(str(started[name]) for name in ("device", "precision") if started.get(name)),
        *(str(text) for name, text in mapping(started.get("details")).items() if name != "folder"),
    ]
    return f'<p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>'


def _cards(record: RunRecord) -> str:
    summary = record.summary
    gain, rests_on, stands = saved_time(record)
    best = summary.get("best_val_loss")
    val = summary.get("final_val_loss") if summary else _final_loss(record)
    train = summary.get("final_train_loss") if summary else record.last("loss")
    seconds = summary.get("seconds") if summary else record.seconds
    speed = summary.get("tokens_per_second") if summary else record.last("tokens_per_second")
    known = finite(seconds)
    pace = [f"{short(finite(speed) or 0)} {escape(record.unit)} per second"] if finite(speed) else []
    total = finite(summary.get("total_seconds"))
    pace += [] if total is None else [f"{clock(total)} with start-up, evaluation and saving"]
    cards = [
        ("Net time saved", gain, rests_on, f"first {stands}"),
        ("Held-out loss", number(val), f"best {number(best)}" if finite(best) is not None else "", ""),
        ("Training loss", number(train), "", ""),
        ("Steps", number(record.step, ",.0f"), _steps(record), ""),
        ("Time", UNKNOWN if known is None else f'<data value="{seconds}">{clock(known)}</data>', ", ".join(pace), ""),
        ("Moves", *_moves(record), ""),
    ]
    for name, words in (("accuracy", "Right answers"), ("exact_match", "Exact answers")):
        if (share := finite(summary.get(name))) is not None:
            asked = f"of {finite(summary.get('answered')) or 0:,.0f} held-out questions"
            cards.insert(1, (words, percent(share), asked, ""))
    made = "".join(
        f'<div class="card {style}"><dt>{name}</dt><dd class="figure{_length(figure)}">{figure}</dd>'
        f'<dd class="small">{below}</dd></div>'
        for name, figure, below, style in cards
    )
    return f'<dl class="cards">{made}</dl>'


def _length(figure: str) -> str:
    """The class of a figure that is too long for its card in large letters."""
    characters = len(unescape(re.sub(r"<span.*</span>|<[^>]*>", "", figure)))
    return next((style for most, style in _LENGTHS if characters <= most), " longest")


def _steps(record: RunRecord) -> str:
    words = {"warmup": "warm-up", "full": "full", "predict": "predicted", "correct": "correcting"}
    counts = {phase: finite(count) or 0 for phase, count in mapping(record.summary.get("steps")).items()}
    if not record.summary:
        planned = finite(record.started.get("max_steps"))
        return f"of {planned:,.0f}" if planned else ""
    return escape(", ".join(f"{count:,.0f} {words.get(phase, phase)}" for phase, count in counts.items() if count))


def _moves(record: RunRecord) -> tuple[str, str]:
    counts = {str(name).replace("_", " "): count for name, count in mapping(record.summary.get("moves")).items()}
    if not record.summary:
        verdicts = [str(entry.fields.get("verdict")) for entry in record.of_kind("Moved")]
        counts = {name: verdicts.count(name) for name in ("kept", "shrunk", "refused", "rolled back")}
    if not counts:
        return "off", "plain run"
    kept = sum(int(finite(counts.get(name)) or 0) for name in ("kept", "shrunk"))
    others = escape(", ".join(f"{count} {name}" for name, count in counts.items() if name != "kept"))
    return f'{number(kept, ",.0f")} <span class="unit">kept</span>', others


def _warned(record: RunRecord) -> str:
    serious = [one for one in findings(record) if one["level"] in ("critical", "warning")]
    if not serious:
        return ""
    text = "1 finding asks" if len(serious) == 1 else f"{len(serious)} findings ask"
    return f'<p class="notice"><a href="#findings">{text} for a look</a>: {escape(serious[0]["text"][:240])}</p>'


def _overview(records: Records) -> str:
    units = {escape(record.unit) for record in records}
    head = [
        "run",
        "state",
        "steps",
        "held-out loss",
        "best",
        "training loss",
        "time",
        f"{units.pop()}/s" if len(units) == 1 else "per second",
        "moves",
        "net time saved",
    ]
    rows = []
    for place, record in enumerate(records):
        summary = record.summary
        seconds = finite(summary.get("seconds")) or record.seconds
        gain, rests_on, _ = saved_time(record)
        rows.append(
            [
                f'<span class="swatch-line run-{place % 8}" aria-hidden="true"></span>{escape(record.name)}',
                escape(record.state),
                number(record.step, ",.0f"),
                number(_final_loss(record)),
                number(summary.get("best_val_loss")),
                number(summary.get("final_train_loss") if summary else record.last("loss")),
                clock(seconds),
                short(finite(summary.get("tokens_per_second")) or record.last("tokens_per_second") or 0),
                _moves(record)[0],
                f'{gain}<div class="small">{rests_on}</div>',
            ]
        )
    return table("What each run came to", head, rows, numbers_from=2, to=9)


# --- resources, findings, setup ---------------------------------------------------------------------------------------


def _resources(record: RunRecord) -> str:
    used: dict[str, dict[str, float]] = {}
    told = [(entry.fields.get("phase"), entry.fields) for entry in record.memory]
    for phase, fields in [*told, *mapping(record.summary.get("memory")).items()]:
        row = used.setdefault(str(phase), {})
        for name in ("allocated", "reserved", "peak", "pinned", "resident_peak"):
            if (value := finite(mapping(fields).get(name))) is not None:
                row[name] = value
    speeds = _speeds(record)
    for phase in speeds:
        used.setdefault(phase, {})
    if not used:
        return '<p class="small">Memory and speed were not logged.</p>'
    names = {
        "peak": "peak on the device",
        "reserved": "reserved",
        "pinned": "pinned on the host",
        "resident_peak": "process, at most",
    }
    shown = [name for name in names if any(name in row for row in used.values())]
    head = ["phase", "steps", f"{escape(record.unit)} per second", *(names[name] for name in shown)]
    steps = mapping(record.summary.get("steps"))
    rows = [
        [
            escape(phase),
            number(steps.get(phase), ",.0f"),
            number(speeds.get(phase), ",.0f"),
            *(
                f'<data value="{row[name]:.0f}">{in_words(row[name])}</data>' if name in row else UNKNOWN
                for name in shown
            ),
        ]
        for phase, row in used.items()
    ]
    return table("Memory and speed per phase", head, rows)


def _speeds(record: RunRecord) -> dict[str, float]:
    """Tokens per second of the entries that ended in each phase, each by its length."""
    tokens: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for before, after in zip(record.progress, record.progress[1:], strict=False):
        spent = after.seconds - before.seconds
        speed = finite(after.fields.get("tokens_per_second"))
        if spent > 0 and speed:
            phase = str(after.fields.get("phase"))
            tokens[phase] = tokens.get(phase, 0.0) + speed * spent
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return {phase: round(tokens[phase] / seconds[phase], 1) for phase in tokens}


def _layers(record: RunRecord) -> str:
    rows = [[escape(layer), *(number(value, ".3g") for value in numbers)] for layer, numbers in extremes(record)]
    if not rows:
        return ""
    head = [
        "layer",
        *(f"{measure}, {which}" for measure in MEASURES.values() for which in ("lowest", "highest", "last")),
    ]
    return details("The numbers behind this chart", table("Lowest, highest and last of every layer", head, rows))


def _findings(record: RunRecord) -> str:
    found = findings(record)
    if not found:
        return "<p>Nothing was found that asks for a change.</p>"
    rows = []
    for one in found:
        times = f" to {one['last']:,} ({one['times']} times)" if one["times"] > 1 and one["last"] else ""
        step = UNKNOWN if one["first"] is None else f"{one['first']:,}{times}"
        place = f" in {one['place']}" if one["place"] else ""
        name = f"<strong>{escape(one['title'])}</strong>{escape(place)}: " if one["title"] else escape(place)
        measured = "" if one["value"] is None else f"{one['measure']} {one['value']:.4g}"
        measured += f" (healthy: {one['healthy']})" if measured and one["healthy"] else ""
        small = f'<div class="small">{escape(measured)}</div>' if measured else ""
        advice = f'<div class="advice">set <code>{escape(one["advice"])}</code></div>' if one["advice"] else ""
        level = f'<span class="level {escape(one["level"])}">{escape(one["level"])}</span>'
        rows.append([level, step, f"{name}{escape(one['text'])}{small}{advice}"])
    return table("What was found, and what to change", ["how bad", "step", "what was found"], rows, numbers_from=9)


def _setup(record: RunRecord) -> str:
    config = mapping(record.summary.get("config")) or record.config
    environment = mapping(record.summary.get("environment"))
    parts = [details("Configuration", settings_table(config), "block") if config else ""]
    parts.append(details("Environment", settings_table(environment), "block") if environment else "")
    made = "".join(parts)
    return made or '<p class="small">The folder holds neither config.toml nor summary.json.</p>'
