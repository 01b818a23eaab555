"""What all commands share."""

from __future__ import annotations

import sys

import pytest

from foretrain.errors import InputError
from foretrain.terminal import as_json, chosen_level, put_beside


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


def test_text_stays_beside_its_name_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    put_beside("name  ", "some words that are too long for one line")
    assert capsys.readouterr().out == "name  some words that are too long for one line\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    put_beside("name  ", "some words that are too long for one line")
    assert capsys.readouterr().out == "name  some words that are too long for\n      one line\n"
