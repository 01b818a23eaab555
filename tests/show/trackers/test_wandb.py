"""Rows of Weights & Biases: they only grow, over rollbacks, resumptions and kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.show.trackers.conftest import tiny_config

from foretrain.show.trackers import opening
from foretrain.show.trackers.entries import TrackerEntry
from foretrain.show.trackers.tracker import Tracker


class FakeRun:
    """What the package's own run is to us."""

    id = "mine"

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def define_metric(self, *names: str, **options: Any) -> None: ...

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append(step)

    def finish(self, exit_code: int) -> None: ...


def session(folder: Path, resume: bool, start: int, steps: list[int], killed: bool) -> None:
    """One start of the run, without the thread between."""
    kept: list[Tracker] = []

    class Kept:
        def __init__(self, name: str, tracker: Tracker, emit: object) -> None:
            kept.append(tracker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "TrackerListener", Kept)
        opening.open_trackers(tiny_config(log__trackers=["wandb"]), folder, resume, lambda _: None)
    (tracker,) = kept
    tracker.start(start)
    for step in steps:
        tracker.log(TrackerEntry(step, {"loss": 1.0}))
    if not killed:
        tracker.close("interrupted")


@pytest.mark.parametrize("killed", [False, True])
def test_rows_go_on_after_a_rollback_and_a_resumption(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    rows: list[int] = []
    monkeypatch.setattr(wandb, "init", lambda **options: FakeRun(rows))
    session(tmp_path, False, 0, [50, 100, 150, 200, 20, 50, 100, 120], killed)
    before = len(rows)
    session(tmp_path, True, 120, [150, 200, 1300], killed=False)
    assert len(rows) == before + 3
    assert rows == sorted(set(rows))
    kept = json.loads((tmp_path / opening.IDS).read_text(encoding="utf-8"))
    assert kept == {"wandb": "mine", "wandb/row": rows[-1]}
    if not killed:
        assert rows[before] == rows[before - 1] + 1, "no gap where it was closed"
