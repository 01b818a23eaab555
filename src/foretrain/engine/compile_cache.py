"""What `torch.compile` makes is kept from run to run, and what it took is said."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.events import Event, Notice
from foretrain.persist.files import user_path

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable by which torch is told where compiled code is. Without it that is a temporary folder, which
is lost when the machine starts anew."""
_TIMES = ("entire_frame_compile", "entire_backward_compile")
_HITS = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
_MISSES = (("aot_autograd", "autograd_cache_miss"), ("inductor", "fxgraph_cache_miss"))


def keep_compiled() -> None:
    """Let torch keep compiled code in the user's cache folder, unless its user chose where, or nothing can be written
    there. To be called before anything is compiled."""
    if os.environ.get(FOLDER, "") not in ("", _own_of_torch()):
        return
    try:
        cache = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
        folder = cache.absolute() / "foretrain" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ForetrainError):
        return
    if os.access(folder, os.W_OK | os.X_OK):
        os.environ[FOLDER] = str(folder)


def _own_of_torch() -> str:
    """Return the folder that torch names in the variable by itself, as soon as a part of it is loaded that compiles."""
    loaded: Any = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    default = getattr(loaded, "default_cache_dir", None)  # another version of torch may have no such function
    return "" if default is None else str(Path(default()).absolute())


class Compilation:
    """Knows what was compiled since it was made, by torch's own counters."""

    def __init__(self) -> None:
        self._before = _counted()

    def words(self) -> str:
        """Say how long compiling took, and whether earlier runs had left it; empty where nothing was compiled."""
        seconds, hits, misses = (now - then for now, then in zip(_counted(), self._before, strict=True))
        if seconds <= 0:
            return ""
        took = f"compiled in {seconds:.0f} s" if seconds >= 10 else f"compiled in {seconds:.1f} s"
        folder = os.environ.get(FOLDER, "")
        if not folder or not (hits or misses):
            return took
        if misses:
            part = ", in part from what earlier runs left there" if hits else ""
            return f"{took}{part}; {folder} keeps it for the next run of this model"
        return f"{took}, from what earlier runs left in {folder}"

    def tell(self, emit: Callable[[Event], None]) -> None:
        if words := self.words():
            emit(Notice(words, level="info"))


def anything_compiled() -> bool:
    """Return whether torch has compiled anything in this process."""
    return _counted()[0] > 0


def _counted() -> tuple[float, float, float]:
    """Return the seconds, and how often compiled code was found and not found. Parts of torch that compile are not
    loaded for it, as that takes a second."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    times, counters = getattr(utils, "cumulative_time_spent_ns", {}), getattr(utils, "counters", {})

    def total(names: tuple[tuple[str, str], ...]) -> float:
        return float(sum(counters.get(group, {}).get(name, 0) for group, name in names))

    return sum(times.get(name, 0) for name in _TIMES) / 1e9, total(_HITS), total(_MISSES)
