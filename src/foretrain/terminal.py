"""What all commands share: options, and the three ways to say something."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from foretrain.errors import InputError
from foretrain.events import CheckpointRejected, Event, Notice, Recovered


def flag(text: str, name: str | None = None) -> Parameter:
    return Parameter(name=name, negative=(), show_default=False, help=text)


Settings = Annotated[
    list[str] | None,
    Parameter(
        name=["--set", "-s"],
        negative=(),
        help="Change one setting, for example `--set optimizer.learning_rate=3e-4`. Repeatable.",
    ),
]
Json = Annotated[bool, flag("Print the result as JSON on standard output.", "--json")]


def check_resume(resume: bool, overwrite: bool, out: Path | None) -> None:
    if resume and out is None:
        raise InputError("--resume needs --out DIR, the folder of the run to go on with")
    if resume and overwrite:
        raise InputError("--resume and --overwrite contradict each other; keep one of them")


def check_target(folder: Path, overwrite: bool) -> None:
    """Nobody's files are written over by mistake."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file, not a folder; choose another name")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InputError(
            f"{folder}: there is something in it already; choose another folder, or add --overwrite to replace "
            "files of the same names"
        )


def leave(summary: dict[str, Any]) -> None:
    """A run that is saved but not finished: a shell's `&&` and a scheduler must know."""
    if summary["reason"] == "interrupted":
        sys.exit(128 + signal.Signals[summary["signal"]])


def put(text: str) -> None:
    """A result, on standard output."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """What happens, on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def silent(text: str) -> None:
    return


def warn(event: Event) -> None:
    """What even a quiet run must say."""
    if isinstance(event, CheckpointRejected):
        say(f"warning: damaged checkpoint put aside as {event.path}: {event.reason}")
    elif isinstance(event, Notice) and event.level == "warning":
        say(f"warning: {event.message}")
    elif isinstance(event, Recovered) and event.action in ("roll_back", "abort", "out_of_memory"):
        say(f"warning: step {event.step}: {event.text}")
