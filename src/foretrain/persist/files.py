"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError

_LONGEST_SHOWN = 100
_MOST_LEVELS = 100


def for_json(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(text: str | bytes, **options: Any) -> Any:
    """Read JSON that somebody else may have written; every such text goes through here.

    Raises ValueError for whatever cannot be used, also for brackets within brackets without end."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _is_deep(value):
        raise ValueError("nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    """Say whether the value has more levels than Python can safely walk through."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        within = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [item for items in within for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def user_path(text: str | Path, what: str = "") -> Path:
    """Read a path as somebody wrote it, with `~`; every such path goes through here. It need not exist.

    Raises InputError for one that the system cannot even look up. what: the setting or option that it comes from.
    """
    where = f"{what} = " if what else ""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except RuntimeError:
        user = str(text).partition("/")[0]
        raise InputError(f"{where}{text}: there is no home folder of {user}; write the path in full") from None
    except ValueError:  # a zero byte, or half a surrogate pair
        raise InputError(f"{where}{str(text)!r}: no path can hold these characters; write it without them") from None
    except OSError as error:
        shown = _shortened(str(text))
        raise InputError(f"{where}{shown}: cannot be looked up ({error.strerror}); check the path") from None
    return path


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def sync_file(path: Path) -> None:
    """Make the content of a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of this name itself: a link that bears it is refused, never written through."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_synced(path: Path, text: str) -> None:
    """Write a text file that is on the disk when this returns. It is made anew, whatever bore its name before.

    What UTF-8 cannot hold, halves of surrogate pairs that come from names and JSON, is written as an escape."""
    path.unlink(missing_ok=True)
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str) -> None:
    """Write a file beside it, sync and rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_synced(temporary, text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_file(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, whose names survive a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_file(path.parent)


def give_usual_mode(path: Path) -> None:
    """Let the umask decide who may read a file; some libraries make theirs for the owner alone."""
    usual = path.with_name(f".tmp-mode-{path.name}")
    usual.unlink(missing_ok=True)
    os.close(open_own(usual, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    mode = usual.lstat().st_mode
    usual.unlink()
    path.chmod(stat.S_IMODE(mode))


def give_mode_of_folder(path: Path) -> None:
    """Let those read a file who may read its folder, which was just made: the umask has decided about it."""
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def explain_failed_write(error: Exception) -> tuple[str, str]:
    """Return (cause, advice) in words. safetensors tells the cause only in its text."""
    text = " ".join(str(error).split())
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in text or "quota exceeded" in text:
        return "the disk is full (No space left on device)", "Free some space"
    return text, "Check the folder and its permissions"
