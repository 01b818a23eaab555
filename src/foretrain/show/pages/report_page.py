"""Make the page of `foretrain report` and `foretrain watch`: in one file with all it needs, or served live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from foretrain.config.units import format_size
from foretrain.show.numbers import finite, mapping
from foretrain.show.pages.charts import MARKS, PHASES, key
from foretrain.show.pages.render import Cell, PageTable, macro, number, one_file, script, served, settings_table
from foretrain.show.pages.report_cards import moves
from foretrain.show.pages.report_charts import METRICS, charts
from foretrain.show.pages.report_end import said_of_the_end
from foretrain.show.pages.report_forecasts import calibration, horizons, said_of_prediction
from foretrain.show.pages.report_health import findings, heat_map, layer_table
from foretrain.show.pages.report_lead import lead, share_done
from foretrain.show.pages.report_ledger import first_rows, ledger_rows
from foretrain.show.record import RunRecord

SCRIPTS = ("page", "charts", "report", "heat", "ledger", "live")
HEAT_COLUMNS = 160
"""The heat maps of all runs together have so many columns."""
_MEMORY = {
    "peak": "peak on the device",
    "reserved": "reserved",
    "pinned": "pinned on the host",
    "resident_peak": "process, at most",
}
_WORDS = {
    "loss": "how wrong the model is; lower is better. The training loss is measured on what it learns from, the "
    "held-out loss on data that it never learns from.",
    "perplexity": "e to the loss: among how many tokens the model is in doubt, on average.",
    "gradient norm": "how steep the loss is. A jump says that training is not stable.",
    "move": "a jump of the weights to where they are forecast to be some steps later. It is checked on data before it "
    "is kept; a refused move or one that is rolled back leaves no trace in the weights.",
    "leap": "a move over many steps at once. Where every batch gives the same loss, a chain of leaps is judged by it.",
    "window": "the steps over which the weights are watched for one forecast.",
    "audit": "the run goes on from one step with the move and without it, to measure what it is worth.",
    "confidence": "how likely the next move is to be kept, by what came of the ones before.",
    "phase": "full: ordinary steps. Warm-up: ordinary steps before forecasts begin. Predict: a move is made. Correct: "
    "ordinary steps that check a move.",
    "forecast of the end": "the held-out loss with which the run will end, forecast from its curve and from the plan "
    "of its learning rate. The end should lie in the interval as often as it says.",
    "R²": "the share of the weights' motion that was forecast: 1 is exact, 0 no better than standing still.",
}
"""What is said in a report must not need another page."""
Told = TypeVar("Told")
Records = Sequence[RunRecord]


@dataclass(frozen=True)
class Parts:
    """It holds what changes while a run goes on: markup of the text sections, and the data of the charts."""

    title: str
    sections: dict[str, str]
    charts: dict[str, Any]


def parts(records: Records, beside: Path | None = None) -> Parts:
    """Make what changes of the page. beside: the folder in which it will lie, for links to the files of its runs."""
    names = ", ".join(record.name for record in records)
    if len(records) == 1 and (share := share_done(records[0])) is not None:
        names = f"{100 * share:.0f} % · {names}"
    columns = max(40, HEAT_COLUMNS // len(records))
    heat = [found for record in records if (found := heat_map(record, columns))]
    drawn = charts(records)
    over_run = {name: chart for name, chart in drawn.items() if name != "shared" and "x" not in chart}
    tables = {f"{name}-numbers": _made("behind", _ends(chart)) for name, chart in over_run.items()}
    data = drawn | {"heat": heat} | ledger_rows(records)
    return Parts(f"{names} · foretrain", _sections(records, drawn["shared"], beside) | tables, data)


def page(records: Records, beside: Path | None = None) -> str:
    made = parts(records, beside)
    return one_file("report.html", SCRIPTS, made.charts, **_layout(made))


def live_page(made: Parts) -> str:
    return served("report.html", made.charts, **_layout(made))


def live_script() -> str:
    return script(SCRIPTS)


def _layout(made: Parts) -> dict[str, Any]:
    """Return what the template of the document asks for beside the data."""
    prediction, metrics = made.charts["shared"]["prediction"], [f"metric-{place}" for place in range(METRICS)]
    absent = {"health": not made.charts["heat"], "prediction": prediction == "off"}
    optional = ["end", "horizons", "calibration", "blocks", "rates", *metrics]
    return {
        "title": made.title,
        "sections": made.sections,
        "absent": [name for name, hidden in absent.items() if hidden],
        "drawn": [name for name in optional if any(run["series"] for run in made.charts[name]["runs"])],
        "metrics": metrics,
        "titles": {name: made.charts[name]["title"] for name in metrics},
        "tried": prediction == "tried",
        "ledger": made.charts["ledger"],
        "rows": first_rows(made.charts),
        "words": _WORDS,
    }


# --- the text sections ------------------------------------------------------------------------------------------------


def _sections(records: Records, shared: Mapping[str, Any], beside: Path | None) -> dict[str, str]:
    """Make the markup of every text section by its name."""
    tried = any(record.tried for record in records)
    layers = [(name, found) for name, found in _each(records, layer_table) if found]
    return {
        "lead": _made("lead", lead(records, beside)),
        "key": _made("signs", _key(shared)),
        "prediction-title": "Prediction" if tried else "Prediction (not tried)",
        "prediction": _made("prediction", _each(records, lambda record: said_of_prediction(record, *moves(record)))),
        "end": _made("scores", [one for one in _each(records, said_of_the_end) if one[1]["said"]]),
        "horizons": _made("scores", _each(records, horizons)),
        "calibration": _made("scores", [one for one in _each(records, calibration) if one[1]["table"]]),
        "layers": _made("layers", layers),
        "resources": _made("resources", _each(records, _resources)),
        "findings": _made("findings", _each(records, findings)),
        "setup": _made("setup", _each(records, _setup)),
    }


def _made(name: str, told: object) -> str:
    return macro("report_sections.html", name, told)


def _each(records: Records, section: Callable[[RunRecord], Told]) -> list[tuple[str, Told]]:
    """List (name, section) of every run; a single run needs no name."""
    return [(record.name if len(records) > 1 else "", section(record)) for record in records]


def _key(shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tell what those phases and marks mean that there are."""
    runs = shared["runs"]
    phases = {phase for run in runs for _, _, phase, _ in run["phases"]} if shared["prediction"] == "tried" else set()
    marks = {kind for run in runs for _, _, kind, _, _ in run["marks"]}
    return key([name for name in PHASES if name in phases], [name for name in MARKS if name in marks])


