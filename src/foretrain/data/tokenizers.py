"""Text to token numbers and back. All are saved in the `tokenizers` library's JSON form, which others read too."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foretrain.data import library
from foretrain.errors import DataError
from foretrain.persist.files import from_json, user_path

END_OF_TEXT = "<|endoftext|>"
Tokens = NDArray[np.unsignedinteger[Any]]
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""GPT-2 writes each byte as one visible character: itself where it is one, the next free one from 256 on if not."""


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    vocab_size: int
    end_of_text: int
    """Written after each document."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...
    def to_json(self) -> str: ...


class _Encoder(ABC):
    """One text as `encode_batch` encodes many."""

    def encode(self, text: str) -> list[int]:
        """Return token numbers as `torch.tensor` and embeddings take them."""
        return [int(token) for token in self.encode_batch([text])[0]]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]: ...


class ByteTokenizer(_Encoder):
    """One token per byte of UTF-8: no vocabulary, no unknown characters."""

    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Write it as byte-pair encoding that merges nothing."""
        vocabulary = dict(sorted(BYTE_OF.items(), key=lambda item: item[1]))
        model = {"type": "BPE", "vocab": vocabulary | {END_OF_TEXT: self.end_of_text}, "merges": []}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return _library_json(self.end_of_text, model, level, level)


class CharacterTokenizer(_Encoder):
    """One token per character that occurs in the data; the last number stands for ends and for unknown characters."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(whole(characters))))
        self.end_of_text = len(self.characters)
        self.vocab_size = self.end_of_text + 1
        codes = [ord(character) for character in self.characters]
        self._numbers = np.full(max(codes, default=0) + 2, self.end_of_text, dtype=np.uint32)
        """Characters by code; the last one stands for all that come after it."""
        self._numbers[codes] = np.arange(len(codes), dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Tokens:
        codes = np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype=np.uint32)
        return self._numbers[np.minimum(codes, len(self._numbers) - 1)]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[token] for token in tokens if token < self.end_of_text)

    def to_json(self) -> str:
        """Write it as a vocabulary of words that are all one character long."""
        vocabulary = {character: number for number, character in enumerate(self.characters)}
        model = {"type": "WordLevel", "vocab": vocabulary | {END_OF_TEXT: self.end_of_text}, "unk_token": END_OF_TEXT}
        each = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        return _library_json(self.end_of_text, model, each, {"type": "Fuse"})


def _library_json(end_of_text: int, model: dict[str, Any], split: dict[str, Any], decoder: dict[str, Any]) -> str:
    """Return a file of the `tokenizers` library. Of these fields it needs every one, and knows no others."""
    end = {"id": end_of_text, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False)


class BPETokenizer(_Encoder):
    """Byte-pair encoding by the `tokenizers` library."""

    def __init__(self, inner: Any, origin: str, end: int | None = None) -> None:
        """end: the token that ends a text; None: the one that GPT-2 calls so."""
        library.encode_whole(inner)
        self.inner = inner
        self.vocab_size = library.vocabulary_size(inner, origin)
        end = inner.token_to_id(END_OF_TEXT) if end is None else end
        if end is None:
            raise DataError(f"{origin}: the tokenizer has no {END_OF_TEXT} token; add it as a special token")
        self.end_of_text = int(end)
        self._origin = origin

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        with library.called(f"{self._origin}: the tokenizer cannot encode this text"):
            encoded = self.inner.encode_batch_fast([whole(text) for text in texts], add_special_tokens=False)
        return [np.array(entry.ids, dtype=np.uint32) for entry in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        with library.called(f"{self._origin}: the tokenizer cannot decode these tokens"):
            text: str = self.inner.decode(list(tokens))
        return text

    def to_json(self) -> str:
        text: str = self.inner.to_str()
        return text


def whole(text: str) -> str:
    """Return the text with `?` for halves of surrogate pairs: JSON can write them, but they are no characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace").decode("utf-8")
    return text


def characters_of(texts: Iterable[str]) -> str:
    """Return every character that occurs."""
    found = np.zeros(sys.maxunicode + 1, dtype=bool)
    for text in texts:
        found[np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype=np.uint32)] = True
    return "".join(map(chr, np.flatnonzero(found)))


def cut_of(tokenizer: Tokenizer) -> Callable[[str], int] | None:
    """Return how much of a text is encoded as if nothing followed; None: of any text that may be nothing."""
    if isinstance(tokenizer, (ByteTokenizer, CharacterTokenizer)):
        return len
    if isinstance(tokenizer, BPETokenizer) and library.splits_as_gpt2(tokenizer.inner):
        return byte_level_cut
    return None


def byte_level_cut(text: str) -> int:
    """Return the text up to the last line end that stands alone between other characters: there GPT-2's splitting
    always cuts, and neither side is split otherwise without the other. Spaces around it would be shared out between
    both."""
    place = text.rfind("\n", 1, -1)
    while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind("\n", 1, place)
    return max(place, 0) and place + 1


def gpt2(folder: str | Path) -> BPETokenizer:
    """Make GPT-2's own encoding from its two vocabulary files."""
    from tokenizers import AddedToken

    folder = user_path(folder, "data.vocabulary")
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            break
    else:
        raise DataError(
            f"data.vocabulary: {folder} does not hold encoder.json and vocab.bpe (or vocab.json and merges.txt); "
            "name the folder with GPT-2's vocabulary files"
        )
    inner = _byte_level(str(folder / vocabulary), str(folder / merges))
    inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return BPETokenizer(inner, str(folder))


def train_bpe(texts: Iterator[str], size: int) -> BPETokenizer:
    """Learn a new encoding from the training documents."""
    from tokenizers import pre_tokenizers, trainers

    inner = _byte_level(None, None)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with library.called("data.tokenizer: no encoding can be learned from this text"):
        inner.train_from_iterator(texts, trainer)
    return BPETokenizer(inner, "data.tokenizer")


def _byte_level(vocabulary: str | None, merges: str | None) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    with library.called(f"data.vocabulary: {vocabulary} and {merges} are no GPT-2 vocabulary"):
        model = models.BPE.from_file(vocabulary, merges) if vocabulary and merges else models.BPE()
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def load(path: str | Path) -> Tokenizer:
    """Read a tokenizer from its JSON file: one written by foretrain, or any `tokenizers` file."""
    path = user_path(path, "data.tokenizer")
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"data.tokenizer: {path} cannot be read ({error.strerror}); use byte, char, gpt2, bpe or a tokenizer.json"
        ) from None
    except ValueError as error:
        raise DataError(f"data.tokenizer: {path} is not JSON ({error})") from None
    if (own := _own(content)) is not None:
        return own
    with library.called(f"data.tokenizer: {path} is not a tokenizer file"):
        return BPETokenizer(library.read(json.dumps(library.without_extras(content))), str(path))


def _own(content: Any) -> Tokenizer | None:
    """Return the tokenizer of ours that writes this file."""
    if not isinstance(content, dict):
        return None
    if content.get("foretrain") == "byte":  # as they were written first
        return ByteTokenizer()
    if content.get("foretrain") == "char" and isinstance(content.get("characters"), str):
        return CharacterTokenizer(content["characters"])
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        return None
    ours: list[Tokenizer] = [ByteTokenizer()]
    if all(len(character) == 1 or character == END_OF_TEXT for character in vocabulary):
        ours.append(CharacterTokenizer("".join(character for character in vocabulary if len(character) == 1)))
    return next((tokenizer for tokenizer in ours if json.loads(tokenizer.to_json()) == content), None)
