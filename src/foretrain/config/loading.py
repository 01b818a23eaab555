"""Configurations: TOML in and out, presets, other names, `--set`. The settings themselves are in `schema.py`."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from foretrain.config import schema
from foretrain.config.names import (
    BARE_ALIASES,
    KEY_ALIASES,
    NICKNAMES,
    PRESETS,
    RESERVED,
    SECTION_ALIASES,
    VALUE_ALIASES,
    WITHOUT_SIZE,
)
from foretrain.config.schema import (
    AuditConfig,
    CheckpointConfig,
    Config,
    CorrectionConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    GuardConfig,
    HybridConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    PredictorConfig,
    ScheduleConfig,
    Setting,
    settings,
)
from foretrain.errors import ConfigError
from foretrain.persist.files import user_path

__all__ = [
    "KNOWN",
    "AuditConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GuardConfig",
    "HybridConfig",
    "Loaded",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "PredictorConfig",
    "ScheduleConfig",
    "Setting",
    "changed",
    "from_mapping",
    "given",
    "load",
    "parse_override",
    "settings",
    "to_mapping",
    "to_toml",
]

KNOWN = frozenset(setting.name for setting in settings())


@dataclass(frozen=True)
class Loaded:
    """A configuration and what its reader should be told."""

    config: Config
    notices: tuple[str, ...] = ()


def load(path: str | Path | None = None, overrides: Sequence[str] = (), preset: str = "measured") -> Loaded:
    """Read a TOML file (or nothing), then apply `key=value` overrides. Raises ConfigError with one clear line.

    preset: where neither names one."""
    notices: list[str] = []
    values = _resolve(_read(user_path(path)), str(path), notices) if path is not None else {}
    said: dict[str, str] = {}
    entries: dict[str, Any] = {}
    for text in overrides:
        name, value = parse_override(text)
        entries[name] = value
        said |= dict.fromkeys(_canonical(name, "--set"), f"--set {text}")
    values |= _resolve(entries, "--set", notices)
    values.setdefault("preset", preset)
    if str(values["preset"]) in WITHOUT_SIZE:
        notices.append(f"preset = {values['preset']!r} sets phases and rates, no model size: that is model.type")
    origin = " with ".join([str(path)] * (path is not None) + ["--set"] * bool(said))
    return Loaded(_build(values, origin or "the defaults", said), tuple(notices))


def from_mapping(mapping: Mapping[str, Any], origin: str = "mapping") -> Config:
    """A configuration from nested or dotted keys, as in a TOML file."""
    notices: list[str] = []
    return _build(_resolve(_flatten(mapping), origin, notices), origin)


def changed(config: Config, values: Mapping[str, Any], origin: str = "the changed configuration") -> Config:
    """The same configuration with other values, by dotted names."""
    present = _flatten(to_mapping(config))
    if config.epochs is not None and "max_steps" not in config.model_fields_set:
        present.pop("max_steps")
    return from_mapping(present | dict(values), origin)


def given(config: Config) -> frozenset[str]:
    """The settings that a file, `--set` or a preset named, whatever their values are."""
    names: set[str] = set()
    for key in config.model_fields_set:
        value = getattr(config, key)
        names |= {f"{key}.{name}" for name in value.model_fields_set} if hasattr(value, "model_fields_set") else {key}
    return frozenset(names)


def to_mapping(config: Config, changed_only: bool = False) -> dict[str, Any]:
    """Plain nested values; unset ones are left out (TOML has no null). changed_only: what differs from the preset."""
    values = config.model_dump(mode="json", exclude_none=True)
    if not changed_only:
        return values
    base = _build({"preset": config.preset}, "preset").model_dump(mode="json", exclude_none=True)
    changed: dict[str, Any] = {} if config.preset == "measured" else {"preset": config.preset}
    for key, value in values.items():
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if name not in base[key] or base[key][name] != item}
            if value:
                changed[key] = value
        elif value != base[key]:
            changed[key] = value
    return changed


def to_toml(config: Config, comments: bool = True, changed_only: bool = False) -> str:
    """The configuration as TOML that `load` reads back to an equal one. Unset values appear as comments."""
    import tomlkit

    values = to_mapping(config, changed_only)
    named = [(_section_of(setting.name), setting) for setting in settings()]
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


def _section_of(name: str) -> str:
    return name.rpartition(".")[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the configuration file ({error.strerror}); "
            "`foretrain config init FILE` writes one to start from"
        ) from None
    try:
        return _flatten(tomllib.loads(text.decode("utf-8")))
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        data = "" if Path(path).suffix == ".toml" else f"; data is named with --set data.path={path}"
        raise ConfigError(f"{path}: not valid TOML: {error}{data}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a configuration; settings have at most one section") from None


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    if prefix.count(".") > _FEW:
        raise ConfigError(f"{prefix[:_SHOWN]}...: settings have a section and a name, and nothing below that")
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value`, the value as in TOML."""
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


