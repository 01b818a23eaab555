"""Reads the file of an offline run: records in LevelDB's log format, as wandb's own protocol buffers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def read_records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place + _HEADER.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        checksum, length, kind = _HEADER.unpack_from(content, place)
        data = content[place + _HEADER.size : place + _HEADER.size + length]
        place += _HEADER.size + length
        assert checksum == zlib.crc32(bytes([kind]) + data)
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
