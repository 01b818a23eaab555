"""Settings by their dotted names: to get, to set, to nest, to flatten, and to say in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain.config.schema import Config


def section_of(name: str) -> str:
    """Return what stands before the last dot; nothing for a setting of the top level."""
    return name.rpartition(".")[0]


def value_of(config: Config, name: str) -> Any:
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, quickly and unchecked: the values are known to be allowed."""
    update: dict[str, Any] = {}
    for name, value in nested(settings).items():
        update[name] = getattr(config, name).model_copy(update=value) if isinstance(value, dict) else value
    return config.model_copy(update=update) if update else config


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into one dictionary per section."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[key] = value
    return found


def flattened(values: Mapping[str, Any], prefix: str = "", joint: str = ".") -> dict[str, Any]:
    """Join nested names; lists stay as they are."""
    return dict(_leaves(values, prefix, joint))


def _leaves(values: Mapping[str, Any], prefix: str, joint: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{joint}{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name, joint)
        else:
            yield name, value


def assignments(change: object) -> str:
    """Write settings as a configuration file does: optimizer.learning_rate = 0.0003. Anything else gives no text."""
    if not isinstance(change, Mapping):
        return ""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in change.items())
