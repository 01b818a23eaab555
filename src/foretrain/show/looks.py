"""A look at every layer, as a log has it: its measures by name, whatever form they were written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from foretrain.show.scales import finite

MEASURES = {
    "gradient_to_weight": "gradient/weight ratio",
    "update_to_weight": "update/weight ratio",
    "gradient_norm": "gradient norm",
}
"""Of a layer, in the order in which they are offered."""
_BESIDE = ("gradient_norms", "gradient_norm", "gradients", "gradient", "norms")
Look = Mapping[str, Mapping[str, float | None]]
"""Of every layer its measures."""


def layer_measures(fields: Mapping[str, Any]) -> Look:
    """Measures per layer, from `layers`: {name: {"gradient_norm": norm, ...}}, {name: norm}, a list of such with their
    names, or names alone with the norms beside them."""
    layers = fields.get("layers")
    if isinstance(layers, Mapping):
        return {str(name): _measures(value) for name, value in layers.items()}
    if not is_list(layers):
        return {}
    named = [one for one in layers if isinstance(one, Mapping)]
    if named:
        return {str(one.get("name") or one.get("layer")): _measures(one) for one in named}
    beside = next((fields[name] for name in _BESIDE if is_list(fields.get(name))), ())
    return {str(layer): _measures(value) for layer, value in zip(layers, beside, strict=False)}


def _measures(value: object) -> dict[str, float | None]:
    if not isinstance(value, Mapping):
        return {"gradient_norm": finite(value)}
    norm = next((finite(value[name]) for name in _BESIDE if name in value), None)
    return {name: finite(value.get(name)) for name in MEASURES} | {"gradient_norm": norm}


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
