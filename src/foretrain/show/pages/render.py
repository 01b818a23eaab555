"""Make pages from templates that escape everything, with style, scripts, and cells and tables of numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from foretrain.config.paths import flattened
from foretrain.config.units import loss_text
from foretrain.show.numbers import finite

TEMPLATES = Environment(
    loader=PackageLoader("foretrain.show.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src {}; img-src data:; base-uri 'none'"


# --- numbers, cells, tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """It has a text, the number behind it (for programs), and what is said below in small letters."""

    text: str
    value: object = None
    unit: str = ""
    small: Line = ()
    href: str = ""
    swatch: int | None = None
    code: bool = False


Shown = Cell | str | None
"""What is shown is a cell, a text without more, or None if it is unknown."""
Line = Sequence[Shown]
"""A line is texts and numbers one after the other."""


@dataclass(frozen=True)
class PageTable:
    """Columns `numbers_from` to `numbers_to` stand to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Line]
    numbers_from: int = 1
    numbers_to: int = 99


def number(value: object, form: str = "", unit: str = "", small: Line = ()) -> Cell | None:
    """Round a number as it is shown; without a form it is a loss. None if it is unknown."""
    known = finite(value)
    if known is None:
        return None
    text = f"{known:{form}}{unit}" if form else loss_text(known)
    return Cell(text.replace("-", "−"), value, small=small)


def percent(value: object) -> Cell | None:
    known = finite(value)
    return None if known is None else Cell(f"{100 * known:.1f} %", value)


def settings_table(settings: Mapping[str, object]) -> PageTable:
    """Make rows of dotted names and values from a nested mapping."""
    rows = [(name, "not set" if value is None else str(value)) for name, value in flattened(settings).items()]
    return PageTable("", ["setting", "value"], [[Cell(part, code=True) for part in row] for row in rows], 2)


def sentence(text: object) -> str:
    """Write a capital, a true minus before numbers, and no line end between a number and its unit."""
    told = re.sub(r"(?<![\w.])-(?=\d)", "−", str(text or ""))
    told = re.sub(r"(?<=\d) (?=(?:s|%)(?!\w))", "\u00a0", told)
    return f"{told[:1].upper()}{told[1:]}"


# --- the document -----------------------------------------------------------------------------------------------------


@cache
def template(name: str) -> Template:
    return TEMPLATES.get_template(name)


def macro(file: str, name: str, *values: object) -> str:
    """Make a piece of a page with a macro of a template: markup in which all texts are escaped."""
    made: str = getattr(template(file).module, name)(*values)
    return made


@cache
def asset(name: str) -> str:
    return resources.files("foretrain.show.pages").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script(names: Sequence[str]) -> str:
    """Put the script of a page together from several files that share one scope."""
    return "'use strict';\n(() => {\n" + "".join(asset(f"{name}.js") for name in names) + "begin();\n})();\n"


def style() -> str:
    return f"{asset('uplot.css')}\n{asset('page.css')}"


def as_data(value: Any) -> str:
    """Write JSON that can stand in a page: nothing in it can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def one_file(name: str, scripts: Sequence[str], data: Mapping[str, Any], **values: object) -> str:
    """Make a page in one file that needs no network. Its own scripts and no others may run in it."""
    own = [asset("uplot.js"), script(tuple(scripts))]
    policy = _POLICY.format(" ".join(f"'sha256-{_digest(text)}'" for text in own))
    return template(name).render(values, policy=policy, style=style(), scripts=own, live=False, data=as_data(data))


def served(name: str, data: Mapping[str, Any], **values: object) -> str:
    """Make the page for a server that has style and scripts under addresses of their own."""
    return template(name).render(values, policy="", style="", scripts=(), live=True, data=as_data(data))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def joined(parts: Iterable[Line], between: str = ", ") -> Line:
    """Join several lines to one, with a text between them."""
    made: list[Shown] = []
    for part in parts:
        made += [between, *part] if made else [*part]
    return made
