"""From documents to two token streams: the split, the cache, token files."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrain.config import DataConfig
from foretrain.data import cache, documents, tokens
from foretrain.data.tokenizers import ByteTokenizer, train_bpe
from foretrain.data.tokens import Corpus, prepare
from foretrain.errors import ConfigError, DataError
from foretrain.recipes import train as run

END = ByteTokenizer.end_of_text


def config(path: Any, **changes: Any) -> DataConfig:
    return DataConfig(path=[str(item) for item in path] if isinstance(path, list) else str(path), **changes)


def pieces(part: np.ndarray) -> list[str]:
    """The documents of a byte stream."""
    places = np.flatnonzero(part == END)
    return [ByteTokenizer().decode(piece) for piece in np.split(np.asarray(part), places + 1) if len(piece)]


def write_documents(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


# --- the held-out part ---------------------------------------------------------------------------------------------


def test_few_documents_are_split_at_the_end_of_the_text(text_file: Path) -> None:
    text = text_file.read_text(encoding="utf-8")
    corpus = prepare(config(text_file, held_out=0.2))
    cut = int(len(text) * 0.8)
    assert pieces(corpus.train) == [text[:cut]]
    assert pieces(corpus.held_out) == [text[cut:]]


def test_the_cut_may_fall_into_any_document(tmp_path: Path) -> None:
    texts = [letter * 100 for letter in "abcdefghij"]
    corpus = prepare(config(write_documents(tmp_path / "a.jsonl", texts), held_out=0.25))
    assert pieces(corpus.train) == [*texts[:7], "h" * 50]
    assert pieces(corpus.held_out) == ["h" * 50, "i" * 100, "j" * 100]


@pytest.mark.parametrize("count", [100, 400])
def test_many_documents_are_held_out_whole(count: int, tmp_path: Path) -> None:
    texts = [f"document number {number}, and nothing more" for number in range(count)]
    corpus = prepare(config(write_documents(tmp_path / "a.jsonl", texts), held_out=0.2))
    train, held_out = pieces(corpus.train), pieces(corpus.held_out)
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)
    assert len(held_out) / count == pytest.approx(0.2, abs=0.1)
    assert train == [text for text in texts if text in set(train)]  # in reading order


def test_equal_documents_never_stand_on_both_sides(tmp_path: Path) -> None:
    texts = [f"document number {number % 40}" for number in range(200)]
    corpus = prepare(config(write_documents(tmp_path / "a.jsonl", texts), held_out=0.3))
    train, held_out = pieces(corpus.train), pieces(corpus.held_out)
    assert len(train) + len(held_out) == 200
    assert held_out
    assert not set(train) & set(held_out)


def test_a_document_stays_on_its_side_when_others_are_added(tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(300)]
    few = prepare(config(write_documents(tmp_path / "a.jsonl", texts[:150]), held_out=0.2))
    more = prepare(config(write_documents(tmp_path / "b.jsonl", texts), held_out=0.2))
    assert set(pieces(few.held_out)) <= set(pieces(more.held_out))
    assert set(pieces(few.train)) <= set(pieces(more.train))


def test_validation_data_of_its_own_leaves_everything_to_train_on(tmp_path: Path, text_file: Path) -> None:
    validation = write_documents(tmp_path / "validation.jsonl", [f"held out {number}" for number in range(150)])
    corpus = prepare(config(text_file, validation_path=str(validation)))
    assert pieces(corpus.train) == [text_file.read_text(encoding="utf-8")]
    assert pieces(corpus.held_out) == [f"held out {number}" for number in range(150)]


def test_max_documents_counts_training_documents(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", [f"{number:03d}" * 9 for number in range(300)])
    corpus = prepare(config(path, max_documents=120))
    both = pieces(corpus.train) + pieces(corpus.held_out)
    assert sorted(both) == [f"{number:03d}" * 9 for number in range(120)]


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_a_side_that_got_no_document_is_an_error_that_says_what_to_change(held_out: float, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", [f"document number {number}" for number in range(100)])
    with pytest.raises(DataError, match=r"data\.held_out"):
        build(config(path, held_out=held_out))


def test_a_hundred_copies_of_one_document_are_an_error_that_says_what_to_change(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["the very same text, again and again"] * 100)
    with pytest.raises(DataError, match=r"data\.held_out|validation_path"):
        build(config(path))


def build(data: DataConfig) -> None:
    """Up to where a run has its windows: the error may come from any place on the way."""
    from foretrain.data.loader import TokenWindows, held_out_batches

    corpus = prepare(data)
    TokenWindows(corpus.train, 8, 0)
    held_out_batches(corpus.held_out, 8, 2, 2)


@pytest.mark.parametrize("text", ["", "\n"])
def test_empty_data_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.txt|data\.path"):
        build(config(tmp_path / "empty.txt"))


# --- tokenizers ----------------------------------------------------------------------------------------------------


def test_characters_of_both_parts_are_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 95 + "zzzzz", encoding="utf-8")
    corpus = prepare(config(tmp_path / "a.txt", tokenizer="char", held_out=0.05))
    assert corpus.vocab_size == 3
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode(corpus.held_out) == "zzzzz"


def test_a_trained_encoding_never_sees_the_held_out_part(tmp_path: Path, make_text: Callable[..., str]) -> None:
    train = make_text(400)[:1600]
    (tmp_path / "a.txt").write_text(train + "qjxzqjxz" * 200, encoding="utf-8")
    corpus = prepare(config(tmp_path / "a.txt", tokenizer="bpe", bpe_size=290, held_out=0.5))
    only_train = train_bpe(iter([train]), 290)
    assert corpus.tokenizer is not None
    assert "qj" not in json.dumps(json.loads(corpus.tokenizer.to_json())["model"]["merges"])
    assert corpus.tokenizer.to_json() == only_train.to_json()


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_both_parts_decode_to_the_text(kind: str, text_file: Path) -> None:
    corpus = prepare(config(text_file, tokenizer=kind, bpe_size=270))
    assert corpus.tokenizer is not None
    decoded = corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.held_out)
    assert decoded == text_file.read_text(encoding="utf-8")
    assert corpus.train[-1] == corpus.held_out[-1] == corpus.tokenizer.end_of_text


def test_a_tokenizer_file_is_used(tmp_path: Path, text_file: Path, make_text: Callable[..., str]) -> None:
    trained = train_bpe(iter([make_text(300)]), 280)
    (tmp_path / "tokenizer.json").write_text(trained.to_json(), encoding="utf-8")
    corpus = prepare(config(text_file, tokenizer=str(tmp_path / "tokenizer.json")))
    assert corpus.vocab_size == 280
    wanted = trained.encode_batch([text_file.read_text(encoding="utf-8")])[0]
    assert list(corpus.train[:50]) == list(wanted[:50])


def test_a_large_vocabulary_is_kept_in_four_bytes(tmp_path: Path) -> None:
    text = "".join(chr(number) for number in range(0x20, 0x1_2000) if not 0xD800 <= number < 0xE000)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    corpus = prepare(config(tmp_path / "a.txt", tokenizer="char"))
    assert corpus.vocab_size == len(text) + 1 > 2**16
    assert corpus.train.dtype == np.dtype("<u4")
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode(corpus.held_out) == text[int(len(text) * 0.9) :]


# --- the cache -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever something is tokenised."""
    calls: list[int] = []
    original = tokens._encode

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(tokens, "_encode", counted)
    return calls


