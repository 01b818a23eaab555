"""Text piece by piece: together the pieces are the whole, characters stay whole, stop strings never show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretrain.data.tokenizers import END_OF_TEXT, BPETokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer, train_bpe
from foretrain.serve.streaming import ByteDecoder, StopStrings, TextStream, WindowDecoder, decoder_factory

TEXT = "the cat sat on the mat 🙂🙂 äöü 日本語 — the 👩‍👩‍👧 cat"
unicode_text = st.text(st.characters(codec="utf-8") | st.sampled_from("aé€日🙂👩‍\ufffd "), max_size=30)


@cache
def byte_pairs() -> BPETokenizer:
    tokenizer = train_bpe(iter([TEXT] * 20), 300)
    tokenizer.inner.add_tokens(["<tool>", "naïve 東"])
    tokenizer.inner.add_special_tokens(["<|pad|>"])
    return BPETokenizer(tokenizer.inner, "test")


@cache
def sentence_pieces() -> BPETokenizer:
    """Spaces are part of tokens, unknown characters are bytes: another decoder than GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = [END_OF_TEXT, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thecasonm", "▁t", "th", "▁th", "▁the", "at"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("a", "t")]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    inner.add_special_tokens([END_OF_TEXT])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return BPETokenizer(inner, "test")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "characters": lambda: CharacterTokenizer(TEXT),
    "byte pairs": byte_pairs,
    "sentence pieces": sentence_pieces,
}


def pieces_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = decoder_factory(tokenizer)()
    return [*(decoder.push(token) for token in tokens), decoder.finish()]


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=unicode_text)
@example(text=TEXT)
def test_pieces_of_a_text_are_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = [int(token) for token in tokenizer.encode_batch([text])[0]]
    pieces = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["bytes", "characters", "byte pairs"])
@given(data=st.data())
def test_pieces_of_any_tokens_are_what_decoding_them_gives(name: str, data: Any) -> None:
    """Also of those that form no characters, of ends in the middle, and of numbers beyond the vocabulary."""
    tokenizer = TOKENIZERS[name]()
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(data=st.data())
def test_pieces_of_any_sentence_pieces_are_what_decoding_them_gives(data: Any) -> None:
    tokenizer = sentence_pieces()
    tokens = data.draw(st.lists(st.integers(257, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["bytes", "byte pairs", "sentence pieces"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_no_half_character_is_ever_shown(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = [int(token) for token in tokenizer.encode_batch([text])[0]]
    assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, tokens))


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces_of(ByteTokenizer(), [97, *"🙂".encode(), 98]) == ["a", "", "", "", "🙂", "b", ""]


def test_half_a_character_at_the_end_is_replaced_as_decoding_would() -> None:
    assert pieces_of(ByteTokenizer(), [97, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_tokenizers_of_bytes_get_the_decoder_of_bytes_and_others_the_general_one() -> None:
    kinds = [type(decoder_factory(TOKENIZERS[name]())()) for name in TOKENIZERS]
    assert kinds == [ByteDecoder, ByteDecoder, ByteDecoder, WindowDecoder]


def test_the_general_decoder_looks_at_a_few_tokens_however_long_the_text() -> None:
    tokenizer = sentence_pieces()
    looked_at: list[int] = []

    def decode(tokens: Any) -> str:
        looked_at.append(len(tokens))
        return tokenizer.decode(tokens)

    decoder = WindowDecoder(decode)
    for token in tokenizer.encode_batch(["the cat sat on the mat 🙂 " * 20])[0]:
        decoder.push(int(token))
    assert max(looked_at) <= 6


# --- stop strings --------------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: read letter by letter, stop as soon as a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(
    st.lists(st.text("abc🙂", max_size=6), max_size=10),
    st.lists(st.text("abc🙂", min_size=1, max_size=4), max_size=3),
)
def test_text_is_passed_on_up_to_the_first_stop_string_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    expected, expected_stop = cut("".join(pieces), stops)
    stream = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stopped = stream.push(piece)
        shown += text
        assert expected.startswith(shown), "something was shown that had to wait"
        if stopped:
            break
    else:
        stopped = False
        shown += stream.finish()
    assert (shown, stopped) == (expected, expected_stop)


@given(unicode_text, st.lists(unicode_text.filter(bool), max_size=2))
def test_stop_strings_work_on_characters_that_come_byte_by_byte(text: str, stops: list[str]) -> None:
    stops = [*stops, *([text[3:5]] if text[3:5] else [])]
    stream = TextStream(decoder_factory(ByteTokenizer())(), stops)
    shown = ""
    for byte in text.encode():
        piece, stopped = stream.push(byte)
        shown += piece
        if stopped:
            break
    else:
        shown += stream.finish()[0]
    assert shown == cut(text, stops)[0]


def test_only_what_may_become_a_stop_string_waits() -> None:
    stream = StopStrings(["\n\nUser:"])
    assert stream.push("Hi\n") == ("Hi", False)
    assert stream.push("\n") == ("", False)
    assert stream.push("\n") == ("\n", False)
    assert stream.push("Use") == ("", False)
    assert stream.push("less") == ("\n\nUseless", False)
    assert stream.push(" \n\nUser: no") == (" ", True)
    assert stream.finish() == ""
