"""`foretrain forecast`: its table, its document, and its errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., int]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.csv"
    rows = [f"{step},{2 + 3 * step**-0.5:.5f}" for step in range(10, 1001, 10)]
    file.write_text("step,val_loss\n" + "\n".join(rows), encoding="utf-8")
    return file


def test_a_back_test_prints_the_end_and_the_error(
    command: Command, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    assert command("forecast", log, "--at", "0.5", "--schedule", "constant") == 0
    shown = capsys.readouterr()
    assert "500 of 1,000" in shown.out
    assert "end, 80 % interval" in shown.out
    assert "2.0949" in shown.out
    assert "last value" in shown.out
    assert shown.err == ""


def test_the_document_has_every_number(command: Command, capsys: pytest.CaptureFixture[str], log: Path) -> None:
    assert command("forecast", log, "--total-steps", "2000", "--schedule", "constant", "--level", "0.9", "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["seen_steps"], told["total_steps"], told["level"], told["truth"]) == (1000, 2000, 0.9, None)
    assert told["low"] < told["loss"] < told["high"]
    assert told["loss"] == pytest.approx(2 + 3 * 2000**-0.5, rel=0.02)
    assert told["baselines"]["last value"] == pytest.approx(2.09487)


def test_errors_are_one_line(command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, log: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(bytes(range(256)) * 20)
    for given, words in (
        ([tmp_path / "none"], "there is no such file or folder"),
        ([garbage], "a binary file"),
        ([log], "--total-steps N"),
        ([tmp_path], "neither a run folder"),
        ([log, "--at", "2"], "a share between 0 and 1"),
        ([log, "--schedule", "sawtooth"], "sawtooth"),
    ):
        assert command("forecast", *given) == 2
        (text,) = capsys.readouterr().err.strip().splitlines()
        assert words in text
