"""Tokenizers: round trips, sizes, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.data import tokenizers
from foretrain.data.tokenizers import END_OF_TEXT, BPETokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer
from foretrain.errors import DataError

TEXTS = ["hello world", "", "äöü ß — 漢字 🙂\n\ttab\r\n", "  two  spaces  ", "the cat sat on the mat" * 3]


def vocabulary_folder(folder: Path, text: str, names: tuple[str, str] = ("vocab.json", "merges.txt")) -> Path:
    """GPT-2-style vocabulary files of a tiny encoding, its end-of-text token last, as in the original."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = tokenizers.train_bpe(iter([text]), 290).inner
    trained = [token for token, _ in sorted(inner.get_vocab().items(), key=lambda item: item[1])]
    ordered = [token for token in trained if token != END_OF_TEXT] + [END_OF_TEXT]
    inner.model.save(str(folder))
    merges = (folder / "merges.txt").read_text(encoding="utf-8")
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()
    (folder / names[0]).write_text(json.dumps({token: number for number, token in enumerate(ordered)}))
    (folder / names[1]).write_text(merges, encoding="utf-8")
    return folder


@pytest.fixture(params=["byte", "char", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path, make_text: Callable[..., str]) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "char":
        return CharacterTokenizer("".join(TEXTS))
    if request.param == "bpe":
        return tokenizers.train_bpe(iter([make_text(300)]), 280)
    return tokenizers.gpt2(vocabulary_folder(tmp_path / "vocabulary", make_text(300)))


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(tokens) for tokens in encoded] == TEXTS
    assert [len(tokens) for tokens in encoded][1] == 0


def test_all_tokens_are_in_the_vocabulary_and_the_end_is_not_among_them(tokenizer: Tokenizer) -> None:
    for tokens in tokenizer.encode_batch(TEXTS):
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.end_of_text not in tokens
    assert 0 <= tokenizer.end_of_text < tokenizer.vocab_size


def test_the_end_of_text_decodes_to_nothing(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode_batch(["hello"])[0], tokenizer.end_of_text]
    assert tokenizer.decode(tokens) == "hello"


def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = tokenizers.load(path)
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    for one, other in zip(loaded.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS), strict=True):
        assert list(one) == list(other)
    assert loaded.to_json() == tokenizer.to_json()


def test_batches_and_single_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode_batch(TEXTS)
    for text, tokens in zip(TEXTS, together, strict=True):
        assert list(tokenizer.encode_batch([text])[0]) == list(tokens)


def test_one_text_is_encoded_for_an_embedding(tokenizer: Tokenizer) -> None:
    tokens = torch.tensor(tokenizer.encode(TEXTS[2]))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == tokenizer.encode_batch(TEXTS)[2].tolist()
    assert torch.nn.Embedding(tokenizer.vocab_size, 2)(tokens).shape == (len(tokens), 2)


