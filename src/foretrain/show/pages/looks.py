"""A look at every layer, as a log has it: its measures by name, and nothing that cannot be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from foretrain.show.pages.scales import finite

MEASURES = {
    "gradient_to_weight": "gradient/weight ratio",
    "update_to_weight": "update/weight ratio",
    "gradient_norm": "gradient norm",
}
"""Of a layer, in the order in which they are offered."""
Look = Mapping[str, Mapping[str, float | None]]
"""Of every layer its measures."""


def layer_measures(layers: object) -> Look:
    """From the `layers` of a look; whatever is no number is None."""
    if not isinstance(layers, Mapping):
        return {}
    known = {str(name): measures for name, measures in layers.items() if isinstance(measures, Mapping)}
    return {name: {one: finite(measures.get(one)) for one in MEASURES} for name, measures in known.items()}


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
