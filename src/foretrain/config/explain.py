"""Says what is wrong with a configuration, in one line: who said it, what is wrong with it, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from foretrain.config.listing import KNOWN, settings
from foretrain.config.names import KEY_ALIASES
from foretrain.config.paths import section_of
from foretrain.config.resolving import nearest
from foretrain.config.schema import Config

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
"""Our words, by how pydantic's names of problems begin."""
_FIELD_PARTS = frozenset(part for name in KNOWN for part in name.split("."))


def explain(error: ValidationError, origin: str, said: Mapping[str, str]) -> str:
    """Return the first problem in one line: who said it, what is wrong with it, what is allowed."""
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


def in_python(error: ValidationError, section: type[BaseModel]) -> str:
    """Say what is wrong with what Python code wrote: `Config(...)`, or one of its sections."""
    place = next(((name,) for name, field in Config.model_fields.items() if field.annotation is section), ())
    problems: list[dict[str, Any]] = [{**problem, "loc": (*place, *problem["loc"])} for problem in error.errors()]
    first = problems[0]
    name, origin = ".".join(map(str, first["loc"])), section.__name__
    if first["type"] == "model_type":  # a value where a section is wanted
        key = next(setting.name.rpartition(".")[2] for setting in settings() if section_of(setting.name) == name)
        return f"{origin}: {name} = {first['input']!r}: settings are wanted, such as {name}={{{key!r}: ...}}"
    if first["type"] != "extra_forbidden":
        return _say(problems, origin, {})
    section_name, _, key = name.rpartition(".")
    near = nearest(name, section_name, key)
    near = KEY_ALIASES[near][0] if near in KEY_ALIASES else near
    hint = f"; did you mean {_as_arguments(near, first['input'])}?" if near else "; `foretrain config show` lists all"
    return f"{origin}: unknown setting {name}{hint}"


def _as_arguments(names: str, value: Any) -> str:
    """Write `a.b or c` as arguments of Config."""
    words = []
    for name in names.split(" or "):
        section, _, key = name.rpartition(".")
        words.append(f"{section}={{{key!r}: {value!r}}}" if section else f"{key}={value!r}")
    return " or ".join(words)


def _named(problem: Any) -> str:
    return ".".join(part for part in map(str, problem["loc"]) if part in _FIELD_PARTS)
