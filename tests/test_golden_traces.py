"""The golden traces hold what they are there for, and are the same whenever they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import load_script

pytestmark = pytest.mark.xdist_group("golden")  # what is below is made once


@pytest.fixture(scope="module")
def golden() -> Any:
    return load_script(Path(__file__).parents[1] / "benchmarks" / "golden_traces.py")


def test_a_trace_is_the_same_when_it_is_made_again(golden: Any) -> None:
    names = ["leap, audited, rolled back", "emergency rollback", "chain"]
    assert golden.traces(names) == golden.traces(names)


def test_stops_inside_moves_change_no_move_and_no_weight(golden: Any) -> None:
    whole, cut = golden.traces(["leap, audited, kept", "resumed inside moves"]).values()
    assert sum(line.startswith("Resumed") for line in cut) == 3
    for kind in ("Moved", "weights"):
        assert [line for line in cut if line.startswith(kind)] == [line for line in whole if line.startswith(kind)]


def test_the_first_difference_is_shown(golden: Any) -> None:
    assert golden.difference(["a", "b 1 c"], ["a", "b 1 c"]) == ""
    assert golden.difference(["a", "b 1 c"], ["a", "b 2 c"]) == "line 2:\n    was b 1 c\n    is  b 2 c"
    assert golden.difference(["a"], ["a", "b"]) == "1 lines were, 2 lines are"


def test_a_trace_without_what_it_is_there_for_is_no_trace(golden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = golden.RUNS["leap, refused"]
    monkeypatch.setitem(golden.RUNS, "hollow", golden.Own({"max_steps": 10}, kept.model, kept.batch, must=("Moved",)))
    with pytest.raises(SystemExit, match="hollow: the run shows nothing of Moved"):
        golden.traces(["hollow"])


def test_times_and_sizes_of_memory_are_left_out(golden: Any) -> None:
    event = {"seconds": 3.2, "text": "step 98, 0.5 s; held 383 MB", "loss": float("nan"), "steps": (1, 2)}
    assert golden.plain(event) == {"text": "step 98, # s; held # MB", "loss": "nan", "steps": [1, 2]}
