"""What all commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretrain.cli.app import main
from foretrain.cli.terminal import Document, as_json, chosen_level, end_run, put, put_beside
from foretrain.errors import InputError


def test_levels_by_flags() -> None:
    assert chosen_level(False, False) is None
    assert (chosen_level(True, False), chosen_level(False, True)) == ("quiet", "verbose")
    with pytest.raises(InputError, match="contradict"):
        chosen_level(True, True)


def test_json_is_valid_and_exact() -> None:
    text = as_json({"nan": float("nan"), "more": [float("inf"), 0.1 + 0.2], "name": "ä\udcff"})
    assert text.isascii()
    assert text.split() == ["{", '"nan":', "null,", '"more":', "[", "null,", "0.30000000000000004", "],", '"name":',
                            '"\\u00e4\\udcff"', "}"]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["--json"], True),
        (["--json=true"], True),
        (["--json=Yes", "x"], True),
        (["--json=1"], True),
        (["--json=false"], False),
        (["--json=0"], False),
        (["--jsonl"], False),
        (["--set", "data.path=--json"], False),
        (["--", "--json"], False),
    ],
)
def test_json_is_asked_for_in_every_way_a_switch_can_be_given(
    arguments: list[str], asks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Document.wanted(arguments) as document:
        assert (document is not None) == asks
        print("by the way")
        if document is not None:
            document.put({"answer": 1})
    shown = capsys.readouterr()
    assert (shown.err, json.loads(shown.out)) == ("by the way\n", {"answer": 1}) if asks else shown.err == ""


def test_an_error_is_a_document_with_json_set_to_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", str(tmp_path / "nowhere.toml"), "--json=true"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_text_stays_beside_its_name_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    put_beside("name  ", "some words that are too long for one line")
    assert capsys.readouterr().out == "name  some words that are too long for one line\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    put_beside("name  ", "some words that are too long for one line")
    assert capsys.readouterr().out == "name  some words that are too long for\n      one line\n"


def test_a_quiet_run_that_was_stopped_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"reason": "interrupted", "signal": "SIGTERM", "global_step": 3, "seconds": 61.0, "final_val_loss": 1.5}
    with pytest.raises(SystemExit, match="143"):
        end_run(summary, tmp_path, "quiet", json_=False)
    line = f"interrupted: held-out loss 1.5000, 3 steps in 1:01; {tmp_path}, go on with --resume\n"
    assert capsys.readouterr() == (line, "")


def test_after_the_line_on_how_to_go_on_nothing_more_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="130"):
        end_run({"reason": "interrupted", "signal": "SIGINT"}, tmp_path, "normal", json_=False)
    assert capsys.readouterr() == ("", "")


def test_the_end_of_a_run_names_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my run"
    (folder / "adapter").mkdir(parents=True)
    counts = {"global_step": 3, "steps": {}, "backward_passes": 3, "tokens": 12, "seconds": 1.0}
    summary = {"reason": "finished", **counts}
    end_run(summary, folder, "normal", json_=False, results=lambda: ["accuracy 90.0%"])
    shown = capsys.readouterr()
    assert shown.out.startswith("run finished")
    assert shown.out.endswith("┘\naccuracy 90.0%\n")
    ask = f"foretrain generate '{folder}' --prompt \"...\""
    assert shown.err == f"folder   {folder}\nadapter  {folder / 'adapter'}  ({ask})\n"


def test_a_terminal_is_not_steered_by_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\x1b[2Jb\n"  # programs get names as they are
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    put("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"
