"""The page of `foretrain report` and `foretrain watch`: one document, in one file with all it needs, or served live."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from foretrain.show.pages.markup import STYLE
from foretrain.show.pages.report_charts import METRICS, charts
from foretrain.show.pages.report_curves import curve_tables
from foretrain.show.pages.report_health import heat_map
from foretrain.show.pages.report_lead import share_done
from foretrain.show.pages.report_ledger import ledger, ledger_rows
from foretrain.show.pages.report_sections import sections
from foretrain.show.pages.report_words import key, words
from foretrain.show.record import RunRecord

_NAVIGATION = {
    "loss": "Loss",
    "findings": "Findings",
    "decisions": "Decisions",
    "prediction": "Prediction",
    "health": "Layers",
    "resources": "Memory and speed",
    "setup": "Configuration",
    "words": "Words",
}
_SCRIPTS = ("page", "charts", "heat", "ledger", "live")
HEAT_COLUMNS = 160
"""Of all runs together."""
_CHARTS = {
    "loss": ("Loss over the run: training and held out.", ""),
    "rate": ("Learning rate over the run.", ""),
    "gradient": ("Gradient norm over the run.", ""),
    "forecast": (
        "Predicted against actual loss, each the mean of a window of steps.",
        "What the predictor said a window before, and what came. The band is as wide as 90 % of the errors before it.",
    ),
    "confidence": (
        "Confidence over the run.",
        "How likely the run thinks the next predicted move is to be kept. Below the threshold it does not try.",
    ),
    "speed": ("Speed over the run.", ""),
    **{f"metric-{place}": ("A measure of the user's own, on held-out data.", "") for place in range(METRICS)},
}
"""What each chart shows, for those who cannot see it; and how to read it."""
_HINT = (
    "Drag over a chart to look closer, double-click to see everything again. Click a name below a chart to hide its "
    "curve. Charts show the lowest and highest value of every stretch; metrics.jsonl has every number."
)


@dataclass(frozen=True)
class Parts:
    """What changes while a run goes on: markup of the text sections, and the data of the charts."""

    title: str
    sections: dict[str, str]
    charts: dict[str, Any]


def parts(records: Sequence[RunRecord], beside: Path | None = None) -> Parts:
    """beside: the folder in which the page will lie, for links to the files of its runs."""
    names = ", ".join(record.name for record in records)
    if len(records) == 1 and (share := share_done(records[0])) is not None:
        names = f"{100 * share:.0f} % · {names}"
    columns = max(40, HEAT_COLUMNS // len(records))
    heat = [found for record in records if (found := heat_map(record, columns))]
    curves = charts(records)
    texts = sections(records, beside) | curve_tables(curves) | {"key": key(curves["shared"])}
    return Parts(f"{names} · foretrain", texts, curves | {"heat": heat} | ledger_rows(records))


def page(records: Sequence[RunRecord], beside: Path | None = None) -> str:
    """One file that needs no network. Its own scripts and no others may run in it."""
    made = parts(records, beside)
    scripts = [asset("uplot.js"), script()]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data:; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style()}</style>'
    return _document(made, head, "".join(f"<script>{script}</script>\n" for script in scripts))


def live_page(made: Parts) -> str:
    """The same page for a server that has style and scripts under names of their own."""
    head = '<link rel="stylesheet" href="/style.css">'
    scripts = '<script src="/uplot.js"></script>\n<script src="/report.js"></script>\n'
    return _document(made, head, scripts, live=True)


@cache
def asset(name: str) -> str:
    return resources.files("foretrain.show.pages").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The page's own script, of several files that share one scope."""
    return "'use strict';\n(() => {\n" + "".join(asset(f"{name}.js") for name in _SCRIPTS) + "})();\n"


def style() -> str:
    return "\n".join((STYLE, asset("uplot.css"), asset("report.css")))


def as_data(value: Any) -> str:
    """JSON that can stand in a page: nothing in it can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- the document -----------------------------------------------------------------------------------------------------


def _document(made: Parts, head: str, scripts: str, live: bool = False) -> str:
    absent = _absent(made)
    links = "".join(
        f'<li{" hidden" if name in absent else ""}><a href="#{name}">{text}</a></li>'
        for name, text in _NAVIGATION.items()
    )
    status = '<span id="status" role="status">Connecting</span>' if live else ""
    what = "foretrain · live" if live else "foretrain · run report"
    return f"""<!doctype html>
