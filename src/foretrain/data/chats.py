"""Chats: a list of messages becomes plain lines, `User: ...` and `Assistant: ...`, and what the assistant says is
learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import DataError

FIELDS = ("messages", "conversations")
"""Fields of a record that hold a chat."""
ROLES = {
    "system": "System",
    "user": "User",
    "human": "User",
    "assistant": "Assistant",
    "gpt": "Assistant",
}
_ROLE_KEYS, _TEXT_KEYS = ("role", "from"), ("content", "value")
JINJA = (
    "{% for message in messages %}{{ '' if loop.first else '\\n' }}{{ message['role'] | capitalize }}: "
    "{{ message['content'] | trim }}{% endfor %}"
    "{{ ('\\n' if messages else '') + 'Assistant:' if add_generation_prompt else '' }}"
)
"""The format of a chat as a template for the tokenizers of transformers (`apply_chat_template`)."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    """System, User or Assistant."""
    text: str

    @property
    def is_learned(self) -> bool:
        return self.role == ROLES["assistant"]


def read_messages(value: Any, where: str, field: str) -> list[Message]:
    """Return the messages of a record, checked. Raises DataError that names `where`, a file and line."""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else type(value).__name__
        raise DataError(
            f"{where}: {field!r} is {kind}; it must be a list of messages, such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    return [_message(entry, f"{where}: {field}[{number}]") for number, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {type(entry).__name__}; a message is an object with a role and a content")
    role = _first(entry, _ROLE_KEYS, where)
    text = _first(entry, _TEXT_KEYS, where)
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise DataError(f"{where} has the role {role!r}; known are {', '.join(ROLES)}: change it, or leave it out")
    if not isinstance(text, str):
        raise DataError(f"{where}: its content is {type(text).__name__}; write it as text")
    text = text.encode("utf-8", errors="replace").decode("utf-8").strip()  # half surrogate pairs have no encoding
    if not text:
        raise DataError(f"{where}: its content is empty; write something, or leave the message out")
    return Message(known, text)


def _first(entry: dict[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if name in entry:
            return entry[name]
    has = ", ".join(entry) or "nothing"
    raise DataError(f"{where} has no {names[0]!r} (found: {has}); a message has a role and a content")


def turns(messages: Sequence[Message], where: str) -> tuple[tuple[str, ...], str]:
    """Return (what is given and what is said, by turns; the last that is said). What follows the last answer is left
    out."""
    parts: list[str] = []
    given: list[str] = []
    for message in messages:
        if message.is_learned:
            parts += [_opened(given, bool(parts)), f" {message.text}"]
            given = []
        else:
            given.append(f"{message.role}: {message.text}\n")
    if not parts:
        raise DataError(f"{where}: no message of the assistant, there is nothing to learn; remove the record")
    *earlier, answer = parts
    return tuple(earlier), answer


def question(messages: Sequence[Message]) -> str:
    """Return a chat up to where the assistant is to speak next."""
    lines = "".join(f"{message.role}: {message.text}\n" for message in messages)
    return f"{lines}{ROLES['assistant']}:"


def _opened(given: list[str], goes_on: bool) -> str:
    return ("\n" if goes_on else "") + "".join(given) + f"{ROLES['assistant']}:"
