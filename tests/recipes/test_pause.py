"""A run that is left at a step and gone on with later: the same bits, the same length, the same learning rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.recipes import train as run

Make = Callable[..., Any]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def rates(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["learning_rate"] for entry in entries if entry["event"] == "Progress"]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_run_in_pieces_ends_with_the_same_bits(make_config: Make, text_file: Path, tmp_path: Path, mode: str) -> None:
    hybrid = {"hybrid.mode": "off"} if mode == "off" else {"hybrid.warmup_steps": 2, "hybrid.window_steps": 2}
    config = make_config({"data.path": str(text_file), "max_steps": 12, "evaluation.interval": 2, **hybrid})
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run.train(config, whole, progress=False)
    for place, step in enumerate((2, 6, 6)):
        summary = run.train(config, pieces, resume=place > 0, progress=False, pause_at=step)
        assert summary["reason"] == "paused"
        assert summary["global_step"] >= step
        assert not (pieces / "model").exists()
    summary = run.train(config, pieces, resume=True, progress=False, pause_at=99)
    assert (summary["reason"], summary["global_step"]) == ("finished", 12)
    assert weights(pieces) == weights(whole)
    assert rates(pieces) == rates(whole)


def test_a_paused_run_was_evaluated_where_it_stands_and_is_not_saved_twice(
    make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    config = make_config({"data.path": str(text_file), "evaluation.interval": 2, "hybrid.mode": "off"})
    for resume in (False, True):
        run.train(config, tmp_path, resume=resume, overwrite=not resume, progress=False, pause_at=2)
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if entry["event"] == "Evaluated"] == [2]
    assert [entry["step"] for entry in entries if entry["event"] == "CheckpointSaved"].count(2) == 1


def test_a_pause_before_the_first_step_is_refused(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pause_at = 0"):
        run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=False, pause_at=0)
