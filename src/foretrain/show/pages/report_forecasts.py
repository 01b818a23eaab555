"""Tell how good the forecasts of a run were, per horizon, and whether its confidence came true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.show.numbers import finite, is_list, mapping
from foretrain.show.pages.charts import points
from foretrain.show.pages.render import PageTable, number, percent, sentence
from foretrain.show.record import RunRecord

LOWEST = -1.0
"""The chart shows no lower R²; what is below stands on its edge."""


def said_of_prediction(record: RunRecord, kept: int, others: str) -> str:
    """Say what prediction was worth in the words of the run, or why it was not tried."""
    if not record.predicts:
        return "Prediction was off."
    summed_up = (mapping(record.summary.get(name)).get("sentence") for name in ("exact", "audit"))
    told = next((str(told) for told in summed_up if told), "").removesuffix(".")
    if not told:
        told = "what they are worth is told at the end of the run" if record.tried else "not tried yet"
    counts = ", ".join(part for part in (f"{kept:,} kept", others) if part)
    return (f"Predicted moves: {counts}. " if record.tried else "") + f"{sentence(told)}."


# --- per horizon ------------------------------------------------------------------------------------------------------


def horizons(record: RunRecord) -> dict[str, Any]:
    """{"said", "table"}: how predictable the motion was, and the quality of forecasts over as many steps."""
    forecast = mapping(record.summary.get("forecast"))
    if not forecast:
        later = "told when the run has ended" if record.state == "running" else "nothing was forecast in this run"
        return {"said": f"Quality per horizon: {later}.", "table": None}
    head = ["steps ahead", "forecasts", "R²", "R² of repeating", "cosine", "length", "error of the loss"]
    rows = []
    for horizon, quality in forecast.items():
        known = _scored(quality)
        scores = [number(known.get(name), ".2f") for name in ("r2", "repeat_r2", "cosine", "norm_ratio")]
        error = percent(known.get("loss_error"))
        rows.append([horizon, number(known.get("count"), ",.0f"), *scores, error])
    verdict = sentence(mapping(record.summary.get("predictability")).get("verdict"))
    said = f"{verdict}." if verdict else ""
    return {"said": said, "table": PageTable("Forecast quality per horizon", head, rows, 0)}


def _scored(quality: object) -> Mapping[str, Any]:
    """What is known of the forecasts of a horizon. A predictor that foretold no motion yet has no scores; what
    repeating is worth is known."""
    known = mapping(quality)
    if known.get("made") != 0:
        return known
    return {name: known[name] for name in known if name not in ("r2", "cosine", "norm_ratio")}


def horizon_curves(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    names = {"r2": ("forecast", "plain"), "repeat_r2": ("repeating the last move", "dashed")}
    return [_score_curve(record, name, *look) for name, look in names.items()]


def _score_curve(record: RunRecord, name: str, label: str, style: str) -> dict[str, Any]:
    """Draw a score over the horizons. Values below the frame lie on its edge; their tips tell them."""
    known = [
        (steps, finite(_scored(quality).get(name)))
        for horizon, quality in mapping(record.summary.get("forecast")).items()
        if (steps := _steps_ahead(horizon)) is not None
    ]
    if all(value is None for _, value in known):
        return points(label, style, ())
    known.sort(key=lambda point: point[0])
    tips = ["" if value is None else sentence(f"{label}: {value:.4g}") for _, value in known]
    return points(label, style, [(at, None if r2 is None else max(r2, LOWEST)) for at, r2 in known], tips=tips)


def is_below_frame(record: RunRecord) -> bool:
    """Tell whether a score lies below what the chart shows."""
    forecast = mapping(record.summary.get("forecast"))
    scores = [finite(_scored(quality).get(name)) for quality in forecast.values() for name in ("r2", "repeat_r2")]
    return any(score is not None and score < LOWEST for score in scores)


def _steps_ahead(horizon: str) -> float | None:
    """Read a horizon; None if it is no number, as a summary may have been damaged."""
    try:
        return finite(float(horizon))
    except ValueError:
        return None


# --- confidence -------------------------------------------------------------------------------------------------------


def calibration(record: RunRecord) -> dict[str, Any]:
    """{"said", "table"}: how far what was said beforehand lies from what came."""
    bins, confidence = _reliability(record), mapping(record.summary.get("confidence"))
    error, outcomes = finite(confidence.get("calibration_error")), finite(confidence.get("outcomes")) or 0
    if not bins:
        return {"said": "", "table": None}
    forms = {"said": ".2f", "kept": ".2f", "count": ".0f"}
    rows = [[number(one.get(name), form) for name, form in forms.items()] for one in bins]
    said = (
        f"Mean distance from the diagonal: {error or 0:.3f} over {outcomes:,.0f} outcomes. Some 0.05 of it is chance."
    )
    caption = "Confidence said beforehand, and how often it came true"
    table = PageTable(caption, ["said", "came true", "outcomes"], rows, 0)
    return {"said": "" if error is None else said, "table": table}


def _reliability(record: RunRecord) -> list[Mapping[str, Any]]:
    told = mapping(record.summary.get("confidence")).get("reliability")
    return [mapping(one) for one in told] if is_list(told) else []


def calibration_curves(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw the diagonal, and how often what was predicted with some confidence came true."""
    bins = [(finite(one.get("said")), finite(one.get("kept"))) for one in _reliability(record)]
    known = [(said, kept) for said, kept in bins if said is not None and kept is not None]
    if not known:
        return []
    return [points("as said", "reference", ((0.0, 0.0), (1.0, 1.0))), points("as it came", "plain", known)]
