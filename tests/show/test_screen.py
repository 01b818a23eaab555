"""Screens: plain and wide where there is no terminal, whatever the environment says."""

from __future__ import annotations

import pytest

from foretrain.show.screen import screen


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_without_a_terminal_nothing_is_redrawn(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = screen(stream)
    assert not console.is_interactive
    assert console.stderr is (stream == "stderr")


def test_tables_are_whole_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (screen().width, screen("stderr", wide=False).width) == (200, 80)


def test_a_terminal_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "97")
    assert screen().is_interactive
    assert screen().width == 97
    monkeypatch.setenv("TERM", "dumb")
    assert not screen().is_interactive
