"""The chart of learning rates that were tried: which points it draws, and where."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.show.runs import SUMMARY, progress, some_run, write_run

from foretrain.events import Event, RateTried
from foretrain.show.follow import read_runs
from foretrain.show.pages.report_charts import charts
from foretrain.show.pages.report_page import page
from foretrain.show.pages.report_rates import rate_curves
from foretrain.show.record import RunRecord

TRIED = [
    RateTried(30, 1e-3, 30, 2.0, True),
    RateTried(30, 1e-2, 30, 1.7, True),
    RateTried(30, 3e-3, 30, 1.5, True),
    RateTried(30, 1e-1, 30, math.nan, False),
]
"""In the order in which they were tried, which is not that of the axis."""
FOUND = {"chosen": 4e-3, "low": 2e-3, "high": 8e-3}


def run(folder: Path, tried: Sequence[Event] = TRIED, found: Any = None) -> RunRecord:
    summary = None if found is None else SUMMARY | {"learning_rate": found}
    (record,) = read_runs([write_run(folder, [*some_run()[:2], *tried, progress(40)], summary)])
    return record


def drawn(series: dict[str, Any]) -> list[tuple[float, float | None]]:
    return list(zip(series["x"], series["values"], strict=True))


def test_each_rate_is_a_point_at_its_loss_in_the_order_of_the_axis(tmp_path: Path) -> None:
    (tried,) = rate_curves(run(tmp_path / "run"), 100)
    assert (tried["label"], tried["style"]) == ("tried", "plain")
    assert drawn(tried) == [(1e-3, 2.0), (3e-3, 1.5), (1e-2, 1.7), (1e-1, None)], "a trial that failed is a gap"
    assert tried["tips"] == ["1e-3: 2.0000", "3e-3: 1.5000", "0.01: 1.7000", "0.1: failed"]


def test_what_was_chosen_and_what_is_about_as_good_lies_at_the_lowest_loss(tmp_path: Path) -> None:
    _, chosen = rate_curves(run(tmp_path / "run", found=FOUND), 100)
    assert (chosen["label"], chosen["style"]) == ("the run goes on with", "dots")
    assert drawn(chosen) == [(2e-3, 1.5), (4e-3, 1.5), (8e-3, 1.5)]
    assert chosen["tips"] == ["2e-3, about as good", "4e-3, chosen", "8e-3, about as good"]


@pytest.mark.parametrize(
    ("found", "points"),
    [
        ({"chosen": 4e-3, "low": None, "high": None}, [(4e-3, 1.5)]),
        ({"chosen": 4e-3, "low": 2e-3, "high": None}, [(2e-3, 1.5), (4e-3, 1.5)]),
        ({"chosen": None, "low": 2e-3, "high": 8e-3}, []),
        ({"chosen": "fast"}, []),
        ("broken", []),
        ({}, []),
    ],
)
def test_only_what_is_known_of_the_choice_is_drawn(found: Any, points: list[Any], tmp_path: Path) -> None:
    curves = rate_curves(run(tmp_path / "run", found=found), 100)
    assert [drawn(one) for one in curves[1:]] == ([points] if points else [])


def test_a_rate_that_was_tried_again_is_drawn_once_as_it_ended_last(tmp_path: Path) -> None:
    again = [*TRIED, RateTried(60, 1e-3, 60, 1.9, False)]
    (tried,) = rate_curves(run(tmp_path / "run", again), 100)
    assert drawn(tried)[0] == (1e-3, 1.9)
    assert len(drawn(tried)) == 4


def test_where_no_trial_came_to_a_loss_nothing_is_drawn(tmp_path: Path) -> None:
    assert rate_curves(run(tmp_path / "failed", TRIED[-1:], FOUND), 100) == []
    assert rate_curves(run(tmp_path / "plain", [], FOUND), 100) == []


def test_the_page_has_these_points_and_a_tick_at_each_rate(tmp_path: Path) -> None:
    record = run(tmp_path / "run", found=FOUND)
    chart = charts([record])["rates"]
    assert (chart["x"]["log"], chart["x"]["ticks"]) == (True, [1e-3, 3e-3, 1e-2, 1e-1])
    ((shown),) = (one["series"] for one in chart["runs"])
    assert shown == rate_curves(record, 100)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page([record]), re.S)
    assert data is not None
    assert json.loads(data[1])["rates"]["runs"] == json.loads(json.dumps(chart["runs"]))
