"""A kill at every file event of a run, four ways of dying, through ckpt-chaos: nothing fails, nothing differs, nothing
is lost. `benchmarks/crash_matrix.py` does the same with a cold start for every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def run(crash_matrix: Any, warm: Any, folder: Path, keep: int, modes: tuple[str, ...], steps: int) -> Any:
    crash_matrix.write_inputs(folder, keep, steps=steps)  # saves at 3, 6, ... and at the end
    command = [*warm.command, *crash_matrix.COMMAND[1:], "--set", "data.prefetch=0"]
    rows, printed = crash_matrix.run_matrix(folder, command, modes, jobs=2)
    assert crash_matrix.is_clean(rows), printed
    return rows


def test_every_kill_is_survived(crash_matrix: Any, warm: Any, tmp_path: Path) -> None:
    """`before` is the test below: with the events of this run and those of deletions."""
    modes = tuple(mode for mode in crash_matrix.MODES if mode != "before")
    rows = run(crash_matrix, warm, tmp_path, 100, modes, steps=5)
    for mode in modes:  # a save is six files (all but the rename and the folder can be torn)
        assert crash_matrix.counts(rows, mode)["points"] >= 2 * (6 if mode == "torn" else 8)
    assert {0, 3, 5} <= {row.newest_complete_step for row in rows}


def test_every_kill_while_old_checkpoints_are_deleted_is_survived(crash_matrix: Any, warm: Any, tmp_path: Path) -> None:
    rows = run(crash_matrix, warm, tmp_path, 2, ("before",), steps=7)
    events = {row.event.partition(" ")[2] for row in rows}
    assert {"os.remove manifest.json", "shutil.rmtree step-00000003"} <= events


def test_the_matrix_notices_when_nothing_is_synced(
    crash_matrix: Any, warm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kills on a disk that no sync reaches, as if the program made none."""
    monkeypatch.setenv("CKPT_CHAOS_DEAF", "1")
    crash_matrix.write_inputs(tmp_path, 100, steps=4)
    command = [*warm.command, *crash_matrix.COMMAND[1:], "--set", "data.prefetch=0"]
    rows, _ = crash_matrix.run_matrix(tmp_path, command, ("unsynced",), jobs=2, most=8)
    assert crash_matrix.counts(rows, "unsynced")["points"] == 8
    assert not crash_matrix.is_clean(rows)
    assert crash_matrix.counts(rows, "unsynced")["HARD_FAIL"] + crash_matrix.counts(rows, "unsynced")["LOST_WORK"] >= 2
