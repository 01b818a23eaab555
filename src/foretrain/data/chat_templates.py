"""A model's own chat template, rendered in Jinja's sandbox as transformers does it: nothing in it can reach Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foretrain.data.chats import Message
from foretrain.errors import DataError
from foretrain.persist.files import from_json

LONGEST = 2**18
"""Characters of a template; the longest known has some 20,000."""
_DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a date, the same everywhere
"""The day that a template is told, always the same one: examples of a run must not change overnight."""


class _Generation(Extension):
    """Reads `{% generation %}`, by which templates mark what the assistant says, as nothing but its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """How one model writes chats."""

    text: str
    """In Jinja."""
    special: dict[str, str] = field(default_factory=dict)
    """Special tokens by the names that templates use: bos_token, eos_token ..."""
    origin: str = "the chat template"

    @cached_property
    def _template(self) -> Any:
        place = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        place.globals["raise_exception"] = _refuse
        place.globals["strftime_now"] = _DATE.strftime
        place.filters["tojson"] = _to_json
        try:
            return place.from_string(self.text)
        except (TemplateError, RecursionError) as error:
            raise DataError(f"{self.origin}: is no Jinja template ({error}); remove it") from None

    def render(self, messages: Sequence[Message], asked: bool) -> str:
        """Return a chat as the model reads it. asked: up to where the assistant is to speak."""
        given = [{"role": message.role.lower(), "content": message.text} for message in messages]
        names: dict[str, Any] = {"tools": None, "documents": None} | self.special
        try:
            text: str = self._template.render(messages=given, add_generation_prompt=asked, **names)
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{self.origin}: cannot write this chat ({what}); change the chat") from None
        except (RecursionError, MemoryError) as error:
            raise DataError(f"{self.origin}: is too large to be written ({type(error).__name__}); remove it") from None
        return text

    def question(self, messages: Sequence[Message]) -> str:
        """Return a chat up to where the assistant is to speak next."""
        return self.render(messages, asked=True)

    def turns(self, messages: Sequence[Message], where: str) -> tuple[tuple[str, ...], str]:
        """Return (what is given and what is said, by turns; the last that is said). What follows the last answer is
        left out. A template that writes an earlier answer otherwise once more follows teaches the last one only."""
        places = [place for place, message in enumerate(messages) if message.is_learned]
        if not places:
            raise DataError(f"{where}: no message of the assistant, there is nothing to learn; remove the record")
        parts: list[str] = []
        for place in places:
            given, said = self._turn(messages, place, where)
            before = "".join(parts)
            if not given.startswith(before):
                parts, before = [], ""
            parts += [given[len(before) :], said]
        *earlier, answer = parts
        return tuple(earlier), answer

    def _turn(self, messages: Sequence[Message], place: int, where: str) -> tuple[str, str]:
        """Return all that is given before an answer, and the answer up to the end of text."""
        given, whole = self.question(messages[:place]), self.render(messages[: place + 1], asked=False)
        if not whole.startswith(given):
            raise DataError(
                f"{where}: {self.origin} does not write an answer behind its question; this chat cannot be learned"
            )
        end = self.special.get("eos_token") or ""
        said = whole[len(given) :]
        said = said.partition(end)[0] if end and end in said else said.rstrip()
        if not said:
            raise DataError(f"{where}: {self.origin} leaves the answer out; this chat cannot be learned")
        return given, said


def _refuse(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    import json

    known = {name: options[name] for name in ("indent", "sort_keys", "separators") if name in options}
    return json.dumps(value, ensure_ascii=False, **known)


def template_in(folder: Path, special: dict[str, str]) -> ChatTemplate | None:
    """Return the chat template that lies in a model's folder: a file of its own, or a part of the tokenizer's."""
    path = folder / "chat_template.jinja"
    text: Any = None
    try:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        else:
            path = folder / "tokenizer_config.json"
            text = from_json(path.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(text, list):  # several with names
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str) or not text.strip():
        return None
    if len(text) > LONGEST:
        raise DataError(f"{path}: its chat template has {len(text):,} characters; no model has such a one")
    return ChatTemplate(text, special, str(path))
