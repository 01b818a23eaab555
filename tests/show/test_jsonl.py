"""The log: every event one line of valid JSON, whatever happened before."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from foretrain.events import Evaluated, HealthMeasured, Notice, Progress, RunEnded, RunStarted
from foretrain.show.jsonl import JsonlLog

NOW = datetime(2026, 7, 30, 12, 34, 56, 789123, UTC)
TIME = "2026-07-30T12:34:56.789+00:00"


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_become_lines_with_the_names_of_their_fields(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl", now=lambda: NOW)
    log(RunStarted(0, 10, 5, 4, "cpu", "fp32", "title", {"data": "x [y] ü"}))
    log(Progress(1, 2.5, 1.0, 3e-4, 64, 100.0, 0.5, 0))
    log(Evaluated(1, 2.0, 0.1, False, True))
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {
            "event": "RunStarted",
            "time": TIME,
            "step": 0,
            "max_steps": 10,
            "parameters": 5,
            "trained_parameters": 4,
            "device": "cpu",
            "precision": "fp32",
            "title": "title",
            "details": {"data": "x [y] ü"},
            "unit": "tokens",
            "optimizer": "",
            "costs": [],
            "planned": False,
        },
        {
            "event": "Progress",
            "time": TIME,
            "step": 1,
            "loss": 2.5,
            "gradient_norm": 1.0,
            "learning_rate": 3e-4,
            "tokens": 64,
            "tokens_per_second": 100.0,
            "seconds": 0.5,
            "skipped_steps": 0,
            "phase": "full",
            "predicted_loss": None,
            "smoothed_loss": None,
            "confidence": None,
            "kept": 0,
            "refused": 0,
            "gain_percent": None,
            "blocks": None,
            "planned_end": None,
            "earliest_end": None,
            "latest_end": None,
            "seconds_left": None,
        },
        {
            "event": "Evaluated",
            "time": TIME,
            "step": 1,
            "loss": 2.0,
            "seconds": 0.1,
            "averaged_weights": False,
            "best": True,
            "metrics": {},
        },
    ]


def test_every_line_has_the_time_of_day(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log(Notice("now"))
    log.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    time = datetime.fromisoformat(line["time"])
    assert time.tzinfo is not None
    assert abs((time - before).total_seconds()) < 3600


def test_every_line_is_there_at_once(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    for number in range(3):
        log(Notice(f"line {number}\nwith a break"))
        assert len(lines(tmp_path / "metrics.jsonl")) == number + 1
    log.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_become_null(value: float, tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log(Progress(1, value, value, 3e-4, 64, 100.0, 0.5, 0))
    log.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["gradient_norm"], line["learning_rate"]) == (None, None, 3e-4)


def test_the_summary_is_left_to_its_own_file(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl", now=lambda: NOW)
    log(RunEnded(10, "finished", {"final_val_loss": 1.0, "config": {}}))
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"event": "RunEnded", "time": TIME, "step": 10, "reason": "finished"}]


@pytest.mark.parametrize("torn", ["", "{", '{"event": "Pro', '{"event": "Notice"}'])
def test_a_torn_line_is_cut_off_and_nothing_else(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "first"}\n{"event": "second"}\n' + torn, encoding="utf-8")
    log = JsonlLog(path)
    log(Notice("third"))
    log.close()
    assert [line["event"] for line in lines(path)] == ["first", "second", "Notice"]


@pytest.mark.parametrize("content", ["", "torn"])
def test_an_empty_or_wholly_torn_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content, encoding="utf-8")
    log = JsonlLog(path)
    log(Notice("first"))
    log.close()
    assert len(lines(path)) == 1


def test_a_number_that_json_does_not_have_is_null_at_any_depth(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log(HealthMeasured(1, math.nan, None, None, {"a": {"gradient_norm": math.inf, "update_to_weight": 0.5}}))
    log.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["gradient_norm"] is None
    assert line["layers"] == {"a": {"gradient_norm": None, "update_to_weight": 0.5}}
