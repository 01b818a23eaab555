"""The one way into the `tokenizers` library: its errors in our words, and files that only say how to encode."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from foretrain.errors import DataError, ForetrainError

MOST_TOKENS = 2**24
"""A vocabulary that needs more numbers than this is a damaged file: no model has an output for each of them."""
_MOST_HOLES, _SPARE_TOKENS = 16, 2**16
"""Numbers per token, and more, beyond which it is damaged, too: files leave out some numbers, never most of them."""


@contextlib.contextmanager
def called(what: str) -> Iterator[None]:
    """Make a DataError of whatever the library raises, which is bare exceptions and panics, in Python no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, ForetrainError):
        raise
    except BaseException as error:  # noqa: BLE001 - that is what a panic is
        raise DataError(f"{what} ({' '.join(str(error).split())})") from None


@contextlib.contextmanager
def without_panic_text() -> Iterator[None]:
    """A panic prints lines of its own on standard error, past Python. What it says is in the exception, too."""
    try:
        sys.stderr.flush()
        before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):  # there is no standard error
        yield
        return
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def read(text: str) -> Any:
    """Read a tokenizer from its JSON text."""
    import tokenizers

    with without_panic_text():
        return tokenizers.Tokenizer.from_str(text)


def without_extras(content: Any) -> Any:
    """Remove from a tokenizer file what would cut, pad or vary a text: truncation, padding and dropout."""
    if not isinstance(content, dict):
        return content
    plain = content | {"truncation": None, "padding": None}
    if isinstance(content.get("model"), dict) and "dropout" in content["model"]:
        plain["model"] = content["model"] | {"dropout": None}
    return plain


def encode_whole(inner: Any) -> None:
    """Switch off what would cut, pad or vary a text."""
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None) is not None:
        inner.model.dropout = None


def splits_as_gpt2(inner: Any) -> bool:
    """Return whether a text is cut into words as GPT-2 does it, and by nothing else."""
    content = json.loads(inner.to_str())
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    split = content["pre_tokenizer"]
    return (
        content["normalizer"] is None
        and isinstance(split, dict)
        and all(split.get(name) == value for name, value in wanted.items())
        and content["model"]["type"] == "BPE"
        and not any(token["lstrip"] or "\n" in token["content"] for token in content["added_tokens"])
    )


def vocabulary_size(inner: Any, origin: str) -> int:
    """Return how many numbers a model needs: one more than the largest, since a file may leave some out."""
    numbers = inner.get_vocab(with_added_tokens=True).values()
    size = 1 + max(numbers, default=-1)
    if size > min(MOST_TOKENS, _MOST_HOLES * len(numbers) + _SPARE_TOKENS):
        raise DataError(
            f"{origin}: of {len(numbers):,} tokens one has the number {size - 1:,}; this is no vocabulary of a "
            "language model"
        )
    return int(size)
