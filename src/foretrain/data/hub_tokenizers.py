"""The tokenizer of a model in Hugging Face's format, with the tokens that begin and end its texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.data import library
from foretrain.data.tokenizers import BPETokenizer, Tokenizer, Tokens
from foretrain.errors import DataError
from foretrain.persist.files import from_json, user_path

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What lies beside a tokenizer.json and belongs to it."""


class HubTokenizer(BPETokenizer):
    """Any encoding of the `tokenizers` library, with the special tokens that the model's files name."""

    def __init__(self, inner: Any, origin: str, ends: Sequence[int], special: dict[str, str]) -> None:
        super().__init__(inner, origin, ends[0])
        self.ends = frozenset(ends)
        """Tokens at which a text that the model writes is over."""
        self.special = special
        with library.called(f"{origin}: the tokenizer cannot encode a text"):
            around, alone = inner.encode("a").ids, inner.encode("a", add_special_tokens=False).ids
        place = next((at for at in range(len(around)) if around[at : at + len(alone)] == alone), 0)
        self.beginning = tuple(int(token) for token in around[:place])
        """Tokens that the model reads before every text, such as `<s>`."""


def beginning_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that stand before every text of the model; ours have none."""
    return tokenizer.beginning if isinstance(tokenizer, HubTokenizer) else ()


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens at which a text that the model writes is over."""
    return tokenizer.ends if isinstance(tokenizer, HubTokenizer) else frozenset((tokenizer.end_of_text,))


def begun(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Return a text with the tokens before it that the model expects; one that has them already stays as it is, as
    chat templates write them."""
    first = beginning_of(tokenizer)
    if not first or tuple(map(int, tokens[: len(first)])) == first:
        return tokens
    return np.concatenate([np.array(first, dtype=tokens.dtype), tokens])


def load(path: Path, folder: Path) -> HubTokenizer:
    """Read a tokenizer.json. folder: that of the model, whose files name the special tokens."""
    path = user_path(path, "data.tokenizer")
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a tokenizer.json") from None
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error})") from None
    with library.called(f"{path}: is not a tokenizer file"):
        inner = library.read(json.dumps(library.without_extras(content)))
    special = _special(folder)
    return HubTokenizer(inner, str(path), _ends(inner, folder, special, path), special)


def _special(folder: Path) -> dict[str, str]:
    """Return the special tokens as text; later files fill in what earlier ones leave out."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = _values(folder / name)
        for key in SPECIAL:
            value = values.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                found.setdefault(key, text)
    return found


def _ends(inner: Any, folder: Path, special: dict[str, str], path: Path) -> list[int]:
    """Return the tokens that end a text: the tokenizer's first, which training writes, then those of the model."""
    named = inner.token_to_id(special["eos_token"]) if "eos_token" in special else None
    size = library.vocabulary_size(inner, str(path))
    told: list[int] = [] if named is None else [int(named)]
    for name in ("generation_config.json", "config.json"):
        value = _values(folder / name).get("eos_token_id")
        numbers = value if isinstance(value, list) else [value]
        told += [number for number in numbers if type(number) is int and 0 <= number < size]
        if len(told) > (named is not None):
            break  # transformers asks config.json only where generation_config.json says nothing
    if not told:
        raise DataError(
            f"{path}: nothing says which token ends a text; name it as eos_token in {folder / 'tokenizer_config.json'}"
        )
    return list(dict.fromkeys(told))


def _values(path: Path) -> dict[str, Any]:
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def files_of(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Return the tokenizer's files as the model's folder has them, for a folder that is made from it."""
    found = {"tokenizer.json": tokenizer.to_json()}
    for name in FILES:
        try:
            found[name] = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return found
