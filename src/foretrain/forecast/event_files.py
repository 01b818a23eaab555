"""Read the scalars of TensorBoard's event files: the few fields that are needed, with every length checked.

A file is a row of records (length, checksum, bytes, checksum), each the protocol buffer `Event`. Checksums are not
verified: what has no sensible structure is refused all the same, and nothing that is read is ever executed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from foretrain.errors import InputError

_LARGEST_RECORD = 2**24
"""Records with images may be larger; they are skipped by their length, and hold no scalar."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2
"""Types of the numbers in a tensor, as TensorFlow numbers them."""
Field = tuple[int, int | bytes]


def is_event_file(path: Path) -> bool:
    """Tell whether a file is one of TensorBoard's, by its name or by how it begins."""
    if "tfevents" in path.name:
        return True
    with path.open("rb") as file:
        head = file.read(12)
        if len(head) < 12 or not 8 < (length := struct.unpack("<Q", head[:8])[0]) < 2**16:
            return False
        return b"brain.Event:" in file.read(length)


def scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """Yield (step, tag, value) of every scalar, in the order of the file. A record that was cut off ends it, as of a
    program that was killed. Raises InputError for what is no event file."""
    with path.open("rb") as file:
        size, place, read = path.stat().st_size, 0, 0
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if place + 12 + length + 4 > size:
                break
            if length <= _LARGEST_RECORD:
                try:
                    yield from _scalars_of(file.read(length))
                    read += 1
                except (ValueError, struct.error, UnicodeDecodeError):
                    raise InputError(f"{path}: byte {place} begins no record of an event file; it is damaged") from None
            place += 12 + length + 4
            file.seek(place)
    if not read:
        raise InputError(f"{path}: no event file of TensorBoard, or an empty one")


def _scalars_of(record: bytes) -> Iterator[tuple[int, str, float]]:
    fields = list(_fields(record))
    step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
    if step >= 2**63:
        raise ValueError("a step below 0")
    for number, summary in fields:
        if number == 5 and isinstance(summary, bytes):
            for _, value in _fields(summary):
                found = _scalar(value) if isinstance(value, bytes) else None
                if found is not None:
                    yield step, *found


def _scalar(message: bytes) -> tuple[str, float] | None:
    """Read one value of a summary: its tag, and a number that stands there plainly or as a tensor of one number."""
    tag, number = "", None
    for field, value in _fields(message):
        match field, value:
            case 1, bytes():
                tag = value.decode()
            case 2, bytes() if len(value) == 4:
                number = struct.unpack("<f", value)[0]
            case 8, bytes():
                number = _of_tensor(value)
    return None if number is None else (tag, number)


def _of_tensor(message: bytes) -> float | None:
    """Read the only number of a tensor; None for one of text or of several numbers."""
    kind, content = 0, b""
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            content = value
    form = {(_FLOAT, 4): "<f", (_DOUBLE, 8): "<d"}.get((kind, len(content)))
    return None if form is None else float(struct.unpack(form, content)[0])


def _fields(message: bytes) -> Iterator[Field]:
    """Yield (number, value) of every field of a protocol buffer: whole numbers as such, all else as bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, place = _varint(message, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"no field has the kind {kind}")
        if place + length > len(message):
            raise ValueError("a field that is longer than its message")
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Read a whole number of up to ten bytes, and return the place after it."""
    number = 0
    for count in range(10):
        if place + count >= len(message):
            raise ValueError("a number that is cut off")
        byte = message[place + count]
        number |= (byte & 127) << (7 * count)
        if byte < 128:
            return number, place + count + 1
    raise ValueError("a number without end")
