"""Records become prompts and answers: templates with {field} in them, and the ones well-known data sets use."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretrain.data import chats
from foretrain.data.chat_templates import ChatTemplate
from foretrain.errors import DataError

Record = Mapping[str, Any]
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_PYTHON_SYNTAX = re.compile(r"[.\[\]:!]")


@dataclass(frozen=True)
class Template:
    """Text with fields: `{name}` stands for a record's field, `{{` and `}}` for braces, and nothing else is special."""

    text: str
    literals: tuple[str, ...]
    """What stands around the fields: one more than there are fields."""
    fields: tuple[str, ...]

    def render(self, record: Record, where: str) -> str:
        """Return the text with the record's fields in it. Raises DataError that names `where`, a file and line."""
        values = [self._value(record, field, where) for field in self.fields]
        return self.literals[0] + "".join(
            value + literal for value, literal in zip(values, self.literals[1:], strict=True)
        )

    def fills(self, record: Record) -> bool:
        """Return whether the record has something to say in every field."""
        return all(not _is_blank(record.get(field)) for field in self.fields)

    def is_blank(self, record: Record) -> bool:
        """Return whether none of the fields says anything."""
        return all(_is_blank(record.get(field)) for field in self.fields)

    def _value(self, record: Record, field: str, where: str) -> str:
        if field not in record:
            raise DataError(f"{where}: no field {field!r} for the template {self.text!r}; {_advice(field, record)}")
        value = record[field]
        if value is None:
            return ""
        if isinstance(value, str):
            return value.encode("utf-8", errors="replace").decode("utf-8")  # half surrogate pairs have no encoding
        if isinstance(value, (bool, int, float)):
            return json.dumps(value)
        kind = "a list" if isinstance(value, list) else "an object"
        raise DataError(
            f"{where}: field {field!r} is {kind}; templates take text, numbers, true and false: "
            "write what is wanted into a field of its own"
        )


def parse(text: str) -> Template:
    """Read a template. Raises DataError for a lone brace or a field without a name."""
    literals, fields, end = [""], [], 0
    for match in _PIECE.finditer(text):
        literals[-1] += text[end : match.start()]
        end = match.end()
        piece = match.group()
        if piece in ("{{", "}}"):
            literals[-1] += piece[0]
        elif piece in ("{", "}"):
            raise DataError(f"the template {text!r} has a lone {piece}; a field is {{name}}, a brace itself is doubled")
        elif not match.group(1).strip():
            raise DataError(f"the template {text!r} has a field without a name; write {{name}}")
        else:
            fields.append(match.group(1).strip())
            literals.append("")
    literals[-1] += text[end:]
    return Template(text, tuple(literals), tuple(fields))


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _advice(field: str, record: Record) -> str:
    has = f"the record has {', '.join(record)}" if record else "the record is empty"
    near = difflib.get_close_matches(field, list(record), n=1, cutoff=0.5)
    if near:
        return f"{has}; did you mean {{{near[0]}}}?"
    if _PYTHON_SYNTAX.search(field):
        return f"{has}; only {{name}} is known, without parts or formats"
    return f"{has}; name one of them"


@dataclass(frozen=True)
class Format:
    """How a record becomes a prompt and an answer, in training and later when the model is asked."""

    name: str
    prompts: tuple[Template, ...]
    """The first whose fields all say something in a record is the one used, otherwise the last. So a part that belongs
    to an optional field stands in all but the last."""
    answer: Template

    def prompt_of(self, record: Record, where: str = "the record") -> str:
        """Return what the model is asked; the record needs no answer."""
        chosen = next((prompt for prompt in self.prompts if prompt.fills(record)), self.prompts[-1])
        return chosen.render(record, where)

    def ask(self, text: str = "", fields: Record | None = None) -> str:
        """Return the prompt with `text` in the first field that every record has, and others by name; the rest stays
        empty."""
        known = dict.fromkeys(field for prompt in self.prompts for field in prompt.fields)
        fields = dict(fields or {})
        for name in fields:
            if name not in known:
                raise DataError(f"there is no field {name!r} in the prompt; it has {', '.join(known) or 'none'}")
        first = next(iter(self.prompts[-1].fields), None)
        given = {first: text} if text and first is not None else {}
        return self.prompt_of(dict.fromkeys(known, "") | given | fields)

    def answer_of(self, record: Record, where: str = "the record") -> str:
        """Return what the model is to say."""
        text = self.answer.render(record, where)
        if not text.strip() or self.answer.is_blank(record):
            raise DataError(
                f"{where}: the answer is empty, there is nothing to learn; remove the record or change the template "
                f"{self.answer.text!r}"
            )
        return text

    def read(self, record: Record, where: str) -> tuple[tuple[str, ...], str]:
        """Return what is given, and what is to be said. In a chat more is given and said before, by turns."""
        return (self.prompt_of(record, where),), self.answer_of(record, where)

    def __str__(self) -> str:
        prompts = " or ".join(repr(prompt.text) for prompt in self.prompts)
        return f"{self.name}: prompt {prompts}, answer {self.answer.text!r}"


