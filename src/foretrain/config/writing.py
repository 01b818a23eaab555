"""Configurations as mappings and as TOML, and with other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.config.listing import settings
from foretrain.config.loading import from_mapping
from foretrain.config.paths import flattened, section_of
from foretrain.config.schema import Config


def changed(config: Config, values: Mapping[str, Any], origin: str = "the changed configuration") -> Config:
    """Return the configuration with other values, by dotted names."""
    present = flattened(to_mapping(config))
    if config.epochs is not None and "max_steps" not in config.model_fields_set:
        present.pop("max_steps", None)
    return from_mapping(present | dict(values), origin)


def given(config: Config) -> frozenset[str]:
    """Return the settings that a file, `--set` or a preset named, whatever their values are."""
    names: set[str] = set()
    for key in config.model_fields_set:
        value = getattr(config, key)
        names |= {f"{key}.{name}" for name in value.model_fields_set} if hasattr(value, "model_fields_set") else {key}
    return frozenset(names)


def to_mapping(config: Config, changed_only: bool = False) -> dict[str, Any]:
    """Return plain nested values; unset ones are left out (TOML has no null), and so is a `max_steps` that `max_time`
    stands for. changed_only: what differs from the preset."""
    values = config.model_dump(mode="json", exclude_none=True)
    if not config.steps_are_limited:
        del values["max_steps"]
    if not changed_only:
        return values
    base = to_mapping(from_mapping({"preset": config.preset}))
    changed: dict[str, Any] = {} if config.preset == "measured" else {"preset": config.preset}
    for key, value in values.items():
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if name not in base[key] or base[key][name] != item}
            if value:
                changed[key] = value
        elif key not in base or value != base[key]:
            changed[key] = value
    return changed


def to_toml(config: Config, comments: bool = True, changed_only: bool = False) -> str:
    """Write the configuration as TOML that `load` reads back to an equal one. Unset values appear as comments."""
    import tomlkit

    values = to_mapping(config, changed_only)
    named = [(section_of(setting.name), setting) for setting in settings()]
    lines: list[str] = []
    for section in ["", *(key for key, value in values.items() if isinstance(value, dict))]:
        prefix = f"{section}." if section else ""
        given = values[section] if section else values
        if section:
            lines += [""] * bool(lines) + [f"[{section}]"]
        for setting in (setting for place, setting in named if place == section):
            key = setting.name.removeprefix(prefix)
            if key not in given and (changed_only or not comments):
                continue
            if comments:
                lines.append(f"# {setting.meaning}")
            lines.append(f"{key} = {tomlkit.item(given[key]).as_string()}" if key in given else f"# {key} =")
    return "".join(f"{line}\n" for line in lines)
