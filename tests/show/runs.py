"""Run folders as a trainer leaves them, for tests of what is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.events import (
    Evaluated,
    Event,
    HealthFound,
    HealthMeasured,
    MemoryUsed,
    Moved,
    Notice,
    PhaseChanged,
    Progress,
    Recovered,
    RunStarted,
)
from foretrain.show.jsonl import JsonlLog

FINDING = HealthFound(
    ailment="vanishing layer",
    step=60,
    measure="gradient norm",
    place="blocks.1",
    value=1e-9,
    healthy="0.01 to 100",
    level="critical",
    meaning="it learns nothing",
    change={"optimizer.learning_rate": 0.002},
)
STARTED = RunStarted(0, 100, 5_000, 5_000, "cpu", "fp32", "tiny", {"data": "a book", "folder": "runs/x"})


def progress(step: int, loss: float = 2.0, **more: Any) -> Progress:
    given: dict[str, Any] = {"predicted_loss": loss + 0.1, "smoothed_loss": loss, "confidence": 0.5, **more}
    seconds = given.pop("seconds", step / 10)
    return Progress(step, loss, 1.0, 1e-3, 64 * step, 100.0, seconds, 0, **given)


def moved(step: int, verdict: str = "kept", reason: str = "sure enough") -> Moved:
    return Moved(step, 10, verdict, 1.0, True, False, 2.0, 1.8, 1.9, 0.7, 4.0, 2.0, reason)


def measured(step: int, norms: Mapping[str, float | None], ratio: float | None = None) -> HealthMeasured:
    layers = {
        name: {"gradient_norm": norm, "gradient_to_weight": ratio, "update_to_weight": ratio}
        for name, norm in norms.items()
    }
    return HealthMeasured(step, 1.0, ratio, ratio, layers)


def some_run() -> list[Event]:
    """Every kind of event that a report tells of."""
    steps = [progress(step, 3.0 - step / 50) for step in range(10, 101, 10)]
    return [
        STARTED,
        MemoryUsed(0, "setup", resident_peak=300_000_000),
        *steps[:3],
        PhaseChanged(30, "full", "warm-up is done"),
        Evaluated(30, 2.5, 0.2, False, True),
        PhaseChanged(40, "predict", "confidence 0.70 is above 0.50"),
        moved(50, "kept"),
        moved(55, "rolled back", "the run is worse"),
        Recovered(60, "reduce_rate", "the gradient explodes: half the learning rate"),
        FINDING,
        Notice("2 of the last 10 steps were not finite and changed nothing"),
        *steps[3:],
        Evaluated(100, 1.25, 0.2, False, True),
    ]


SUMMARY: dict[str, Any] = {
    "final_val_loss": 1.25,
    "final_train_loss": 1.0,
    "best_val_loss": 1.25,
    "global_step": 100,
    "steps": {"warmup": 30, "full": 60, "predict": 4, "correct": 6},
    "backward_passes": 104,
    "tokens": 6400,
    "seconds": 10.5,
    "tokens_per_second": 609.5,
    "moves": {"kept": 1, "shrunk": 0, "refused": 0, "rolled_back": 1},
    "forecast": {
        "10": {"count": 5, "cosine": 0.7, "norm_ratio": 0.9, "r2": 0.41, "repeat_r2": 0.3, "loss_error": 0.04},
        "20": {"count": 3, "cosine": 0.5, "norm_ratio": 0.9, "r2": 0.22, "repeat_r2": -0.1, "loss_error": 0.08},
    },
    "confidence": {
        "last": 0.7,
        "calibration_error": 0.123,
        "outcomes": 12,
        "reliability": [{"said": 0.3, "kept": 0.25, "count": 6}, {"said": 0.8, "kept": 0.9, "count": 6}],
    },
    "predictability": {"verdict": "41% of the motion is predictable"},
    "audit": {"gain_percent": 3.21, "low": 1.05, "high": 5.4, "n": 4, "sentence": "prediction saved 3.2 % of the time"},
    "memory": {"full": {"resident_peak": 400_000_000}},
    "config": {"max_steps": 100, "optimizer": {"type": "muon"}},
    "environment": {"torch": "2.13.0"},
}


def write_run(
    folder: Path,
    told: Sequence[Event],
    summary: dict[str, Any] | None = None,
    reason: str = "finished",
) -> Path:
    """A run folder; with a summary the run has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    log = JsonlLog(folder / "metrics.jsonl")
    for event in told:
        log(event)
    log.close()
    (folder / "config.toml").write_text("max_steps = 100\n", encoding="utf-8")
    if summary is not None:
        end(folder, summary, reason)
    return folder


def end(folder: Path, summary: dict[str, Any], reason: str = "finished") -> None:
    append(folder, {"event": "RunEnded", "step": summary["global_step"], "reason": reason})
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def append(folder: Path, *events: dict[str, Any]) -> None:
    """Lines as they stand, also such as no run writes."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
