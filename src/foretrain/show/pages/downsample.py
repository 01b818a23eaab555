"""Long curves made short without losing what one looks for: spikes, ends, and stretches without a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.show.pages.scales import finite


def places_to_keep(values: Sequence[float | None], limit: int) -> list[int]:
    """At most `limit` places: the first, the last, and of every stretch the lowest, the highest and a missing one."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    buckets = max(1, (limit - 2) // 3)
    kept = {0, count - 1}
    for bucket in range(buckets):
        stretch = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [place for place in stretch if values[place] is not None]
        if known:
            kept.add(min(known, key=lambda place: values[place] or 0.0))
            kept.add(max(known, key=lambda place: values[place] or 0.0))
        if len(known) < len(stretch):
            kept.add(next(place for place in stretch if values[place] is None))
    return sorted(kept)


def rounded(value: object, digits: int = 6) -> float | int | None:
    """Short in JSON: six digits are more than a screen shows."""
    number = finite(value)
    if number is None:
        return None
    if isinstance(value, int):
        return value
    short = float(f"{number:.{digits}g}")
    return int(short) if short == math.floor(short) and abs(short) < 1e15 else short
