"""The processes of `thousand_faults.py`: real ones, forked from one that has torch loaded already."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults_inject as inject
import faults_own as own
from faults_inject import Injection
from faults_setups import FILE, Setup
from foretrain.errors import ForetrainError

OUT = "runs/mine"
SECONDS = 300
"""No process takes longer, however busy the machine is: what does hangs."""


@dataclass(frozen=True)
class Order:
    """What a process is to do."""

    setup: Setup
    folder: Path
    out: str = OUT
    how: str = "resume"
    """"resume", "start" (refused where there is a run) or "overwrite"."""
    bare: bool = False
    """Resume by the run folder's own config.toml."""
    poison: tuple[str, int] = ("", 0)
    """Of the predictor, and from which window on."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changed for this process."""

    @property
    def arguments(self) -> list[str]:
        words = [self.setup.command, *([] if self.bare else [FILE]), "--out", self.out]
        words += [] if self.how == "start" else [f"--{self.how}"]
        return words + [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]

    def carry_out(self) -> int:
        if self.setup.command == "fit":
            return self._fit()
        from foretrain.cli.app import main

        main(self.arguments)
        return 0

    def _fit(self) -> int:
        """As a program of the user's own does it that tells errors of foretrain in one line."""
        assert self.setup.parts is not None
        predictor = None if self.setup.factor is None else own.Scripted(self.setup.factor, *self.poison)
        try:
            parts = self.setup.parts(self.setup.settings | self.settings, predictor)
            how = {} if self.how == "start" else {self.how: True}
            parts.trainer.fit(parts.loader, parts.held_out, out=self.out, **how, **parts.options)
        except ForetrainError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code
        return 0


@dataclass(frozen=True)
class Outcome:
    """How a process ended. code: 128 + number after a signal."""

    code: int
    text: str
    fired: bool = False
    """A fault that waits for its moment has happened, as far as the process can tell."""
    spoiled: bool = False
    """A loss was not finite."""

    @property
    def last(self) -> str:
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "")


class Process:
    """An order at work, in a fork of this process."""

    def __init__(
        self, order: Order, injections: Sequence[Injection] = (), note: Callable[[], Any] | None = None
    ) -> None:
        reader, writer = os.pipe()
        self._fired, fires = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            inject.channel[0] = fires
            _be_child(order, injections, writer, note)
        os.close(writer)
        os.close(fires)
        self._reader, self._parts = reader, list[bytes]()

    def _read(self, seconds: float | None) -> bool:
        """Whether there is more to come; None: wait for it."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return True
        part = os.read(self._reader, 1 << 16)
        self._parts.append(part)
        return bool(part)

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._read(0)

    def kill_after(self, seconds: float) -> None:
        """SIGKILL, unless it has ended by then."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._read(left):
                return
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        while not self._parts or self._parts[-1]:
            self._read(None)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        marks = os.read(self._fired, 4096)
        fired, spoiled = b"1" in marks or code == -signal.SIGKILL, inject.SPOILED in marks
        os.close(self._reader)
        os.close(self._fired)
        return Outcome(
            code if code >= 0 else 128 - code, b"".join(self._parts).decode(errors="replace"), fired, spoiled
        )


def _be_child(order: Order, injections: Sequence[Injection], writer: int, note: Callable[[], Any] | None) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal has it
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.chdir(order.folder)
        with ExitStack() as stack:
            for inject in injections:
                inject(stack)
            code = order.carry_out()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        if note is not None:
            note()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
        os._exit(code)
