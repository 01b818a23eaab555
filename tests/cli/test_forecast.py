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


@pytest.mark.parametrize("new_style", [False, True], ids=["simple values", "tensors"])
def test_a_log_of_tensorboards_own_writer(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, new_style: bool
) -> None:
    """The writer of the package tensorboard, in both forms that it gives to a scalar; losses follow a power law."""
    from torch.utils.tensorboard.writer import SummaryWriter

    folder = tmp_path / "logs"
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("settings", "a text is no scalar")
        for step in range(10, 1001, 10):
            writer.add_scalar("train/loss", 1.9 + 3 * step**-0.5, step, new_style=new_style)
            writer.add_scalar("train/learning_rate", 3e-4, step, new_style=new_style)
            if step % 50 == 0:
                writer.add_scalar("eval/loss", 2 + 3 * step**-0.5, step, new_style=new_style)
    (file,) = folder.iterdir()
    at_end = 2 + 3 * 2000**-0.5
    for path in (folder, file):
        assert command("forecast", path, "--total-steps", "2000", "--schedule", "constant", "--json") == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert (told["losses"], told["seen_steps"], told["total_steps"]) == ("held-out loss", 1000, 2000)
        assert told["loss"] == pytest.approx(at_end, rel=0.005)
        assert told["low"] < at_end < told["high"]
        assert told["baselines"]["last value"] == pytest.approx(2 + 3 * 1000**-0.5, rel=1e-6)
    assert command("forecast", file, "--at", "0.5", "--loss", "train/loss", "--json") == 0  # with its rates
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["losses"], told["seen_steps"], told["total_steps"]) == ("train/loss (training)", 500, 1000)
    assert told["truth"] == pytest.approx(1.9 + 3 * 1000**-0.5, rel=1e-6)
    assert abs(told["error_percent"]) < 0.5
    file.write_bytes(file.read_bytes()[:-9])  # as a writer leaves it that was killed
    assert command("forecast", file, "--total-steps", "2000", "--schedule", "constant") == 0
    assert "950 of 2,000" in capsys.readouterr().out
