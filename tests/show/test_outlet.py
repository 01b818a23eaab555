"""Output that nobody reads: it is dropped, and nothing ends because of it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from foretrain.show.outlet import Outlet, is_lost


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


def test_a_full_disk_is_remembered() -> None:
    outlet = Outlet(Gone(errno.ENOSPC))
    assert outlet.write("some words") == 10
    assert is_lost(outlet)
    assert outlet.failure is not None
    assert outlet.failure.errno == errno.ENOSPC


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


@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_under_the_output_is_told_at_the_end_of_the_run(
    both: bool,
    text_file: Path,
    tiny_settings: list[str],
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    with Path("/dev/full").open("w") as full, Path("/dev/full").open("w") as full_too:
        monkeypatch.setattr(sys, "stdout", full)
        if both:
            monkeypatch.setattr(sys, "stderr", full_too)
        assert command("train", *tiny_settings, "--set", f"data.path={text_file}", "--out", out) == 1
    assert json.loads((out / "summary.json").read_text())["reason"] == "finished"
    assert (out / "model" / "model.safetensors").is_file()
    told = "" if both else "error: standard output: No space left on device; what was printed is cut off"
    assert told in capsys.readouterr().err


def test_no_standard_output_at_all(text_file: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    """As after `foretrain ... >&-`."""
    code = "import os; os.close(1); import sys; sys.stdout = None; from foretrain.cli.app import main; main()"
    arguments = ["train", *tiny_settings, "--set", f"data.path={text_file}", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_so_does_one_that_python_code_began(
    text_file: Path, make_config: Callable[..., object], tmp_path: Path
) -> None:
    from foretrain.recipes import train as run

    with nobody_reads():
        summary = run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=True)  # type: ignore[arg-type]
    assert summary["reason"] == "finished"