def _ends(chart: Mapping[str, Any]) -> PageTable | None:
    """List the ends and extremes of every curve, for readers who cannot see it."""
    rows = []
    for run in chart["runs"]:
        for series in run["series"]:
            known = [point for point in zip(series["values"], series["steps"], strict=True) if point[0] is not None]
            name = f"{run['name']}: {series['label']}" if len(chart["runs"]) > 1 else series["label"]
            ends = [number(value, ".5g") for value in (known[0][0], known[-1][0])]
            found = [(number(value, ".5g"), number(step, ",.0f")) for value, step in (min(known), max(known))]
            rows.append([name, *ends, *(shown for pair in found for shown in pair)])
    head = ["curve", "first", "last", "lowest", "at step", "highest", "at step"]
    return PageTable("Ends and extremes of every curve", head, rows) if rows else None


def _resources(record: RunRecord) -> PageTable | None:
    used: dict[str, dict[str, float]] = {}
    told = [(entry.fields.get("phase"), entry.fields) for entry in record.memory]
    for phase, fields in [*told, *mapping(record.summary.get("memory")).items()]:
        row = used.setdefault(str(phase), {})
        row |= {name: value for name in _MEMORY if (value := finite(mapping(fields).get(name))) is not None}
    speeds = _speeds(record)
    for phase in speeds:
        used.setdefault(phase, {})
    if not used:
        return None
    shown = [name for name in _MEMORY if any(name in row for row in used.values())]
    steps = mapping(record.summary.get("steps"))
    rows = [
        [
            PHASES.get(phase, phase),
            number(steps.get(phase), ",.0f"),
            number(speeds.get(phase), ",.0f"),
            *(Cell(format_size(row[name], 1), f"{row[name]:.0f}") if name in row else None for name in shown),
        ]
        for phase, row in used.items()
    ]
    head = ["phase", "steps", f"{record.unit} per second", *(_MEMORY[name] for name in shown)]
    return PageTable("Memory and speed per phase", head, rows)


def _speeds(record: RunRecord) -> dict[str, float]:
    """Reckon how much was done per second in each phase: the mean of the entries that ended in it, by their lengths."""
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


def _setup(record: RunRecord) -> dict[str, PageTable | None]:
    config = mapping(record.summary.get("config")) or record.config
    environment = mapping(record.summary.get("environment"))
    told = {"config": config, "environment": environment}
    return {name: settings_table(settings) if settings else None for name, settings in told.items()}
