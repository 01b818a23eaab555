"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Make the content of a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Write beside, sync, rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_file(path.parent)
