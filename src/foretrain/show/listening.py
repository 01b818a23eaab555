"""Everything that listens to a run and shows it: console, log, report and trackers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.events import Bus
from foretrain.persist.folder import RunFolder
from foretrain.show.console import Console
from foretrain.show.jsonl import JsonlLog
from foretrain.show.pages.report import ReportWriter
from foretrain.show.trackers.listener import close_all
from foretrain.show.trackers.opening import open_trackers


def listen(
    stack: ExitStack,
    bus: Bus,
    config: Config,
    folder: RunFolder | None,
    *,
    resume: bool,
    level: Level | None,
    table: bool,
    settings: dict[str, Any],
) -> None:
    """Console, log, report and trackers listen until `stack` is left. level: of the console; None: there is none."""
    if level is not None:
        console = Console(level=level, table=table)
        stack.callback(bus.subscribe(console, trusted=True))
        stack.callback(console.close)
    if folder is None:
        return
    log = JsonlLog(folder.metrics, emit=bus.emit)
    stack.callback(bus.subscribe(log, trusted=True))
    stack.callback(log.close)
    if config.log.report:
        stack.callback(bus.subscribe(ReportWriter(folder.path), trusted=True))
    trackers = open_trackers(config, folder.path, resume, bus.emit, settings)
    for tracker in trackers:
        stack.callback(bus.subscribe(tracker, trusted=True))
    stack.callback(close_all, trackers)
