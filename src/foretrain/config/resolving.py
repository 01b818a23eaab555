"""Turns every name that is accepted for a setting into the one of the schema, and finds what a wrong one meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.listing import KNOWN, settings
from foretrain.config.names import (
    BARE_ALIASES,
    KEY_ALIASES,
    NICKNAMES,
    RESERVED,
    SECTION_ALIASES,
    VALUE_ALIASES,
)
from foretrain.config.paths import section_of
from foretrain.errors import ConfigError

_FEW = 3


def resolve(entries: Mapping[str, Any], source: str, notices: list[str]) -> dict[str, Any]:
    """Turn every accepted name into its canonical one."""
    resolved: dict[str, tuple[str, Any]] = {}
    beside = frozenset(entries) if source != "--set" else frozenset()
    for name, value in entries.items():
        for canonical in canonical_names(name, source, beside):
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


def canonical_names(name: str, source: str, beside: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the names of the schema that a name means. beside: all keys of the file that it stands in."""
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
    near = nearest(spelled, section, key)
    hint = f"; did you mean {near}?" if near else "; `foretrain config show` lists every key"
    raise ConfigError(f"{source}: unknown key {name}{hint}")


def _same_key(key: str) -> list[str]:
    return [name for name in sorted(KNOWN) if name.rpartition(".")[2] == key]


def _in_company(meant: str, beside: frozenset[str]) -> bool:
    """Return whether other bare keys of its section stand beside it, which mean nothing else: so the methodology prints
    it."""
    company = {key for key in beside & set(BARE_ALIASES) if section_of(BARE_ALIASES[key]) == section_of(meant)}
    return any(len(_same_key(key)) == 1 for key in company)


def _both(names: Sequence[str]) -> str:
    """Name all of them, with the first words on each."""
    meanings = {setting.name: setting.meaning for setting in settings()}
    first = {name: re.split(r"[.;:]", meanings[name])[0] for name in names}
    return " or ".join(f"{name} ({text[0].lower()}{text[1:]})" for name, text in first.items())


def nearest(spelled: str, section: str, key: str) -> str | None:
    """Return what was probably meant: what other tools call so, the same name in another section, or the nearest
    spelling."""
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
