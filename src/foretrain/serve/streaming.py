"""Tokens become text piece by piece: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

from foretrain.data.tokenizers import BYTE_OF, BPETokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer

FinishReason = Literal["eos", "stop", "length", "context"]
"""The model ended the text; a stop token or string came; max_tokens are written; model.context is full."""
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class StreamToken:
    """One token of a stream. The texts of all of them, in order, are the whole text."""

    id: int
    text: str
    """What can be shown now: nothing while a character is incomplete, more than its own where one was held back."""
    log_probability: float
    """Under the model's own distribution: before penalty, temperature, top-k and top-p."""
    is_eos: bool
    finish_reason: FinishReason | None = None
    """Set on the last token."""


class Decoder(Protocol):
    """Token numbers in, text out, nothing lost: all pieces together are `tokenizer.decode` of all tokens."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class ByteDecoder:
    """Decodes tokens that are bytes: those of an incomplete character wait for the rest."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDecoder:
    """Decodes with any other tokenizer: returns what the newest token adds to the decoded text of the last few."""

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._settled = 0
        """So many tokens of the window have been given out as text; they stay as left context of the others."""

    def push(self, token: int) -> str:
        self._window.append(token)
        piece = self._rest()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        del self._window[: self._settled]
        self._settled = len(self._window)
        return piece

    def finish(self) -> str:
        piece = self._rest()
        self._settled = len(self._window)
        return piece

    def _rest(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._settled])) :]


def decoder_factory(tokenizer: Tokenizer) -> Callable[[], Decoder]:
    """Return what makes a new decoder for each text; tables are made once, here."""
    if isinstance(tokenizer, ByteTokenizer):
        return lambda: ByteDecoder(lambda token: bytes((token,)) if token < 256 else b"")
    if isinstance(tokenizer, CharacterTokenizer):
        return lambda: ByteDecoder(lambda token: tokenizer.decode((token,)).encode())
    if isinstance(tokenizer, BPETokenizer):
        from tokenizers.decoders import ByteLevel

        if isinstance(tokenizer.inner.decoder, ByteLevel):
            token_bytes = _byte_level_bytes(tokenizer)
            return lambda: ByteDecoder(token_bytes)
    return lambda: WindowDecoder(tokenizer.decode)


def _byte_level_bytes(tokenizer: BPETokenizer) -> Callable[[int], bytes]:
    """Return what each token stands for; special ones for nothing."""
    special = {number for number, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}

    @cache
    def token_bytes(token: int) -> bytes:
        written = None if token in special else tokenizer.inner.id_to_token(token)
        if written is None:
            return b""
        if all(character in BYTE_OF for character in written):
            return bytes(BYTE_OF[character] for character in written)
        return bytes(written.encode())

    return token_bytes


class StopStrings:
    """Passes text through up to the stop string that is complete first, of those that end together the longest."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return what is sure to stand before any stop string, and whether one is complete."""
        if not self._strings:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._strings if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        sure = len(text) - self._longest_beginning(text)
        self._held = text[sure:]
        return text[:sure], False

    def _longest_beginning(self, text: str) -> int:
        """Return how much of the end of `text` may be the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._strings)) - 1)
        ends = (text[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._strings)), 0)

    def finish(self) -> str:
        """Return what was held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one continuation, as it grows."""

    def __init__(self, decoder: Decoder, stop_strings: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stop_strings)

    def push(self, token: int) -> tuple[str, bool]:
        """Return what can be shown now, and whether a stop string ends the text here."""
        return self._stops.push(self._decoder.push(token))

    def finish(self) -> tuple[str, bool]:
        """Return all that is left, at the end of the tokens."""
        text, stopped = self._stops.push(self._decoder.finish())
        return text + self._stops.finish(), stopped
