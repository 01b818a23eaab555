"""A saved run goes on with the depths that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.errors import CheckpointError
from foretrain.hybrid.growth import Growth


def check_depths(growth: Growth | None, saved: Any, origin: str) -> None:
    """Refuse a state whose run went through other depths: its hidden blocks would be used as if they had learned, or
    blocks that have learned would be thrown away. saved: the state of its growth, None: it had none."""
    now = [] if growth is None else growth.depths[:-1]
    then = list(saved["depths"])[:-1] if isinstance(saved, Mapping) and "depths" in saved else []
    if then == now or (not now and saved["stage"] == len(then)):  # it has all its blocks
        return
    before, after = (layers if len(layers) > 1 else (layers or [0])[0] for layers in (then, now))
    raise CheckpointError(
        f"{origin}: it was saved with growth.layers = {before}, and now it is {after}; go on with growth.layers = "
        f"{before}, or start a new run"
    )
