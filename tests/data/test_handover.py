"""The files for other tools: the same numbers for the same text, and the same text for the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.test_tokenizers import vocabulary_folder
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foretrain.data import tokenizers
from foretrain.data.handover import tokenizer_files
from foretrain.data.tokenizers import END_OF_TEXT, BPETokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer

KNOWN = "the cat sat on the mat, äöü ß — 漢字 🙂\n\ttab\r\n  two  spaces don't I'll\u00a0no\u2028line\0"
TEXTS = [KNOWN, "", "\n", " x ", f"a{END_OF_TEXT}b", "unknown: Ω ж\n", "e\u0301 or é"]


@pytest.fixture(params=["byte", "char", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path, make_text: Callable[..., str]) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "char":
        return CharacterTokenizer(KNOWN)
    if request.param == "bpe":
        return tokenizers.train_bpe(iter([make_text(300)]), 280)
    return tokenizers.gpt2(vocabulary_folder(tmp_path / "vocabulary", make_text(300)))


def load(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir(exist_ok=True)
    for name, text in tokenizer_files(tokenizer, 1000).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return AutoTokenizer.from_pretrained(folder)


def test_other_tools_encode_and_decode_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = load(tokenizer, tmp_path / "files")
    assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        1000,
    )
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == tokens, text
        assert theirs.decode(tokens, skip_special_tokens=True) == tokenizer.decode(tokens), text


def test_half_characters_decode_alike(tmp_path: Path) -> None:
    theirs, ours = load(ByteTokenizer(), tmp_path / "files"), ByteTokenizer()
    content = "漢🙂é".encode()
    for first in range(len(content)):
        for last in range(first, len(content) + 1):
            tokens = [*content[first:last], 97]
            assert theirs.decode(tokens) == ours.decode(tokens)


def test_what_other_tools_save_again_can_be_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    load(tokenizer, tmp_path / "files").save_pretrained(tmp_path / "again")
    again = tokenizers.load(tmp_path / "again" / "tokenizer.json")
    assert again.end_of_text == tokenizer.end_of_text
    assert again.encode(KNOWN) == tokenizer.encode(KNOWN)
    assert again.decode(again.encode(KNOWN)) == tokenizer.decode(tokenizer.encode(KNOWN))


def test_nothing_is_put_around_a_text(make_text: Callable[..., str], tmp_path: Path) -> None:
    """A file may say to begin every text with a special token, to cut it and to fill it up: trained without that."""
    content = json.loads(tokenizers.train_bpe(iter([make_text(300)]), 280).to_json())
    end = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = tokenizers.load(tmp_path / "tokenizer.json")
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.decode(tokenizer.encode(KNOWN)) == KNOWN
    assert load(tokenizer, tmp_path / "files")(KNOWN)["input_ids"] == tokenizer.encode(KNOWN)
