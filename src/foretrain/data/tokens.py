"""Documents become two token files, one to train on and one held out; both are mapped, never loaded."""

from __future__ import annotations

import hashlib
import json
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.config import DataConfig
from foretrain.data import cache, documents, tokenizers
from foretrain.data.documents import Piece, Source
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import DataError
from foretrain.persist.files import user_path

DOCUMENT_SPLIT_FROM = 100
"""From this many documents on, whole documents are held out; below it, the end of the text is."""
_FORMAT = 3
_BATCH_TEXTS, _BATCH_CHARACTERS = 256, 2**20
TokenArray = NDArray[Any]
_NO_ARRAY = (ValueError, EOFError, TypeError, OverflowError, SyntaxError, RecursionError, tokenize.TokenError)
"""What numpy raises for files that are not its own: it reads their headers as Python."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, tokens that no decision of the run may see, and how they were made."""

    train: TokenArray
    held_out: TokenArray
    tokenizer: Tokenizer | None
    vocab_size: int | None
    """None for token files without a tokenizer: the configuration has to say it."""
    fingerprint: str
    """SHA-256 of both token streams: a resumed run must find the same data."""
    title: str
    checked: bool = False
    """No token is beyond `vocab_size`."""


def prepare(config: DataConfig, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Find, split and tokenise the data, or map what an earlier run left in the cache."""
    source = documents.find(config.path)
    validation = documents.find(config.validation_path, "data.validation_path") if config.validation_path else None
    if source.is_tokens:
        return _token_files(config, source, validation)
    folder = cache.root(config.cache) / _key(config, source, validation)
    title = _title(config, source)
    problem = ""
    if folder.exists():
        try:
            return _open(folder, title)
        except cache.Damaged as error:
            problem = str(error)
    if problem:
        say(f"{folder}: the token cache is damaged ({problem}); tokenising {title} again")
    else:
        say(f"tokenising {title} (kept in {folder.parent} for the next run)")
    _write(config, source, validation, folder)
    try:
        return _open(folder, title)
    except cache.Damaged as error:
        raise DataError(f"{folder}: the token cache cannot be used ({error}); set data.cache to another disk") from None


def _open(folder: Path, title: str) -> Corpus:
    meta = cache.check(folder)
    try:
        tokenizer = tokenizers.load(cache.tokenizer_of(folder))
    except DataError as error:
        raise cache.Damaged(str(error)) from None
    train, held_out = (cache.tokens_of(folder, part, meta) for part in cache.PARTS)
    return Corpus(train, held_out, tokenizer, int(meta["vocab_size"]), str(meta["fingerprint"]), title, checked=True)


def _title(config: DataConfig, source: Source) -> str:
    if source.hub_name:
        return f"hf:{source.hub_name}"
    if not config.path:
        return f"Python's standard library ({len(source.files)} files)"
    return source.files[0].name if len(source.files) == 1 else f"{len(source.files)} files"


def _key(config: DataConfig, source: Source, validation: Source | None) -> str:
    recipe = {
        "format": _FORMAT,
        "settings": config.model_dump(mode="json", exclude={"path", "validation_path", "cache", "prefetch"}),
        "files": source.fingerprint(),
        "validation": validation.fingerprint() if validation else None,
    }
    for setting, name in (("data.tokenizer", config.tokenizer), ("data.vocabulary", config.vocabulary)):
        path = user_path(name, setting)
        if name and path.exists():
            files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
            recipe[name] = documents.fingerprint(files)
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


# --- splitting -------------------------------------------------------------------------------------------------------

Part = tuple[bool, str, bool]
"""Held out?, text, does a document end with it?"""


@dataclass(frozen=True)
class Split:
    """Says which part of which document is held out; it is decided once, before any token is made."""

    by_document: bool
    cut: int = 0
    """Characters before the held-out end of the text, when it is not split by document."""
    sides: bytes = b""
    """For each document whether it is held out, when it is split by document."""

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """Yield the parts in reading order."""
        return self._whole_documents(pieces) if self.by_document else self._cut_text(pieces)

    def _whole_documents(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        number = 0
        for text, last in pieces:
            yield bool(self.sides[number]), text, last
            number += last

    def _cut_text(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        seen, begun = 0, None
        for text, last in pieces:
            before = min(max(self.cut - seen, 0), len(text))
            seen += len(text)
            for held_out, part in ((False, text[:before]), (True, text[before:])):
                if not part:
                    continue
                if begun is not None and begun != held_out:  # the cut is in the middle of a document
                    yield begun, "", True
                yield held_out, part, False
                begun = held_out
            if last and begun is not None:
                yield begun, "", True
                begun = None


def _plan_split(config: DataConfig, source: Source) -> Split:
    known = documents.count(source)
    by_document = not config.validation_path and (known is None or known >= DOCUMENT_SPLIT_FROM)
    sides = bytearray()
    characters = 0
    digest = _document_digest()
    for text, last in documents.pieces(source, config.text_field, config.max_documents):
        characters += len(text)
        if by_document:
            digest.update(text.encode("utf-8", errors="replace"))
        if last:
            # Equal documents share a digest and so stay on one side of the split.
            sides.append(int.from_bytes(digest.digest(), "big") / 2**64 < config.held_out)
            digest = _document_digest()
    if characters == 0:
        names = config.path or "the standard library"
        raise DataError(f"data.path: {names} is empty; name files that hold text")
    if config.validation_path:
        return Split(by_document=False, cut=characters)
    if by_document and len(sides) >= DOCUMENT_SPLIT_FROM:
        return Split(by_document=True, sides=bytes(sides))
    return Split(by_document=False, cut=int(characters * (1 - config.held_out)))


def _document_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


# --- tokenising ------------------------------------------------------------------------------------------------------


def _write(config: DataConfig, source: Source, validation: Source | None, folder: Path) -> None:
    split = _plan_split(config, source)

    def parts() -> Iterator[Part]:
        yield from split.parts(documents.pieces(source, config.text_field, config.max_documents))
        if validation is not None:
            yield from ((True, *piece) for piece in documents.pieces(validation, config.text_field))

    tokenizer = _make_tokenizer(config, parts)
    cache.write(folder, lambda new: _encode(tokenizer, parts(), new), tokenizer.to_json())


def _make_tokenizer(config: DataConfig, parts: Callable[[], Iterator[Part]]) -> Tokenizer:
    if config.tokenizer == "byte":
        return tokenizers.ByteTokenizer()
    if config.tokenizer == "char":
        return tokenizers.CharacterTokenizer(tokenizers.characters_of(text for _, text, _ in parts()))
    if config.tokenizer == "gpt2":
        return tokenizers.gpt2(config.vocabulary)
    if config.tokenizer == "bpe":
        trained = (part for part in parts() if not part[0])
        texts = (text for _, text, _ in _cut_where(tokenizers.byte_level_cut, trained))
        return tokenizers.train_bpe(texts, config.bpe_size)
    return tokenizers.load(config.tokenizer)


def _encode(tokenizer: Tokenizer, parts: Iterator[Part], folder: Path) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    end = np.array([tokenizer.end_of_text], dtype=dtype).tobytes()
    counts = dict.fromkeys(cache.PARTS, 0)
    hashes = {name: hashlib.sha256() for name in counts}
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held_out:
        files = dict(zip(cache.PARTS, (train, held_out), strict=True))
        for batch in _batches(_cut_where(tokenizers.cut_of(tokenizer), parts)):
            encoded = tokenizer.encode_batch([text for _, text, _ in batch])
            for (is_held_out, _, ends), tokens in zip(batch, encoded, strict=True):
                name = cache.PARTS[is_held_out]
                if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
                    raise DataError(
                        f"data.tokenizer: it made token {tokens.max()}, but has only {tokenizer.vocab_size} of them"
                    )
                for content in (tokens.astype(dtype).tobytes(), end if ends else b""):
                    files[name].write(content)
                    hashes[name].update(content)
                counts[name] += len(tokens) + ends
    fingerprint = hashlib.sha256(b"".join(digest.digest() for digest in hashes.values())).hexdigest()
    return {"dtype": dtype.str, "vocab_size": tokenizer.vocab_size, "fingerprint": fingerprint, **counts}


def _cut_where(cut: Callable[[str], int] | None, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the text in other pieces. cut: how much of a text is encoded as if nothing followed; None: all of it."""
    waiting: list[str] = []
    for held_out, text, ends in parts:
        if cut is not None and not ends:
            text = "".join([*waiting, text])
            waiting.clear()
            place = cut(text)
            if place:
                yield held_out, text[:place], False
            text = text[place:]
        waiting.append(text)
        if ends:
            yield held_out, "".join(waiting), True
            waiting.clear()


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Yield texts to encode at once: not too many, and not too much."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1])
        if len(batch) >= _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


# --- token files -----------------------------------------------------------------------------------------------------


def _token_files(config: DataConfig, source: Source, validation: Source | None) -> Corpus:
    """Read tokens that were made elsewhere: `.npy` of any integer type, `.bin` as little-endian uint16."""
    tokens = read_token_files(source)
    if validation is None:
        cut = int(len(tokens) * (1 - config.held_out))
        train, held_out = tokens[:cut], tokens[cut:]
    else:
        train, held_out = tokens, read_token_files(validation)
    tokenizer: Tokenizer | None = None
    if config.tokenizer == "gpt2" and config.vocabulary:
        tokenizer = tokenizers.gpt2(config.vocabulary)
    elif config.tokenizer not in ("byte", "char", "gpt2", "bpe"):
        tokenizer = tokenizers.load(config.tokenizer)
    vocab_size = tokenizer.vocab_size if tokenizer else (50257 if config.tokenizer == "gpt2" else None)
    digest = hashlib.sha256(np.ascontiguousarray(train).data)
    digest.update(np.ascontiguousarray(held_out).data)
    return Corpus(train, held_out, tokenizer, vocab_size, digest.hexdigest(), _title(config, source))


def read_token_files(source: Source) -> TokenArray:
    """Return the tokens of all its files, one after the other."""
    arrays = [_read_token_file(path) for path in source.files]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _read_token_file(path: Path) -> TokenArray:
    try:
        if path.suffix == ".npy":
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            if path.stat().st_size == 0:
                raise DataError(f"{path}: the token file is empty")
            array = np.memmap(path, dtype="<u2", mode="r")
    except (*_NO_ARRAY, OSError) as error:
        raise DataError(
            f"{path}: not a token file ({error}); .npy must hold integers, .bin little-endian uint16"
        ) from None
    if not isinstance(array, np.ndarray):  # an archive of several
        array.close()
        raise DataError(f"{path}: not a token file (it holds several arrays); .npy must hold integers")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path}: tokens must be a one-dimensional array of integers, found {array.dtype} {array.shape}"
        )
    if not len(array):
        raise DataError(f"{path}: the token file is empty")
    return array