def _resolve(entries: Mapping[str, Any], source: str, notices: list[str]) -> dict[str, Any]:
    """Turn every accepted name into its canonical one."""
    resolved: dict[str, tuple[str, Any]] = {}
    beside = frozenset(entries) if source != "--set" else frozenset()
    for name, value in entries.items():
        for canonical in _canonical(name, source, beside):
            if canonical in RESERVED:
                notices.append(f"{name} has no effect: {RESERVED[canonical]}")
                continue
            value = _spelling(canonical, value)
            if canonical in resolved and resolved[canonical][1] != value:
                other, earlier = resolved[canonical]
                raise ConfigError(
                    f"{source}: {other} = {earlier} and {name} = {value} both mean {canonical}; keep one of them"
                )
            resolved[canonical] = (name, value)
    return {canonical: value for canonical, (_, value) in resolved.items()}


def _canonical(name: str, source: str, beside: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """beside: all keys of the file that this one stands in."""
    section, _, key = name.rpartition(".")
    section = SECTION_ALIASES.get(section, section)
    spelled = f"{section}.{key}" if section else key
    if spelled in KNOWN or spelled in RESERVED:
        return (spelled,)
    if spelled in KEY_ALIASES:
        return KEY_ALIASES[spelled]
    if key in BARE_ALIASES:
        if len(_same_key(key)) > 1 and not (spelled == key and _in_company(BARE_ALIASES[key], beside)):
            raise ConfigError(f"{source}: {name} can mean {_both(_same_key(key))}; write the full name")
        return (BARE_ALIASES[key],)
    near = _nearest(spelled, section, key)
    hint = f"; did you mean {near}?" if near else "; `foretrain config show` lists every key"
    raise ConfigError(f"{source}: unknown key {name}{hint}")


def _same_key(key: str) -> list[str]:
    return [name for name in sorted(KNOWN) if name.rpartition(".")[2] == key]


def _in_company(meant: str, beside: frozenset[str]) -> bool:
    """Whether other bare keys of its section stand beside it, which mean nothing else: so the methodology prints it."""
    company = {key for key in beside & set(BARE_ALIASES) if _section_of(BARE_ALIASES[key]) == _section_of(meant)}
    return any(len(_same_key(key)) == 1 for key in company)


def _both(names: Sequence[str]) -> str:
    """With the first words on each."""
    meanings = {setting.name: setting.meaning for setting in settings()}
    first = {name: re.split(r"[.;:]", meanings[name])[0] for name in names}
    return " or ".join(f"{name} ({text[0].lower()}{text[1:]})" for name, text in first.items())


def _nearest(spelled: str, section: str, key: str) -> str | None:
    """What was probably meant: what other tools call so, the same name in another section, or the nearest spelling."""
    if spelled in NICKNAMES:
        return NICKNAMES[spelled]
    if key in NICKNAMES:
        there = f"{section}.{NICKNAMES[key].rpartition('.')[2]}"
        return there if there in KNOWN else NICKNAMES[key]
    same = _same_key(key)
    if same and spelled == key:
        return " or ".join(same) if len(same) <= _FEW else difflib.get_close_matches(spelled, same, n=1, cutoff=0)[0]
    known = [*KNOWN, *RESERVED, *KEY_ALIASES, *BARE_ALIASES]
    near = difflib.get_close_matches(spelled, known, n=1, cutoff=0.6)
    if not near:
        by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in known}
        near = [by_leaf[leaf] for leaf in difflib.get_close_matches(key, by_leaf, n=1, cutoff=0.6)]
    return near[0] if near else None