@dataclass(frozen=True)
class ChatFormat(Format):
    """A list of messages: whatever the assistant says is learned, and asked for."""

    own: ChatTemplate | None = None
    """The model's own way to write chats; None: plain lines."""

    @property
    def field(self) -> str:
        return self.answer.fields[0]

    def prompt_of(self, record: Record, where: str = "the record") -> str:
        """Return the chat up to the assistant's next words, or to its last ones if it ends with them."""
        messages = self._messages(record, where)
        return self._question(messages[:-1] if messages[-1].is_learned else messages)

    def answer_of(self, record: Record, where: str = "the record") -> str:
        return self.read(record, where)[1]

    def read(self, record: Record, where: str) -> tuple[tuple[str, ...], str]:
        return (self.own or chats).turns(self._messages(record, where), where)

    def _question(self, messages: list[chats.Message]) -> str:
        return (self.own or chats).question(messages)

    def ask(self, text: str = "", fields: Record | None = None) -> str:
        """Return a chat that begins with `text`; `system`, among the fields, stands before it."""
        fields = dict(fields or {})
        for name in fields:
            if name != "system":
                raise DataError(f"there is no field {name!r} in a chat; it has system")
        given = [("system", fields.get("system", "")), ("user", text)]
        return self._question([chats.Message(chats.ROLES[role], said.strip()) for role, said in given if said.strip()])

    def _messages(self, record: Record, where: str) -> list[chats.Message]:
        if self.field not in record:
            raise DataError(f"{where}: no field {self.field!r}; {_advice(self.field, record)}")
        return chats.read_messages(record[self.field], where, self.field)

    def __str__(self) -> str:
        if self.own is not None:
            return f"{self.name}: by the model's own chat template; what the assistant says is learned"
        return f"{self.name}: lines 'User: ...' and 'Assistant: ...'; what the assistant says is learned"


def make_format(prompt: str | Sequence[str], answer: str, name: str = "given templates") -> Format:
    """Return a format from templates; several prompts are alternatives, see `Format.prompts`."""
    prompts = tuple(parse(text) for text in ([prompt] if isinstance(prompt, str) else prompt))
    if not prompts:
        raise DataError("there is no prompt template; give one, or None to have it guessed")
    parsed = parse(answer)
    if not parsed.fields:
        raise DataError(
            f"the answer template {answer!r} names no field, every answer would be the same; write {{name}}"
        )
    if parsed.text in _CHATS and [one.text for one in prompts] == [parsed.text]:
        return ChatFormat("chat", prompts, parsed)
    return Format(name, prompts, parsed)


def with_chat(format_: Format, template: ChatTemplate | None) -> Format:
    """Return the format; where it is a chat, with the model's own way to write it."""
    return replace(format_, own=template) if template is not None and isinstance(format_, ChatFormat) else format_


_CHATS = tuple(f"{{{field}}}" for field in chats.FIELDS)
"""The template of prompt and answer where a record holds a list of messages."""
_INSTRUCTION = "### Instruction:\n{instruction}\n\n"
_RESPONSE = "### Response:\n"
# The answer begins with a space where the prompt ends in a word: byte-pair encodings have most words with one.
FORMATS: tuple[Format, ...] = (
    *(make_format(chat, chat) for chat in _CHATS),
    make_format("{prompt}", "{completion}", "prompt and completion"),
    make_format("{prompt}", "{response}", "prompt and response"),
    make_format(
        (f"{_INSTRUCTION}### Input:\n{{input}}\n\n{_RESPONSE}", _INSTRUCTION + _RESPONSE),
        "{output}",
        "instruction, optional input, output",
    ),
    make_format(
        (f"{_INSTRUCTION}### Input:\n{{context}}\n\n{_RESPONSE}", _INSTRUCTION + _RESPONSE),
        "{response}",
        "instruction, optional context, response",
    ),
    make_format("Question: {question}\nAnswer:", " {answer}", "question and answer"),
    make_format("{text}\nLabel:", " {label}", "text and label"),
)
"""What is tried, in this order, where no templates are given."""


def guess(fields: Collection[str], where: str) -> Format:
    """Return the first known format whose required fields are there."""
    for known in FORMATS:
        if {*known.prompts[-1].fields, *known.answer.fields} <= set(fields):
            return known
    names = "; ".join(", ".join(dict.fromkeys((*known.prompts[-1].fields, *known.answer.fields))) for known in FORMATS)
    has = ", ".join(fields) or "nothing"
    raise DataError(
        f"{where}: no known set of fields (found: {has}; known: {names}); give templates for prompt and answer, "
        'such as "Question: {question}\\nAnswer:" and " {answer}"'
    )
