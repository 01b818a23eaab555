"""Prepare what trackers are told: events as named numbers and short texts, settings as flat names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrain.config.paths import assignments, flattened
from foretrain.config.units import chain_in_words
from foretrain.events import (
    CheckpointRejected,
    Evaluated,
    Event,
    Grown,
    HealthFound,
    LossForecasted,
    Moved,
    Notice,
    PhaseChanged,
    Planned,
    Progress,
    Recovered,
    Tuned,
)
from foretrain.persist.files import for_json

PHASES = ("warmup", "full", "predict", "correct")
"""The number `phase` is a place in here."""
SERIOUS = frozenset({"finding", "recovery", "warning"})
"""Texts of these kinds say that something was wrong."""


@dataclass(frozen=True)
class TrackerEntry:
    """It says what happened at a step. Numbers are finite; texts go by their kind."""

    step: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def entry_of(event: Event, step: int, unit: str = "tokens") -> TrackerEntry | None:
    """The event as numbers and texts; None where a tracker has no use for it. step: of an event that has none. unit:
    what the run counts."""
    match event:
        case Progress():
            return TrackerEntry(event.step, _finite(_progress(event, unit)))
        case Evaluated():
            metrics = {f"held_out/{name}": value for name, value in event.metrics.items()}
            return TrackerEntry(event.step, _finite({"held_out/loss": event.loss, **metrics}))
        case LossForecasted():
            numbers = {"loss": event.loss, "low": event.low, "high": event.high}
            return TrackerEntry(event.step, _finite({f"end/{name}": value for name, value in numbers.items()}))
        case Moved():
            far = chain_in_words(event.horizon, event.leaps) if event.chained else f"{event.horizon} steps ahead"
            text = f"{far}: {event.verdict} ({event.reason})"
            return TrackerEntry(event.step, _finite({"prediction/worth_steps": event.worth_steps}), {"move": text})
        case PhaseChanged():
            return TrackerEntry(event.step, texts={"phase": f"{event.phase}: {event.reason}"})
        case Recovered():
            return TrackerEntry(event.step, texts={"recovery": f"{event.action}: {event.text}"})
        case HealthFound():
            return TrackerEntry(event.step, texts={"finding": _finding(event)})
        case Grown():
            text = f"to {event.layers} of {event.of} blocks: {event.verdict} ({event.reason})"
            return TrackerEntry(event.step, texts={"growth": text})
        case Planned():
            return TrackerEntry(event.step, texts={"target": event.text})
        case Tuned():
            return TrackerEntry(event.step, texts={"recovery": f"{event.ailment}: set {assignments(event.change)}"})
        case Notice(level="warning"):
            return TrackerEntry(step, texts={"warning": event.message})
        case CheckpointRejected():
            return TrackerEntry(step, texts={"warning": f"{event.path}: {event.reason}"})
    return None


def _progress(event: Progress, unit: str) -> dict[str, float | None]:
    return {
        "train/loss": event.loss,
        "train/smoothed_loss": event.smoothed_loss,
        "train/gradient_norm": event.gradient_norm,
        "train/learning_rate": event.learning_rate,
        f"train/{unit}": event.tokens,
        f"train/{unit}_per_second": event.tokens_per_second,
        "train/seconds": event.seconds,
        "train/skipped_steps": event.skipped_steps,
        "phase": PHASES.index(event.phase) if event.phase in PHASES else None,
        "prediction/predicted_loss": event.predicted_loss,
        "prediction/confidence": event.confidence,
        "prediction/kept": event.kept,
        "prediction/refused": event.refused,
        "prediction/gain_percent": event.gain_percent,
        **{f"blocks/{name}": value for name, value in (event.blocks or {}).items()},
    }


def _finding(event: HealthFound) -> str:
    value = "" if event.value is None else f" = {event.value:.4g} (healthy: {event.healthy})"
    advice = f"; set {assignments(event.change)}" if event.change else ""
    return f"{event.level}: {event.ailment} at {event.place}: {event.measure}{value}. {event.meaning}{advice}"


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in for_json(numbers).items() if value is not None}


def summary_entry(step: int, summary: Mapping[str, Any]) -> TrackerEntry:
    """Name the summary's numbers and sentences `summary/...`. Settings and machine are told at the start."""
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    told = {name: value for name, value in summary.items() if name not in ("config", "environment")}
    for name, value in flattened(for_json(told), "summary", "/").items():
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, (int, float)):
            numbers[name] = float(value)
    return TrackerEntry(step, numbers, texts)


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Name settings with dots; a list becomes JSON, as no tracker has lists."""
    return {
        name: value if isinstance(value, (str, int, float, bool)) else json.dumps(value)
        for name, value in flattened(settings).items()
    }
