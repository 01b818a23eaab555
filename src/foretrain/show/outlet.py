"""Drop output that nobody reads any more, or that a disk does not take, so that it ends no work."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESTALE}
"""Writing fails with one of these when the reader of a pipe, or the terminal, is gone."""


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""These characters steer a terminal, or turn the direction of reading: those that come from files are only shown."""


_LONGEST_LINE = 2000


def visible(text: str) -> str:
    """Write the characters that steer a terminal as escapes."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str) -> str:
    """Cut off what nobody would read: files may hold names and values without end."""
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ..."


class Outlet:
    """A stream as it was, but for one thing: once it cannot be written any more, what is written is dropped.

    lost: nothing is written any more. failure: why, where that is not just a reader who is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = False
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        if not self.lost:
            with self._dropping():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:  # names that are not UTF-8, or a terminal that knows few characters
                    encoding = self._stream.encoding
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            with self._dropping():
                self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = True
            if error.errno not in _GONE:  # such as a file on a full disk
                self.failure = error
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Make a stream write to nowhere from now on, also what it still holds when the program ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file has nothing to fail later
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def outlets() -> Iterator[Outlet]:
    """Replace standard output and standard error by outlets, and yield the first."""
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        streams = [stream or stack.enter_context(_nowhere(number)) for number, stream in enumerate(before, start=1)]
        out, err = Outlet(streams[0]), Outlet(streams[1])
        sys.stdout, sys.stderr = out, err
        try:
            yield out
        finally:
            for outlet in (out, err):
                outlet.flush()
            sys.stdout, sys.stderr = before


def _nowhere(number: int) -> TextIO:
    """For a stream that was closed before the program began, as by `>&-`. Its number is taken, too: else the next file
    that is opened would get it, and with it whatever a library prints."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    return Path(os.devnull).open("w", encoding="utf-8")


def is_lost(stream: object) -> bool:
    """Tell whether nobody reads it any more."""
    return isinstance(stream, Outlet) and stream.lost
