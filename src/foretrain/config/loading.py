"""Configurations from TOML files, mappings and `--set`. The settings themselves are in `schema.py`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from foretrain.config.explain import explain
from foretrain.config.listing import KNOWN
from foretrain.config.names import PRESETS, WITHOUT_SIZE
from foretrain.config.paths import flattened, nested
from foretrain.config.resolving import canonical_names, resolve
from foretrain.config.schema import Config
from foretrain.errors import ConfigError
from foretrain.persist.files import user_path

_DEEPEST = 3
_SHOWN = 60


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and what its reader should be told."""

    config: Config
    notices: tuple[str, ...] = ()


def load(path: str | Path | None = None, overrides: Sequence[str] = (), preset: str = "measured") -> LoadedConfig:
    """Read a TOML file (or nothing), then apply `key=value` overrides. Raises ConfigError with one clear line.

    preset: where neither names one."""
    notices: list[str] = []
    values = resolve(_read(user_path(path)), str(path), notices) if path is not None else {}
    said: dict[str, str] = {}
    entries: dict[str, Any] = {}
    for text in overrides:
        name, value = parse_override(text)
        entries[name] = value
        said |= dict.fromkeys(canonical_names(name, "--set"), f"--set {text}")
    values |= resolve(entries, "--set", notices)
    values.setdefault("preset", preset)
    if str(values["preset"]) in WITHOUT_SIZE:
        notices.append(f"preset = {values['preset']!r} sets phases and rates, no model size: that is model.type")
    origin = " with ".join([str(path)] * (path is not None) + ["--set"] * bool(said))
    return LoadedConfig(_build(values, origin or "the defaults", said), tuple(notices))


def from_mapping(mapping: Mapping[str, Any], origin: str = "mapping") -> Config:
    """Make a configuration from nested or dotted keys, as in a TOML file."""
    notices: list[str] = []
    return _build(resolve(_flat(mapping), origin, notices), origin)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the configuration file ({error.strerror}); "
            "`foretrain config init FILE` writes one to start from"
        ) from None
    try:
        return _flat(tomllib.loads(text.decode("utf-8")))
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        data = "" if Path(path).suffix == ".toml" else f"; data is named with --set data.path={path}"
        raise ConfigError(f"{path}: not valid TOML: {error}{data}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a configuration; settings have at most one section") from None


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse what is nested deeper than any setting, however deep that is."""
    try:
        flat = flattened(mapping)
        deep = next((name for name in flat if name.count(".") > _DEEPEST), None)
    except RecursionError:
        flat, deep = {}, ".".join(map(str, mapping))
    if deep is not None:
        raise ConfigError(f"{deep[:_SHOWN]}...: settings have a section and a name, and nothing below that")
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """Read `key=value`, the value as in TOML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write it as key=value, for example --set optimizer.learning_rate=3e-4")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # bare words need no quotes on the command line
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--set {text[:_SHOWN]}...: no setting has so many digits, or brackets within brackets"
        ) from None


def _build(values: Mapping[str, Any], origin: str, said: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Validate settings on top of their preset. said: how the command line gave a setting, by canonical name."""
    preset = values.get("preset", "measured")
    merged = {name: value for name, value in PRESETS.get(str(preset), {}).items() if name in KNOWN} | dict(values)
    if ("epochs" in values or "max_time" in values) and "max_steps" not in values:  # of a preset
        merged.pop("max_steps", None)
    _refuse_half_characters(merged, origin)
    try:
        return Config.model_validate(nested(merged))
    except ValidationError as error:
        raise ConfigError(explain(error, origin, said)) from None


def _refuse_half_characters(values: Mapping[str, Any], origin: str) -> None:
    """Names that are not UTF-8 reach Python as halves of characters; a run's config.toml cannot hold them."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode("utf-8")
            except UnicodeEncodeError:
                raise ConfigError(
                    f"{origin}: {name} = {str(text)!r} is not UTF-8, and config.toml could not hold it; rename the file"
                ) from None