@pytest.mark.parametrize("written", ['{"foretrain": "byte"}', '{"foretrain": "char", "characters": "abc"}'])
def test_files_in_the_first_form_are_still_read(written: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(written)
    tokenizer = tokenizers.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("ab") == ([97, 98] if "byte" in written else [0, 1])


# --- bytes and characters ------------------------------------------------------------------------------------------


def test_bytes_are_their_own_numbers() -> None:
    tokenizer = ByteTokenizer()
    assert list(tokenizer.encode_batch(["aé"])[0]) == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_half_a_character_decodes_to_the_replacement() -> None:
    assert ByteTokenizer().decode([97, 0xC3]) == "a\ufffd"


def test_characters_are_numbered_in_order() -> None:
    tokenizer = CharacterTokenizer("cabbage")
    assert tokenizer.characters == "abceg"
    assert list(tokenizer.encode_batch(["cab"])[0]) == [2, 0, 1]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (6, 5)


def test_an_unknown_character_gets_the_last_number() -> None:
    tokenizer = CharacterTokenizer("abc")
    for unknown in ("A", "z", "🙂", "\0"):
        assert list(tokenizer.encode_batch([f"a{unknown}c"])[0]) == [0, 3, 2]


# --- byte-pair encoding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [257, 260, 285])
def test_a_trained_encoding_has_the_size_asked_for(size: int, make_text: Callable[..., str]) -> None:
    tokenizer = tokenizers.train_bpe(iter([make_text(300)]), size)
    assert tokenizer.vocab_size == size


def test_training_is_deterministic_and_shortens_what_it_saw(make_text: Callable[..., str]) -> None:
    text = make_text(300)
    one, other = (tokenizers.train_bpe(iter([text]), 290) for _ in range(2))
    assert one.to_json() == other.to_json()
    assert len(one.encode_batch([text])[0]) < len(text) / 2


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2_vocabulary_files_under_both_names(
    names: tuple[str, str], tmp_path: Path, make_text: Callable[..., str]
) -> None:
    folder = vocabulary_folder(tmp_path / "vocabulary", make_text(300), names)
    tokenizer = tokenizers.gpt2(folder)
    vocabulary = json.loads((folder / names[0]).read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == len(vocabulary)
    assert tokenizer.end_of_text == vocabulary[END_OF_TEXT] == len(vocabulary) - 1
    tokens = tokenizer.encode_batch(["the cat"])[0]
    by_number = {number: token for token, number in vocabulary.items()}
    assert "".join(by_number[token] for token in tokens).replace("Ġ", " ") == "the cat"


def test_gpt2_splits_like_the_original(tmp_path: Path, make_text: Callable[..., str]) -> None:
    """Against the implementation in transformers, on the same files."""
    from transformers import GPT2Tokenizer

    folder = vocabulary_folder(tmp_path / "vocabulary", make_text(300))
    reference = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    ours = tokenizers.gpt2(folder)
    for text in TEXTS[:1] + TEXTS[2:]:
        assert list(ours.encode_batch([text])[0]) == reference.encode(text, add_special_tokens=False)


def test_without_vocabulary_files_the_error_says_which(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.vocabulary: .*encoder\.json and vocab\.bpe"):
        tokenizers.gpt2(tmp_path)


@pytest.mark.parametrize("damage", ["vocab.json", "merges.txt"])
def test_broken_vocabulary_files_are_named(damage: str, tmp_path: Path, make_text: Callable[..., str]) -> None:
    folder = vocabulary_folder(tmp_path / "vocabulary", make_text(100))
    (folder / damage).write_text("{ this is not it", encoding="utf-8")
    with pytest.raises(DataError, match="vocabulary"):
        tokenizers.gpt2(folder)


def test_half_a_surrogate_pair_is_encoded_as_a_question_mark(make_text: Callable[..., str]) -> None:
    trained = tokenizers.train_bpe(iter([make_text(300)]), 280)
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("a\ud800?"), trained):
        assert tokenizer.decode(tokenizer.encode_batch(["a\ud800"])[0]) == "a?"
        json.loads(tokenizer.to_json().encode("utf-8"))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_tokenizers_file_without_end_of_text_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"has no <\|endoftext\|> token"):
        tokenizers.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("{}", "is not a tokenizer file"), ("[]", "is not a tokenizer")],
)
def test_what_is_no_tokenizer_is_named(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        tokenizers.load(path)
    assert str(caught.value).startswith(f"data.tokenizer: {path}")
    assert words in str(caught.value)


def test_any_library_tokenizer_with_an_end_of_text_loads(tmp_path: Path, make_text: Callable[..., str]) -> None:
    trained = tokenizers.train_bpe(iter([make_text(300)]), 270)
    trained.inner.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizers.load(tmp_path / "tokenizer.json")
    assert isinstance(loaded, BPETokenizer)
    assert loaded.decode(loaded.encode_batch(["the cat"])[0]) == "the cat"


@pytest.mark.parametrize(
    "extra",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9}},
        {
            "padding": {
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": END_OF_TEXT,
            }
        },
        {"dropout": 0.5},
        {"dropout": 7},
    ],
)
def test_a_file_neither_cuts_nor_pads_nor_varies_the_text(
    extra: dict[str, Any], tmp_path: Path, make_text: Callable[..., str]
) -> None:
    trained = tokenizers.train_bpe(iter([make_text(300)]), 280)
    content = json.loads(trained.to_json())
    if "dropout" in extra:
        content["model"] |= extra
    else:
        content |= extra
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    loaded = tokenizers.load(path)
    for _ in range(3):
        assert [list(one) for one in loaded.encode_batch(TEXTS)] == [list(one) for one in trained.encode_batch(TEXTS)]
    assert json.loads(loaded.to_json()) == json.loads(trained.to_json())


def test_nor_does_a_tokenizer_of_the_library_that_is_handed_over(make_text: Callable[..., str]) -> None:
    trained = tokenizers.train_bpe(iter([make_text(300)]), 280)
    expected = [list(one) for one in trained.encode_batch(TEXTS)]
    inner = tokenizers.train_bpe(iter([make_text(300)]), 280).inner
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.model.dropout = 0.5
    assert [list(one) for one in BPETokenizer(inner, "mine").encode_batch(TEXTS)] == expected


def library_file(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    end = {"id": 0, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    } | changes


WORDS = {"type": "WordLevel", "vocab": {END_OF_TEXT: 0, "the": 1}, "unk_token": END_OF_TEXT}
UNUSABLE = {
    "words without unknown": library_file(WORDS | {"unk_token": "[UNK]"}),
    "pieces without unknown": library_file(
        {
            "type": "WordPiece",
            "vocab": {END_OF_TEXT: 0, "the": 1},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
    ),
    "unigram without unknown": library_file(
        {"type": "Unigram", "vocab": [[END_OF_TEXT, 0.0], ["the", -1.0]], "unk_id": None, "byte_fallback": False}
    ),
    "a panic": library_file(WORDS, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an endless vocabulary": library_file(WORDS | {"vocab": {END_OF_TEXT: 0, "the": 4_000_000_000}}),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_the_library_refuses_is_one_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(UNUSABLE[name]), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        tokenizers.load(path).encode_batch(["the dog"])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_vocabulary_with_gaps_is_as_large_as_its_largest_number(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(library_file(WORDS | {"vocab": {END_OF_TEXT: 0, "the": 90}})), encoding="utf-8")
    loaded = tokenizers.load(path)
    assert loaded.encode_batch(["the"])[0].tolist() == [90]
    assert loaded.vocab_size == 91


def test_characters_that_know_none() -> None:
    assert CharacterTokenizer("").encode_batch(["ab", ""])[0].tolist() == [0, 0]


def test_a_text_is_cut_only_where_both_sides_are_encoded_as_in_one() -> None:
    """Spaces on either side of a line end belong to one word with it."""
    text = "def f():\n    return 1\n\n    x = 2 \ny = 3\nz\n" * 3
    tokenizer = tokenizers.train_bpe(iter([text * 5]), 300)
    cuts = set()
    for end in range(len(text)):
        place = tokenizers.byte_level_cut(text[:end])
        cuts.add(place)
        parts = [tokenizer.encode(part) for part in (text[:place], text[place:end])]
        assert parts[0] + parts[1] == tokenizer.encode(text[:end])
    assert {text[place - 1 : place + 1] for place in cuts - {0}} == {"\nz", "\nd"}
