"""Write the report of runs as a file, when asked for and when a run ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrain.errors import InputError
from foretrain.events import Event, RunEnded
from foretrain.persist.files import write_atomic

NAME = "report.html"


def write_report(folders: Sequence[Path], target: Path) -> int:
    """Write the report of these run folders, and return how many bytes it has."""
    from foretrain.show.follow import read_runs
    from foretrain.show.pages.report_page import page

    text = page(read_runs(list(folders)), target.parent)
    try:
        write_atomic(target, text)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); name another file with --out") from None
    return len(text.encode("utf-8", "backslashreplace"))


class ReportWriter:
    """Listens for the end of a run, after the log; `report.html` is in its folder then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            write_report([self.folder], self.folder / NAME)
