"""Documents become two token files, one to train on and one held out; both are mapped, never loaded."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.config import DataConfig
from foretrain.data import documents, tokenizers
from foretrain.data.documents import Source
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import DataError

DOCUMENT_SPLIT_FROM = 100
"""From this many documents on whole documents are held out; below, the end of the text."""
_FORMAT = 3
TokenArray = NDArray[Any]


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


def prepare(config: DataConfig, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Find, split and tokenise the data, or map what an earlier run left in the cache."""
    source = documents.find(config.path)
    validation = documents.find(config.validation_path, "data.validation_path") if config.validation_path else None
    if source.is_tokens:
        return _token_files(config, source, validation)
    folder = _cache_root(config) / _key(config, source, validation)
    if not (folder / "meta.json").is_file():
        say(f"tokenising {_title(config, source)} (kept in {folder.parent} for the next run)")
        _write(config, source, validation, folder)
    return _read_cache(folder, _title(config, source))


def _read_cache(folder: Path, title: str) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train = _map(folder / "train.bin", meta["dtype"], meta["train"])
        held_out = _map(folder / "held_out.bin", meta["dtype"], meta["held_out"])
        vocab_size, fingerprint = int(meta["vocab_size"]), str(meta["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(folder / "meta.json") from None
    try:
        tokenizer = tokenizers.load(folder / "tokenizer.json")
    except DataError:
        raise _damaged(folder / "tokenizer.json") from None
    return Corpus(train, held_out, tokenizer, vocab_size, fingerprint, title)


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: the token cache is damaged; delete the folder {path.parent} and start again")


def _title(config: DataConfig, source: Source) -> str:
    if source.hub_name:
        return f"hf:{source.hub_name}"
    if not config.path:
        return f"Python's standard library ({len(source.files)} files)"
    return source.files[0].name if len(source.files) == 1 else f"{len(source.files)} files"


def _cache_root(config: DataConfig) -> Path:
    if config.cache:
        return Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    root = Path(base) / "foretrain" / "tokens"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except OSError:
        return Path(tempfile.gettempdir()) / f"foretrain-tokens-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"foretrain-tokens-{os.getuid()}"


def _key(config: DataConfig, source: Source, validation: Source | None) -> str:
    recipe = {
        "format": _FORMAT,
        "settings": config.model_dump(mode="json", exclude={"path", "validation_path", "cache", "prefetch"}),
        "files": source.fingerprint(),
        "validation": validation.fingerprint() if validation else None,
    }
    for name in (config.tokenizer, config.vocabulary):
        path = Path(name).expanduser()
        if name and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            recipe[name] = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def _map(path: Path, dtype: str, count: int) -> TokenArray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise _damaged(path)
    if count == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


# --- splitting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Which part of which document is held out; decided once, before any token is made."""

    by_document: bool
    share: float
    cut: int = 0
    """Characters before the held-out end of the text, when it is not split by document."""

    def parts(self, texts: Iterator[str]) -> Iterator[tuple[bool, str]]:
        """(held out?, text) in reading order."""
        if self.by_document:
            # Equal documents share a digest and so stay on one side of the split.
            yield from ((_digest_share(text) < self.share, text) for text in texts)
            return
        seen = 0
        for text in texts:
            before = min(max(self.cut - seen, 0), len(text))
            if before:
                yield False, text[:before]
            if before < len(text):
                yield True, text[before:]
            seen += len(text)


def _digest_share(text: str) -> float:
    digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _plan_split(config: DataConfig, source: Source) -> Split:
    count = characters = 0
    for text in documents.read(source, config.text_field, config.max_documents):
        count += 1
        characters += len(text)
    if characters == 0:
        names = config.path or "the standard library"
        raise DataError(f"data.path: {names} is empty; name files that hold text")
    if config.validation_path:
        return Split(by_document=False, share=0.0, cut=characters)
    if count >= DOCUMENT_SPLIT_FROM:
        return Split(by_document=True, share=config.held_out)
    return Split(by_document=False, share=config.held_out, cut=int(characters * (1 - config.held_out)))


# --- tokenising ------------------------------------------------------------------------------------------------------


def _write(config: DataConfig, source: Source, validation: Source | None, folder: Path) -> None:
    split = _plan_split(config, source)

    def parts() -> Iterator[tuple[bool, str]]:
        yield from split.parts(documents.read(source, config.text_field, config.max_documents))
        if validation is not None:
            yield from ((True, text) for text in documents.read(validation, config.text_field))

    tokenizer = _make_tokenizer(config, parts)
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
        meta = _encode(tokenizer, parts(), temporary)
        (temporary / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        (temporary / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # unless another run was faster
                raise
    except OSError as error:
        raise DataError(
            f"{folder.parent}: cannot write token files ({error.strerror}); free some space or set data.cache"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_tokenizer(config: DataConfig, parts: Callable[[], Iterator[tuple[bool, str]]]) -> Tokenizer:
    if config.tokenizer == "byte":
        return tokenizers.ByteTokenizer()
    if config.tokenizer == "char":
        return tokenizers.CharacterTokenizer("".join(set().union(*(set(text) for _, text in parts()))))
    if config.tokenizer == "gpt2":
        return tokenizers.gpt2(config.vocabulary)
    if config.tokenizer == "bpe":
        return tokenizers.train_bpe((text for held_out, text in parts() if not held_out), config.bpe_size)
    return tokenizers.load(config.tokenizer)


def _encode(tokenizer: Tokenizer, parts: Iterator[tuple[bool, str]], folder: Path) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    end = np.array([tokenizer.end_of_text], dtype=dtype).tobytes()
    counts = {"train": 0, "held_out": 0}
    hashes = {name: hashlib.sha256() for name in counts}
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held_out:
        files = {"train": train, "held_out": held_out}
        while batch := list(itertools.islice(parts, 256)):
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (is_held_out, _), tokens in zip(batch, encoded, strict=True):
                name = "held_out" if is_held_out else "train"
                content = tokens.astype(dtype).tobytes() + end
                files[name].write(content)
                hashes[name].update(content)
                counts[name] += len(tokens) + 1
    fingerprint = hashlib.sha256(b"".join(digest.digest() for digest in hashes.values())).hexdigest()
    return {"dtype": dtype.str, "vocab_size": tokenizer.vocab_size, "fingerprint": fingerprint, **counts}


# --- token files -----------------------------------------------------------------------------------------------------


def _token_files(config: DataConfig, source: Source, validation: Source | None) -> Corpus:
    """Tokens made elsewhere: `.npy` of any integer type, `.bin` as little-endian uint16."""
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
    """The tokens of all its files, one after the other."""
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
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path}: not a token file ({error}); .npy must hold integers, .bin little-endian uint16"
        ) from None
    if not isinstance(array, np.ndarray):  # an archive of several
        array.close()
        raise DataError(f"{path}: not a token file (it holds several arrays); .npy must hold integers")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{path}: tokens must be a one-dimensional array of integers, found {array.dtype} {array.shape}"
        )
    return array
