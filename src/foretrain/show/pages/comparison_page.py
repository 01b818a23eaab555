"""The page that `foretrain compare` writes: the verdict first, then what it rests on, down to every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretrain.show.pages.comparison_charts import (
    budget_figure,
    curve_figures,
    ladder_figure,
    phases_figure,
    sweep_figure,
)
from foretrain.show.pages.comparison_runs import Comparison
from foretrain.show.pages.drawing import marker, svg
from foretrain.show.pages.markup import UNKNOWN, details, document, scrolling, settings_table, table
from foretrain.show.pages.row_charts import Ratio, interval_axis, interval_cell, ratio_range
from foretrain.show.pages.scales import finite, rate

_BADGES = {"gain": "gain", "slower": "slower", "one run": "caution", "incomplete": "caution"}
_FOREST = 200


def page(result: Mapping[str, Any]) -> str:
    """A comparison as one HTML file. Whatever is unknown (null, NaN) is shown as a dash."""
    comparison = Comparison(result)
    sections = [
        _top(result),
        _arms(comparison),
        curve_figures(comparison),
        budget_figure(comparison),
        sweep_figure(comparison),
        phases_figure(comparison),
        _ladder(comparison),
        _method(result),
        _runs(comparison),
        details("Configuration", settings_table(_mapping(result["config"])), "block"),
        details("Environment", settings_table(_mapping(result["environment"])), "block"),
        f"<h2>Do it again</h2><pre><code>{escape(str(result['command']))}</code></pre>",
    ]
    return document(str(result["title"]), "\n".join(section for section in sections if section))


# --- numbers as text --------------------------------------------------------------------------------------------------


def _shown(value: object, form: str, unit: str = "") -> str:
    number = finite(value)
    return UNKNOWN if number is None else f"{number:{form}}{unit}".replace("-", "−")


def _count(value: object) -> str:
    return _shown(value, ",.0f")


def _rate(value: object) -> str:
    number = finite(value)
    return UNKNOWN if number is None else rate(number)


def _interval(value: object, form: str, unit: str = "") -> str:
    """A mean with its interval, which is left out where there is none."""
    parts = _mapping(value)
    if finite(parts.get("mean")) is None:
        return UNKNOWN
    text = _shown(parts["mean"], form, unit)
    if finite(parts.get("low")) is None or finite(parts.get("high")) is None:
        return text
    return f'{text} <span class="small">({_shown(parts["low"], form)} to {_shown(parts["high"], form)})</span>'


def _small(text: object) -> str:
    return f'<div class="small">{escape(str(text))}</div>' if text else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# --- sections ---------------------------------------------------------------------------------------------------------


def _top(result: Mapping[str, Any]) -> str:
    analysis, settings = result["analysis"], _mapping(result["settings"])
    verdict = str(analysis["verdict"])
    environment = _mapping(result["environment"])
    seeds = settings.get("seeds") or []
    facts = [
        str(result["date"] or "")[:16].replace("T", " "),
        f"commit {str(result['commit'])[:12]}" if result["commit"] else "",
        str(environment.get("device") or environment.get("gpu") or ""),
        f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}" if isinstance(seeds, Sequence) else "",
        f"{len(result['runs'])} runs",
    ]
    parts = [
        f'<div class="top"><h1>{escape(str(result["title"]))}</h1></div>',
        f'<span class="badge {_BADGES.get(verdict, "")}">{escape(verdict)}</span>',
        f'<p class="verdict">{escape(str(analysis["sentence"]))}</p>',
        f'<p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>',
    ]
    if not result["complete"]:
        parts.append(_still_to_run([str(run) for run in result["missing"]]))
    return "\n".join(parts)


def _still_to_run(missing: Sequence[str]) -> str:
    text = f"This comparison is not complete: {len(missing)} run{'' if len(missing) == 1 else 's'} still to do."
    listed = "".join(f"<li>{escape(run)}</li>" for run in missing)
    return f'<div class="notice">{text}{details("Which", f"<ul>{listed}</ul>") if missing else ""}</div>'


def _arms(comparison: Comparison) -> str:
    rows = [_ratio(comparison, arm) for arm in comparison.arms]
    bounds = ratio_range(rows)
    head = [
        "<th>arm</th>",
        f'<th class="forest">speed-up, 95 % interval{interval_axis(bounds, _FOREST)}</th>',
        '<th class="number">speed-up</th><th class="number">final held-out loss,<br>difference to plain</th>',
        '<th class="number">time (s)</th><th class="number">backward<br>passes</th>',
        '<th class="number">learning<br>rate</th>',
        '<th class="number">runs</th><th class="number">smallest<br>effect that<br>could show</th>',
    ]
    body = "".join(_arm(comparison, arm, row, bounds) for arm, row in zip(comparison.arms, rows, strict=True))
    lead = (
        "Speed-up: the seconds plain needs to reach the loss at which an arm ended, over the seconds that the arm "
        "took, with everything charged. Right of the line at 1 is faster."
    )
    made = scrolling(f"<tr>{''.join(head)}</tr>", body, "arms")
    return f'<h2>The arms</h2><p class="lead">{lead}</p><figure>{made}</figure>'


def _ratio(comparison: Comparison, arm: Mapping[str, Any]) -> Ratio:
    speedup = _mapping(arm["speedup"])
    bounds = finite(speedup.get("mean")), finite(speedup.get("low")), finite(speedup.get("high"))
    return Ratio(str(arm["label"]), *bounds, look=comparison.look(arm["arm"]))


def _arm(comparison: Comparison, arm: Mapping[str, Any], row: Ratio, bounds: tuple[float, float]) -> str:
    sample = svg(f'<g class="s{row.look}">{marker(row.look, 8, 8, 4.6)}</g>', "", 16, 16)
    said = [str(arm[key]) for key in ("meaning", "note") if arm.get(key)]
    about = "".join(_small(text) for text in said)
    speedup = "1" if arm["arm"] == "plain" and row.mean is None else _interval(arm["speedup"], ".3f", "×")
    speedup = f'identical<div class="small">{speedup}</div>' if arm.get("identical") else speedup
    forest = (
        interval_cell(row, bounds, _FOREST) if row.mean is not None else interval_cell(Ratio("", None), bounds, _FOREST)
    )
    deviation = finite(arm["loss_deviation"])
    loss = _shown(arm["loss_mean"], ".4f") + ("" if deviation is None else f" ± {deviation:.4f}")
    difference = _mapping(arm["loss_difference"])
    if arm["arm"] != "plain" and finite(difference.get("mean")) is not None:
        loss += f'<div class="small">{_interval(difference, "+.4f").replace(" <span", "<br><span")}</div>'
    cells = [
        speedup.replace(" <span", "<br><span"),
        loss,
        _shown(arm["seconds_mean"], ".1f"),
        _count(arm["backward_passes_mean"]),
        _rate(arm["learning_rate"]),
        _count(arm["n"]),
        _shown(arm["smallest_detectable"], ".3f", "×"),
    ]
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    name = f'<td><span class="swatch" aria-hidden="true">{sample}</span>{escape(str(arm["label"]))}{about}</td>'
    claim = ' class="claim"' if arm["arm"] == "hybrid" else ""
    return f'<tr{claim}>{name}<td class="forest">{forest}</td>{numbers}</tr>'


def _ladder(comparison: Comparison) -> str:
    if not comparison.ladder:
        return ""
    head = ["rung", "setting", "final held-out loss", "time (s)", "over the rung below", "over the first", "runs"]
    rows = [
        [
            escape(str(rung["rung"])) + _small(rung["note"]),
            f"<code>{escape(str(rung['setting']))}</code>",
            _shown(rung["loss_mean"], ".4f"),
            _shown(rung["seconds_mean"], ".1f"),
            _interval(rung["speedup"], ".2f", "×"),
            _shown(rung["cumulative"], ".2f", "×"),
            _count(rung["n"]),
        ]
        for rung in comparison.ladder
    ]
    lead = "Each rung is the one below with one thing added, so that each gain is counted where it arises."
    made = f"<figure>{table(head, rows, numbers_from=2)}</figure>"
    return f'<h2>The ladder</h2><p class="lead">{lead}</p>{ladder_figure(comparison)}{made}'


def _method(result: Mapping[str, Any]) -> str:
    settings = _mapping(result["settings"])

    def listed(name: str) -> str:
        values = settings.get(name)
        return ", ".join(str(value) for value in values) if isinstance(values, list | tuple) and values else "none"

    budgets = f"Plain is trained to several budgets ({listed('budgets')} times the steps), each with its own complete "
    swept = f"The learning rate is swept equally for plain and hybrid ({listed('rate_factors')} times the configured "
    rules = [
        f"Seeds are paired ({listed('seeds')}): all arms of a seed have the same first weights and the same data.",
        "Runs are interleaved in time, so that a slow hour of the machine falls on all arms.",
        "All costs are charged: probes, snapshots, predictor training, audits, refused moves and rollbacks.",
        budgets + "schedule, and read off between them in log(steps); never from an unfinished run.",
        swept + "one); each is shown at its best. Intervals are of paired differences, 95 %.",
    ]
    return f'<h2>How it was measured</h2><ul class="rules">{"".join(f"<li>{escape(rule)}</li>" for rule in rules)}</ul>'


def _runs(comparison: Comparison) -> str:
    head = [
        *("arm", "seed", "learning rate", "budget", "steps", "final loss", "time (s)", "backward passes", "tokens"),
        *("probe tokens", "kept", "refused", "rolled back", "started"),
    ]
    rows = [
        [
            escape(str(run["label"])) + _small(run["failed"]),
            _count(run["seed"]).replace(",", ""),
            _rate(run["learning_rate"]),
            _shown(run["budget"], "g"),
            _count(run["steps"]),
            _shown(run["loss"], ".4f"),
            _shown(run["seconds"], ".1f"),
            *(
                _count(run[key])
                for key in ("backward_passes", "tokens", "probe_tokens", "kept", "refused", "rolled_back")
            ),
            escape(str(run["started"] or "")[:19].replace("T", " ")),
        ]
        for run in comparison.runs
    ]
    return details(f"Every run ({len(rows)})", table(head, rows), "block")
