"""The parts of a report that are text, each by its name: forecasts, resources, findings, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from foretrain.events import in_words
from foretrain.show.pages.looks import MEASURES
from foretrain.show.pages.markup import UNKNOWN, details, settings_table
from foretrain.show.pages.report_forecasts import calibration, horizons, said_of_prediction
from foretrain.show.pages.report_health import extremes, findings
from foretrain.show.pages.report_lead import lead
from foretrain.show.pages.report_text import mapping, number, table
from foretrain.show.pages.report_words import PHASES
from foretrain.show.pages.scales import finite
from foretrain.show.record import RunRecord

Records = Sequence[RunRecord]


def sections(records: Records, beside: Path | None = None) -> dict[str, str]:
    """Markup of every text section by its name. beside: the folder of the page, for links to the files of its runs."""
    return {
        "lead": lead(records, beside),
        "prediction-title": "Prediction" if any(record.tried for record in records) else "Prediction (not tried)",
        "prediction": _each(records, said_of_prediction),
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
            escape(PHASES.get(phase, phase)),
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
    """How much per second in the entries that ended in each phase, each by its length."""
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
