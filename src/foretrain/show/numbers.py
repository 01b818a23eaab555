"""Numbers as they are shown, the same wherever they are."""

from __future__ import annotations

import math


def loss_text(value: float) -> str:
    """A loss: 2.5341, 0.01235, 2.784e-7. Small ones keep four digits, so that none is ever shown as 0.0000."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:.4g}"
    if 0.1 <= size < 1e4:
        return f"{value:.4f}"
    if 1e-4 <= size < 0.1:
        return f"{value:#.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}:{seconds % 60:02d}"


def clock(seconds: float) -> str:
    """8.1 s, 4:43, 2h10m."""
    return f"{seconds:.1f} s" if seconds < 100 else duration(seconds)
