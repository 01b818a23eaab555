"""Properties of the data: orders are bijections, splits never overlap, text survives."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config import DataConfig
from foretrain.data import documents, tokens
from foretrain.data.loader import Loader, MappedSamples, TokenWindows, held_out_batches
from foretrain.data.order import random_integer, shuffled
from foretrain.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, cut_of, train_bpe
from foretrain.data.tokens import Split

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)
characters = st.characters(codec="utf-8")


# --- order ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), seeds, epochs)
def test_every_order_is_a_bijection(count: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@given(st.integers(1, 10**12), seeds, epochs, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_huge_orders_stay_inside_and_differ(count: int, seed: int, epoch: int, indices: list[int]) -> None:
    places = np.unique(np.array(indices, dtype=np.int64) % count)
    order = shuffled(places, count, seed, epoch)
    assert order.min() >= 0
    assert order.max() < count
    assert len(np.unique(order)) == len(places)


@given(seeds, epochs, st.integers(1, 10**6))
def test_random_integers_are_below_their_limit(seed: int, epoch: int, below: int) -> None:
    assert 0 <= random_integer(seed, epoch, below) < below


# --- windows and batches -------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(0, 200), seeds, st.integers(0, 50))
def test_windows_lie_inside_and_do_not_overlap(context: int, more: int, seed: int, epoch: int) -> None:
    count = context + 1 + more
    samples = TokenWindows(np.arange(count), context, seed)
    inputs, targets = samples.fetch(np.arange(len(samples)), epoch)
    assert torch.equal(inputs + 1, targets)
    assert int(inputs.min()) >= 0
    assert int(targets.max()) < count
    assert len(torch.unique(inputs)) == inputs.numel()
    assert count - inputs.numel() <= 2 * context


@given(st.integers(1, 40), st.integers(1, 30), seeds, st.integers(0, 200))
def test_any_batch_is_what_single_samples_give(count: int, size: int, seed: int, position: int) -> None:
    samples = MappedSamples(torch.arange(count))
    single = Loader(samples, 1, seed)
    expected = [int(single.batch(place)) for place in range(position * size, (position + 1) * size)]
    assert Loader(samples, size, seed).batch(position).tolist() == expected


@given(st.integers(1, 40), st.integers(1, 7), seeds)
def test_an_epoch_visits_everything_once(count: int, size: int, seed: int) -> None:
    loader = Loader(MappedSamples(torch.arange(count)), size, seed, prefetch=0)
    rows = torch.cat(list(islice(loader, -(-3 * count // size)))).tolist()
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(st.integers(1, 12), st.integers(0, 300), st.integers(1, 6), st.integers(1, 10))
def test_held_out_windows_are_counted_once(context: int, more: int, size: int, limit: int) -> None:
    tokens = np.arange(context + 1 + more)
    batches = held_out_batches(tokens, context, size, limit)
    assert len(batches) <= limit
    targets = torch.cat([batch[1].flatten() for batch in batches])
    counted = targets[targets != -100]
    assert len(torch.unique(counted)) == len(counted)
    assert len(counted) == context * min((len(tokens) - 1) // context, limit * size)


# --- the split -----------------------------------------------------------------------------------------------------


def in_pieces(texts: list[str], size: int) -> list[tuple[str, bool]]:
    """Documents as they are read, at most `size` characters at a time."""
    found = []
    for text in texts:
        starts = range(0, max(len(text), 1), size)
        found += [(text[start : start + size], start + size >= len(text)) for start in starts]
    return found


def documents_of(parts: Iterable[tuple[bool, str, bool]]) -> list[tuple[bool, str]]:
    """(held out?, text) of every document that a stream of parts makes."""
    found, texts = [], []
    for held_out, text, ends in parts:
        texts.append(text)
        if ends:
            found.append((held_out, "".join(texts)))
            texts = []
    assert not any(texts)
    return found


@given(st.lists(st.text(characters, max_size=12), max_size=12), st.floats(0, 1), st.integers(1, 20))
def test_the_tail_is_cut_off_and_nothing_is_lost(texts: list[str], share: float, size: int) -> None:
    cut = int(sum(map(len, texts)) * (1 - share))
    found = documents_of(Split(by_document=False, cut=cut).parts(in_pieces(texts, size)))
    assert "".join(text for _, text in found) == "".join(texts)
    flags = [held_out for held_out, _ in found]
    assert flags == sorted(flags)
    assert sum(len(text) for held_out, text in found if not held_out) == cut
    assert all(text for _, text in found)
    assert found == documents_of(Split(by_document=False, cut=cut).parts((text, True) for text in texts))


@given(st.lists(st.text(characters, max_size=4), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_equal_documents_stay_together(texts: list[str], share: float) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tokens, "DOCUMENT_SPLIT_FROM", 1):
        path = Path(folder) / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "never empty"]))
        split = tokens._plan_split(DataConfig(path=str(path), held_out=share), documents.find(str(path)))
        found = documents_of(split.parts(documents.pieces(documents.find(str(path)), "text")))
    assert [text for _, text in found] == [*texts, "never empty"]
    sides: dict[str, set[bool]] = {}
    for held_out, text in found:
        sides.setdefault(text, set()).add(held_out)
    assert all(len(side) == 1 for side in sides.values())


# --- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Callable[[str], str]:
    tokenizer = train_bpe(iter(["the cat sat on the mat and saw two dogs run home again " * 20]), 280)
    return lambda text: tokenizer.decode(tokenizer.encode_batch([text])[0])


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Learned from line ends between all kinds of characters."""
    text = "".join(f"{a}{b}\n{c} \n\n" for a in "a .ä" for b in "b1'" for c in "c\t 漢-")
    return train_bpe(iter([text * 3]), 330)


lines = st.text(st.sampled_from("ab1 .'\n\t\r\u00a0\u2028\x1c\u0085ä漢🙂s"), max_size=60)


@given(lines, st.integers(1, 20))
@settings(max_examples=400)
def test_a_text_in_pieces_is_encoded_as_a_whole(byte_level: Tokenizer, text: str, size: int) -> None:
    for tokenizer in (byte_level, ByteTokenizer(), CharacterTokenizer("ab1 \n漢")):
        parts = ((False, *piece) for piece in in_pieces([text], size))
        cut = list(tokens._cut_where(cut_of(tokenizer), parts))
        assert [ends for _, _, ends in cut] == [False] * (len(cut) - 1) + [True]
        got = np.concatenate([tokenizer.encode_batch([piece])[0] for _, piece, _ in cut])
        assert got.tolist() == tokenizer.encode_batch([text])[0].tolist()


@given(st.text(characters, max_size=60))
@settings(max_examples=150)
def test_any_text_survives_every_tokenizer(trained: Callable[[str], str], text: str) -> None:
    bytewise = ByteTokenizer()
    assert bytewise.decode(bytewise.encode_batch([text])[0]) == text
    assert trained(text) == text
    by_character = CharacterTokenizer(text or "x")
    tokens = by_character.encode_batch([text])[0]
    assert by_character.decode(tokens) == text
    assert all(token < by_character.end_of_text for token in tokens)


@given(st.text(characters, min_size=1, max_size=20), st.text(characters, max_size=20))
def test_unknown_characters_are_left_out_and_the_rest_stays(known: str, text: str) -> None:
    tokenizer = CharacterTokenizer(known)
    tokens = tokenizer.encode_batch([text])[0]
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == "".join(letter for letter in text if letter in known)
