"""Losses in the logs of other tools: columns that are guessed or named, steps done again, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.forecast.logged import ColumnNames, read_losses


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_held_out_losses_go_before_training_losses_in_json_lines(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0, "learning_rate": 1e-3} for step in range(10)]
    file = lines(tmp_path / "log.jsonl", *rows, {"step": 9, "eval_loss": 2.5}, {"step": 12, "eval_loss": 2.25})
    found = read_losses(file)
    assert (found.column, found.points) == ("eval_loss", [(9, 2.5), (12, 2.25)])
    assert found.held_out
    assert len(found.rates) == 10
    named = read_losses(file, ColumnNames(loss="loss"))
    assert (len(named.points), named.held_out) == (10, False)


def test_a_row_may_have_names_one_level_deeper(tmp_path: Path) -> None:
    file = lines(tmp_path / "log.jsonl", *({"iter": at, "val": {"loss": 1 / at}} for at in (1, 2, 3)))
    assert read_losses(file).column == "val/loss"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_with_empty_cells_and_any_delimiter(tmp_path: Path, delimiter: str) -> None:
    file = tmp_path / "metrics.csv"
    rows = [["epoch", "step", "train_loss", "val_loss"], ["0", "10", "3.5", ""], ["0", "19", "", "3.25"]]
    rows += [["1", "39", "", "2.75"]]
    file.write_text("\n".join(delimiter.join(row) for row in rows), encoding="utf-8")
    assert read_losses(file).points == [(19, 3.25), (39, 2.75)]


def test_an_export_with_the_name_of_the_run_in_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "wandb.csv"
    text = (
        '"trainer/global_step","deep-run-3 - eval/loss","deep-run-3 - eval/loss__MIN"\n"10","3.5","3.5"\n"20","3","3"\n'
    )
    file.write_text(text, encoding="utf-8")
    found = read_losses(file)
    assert (found.column, found.points) == ("deep-run-3 - eval/loss", [(10, 3.5), (20, 3)])


def test_a_trainer_state_says_how_long_the_run_is(tmp_path: Path) -> None:
    history = [{"step": 10, "loss": 3.0, "learning_rate": 1e-4}, {"step": 10, "eval_loss": 2.9}]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"max_steps": 500, "log_history": history}, indent=2), encoding="utf-8")
    found = read_losses(file)
    assert (found.total_steps, found.points) == (500, [(10, 2.9)])


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    rows = [{"step": step, "val_loss": float(value)} for step, value in ((1, 9), (2, 8), (3, 7), (2, 6), (4, 5))]
    assert read_losses(lines(tmp_path / "log.jsonl", *rows)).points == [(1, 9), (2, 6), (4, 5)]


def test_losses_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("step,val_loss\n1,3\n2,nan\n3,2\n4,inf\n", encoding="utf-8")
    found = read_losses(file)
    assert (found.points, found.broken, found.ends_broken) == ([(1, 3), (3, 2)], 2, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01\x02", "a binary file"),
        (b"\xff\xfe\xfd,\n1,2\n", "neither JSON lines nor CSV"),
        (b"", "no numbers in it"),
        (b"a book about nothing\n", "no numbers in it"),
        (b"step,accuracy\n1,2\n", "no column of losses was found among step, accuracy; name it with --loss"),
        (b"epoch,val_loss\n1,2\n", "no column of steps was found among epoch, val_loss; name it with --step"),
        (b'{"a": [\n', "no JSON that can be read"),
        (b"[" * 5000, "no JSON that can be read"),
        (b'{"step": 1, "note": "x"}\n', "no column of losses was found among step"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "log"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_losses(file)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    file = lines(tmp_path / "log.jsonl", {"step": 1, "val_loss": 2.0})
    with pytest.raises(
        InputError, match=r"no column of numbers is called 'loss2' \(--loss\); there are: step, val_loss"
    ):
        read_losses(file, ColumnNames(loss="loss2"))


def test_a_folder_without_a_log_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a run folder"):
        read_losses(tmp_path)
