"""Ctrl-C, SIGTERM and the like ask a run to stop; the run itself decides when: after the step it is in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal to stop left code of the user's own that may hang."""


class StopRequest:
    """While active, the first signal only sets `requested`; a second one acts as it always did.

    A signal that is ignored, as `nohup` and background jobs of a shell have it, stays ignored.
    """

    leave: Callable[[], bool] = staticmethod(lambda: False)
    """Say whether what runs now may be left at once, by Interrupted."""

    def __init__(self) -> None:
        self.requested = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not Python's to give back
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()
        if self.leave():
            raise Interrupted(self.requested)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def after_step(self, step: int) -> None:
        """The run is at the end of a step: where several processes agree on when to stop, they do it here."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