def same(one: Corpus, other: Corpus) -> bool:
    return (
        np.array_equal(one.train, other.train)
        and np.array_equal(one.held_out, other.held_out)
        and one.fingerprint == other.fingerprint
    )


def test_the_second_time_the_tokens_come_from_the_cache(text_file: Path, tokenised: list[int]) -> None:
    said: list[str] = []
    first, second = prepare(config(text_file), said.append), prepare(config(text_file), said.append)
    assert len(tokenised) == 1
    assert [text.startswith("tokenising tiny.txt") for text in said] == [True]
    assert same(first, second)


def test_the_cache_lies_in_the_users_cache_folder(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepare(config(text_file))
    assert len(list((tmp_path / "xdg" / "foretrain" / "tokens").glob("*/train.bin"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(config(text_file))
    assert len(list((tmp_path / "home" / ".cache" / "foretrain" / "tokens").glob("*/train.bin"))) == 1


def test_a_changed_file_is_tokenised_again(text_file: Path, tokenised: list[int]) -> None:
    first = prepare(config(text_file))
    text_file.write_text(text_file.read_text(encoding="utf-8") + " more", encoding="utf-8")
    second = prepare(config(text_file))
    assert len(tokenised) == 2
    assert first.fingerprint != second.fingerprint
    assert pieces(second.held_out)[0].endswith(" more")


def test_an_added_file_is_tokenised_too(tmp_path: Path, tokenised: list[int]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("first " * 30, encoding="utf-8")
    prepare(config(folder))
    (folder / "b.txt").write_text("second " * 30, encoding="utf-8")
    corpus = prepare(config(folder))
    assert len(tokenised) == 2
    assert "second" in "".join(pieces(corpus.train) + pieces(corpus.held_out))


@pytest.mark.parametrize(
    "changes", [{"tokenizer": "char"}, {"held_out": 0.3}, {"max_documents": 1, "held_out": 0.3}, {"text_field": "body"}]
)
def test_other_settings_are_tokenised_on_their_own(
    changes: dict[str, Any], text_file: Path, tokenised: list[int]
) -> None:
    prepare(config(text_file))
    prepare(config(text_file, **changes))
    assert len(tokenised) == 2


@pytest.mark.parametrize("changes", [{"prefetch": 0}, {"prefetch": 9}])
def test_settings_that_do_not_touch_the_tokens_share_the_cache(
    changes: dict[str, Any], text_file: Path, tokenised: list[int]
) -> None:
    prepare(config(text_file))
    prepare(config(text_file, **changes))
    assert len(tokenised) == 1


def test_a_changed_tokenizer_file_is_noticed(text_file: Path, tmp_path: Path, make_text: Callable[..., str]) -> None:
    path = tmp_path / "tokenizer.json"
    sizes = []
    for size in (270, 285):
        path.write_text(train_bpe(iter([make_text(300)]), size).to_json(), encoding="utf-8")
        sizes.append(prepare(config(text_file, tokenizer=str(path))).vocab_size)
    assert sizes == [270, 285]


def test_changed_vocabulary_files_are_noticed(text_file: Path, tmp_path: Path, make_text: Callable[..., str]) -> None:
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    sizes = []
    for size in (270, 285):
        train_bpe(iter([make_text(300)]), size).inner.model.save(str(folder))
        sizes.append(prepare(config(text_file, tokenizer="gpt2", vocabulary=str(folder))).vocab_size)
    assert sizes == [270, 285]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def zero(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [cut, zero, flip, nest, Path.unlink])
@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json", "meta.json"])
def test_a_damaged_cache_is_made_anew(
    name: str, damage: Callable[[Path], Any], text_file: Path, tmp_path: Path, tokenised: list[int]
) -> None:
    data = config(text_file, tokenizer="char", cache=str(tmp_path / "cache"))
    first = prepare(data)
    fingerprint, train = first.fingerprint, np.array(first.train)
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder / name)
    said: list[str] = []
    second = prepare(data, said.append)
    assert len(tokenised) == 2
    (line,) = said
    assert line.startswith(f"{folder}: the token cache is damaged (")
    assert name in line
    assert line.endswith("tokenising tiny.txt again")
    assert second.fingerprint == fingerprint
    assert np.array_equal(second.train, train)
    assert list((tmp_path / "cache").iterdir()) == [folder]
    prepare(data)
    assert len(tokenised) == 2


def test_a_token_that_the_tokenizer_does_not_have_is_damage(
    text_file: Path, tmp_path: Path, tokenised: list[int]
) -> None:
    """Even where every checksum is right."""
    data = config(text_file, cache=str(tmp_path / "cache"))
    largest = int(prepare(data).train.max())
    (folder,) = (tmp_path / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    meta.pop("crc32")
    said: list[str] = []
    (folder / "meta.json").write_text(cache._sealed(meta | {"vocab_size": largest + 1}))
    prepare(data, said.append)
    assert said == []
    (folder / "meta.json").write_text(cache._sealed(meta | {"vocab_size": largest}))
    prepare(data, said.append)
    assert f"holds token {largest}, but there are {largest}" in said[0]
    assert len(tokenised) == 2


@pytest.mark.parametrize("changed", [{"fingerprint": "0" * 64}, {"vocab_size": 300}], ids=["fingerprint", "vocabulary"])
def test_what_a_cache_says_of_itself_is_checked(
    changed: dict[str, Any], text_file: Path, tmp_path: Path, tokenised: list[int]
) -> None:
    """Also where everything else would fit."""
    data = config(text_file, cache=str(tmp_path / "cache"))
    first = prepare(data)
    (folder,) = (tmp_path / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changed))
    second = prepare(data)
    assert (second.fingerprint, second.vocab_size) == (first.fingerprint, first.vocab_size)
    assert len(tokenised) == 2


def test_a_cache_whose_text_is_gone_is_an_error(text_file: Path, tmp_path: Path) -> None:
    data = config(text_file, cache=str(tmp_path / "cache"))
    prepare(data)
    (folder,) = (tmp_path / "cache").iterdir()
    cut(folder / "train.bin")
    text_file.unlink()
    with pytest.raises(DataError, match=r"tiny\.txt does not exist"):
        prepare(data)


def test_the_tokens_are_on_the_disk_before_they_get_their_name(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an order that a power cut cannot turn round: files, their folder, the name, the folder above."""
    log: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        log.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    prepare(config(text_file, cache=str(tmp_path / "cache")))
    before, after = log[: log.index("renamed")], log[log.index("renamed") + 1 :]
    assert {"train.bin", "held_out.bin", "tokenizer.json", "meta.json"} <= set(before)
    assert before[-1] == "new"
    assert after == ["cache"]


def test_a_file_of_the_same_size_and_time_is_told_apart_by_what_it_holds(text_file: Path) -> None:
    first = prepare(config(text_file))
    status = text_file.stat()
    text_file.write_text(text_file.read_text().replace("cat", "cow"))
    os.utime(text_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert text_file.stat().st_size == status.st_size
    assert prepare(config(text_file)).fingerprint != first.fingerprint


def test_large_files_are_told_apart_by_their_times(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, tokenised: list[int]
) -> None:
    monkeypatch.setattr(documents, "_HASHED", 10)
    prepare(config(text_file))
    prepare(config(text_file))
    assert len(tokenised) == 1
    status = text_file.stat()
    text_file.write_text(text_file.read_text().replace("cat", "cow"))
    os.utime(text_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    prepare(config(text_file))
    assert len(tokenised) == 2


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder cannot be made; the system's temporary folder is here."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"foretrain-tokens-{os.getuid()}"


def test_in_the_systems_temporary_folder_the_cache_is_ours_alone(text_file: Path, no_home: Path) -> None:
    prepare(config(text_file))
    assert len(list(no_home.glob("*/train.bin"))) == 1
    assert stat.S_IMODE(no_home.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "somebody else's"])
def test_what_others_may_have_planted_there_is_not_used(
    kind: str, text_file: Path, tmp_path: Path, no_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a file":
        no_home.write_text("")
    elif kind == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        no_home.symlink_to(tmp_path / "theirs")
    else:
        no_home.mkdir(mode=0o700)
        if kind == "open to others":
            no_home.chmod(0o770)
        else:
            user = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: user + 1)
            no_home = no_home.rename(no_home.with_name(f"foretrain-tokens-{user + 1}"))
    with pytest.raises(DataError, match=r"set data\.cache"):
        prepare(config(text_file))
    assert not list(tmp_path.glob("**/train.bin"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of a text of a million characters, in all steps together, is far less than the text."""
    monkeypatch.setattr(documents, "_PIECE", 2**14)
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 2**14)
    monkeypatch.setattr(cache, "_BLOCK", 2**14)
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat, and so on\n" * 60_000)
    for kind in ("byte", "char"):
        tracemalloc.start()
        prepare(config(path, tokenizer=kind))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_500_000 < path.stat().st_size


def test_a_failed_tokenisation_leaves_nothing_behind(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "_encode", full_disk)
    with pytest.raises(DataError, match=r"No space left on device.*set data\.cache"):
        prepare(config(text_file, cache=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_tokens_are_mapped_and_not_loaded(text_file: Path) -> None:
    corpus = prepare(config(text_file))
    assert isinstance(corpus.train, np.memmap)
    assert not corpus.train.flags.writeable


# --- token files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint32])
def test_npy_tokens_of_any_integer_type(dtype: Any, tmp_path: Path) -> None:
    values = (np.arange(1000) % 60).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    corpus = prepare(config(tmp_path / "a.npy", held_out=0.25))
    assert np.array_equal(corpus.train, values[:750])
    assert np.array_equal(corpus.held_out, values[750:])
    assert corpus.tokenizer is None
    assert corpus.vocab_size is None


def test_bin_tokens_are_little_endian_uint16(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"".join(number.to_bytes(2, "little") for number in range(1000)))
    corpus = prepare(config(tmp_path / "a.bin"))
    assert np.array_equal(corpus.train, np.arange(900))
    assert np.array_equal(corpus.held_out, np.arange(900, 1000))


def test_token_files_join_in_order_and_validate_on_their_own(tmp_path: Path) -> None:
    for name, start in (("b", 10), ("a", 0), ("v", 90)):
        np.save(tmp_path / f"{name}.npy", np.arange(start, start + 10))
    corpus = prepare(config([tmp_path / "b.npy", tmp_path / "a.npy"], validation_path=str(tmp_path / "v.npy")))
    assert list(corpus.train) == [*range(10, 20), *range(10)]
    assert list(corpus.held_out) == list(range(90, 100))


def test_other_tokens_have_another_fingerprint(tmp_path: Path) -> None:
    fingerprints = []
    for last in (1, 1, 2):
        np.save(tmp_path / "a.npy", np.array([0] * 99 + [last], dtype=np.uint16))
        fingerprints.append(prepare(config(tmp_path / "a.npy")).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", np.zeros((3, 3), dtype=np.int64)),
        ("a.npy", np.zeros(9)),
        ("a.npy", b"no array"),
        ("a.npy", b""),
        ("a.bin", b""),
        ("a.bin", b"odd"),
    ],
)
def test_what_holds_no_tokens_is_named(name: str, content: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(DataError, match=name):
        prepare(config(path))


def test_a_pickle_in_an_npy_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy: not a token file"):
        prepare(config(tmp_path / "a.npy"))


# --- the vocabulary of a run ---------------------------------------------------------------------------------------


def corpus_of(values: list[int]) -> Corpus:
    array = np.array(values)
    return Corpus(array, array[:1], None, None, "", "")


def test_token_files_need_a_vocabulary_size(make_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"set model\.vocab_size"):
        run.vocabulary_size(make_config(), corpus_of([1, 2]))
    assert run.vocabulary_size(make_config({"model.vocab_size": 3}), corpus_of([1, 2])) == 3


def test_a_token_outside_the_vocabulary_is_an_error(make_config: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"holds token 7, but model\.vocab_size = 7; set it to at least 8"):
        run.vocabulary_size(make_config({"model.vocab_size": 7}), corpus_of([1, 7]))


def test_a_negative_token_is_an_error(make_config: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="-3"):
        run.vocabulary_size(make_config({"model.vocab_size": 7}), corpus_of([1, -3]))


def test_the_vocabulary_must_hold_the_tokenizers(make_config: Callable[..., Any], text_file: Path) -> None:
    corpus = prepare(config(text_file))
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is smaller than the tokenizer's vocabulary of 257"):
        run.vocabulary_size(make_config({"model.vocab_size": 256}), corpus)
    assert run.vocabulary_size(make_config(), corpus) == 257
    assert run.vocabulary_size(make_config({"model.vocab_size": 300}), corpus) == 300


def test_token_files_are_checked_against_a_tokenizer_too(
    make_config: Callable[..., Any], tmp_path: Path, make_text: Callable[..., str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(iter([make_text(300)]), 280).to_json(), encoding="utf-8")
    np.save(tmp_path / "a.npy", np.arange(281))
    corpus = prepare(config(tmp_path / "a.npy", tokenizer=str(tmp_path / "tokenizer.json")))
    with pytest.raises(DataError, match="holds token 280"):
        run.vocabulary_size(make_config(), corpus)


def test_gpt2_token_files_have_gpt2s_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    assert prepare(config(tmp_path / "a.npy", tokenizer="gpt2")).vocab_size == 50257


def test_a_hub_data_set_becomes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_read_hub", lambda name, field: iter([f"{name} {field} {n}" for n in range(5)]))
    corpus = prepare(DataConfig(path="hf:some/set"))
    assert corpus.title == "hf:some/set"
    assert pieces(corpus.train)[0] == "some/set text 0"
