"""Every setting with its default, its limits and its meaning, for listings and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from foretrain.config.kinds import UNSEEN_LIMITS
from foretrain.config.schema import Config


@dataclass(frozen=True)
class Setting:
    """One setting, for listings."""

    name: str
    default: Any
    kind: str
    meaning: str


def settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting in schema order."""
    for key, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings(info.annotation, f"{prefix}{key}.")
        else:
            kind = _describe(info.annotation, info.metadata)
            yield Setting(prefix + key, info.default, kind, " ".join((info.description or "").split()))


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _describe(get_args(annotation)[0], annotation.__metadata__)
    arguments = get_args(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin in (list, tuple):
        return "list of " + re.sub("^(integer|number|string)", r"\1s", _describe(arguments[0], metadata))
    if arguments:
        kinds = [_describe(part, metadata) for part in arguments if part is not type(None)]
        return " or ".join(kinds)
    name = {int: "integer", float: "number", str: "string", bool: "true | false"}[annotation]
    limits = []
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            for sign, attribute in (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt")):
                limit = getattr(part, attribute, None)
                if limit is not None and not (attribute == "le" and limit in UNSEEN_LIMITS):
                    limits.append(f"{sign} {limit}")
    return f"{name} {', '.join(limits)}".strip()


KNOWN = frozenset(setting.name for setting in settings())
