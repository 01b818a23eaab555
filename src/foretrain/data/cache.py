"""Token files on disk, made once for many runs: synced before they get their name, and checked whenever they are used.

<root>/<key>/        appears by one rename, complete
  train.bin ...      tokens, little-endian
  tokenizer.json
  meta.json          what they hold, size and CRC-32 of every other file, and its own
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import DataError
from foretrain.persist.files import from_json, make_folder, sync_file, user_path, write_synced

PARTS = ("train", "held_out")
_META, _TOKENIZER = "meta.json", "tokenizer.json"
_BLOCK = 2**22
_TYPES = ("<u2", "<u4")


class Damaged(Exception):
    """What is wrong with a folder of token files."""


def root(chosen: str) -> Path:
    """Return where token files are kept: as chosen, in the user's cache folder, or else in the system's temporary
    folder."""
    if chosen:
        return user_path(chosen, "data.cache")
    folder = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "foretrain" / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _own_temporary(Path(tempfile.gettempdir()) / f"foretrain-tokens-{os.getuid()}")


def _own_temporary(folder: Path) -> Path:
    """In a folder that everybody writes to, only what is ours alone is used: others could plant tokens there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DataError(f"{folder}: cannot keep token files there ({error.strerror}); set data.cache") from None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not private:
        raise DataError(
            f"{folder}: it is not a folder of yours alone (mode 700), so its token files cannot be trusted; delete it, "
            "or set data.cache to a folder of yours"
        )
    return folder


# --- writing ---------------------------------------------------------------------------------------------------------


def write(folder: Path, fill: Callable[[Path], dict[str, Any]], tokenizer: str) -> None:
    """Make the folder, or replace it. fill: writes the token files into a folder and says what they hold."""
    temporary: Path | None = None
    try:
        make_folder(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
        new = temporary / "new"
        new.mkdir()
        meta = fill(new)
        write_synced(new / _TOKENIZER, tokenizer)
        files = {path.name: {"size": path.stat().st_size, "crc32": _checksum(path)} for path in sorted(new.iterdir())}
        write_synced(new / _META, _sealed(meta | {"files": files}))
        for path in (*new.iterdir(), new):
            sync_file(path)
        _put_in_place(new, folder, temporary / "old")
        sync_file(folder.parent)
    except OSError as error:
        raise DataError(
            f"{folder.parent}: cannot write token files ({error.strerror}); free some space or set data.cache"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(new: Path, folder: Path, old: Path) -> None:
    if folder.exists() or folder.is_symlink():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if not (folder / _META).is_file():  # unless another run was faster
            raise


def _sealed(meta: dict[str, Any]) -> str:
    return json.dumps(meta | {"crc32": _seal(meta)}, indent=1)


def _seal(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _checksum(path: Path, look: Callable[[bytes], None] = lambda _: None) -> int:
    """Return the CRC-32, which takes 25 ms for 100 MB."""
    value = 0
    with path.open("rb") as file:
        while content := file.read(_BLOCK):
            value = zlib.crc32(content, value)
            look(content)
    return value


# --- reading ---------------------------------------------------------------------------------------------------------


def check(folder: Path) -> dict[str, Any]:
    """Return what the token files hold, once all of them are as they were written. Raises Damaged."""
    try:
        meta = _read_meta(folder / _META)
        for name in (*(f"{part}.bin" for part in PARTS), _TOKENIZER):
            _check_file(folder / name, meta)
    except OSError as error:
        raise Damaged(f"{Path(error.filename).name}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{_META} does not say what the files hold: {error}") from None
    return meta


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = from_json(path.read_text(encoding="utf-8"))
        seal = meta.pop("crc32")
        if seal != _seal(meta) or meta["dtype"] not in _TYPES:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path.name} is not as it was written") from None
    return dict(meta)


def _check_file(path: Path, meta: dict[str, Any]) -> None:
    wanted, dtype = meta["files"][path.name], np.dtype(meta["dtype"])
    largest = 0

    def look(content: bytes) -> None:
        nonlocal largest
        largest = max(largest, int(np.frombuffer(content, dtype).max()))

    if path.stat().st_size != wanted["size"]:
        raise Damaged(f"{path.name} has {path.stat().st_size:,} bytes, not {wanted['size']:,}")
    is_tokens = path.suffix == ".bin"
    if is_tokens and wanted["size"] != meta[path.stem] * dtype.itemsize:
        raise Damaged(f"{path.name} does not hold {meta[path.stem]:,} tokens")
    if _checksum(path, look if is_tokens else lambda _: None) != wanted["crc32"]:
        raise Damaged(f"{path.name} has another checksum than when it was written")
    if is_tokens and wanted["size"] and largest >= meta["vocab_size"]:
        raise Damaged(f"{path.name} holds token {largest}, but there are {meta['vocab_size']}")


def tokens_of(folder: Path, part: str, meta: dict[str, Any]) -> NDArray[Any]:
    """Map one of the token files."""
    if meta[part] == 0:
        return np.zeros(0, dtype=meta["dtype"])  # an empty file cannot be mapped
    return np.memmap(folder / f"{part}.bin", dtype=meta["dtype"], mode="r", shape=(meta[part],))


def tokenizer_of(folder: Path) -> Path:
    """Return the tokenizer that they were made with."""
    return folder / _TOKENIZER
