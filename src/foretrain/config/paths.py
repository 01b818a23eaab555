"""Settings in words and by their dotted names, the same wherever they are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def assignments(change: object) -> str:
    """As in a configuration file: optimizer.learning_rate = 0.0003. Nothing for what is no mapping."""
    if not isinstance(change, Mapping):
        return ""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in change.items())


def flattened(values: Mapping[str, Any], prefix: str = "", joint: str = ".") -> dict[str, Any]:
    """Nested names joined; lists as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{joint}{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat |= flattened(value, name, joint)
        else:
            flat[name] = value
    return flat
