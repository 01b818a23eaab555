"""What can go wrong, said so that the reader knows what to do next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class ForetrainError(Exception):
    """Base of every error foretrain raises on purpose."""

    exit_code = 1
    facts: Mapping[str, Any] = MappingProxyType({})
    """What else was found out, for programs that read errors as JSON."""


class InputError(ForetrainError):
    """Something handed in (a setting, a file, a folder) cannot be used. The message says what to change."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, impossible, or contradicts another one."""


class DataError(InputError):
    """The data is missing, empty, too short, or does not fit the model."""


class CheckpointError(InputError):
    """A checkpoint cannot be used here: damaged, foreign, or of another model."""


class SaveError(ForetrainError):
    """Something could not be written. What was on the disk before is intact."""


class DivergenceError(ForetrainError):
    """The run produced non-finite losses and cannot go on by itself."""


class RanksError(ForetrainError):
    """Processes that train together came apart: they decided differently, or one of them failed."""


class OutOfMemory(ForetrainError):
    """The device or the host had too little memory. The message says where, and what to change."""

    exit_code = 3

    def __init__(self, text: str, *, intact: bool = False, half_done: bool = False) -> None:
        super().__init__(text)
        self.intact = intact
        """The run is, bit for bit, where it was before the step that failed."""
        self.half_done = half_done
        """Weights may have changed by half a step: only an earlier state can be gone on from."""


def how_to_install(*packages: str) -> str:
    """With the interpreter in use: a bare `pip` may be that of another one."""
    return f"install it with: {shlex.quote(sys.executable)} -m pip install {shlex.join(packages)}"


_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "MPS backend out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, or came of another one that does; never one of ours."""
    return root_of_shortage(error) is not None


def root_of_shortage(error: BaseException) -> BaseException | None:
    """The error that said that memory ran out: torch's own, Python's, or one that is told by its text only.

    It need not be the last one: a CUDA graph whose recording it broke off fails once more when it is ended.
    """
    found: BaseException | None = error
    while isinstance(found, (RuntimeError, MemoryError)):
        if isinstance(found, MemoryError) or type(found).__name__ == "OutOfMemoryError":
            return found
        if any(sign in str(found) for sign in _SIGNS):
            return found
        found = found.__cause__ or found.__context__
    return None