<html lang="en"{" data-live" if live else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="foretrain">
<title>{escape(made.title)}</title>
<link rel="icon" href="data:,">
{head}
</head>
<body>
<a class="skip" href="#loss">Skip to the charts</a>
<header>
<div class="top"><p class="product">{what}</p>{status}</div>
{_section(made, "lead")}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{_body(made)}
</main>
<footer><p class="small">{_HINT}</p></footer>
<script type="application/json" id="data">{as_data(made.charts)}</script>
{scripts}</body>
</html>
"""


def _absent(made: Parts) -> set[str]:
    """Sections that have nothing to say in this run."""
    absent = {"health"} if not made.charts["heat"] else set()
    return absent | ({"prediction"} if made.charts["shared"]["prediction"] == "off" else set())


def _body(made: Parts) -> str:
    controls = '<div class="controls"><div class="choices" data-label="Axes of the charts"></div></div>'
    beside = _chart(made, "rate", 200, "Learning rate") + _chart(made, "gradient", 200, "Gradient norm")
    measured = "".join(_metric(made, f"metric-{place}") for place in range(METRICS))
    loss = (
        f'{controls}{_chart(made, "loss", 380, after=_section(made, "key"))}<div class="two">{beside}{measured}</div>'
    )
    heat = (
        '<p class="lead">A row per layer, a column per look. A dark row hardly learns, a bright column explodes. '
        'Ratios are relative to the size of the weights, so that layers can be compared.</p><div class="choices" '
        'data-label="What is measured"></div><div data-heat></div>'
    )
    absent = _absent(made)
    speed = _chart(made, "speed", 200)
    return "\n".join(
        [
            _part("loss", "Loss", loss),
            _part("findings", "Findings and advice", _section(made, "findings")),
            _part("decisions", "Decisions", f'<div id="ledger">{ledger(made.charts)}</div>'),
            _part("prediction", _section(made, "prediction-title", "span"), _prediction(made), "prediction" in absent),
            _part("health", "Layers", f"<figure>{heat}{_section(made, 'layers')}</figure>", "health" in absent),
            _part("resources", "Memory and speed", f"{speed}{_section(made, 'resources')}"),
            _part("setup", "Configuration and environment", _section(made, "setup")),
            _part("words", "Words", words()),
        ]
    )


def _prediction(made: Parts) -> str:
    """Folded where nothing was tried: then there is nothing in it that has to be known."""
    state = " open" if made.charts["shared"]["prediction"] == "tried" else ""
    forecasts = _chart(made, "forecast", 260, "Predicted against actual loss") + _section(made, "horizons")
    confidence = _chart(made, "confidence", 200, "Confidence") + _section(made, "calibration")
    fold = f'<details class="fold"{state}><summary>Forecasts and confidence</summary>{forecasts}{confidence}</details>'
    return f"{_section(made, 'prediction')}{fold}"


def _part(name: str, heading: str, content: str, hidden: bool = False) -> str:
    state = " hidden" if hidden else ""
    title = f'<h2 id="{name}-heading">{heading}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-heading"{state}>{title}{content}</section>'


def _section(made: Parts, name: str, tag: str = "div") -> str:
    return f'<{tag} data-section="{name}">{made.sections[name]}</{tag}>'


def _metric(made: Parts, name: str) -> str:
    """A chart that is not to be seen while there is nothing to show; it is named by its curve."""
    label = next((series["label"] for run in made.charts[name]["runs"] for series in run["series"]), "")
    drawn = _chart(made, name, 200, label or "A measure")
    return drawn.replace("<figure", "<figure data-optional" if label else "<figure data-optional hidden", 1)


def _chart(made: Parts, name: str, height: int, heading: str = "", after: str = "") -> str:
    label, lead = _CHARTS[name]
    title = f"<h3>{escape(heading)}</h3>" if heading else ""
    told = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    drawn = f'<div data-chart="{name}" data-height="{height}" role="group" aria-label="{escape(label)}">'
    drawn += "<noscript>This chart needs script.</noscript></div>"
    return f"<figure>{title}{told}{drawn}{after}{_section(made, f'{name}-numbers')}</figure>"
