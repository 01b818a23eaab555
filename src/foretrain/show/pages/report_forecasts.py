"""How good the forecasts of a run were, per horizon, and whether its confidence came true."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from foretrain.show.pages.charts import Axis, Series, plot
from foretrain.show.pages.looks import is_list
from foretrain.show.pages.report_cards import moves
from foretrain.show.pages.report_text import mapping, number, percent, signs, table
from foretrain.show.pages.scales import finite
from foretrain.show.record import RunRecord

_LOWEST = -1.0
"""R² that the chart shows; what is below stands on its lower edge."""


def said_of_prediction(record: RunRecord) -> str:
    """What it was worth in the words of the run, or why it was not tried."""
    if not record.predicts:
        return "<p>Prediction was off.</p>"
    summed_up = (mapping(record.summary.get(name)).get("sentence") for name in ("exact", "audit"))
    sentence = next((str(told) for told in summed_up if told), "").removesuffix(".")
    if not sentence:
        sentence = "what they are worth is told at the end of the run" if record.tried else "not tried yet"
    kept, others = moves(record)
    counts = ", ".join(part for part in (f"{kept:,} kept", others) if part)
    made = f"Predicted moves: {counts}. " if record.tried else ""
    return f"<p>{escape(made)}{escape(signs(sentence[:1].upper() + sentence[1:]))}.</p>"


def horizons(record: RunRecord) -> str:
    forecast = mapping(record.summary.get("forecast"))
    if not forecast:
        later = "told when the run has ended" if record.state == "running" else "nothing was forecast in this run"
        return f'<p class="small">Quality per horizon: {later}.</p>'
    head = ["steps ahead", "forecasts", "R²", "R² of repeating", "cosine", "length", "error of the loss"]
    rows = []
    for horizon, quality in forecast.items():
        q = _known(quality)
        cells = [
            number(q.get("count"), ",.0f"),
            *(number(q.get(name), ".2f") for name in ("r2", "repeat_r2", "cosine")),
        ]
        error = finite(q.get("loss_error"))
        rows.append([escape(horizon), *cells, number(q.get("norm_ratio"), ".2f"), percent(error)])
    curves = [_curve(forecast, "r2", "forecast", 1), _curve(forecast, "repeat_r2", "repeating the last move", 2)]
    scores = [finite(_known(quality).get(name)) for quality in forecast.values() for name in ("r2", "repeat_r2")]
    below = any(score is not None and score < _LOWEST for score in scores)
    edge = "; below −1 on the edge" if below else ""
    chart = plot(
        curves,
        Axis("steps ahead"),
        Axis(f"R² (1: exact, 0: no better than standing still{edge})", low=_LOWEST if below else None, high=1.0),
        label="Share of the weights' motion that was forecast, by steps ahead; the numbers are in the table",
        width=520,
        height=300,
    )
    verdict = escape(str(mapping(record.summary.get("predictability")).get("verdict") or ""))
    told = f"<p>{verdict[:1].upper()}{verdict[1:]}.</p>" if verdict else ""
    return (
        f'{told}<div class="pair"><figure>{chart}</figure>{table("Forecast quality per horizon", head, rows, 0)}</div>'
    )


def _curve(forecast: Mapping[str, Any], name: str, label: str, look: int) -> Series:
    """Values below the frame are drawn on its edge; the table has all."""
    steps = [_steps_ahead(horizon) for horizon in forecast]
    known = [finite(_known(quality).get(name)) for quality in forecast.values()]
    points = [(step, None if value is None else max(value, _LOWEST)) for step, value in zip(steps, known, strict=True)]
    tips = ["" if value is None else signs(f"{label}: {value:.4g}") for value in known]
    return Series(label, points, look, tips=tips)


def _known(quality: object) -> Mapping[str, Any]:
    """Of a predictor that foretold no motion yet there is nothing to score; what repeating is worth is known."""
    q = mapping(quality)
    return {name: q[name] for name in q if name not in ("r2", "cosine", "norm_ratio")} if q.get("made") == 0 else q


def _steps_ahead(horizon: str) -> float | None:
    """None for what is no number: a summary may have been damaged."""
    try:
        return finite(float(horizon))
    except ValueError:
        return None


def calibration(record: RunRecord) -> str:
    confidence = mapping(record.summary.get("confidence"))
    error, outcomes = finite(confidence.get("calibration_error")), finite(confidence.get("outcomes")) or 0
    told = confidence.get("reliability")
    bins = [mapping(one) for one in told] if is_list(told) else []
    if not bins:
        return ""
    said = f"over {outcomes:,.0f} outcomes" if error is None else f"{error:.3f} over {outcomes:,.0f} outcomes"
    points = [(one.get("said"), one.get("kept")) for one in bins]
    chart = plot(
        [Series("as said", [(0.0, 0.0), (1.0, 1.0)], 0, faint=True), Series("as it came", points, 1)],
        Axis("confidence before the outcome", low=0.0, high=1.0),
        Axis("share that turned out well", low=0.0, high=1.0),
        label="How often what was predicted with a confidence turned out well; the numbers are in the table",
        width=400,
        height=320,
    )
    head = ["said", "came true", "outcomes"]
    rows = [
        [number(one.get("said"), ".2f"), number(one.get("kept"), ".2f"), number(one.get("count"), ".0f")]
        for one in bins
    ]
    told = f"<p>Mean distance from the diagonal: {said}. Some 0.05 of it is chance.</p>" if error is not None else ""
    made = table("Confidence said beforehand, and how often it came true", head, rows, 0)
    return f'{told}<div class="pair"><figure>{chart}</figure>{made}</div>'
