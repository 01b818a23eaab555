"""The benchmark of the ratio of Muon's two rates: what it concludes from losses, and that the page shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import BENCHMARKS, load_script

PAGE = Path(__file__).parents[1] / "docs" / "learning-rate.md"


@pytest.fixture(scope="module")
def script() -> Any:
    load_script(BENCHMARKS / "auto_rate_tasks.py")
    return load_script(BENCHMARKS / "auto_rate_ratio.py")


def run(ratio: float, trial: float, test: float, seed: int = 1, multiple: float = 1.0) -> dict[str, Any]:
    key = {"beta2": 0.95, "multiple": multiple, "seed": seed, "ratio": ratio}
    return {**key, "trial": trial, "test": test, "held_out": test, "copies": [trial, test, 2.0 + ratio]}


RUNS = [run(0.25, 2.9, 2.2), run(0.5, 3.0, 1.9), run(1.0, 3.1, 2.0), run(2.0, 3.2, 2.1)]


def test_a_ratio_is_judged_by_what_it_changes_in_whole_runs(script: Any) -> None:
    found = script.verdict(RUNS)
    assert found["test_percent"] == {"0.25": 10.0, "0.5": -5.0, "1": 0.0, "2": 5.0}
    assert (found["whole run"]["ratio"], found["whole run"]["gain_percent"]) == (0.5, -5.0)
    assert (found["trial"]["ratio"], found["trial"]["gain_percent"]) == (0.25, 10.0)  # the trial is wrong
    assert (found["trial of three"]["ratio"], found["trial of three"]["gain_percent"]) == (0.5, -5.0)
    assert [found[f"copy at {share:g}"]["ratio"] for share in script.COPIES] == [0.25, 0.5, 0.25]
    assert script.verdict(RUNS[:2]) == {}  # there is nothing to compare with


def test_a_trial_that_failed_is_never_chosen(script: Any) -> None:
    assert script.chosen({0.5: math.nan, 1.0: 3.0, 2.0: math.inf}) == 1.0
    assert script.lowest({0.5: 2.04, 1.0: 2.0, 2.0: 2.04}) == 1.0
    assert 0.5 < script.lowest({0.5: 2.01, 1.0: 2.0, 2.0: 2.04}) < 1.0


def test_seeds_are_averaged_and_other_matrix_rates_are_kept_apart(script: Any) -> None:
    second = [run(0.5, 3.0, 2.06, seed=2), run(1.0, 3.1, 2.0, seed=2)]
    half = [run(0.5, 3.0, 3.0, multiple=0.5), run(1.0, 3.1, 2.0, multiple=0.5)]
    runs = [*RUNS, *second, *half]
    tasks = {"one": {"runs": runs, "verdicts": script.verdicts(runs)}}
    assert script.mean_gains(tasks, 0.95, "trial of three") == {"one": -1.0}  # -5 and 3 %
    assert script.mean_gains(tasks, 0.999, "trial") == {}
    assert script.table(tasks) == [
        "| one | 0.95 | 0.5 |  | +50.00 % |  |  | 1 | 0.5 |",
        "| one | 0.95 | 1 | +10.00 % | -1.00 % | +5.00 % |  | 0.5, 1 | 0.25, 0.5 |",
    ]


def test_a_ratio_that_auto_keeps_is_compared_with_equal_rates_of_the_same_seed(script: Any) -> None:
    own = [{"beta2": 0.95, "seed": 1, "ratio": 0.5, "test": 1.98}, {"beta2": 0.95, "seed": 2, "ratio": 0.5, "test": 1}]
    assert script.of_own({"runs": RUNS, "own": own}) == {"beta2 0.95, ratio 0.5, seed 1": -1.0}


def test_the_page_shows_what_was_measured(script: Any) -> None:
    raw = json.loads((BENCHMARKS / "results" / "2026-11-19-auto-rate-ratio-cpu.json").read_text("utf-8"))
    page = PAGE.read_text("utf-8")
    for row in script.table(raw["tasks"]):
        assert row in page
