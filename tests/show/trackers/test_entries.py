"""Events as numbers and texts."""

from __future__ import annotations

import math

from foretrain.events import (
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Event,
    Grown,
    HealthFound,
    Moved,
    Notice,
    PhaseChanged,
    Progress,
    Recovered,
    Tuned,
)
from foretrain.show.trackers.entries import PHASES, TrackerEntry, entry_of, hyperparameters, summary_entry


def progress(**changes: object) -> Progress:
    fields = {"step": 5, "loss": 2.0, "gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 80}
    return Progress(**{**fields, "tokens_per_second": 8.0, "seconds": 10.0, "skipped_steps": 0, **changes})


def test_progress_as_numbers() -> None:
    told = entry_of(progress(phase="predict", confidence=0.75, gain_percent=3.5, kept=2, refused=1), 0)
    assert told is not None
    assert told.step == 5
    assert told.texts == {}
    assert told.numbers == {
        "train/loss": 2.0,
        "train/gradient_norm": 1.0,
        "train/learning_rate": 0.1,
        "train/tokens": 80,
        "train/tokens_per_second": 8.0,
        "train/seconds": 10.0,
        "train/skipped_steps": 0,
        "phase": PHASES.index("predict"),
        "prediction/confidence": 0.75,
        "prediction/kept": 2,
        "prediction/refused": 1,
        "prediction/gain_percent": 3.5,
    }


def test_what_is_no_number_is_left_out() -> None:
    told = entry_of(progress(loss=math.nan, gradient_norm=math.inf), 0)
    assert told is not None
    assert not {"train/loss", "train/gradient_norm"} & told.numbers.keys()
    assert entry_of(Evaluated(3, math.nan, 0.1, False, False), 0) == TrackerEntry(3)


def test_texts() -> None:
    moved = Moved(9, 20, "kept", 1.0, True, False, 2.0, 1.9, 1.9, 0.8, 12.5, 3.0, "it pays")
    found = HealthFound("plateau", 9, "slope", "run", None, "below 0", "critical", "nothing is learned", {})
    told: list[tuple[Event, TrackerEntry | None]] = [
        (moved, TrackerEntry(9, {"prediction/worth_steps": 12.5}, {"move": "20 steps ahead: kept (it pays)"})),
        (PhaseChanged(9, "full", "warm-up is done"), TrackerEntry(9, texts={"phase": "full: warm-up is done"})),
        (Recovered(9, "rollback", "back to 5"), TrackerEntry(9, texts={"recovery": "rollback: back to 5"})),
        (found, TrackerEntry(9, texts={"finding": "critical: plateau at run: slope. nothing is learned"})),
        (Tuned(9, "spikes", {"a.b": 1.0}), TrackerEntry(9, texts={"recovery": "spikes: set a.b = 1.0"})),
        (Notice("careful"), TrackerEntry(4, texts={"warning": "careful"})),
        (CheckpointRejected("step-1", "torn"), TrackerEntry(4, texts={"warning": "step-1: torn"})),
        (Notice("by the way", level="info"), None),
        (CheckpointSaved(9, "step-9", 1.0, 0.1), None),
    ]
    for event, entry in told:
        assert entry_of(event, 4) == entry


def test_the_summary_without_settings_and_machine() -> None:
    summary = {"loss": 0.5, "none": None, "nan": math.nan, "steps": {"full": 3}, "findings": [], "said": "it paid"}
    told = summary_entry(3, {**summary, "config": {"seed": 1}, "environment": {"python": "3"}})
    assert told == TrackerEntry(3, {"summary/loss": 0.5, "summary/steps/full": 3.0}, {"summary/said": "it paid"})


def test_settings_by_their_dotted_names() -> None:
    settings = {"seed": 1, "log": {"trackers": ["wandb"], "report": True}}
    assert hyperparameters(settings) == {"seed": 1, "log.trackers": '["wandb"]', "log.report": True}


def test_growth_is_a_text() -> None:
    found = entry_of(Grown(150, "kept", 12, 12, 3.2, 3.1, "the loss has returned"), 7, "tokens")
    assert found == TrackerEntry(150, texts={"growth": "to 12 of 12 blocks: kept (the loss has returned)"})