def _spelling(canonical: str, value: Any) -> Any:
    if canonical not in VALUE_ALIASES:
        return value
    lowered = value.lower() if isinstance(value, str) else value
    try:
        return VALUE_ALIASES[canonical].get(lowered, lowered)
    except TypeError:  # an unhashable value: the schema says what is wrong with it
        return value


def _build(values: Mapping[str, Any], origin: str, said: Mapping[str, str] = MappingProxyType({})) -> Config:
    """said: how the command line gave a setting, by canonical name."""
    preset = values.get("preset", "measured")
    merged = {name: value for name, value in PRESETS.get(str(preset), {}).items() if name in KNOWN} | dict(values)
    if "epochs" in values and "max_steps" not in values:
        merged.pop("max_steps", None)
    nested: dict[str, Any] = {}
    for name, value in merged.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    _refuse_half_characters(merged, origin)
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, said)) from None


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


def _explain(error: ValidationError, origin: str, said: Mapping[str, str]) -> str:
    """The first problem in one line: who said it, what is wrong with it, what is allowed."""
    return _say(error.errors(), origin, said)


def _say(problems: Sequence[Any], origin: str, said: Mapping[str, str]) -> str:
    first = problems[0]
    name = _named(first)
    setting = next((setting for setting in settings() if setting.name == name), None)
    message = first["msg"].removeprefix("Value error, ")
    if setting is None:  # several settings do not fit together
        return f"{origin}: {message[0].lower()}{message[1:]}"
    who = said.get(name) or f"{origin.removesuffix(' with --set')}: {name} = {first['input']!r}"
    if first["type"] == "value_error":  # in our own words
        return f"{who}: {message}"
    kinds = {problem["type"] for problem in problems if _named(problem) == name}
    wrong = next((text for start, text in _WRONG.items() if all(kind.startswith(start) for kind in kinds)), "")
    if first["type"] == "less_than_equal":
        wrong = f"too large, it is at most {first['ctx']['le']:,}"
    wrong = "no value is given" if first["input"] == "" else wrong or "this cannot be used"
    return f"{who}: {wrong}; allowed: {setting.kind}"


def _explain_in_python(error: ValidationError, section: type[BaseModel]) -> str:
    """The same for what Python code wrote: `Config(...)`, or one of its sections."""
    place = next(((name,) for name, field in Config.model_fields.items() if field.annotation is section), ())
    problems: list[dict[str, Any]] = [{**problem, "loc": (*place, *problem["loc"])} for problem in error.errors()]
    first = problems[0]
    name, origin = ".".join(map(str, first["loc"])), section.__name__
    if first["type"] == "model_type":  # a value where a section is wanted
        key = next(setting.name.rpartition(".")[2] for setting in settings() if _section_of(setting.name) == name)
        return f"{origin}: {name} = {first['input']!r}: settings are wanted, such as {name}={{{key!r}: ...}}"
    if first["type"] != "extra_forbidden":
        return _say(problems, origin, {})
    section_name, _, key = name.rpartition(".")
    near = _nearest(name, section_name, key)
    hint = f"; did you mean {_in_python(near, first['input'])}?" if near else "; `foretrain config show` lists all"
    return f"{origin}: unknown setting {name}{hint}"


def _in_python(names: str, value: Any) -> str:
    """`a.b or c` as arguments of Config."""
    words = []
    for name in names.split(" or "):
        section, _, key = name.rpartition(".")
        words.append(f"{section}={{{key!r}: {value!r}}}" if section else f"{key}={value!r}")
    return " or ".join(words)


schema.explanations.append(_explain_in_python)


def _named(problem: Any) -> str:
    return ".".join(part for part in map(str, problem["loc"]) if part in _FIELD_PARTS)


_WRONG = {
    "literal": "there is no such value",
    "int": "not an integer",
    "float": "not a number",
    "bool": "neither true nor false",
    "string": "not a text; put it in quotes",
    "list": "not a list",
    "greater": "too small",
    "less": "too large",
    "finite": "not a finite number",
}
"""By how pydantic's names of problems begin."""
_FEW = 3
_SHOWN = 60


_FIELD_PARTS = frozenset(part for name in KNOWN for part in name.split("."))
