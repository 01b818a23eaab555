"""Output that nobody reads: it is dropped, and nothing ends because of it."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from foretrain.outlet import Outlet, is_lost


class Gone(io.StringIO):
    """A stream whose other end fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_what_nobody_reads_is_dropped(number: int) -> None:
    outlet = Outlet(Gone(number))
    assert not is_lost(outlet)
    assert [outlet.write("some"), outlet.write("words")] == [4, 5]
    outlet.flush()
    assert is_lost(outlet)


def test_a_full_disk_is_still_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        Outlet(Gone(errno.ENOSPC)).write("some words")


def test_it_is_the_stream_that_it_stands_for() -> None:
    stream = io.StringIO()
    outlet = Outlet(stream)
    outlet.write("words")
    assert (stream.getvalue(), outlet.isatty(), outlet.readable()) == ("words", False, True)


@contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard output and error are pipes that nobody reads, as behind `2>&1 | head -5`."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            os.close(reading)
            patch.setattr(sys, name, opened.enter_context(os.fdopen(writing, "w", encoding="utf-8")))
        yield


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_run_that_nobody_reads_goes_on_to_its_end(
    flags: list[str], text_file: Path, tiny_settings: list[str], command: Callable[..., int], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with nobody_reads():
        assert command("train", *tiny_settings, "--set", f"data.path={text_file}", "--out", out, *flags) == 0
    assert json.loads((out / "summary.json").read_text())["reason"] == "finished"
    assert (out / "report.html").is_file()
    assert (out / "model" / "model.safetensors").is_file()


def test_so_does_one_that_python_code_began(
    text_file: Path, make_config: Callable[..., object], tmp_path: Path
) -> None:
    from foretrain import run

    with nobody_reads():
        summary = run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=True)  # type: ignore[arg-type]
    assert summary["reason"] == "finished"
