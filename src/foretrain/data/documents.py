"""Reads text from files, folders, globs, JSONL, Parquet, Hugging Face datasets, or Python's own sources."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import itertools
import lzma
import shlex
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.data.tokenizers import whole
from foretrain.errors import DataError, how_to_install
from foretrain.persist.files import from_json, user_path

TOKEN_SUFFIXES = (".bin", ".npy")
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_FOLDER_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
HUB_PREFIX = "hf:"
_MOST_ZEROS = 0.01
"""Share of zero bytes above which a file is UTF-16 or no text at all."""
_PIECE = 2**20
"""Bytes of a text file that are read at once."""
_HASHED = 64 * 10**6
"""Files of this many bytes in all are told apart by what they hold (40 ms); larger ones by size and times."""


@dataclass(frozen=True)
class Source:
    """Files of one data path, or one hub dataset, in a fixed order."""

    files: tuple[Path, ...]
    hub_name: str = ""

    @property
    def is_tokens(self) -> bool:
        return any(path.suffix in TOKEN_SUFFIXES for path in self.files)

    @property
    def holds_records(self) -> bool:
        return bool(self.files) and all(_plain_suffix(path) == ".jsonl" for path in self.files)

    def fingerprint(self) -> list[list[str | int]]:
        """Changes when a file is added, removed or edited."""
        return [[self.hub_name]] if self.hub_name else fingerprint(self.files)


def fingerprint(files: Iterable[Path]) -> list[list[str | int]]:
    """Digest path, size and content of each file; for large ones the times of the last change, of which one cannot be
    set."""
    found = [(path.resolve(), path.stat()) for path in files]
    if sum(status.st_size for _, status in found) <= _HASHED:
        return [[str(path), status.st_size, _digest(path)] for path, status in found]
    return [[str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns] for path, status in found]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from None


def find(paths: str | list[str], setting: str = "data.path") -> Source:
    """Resolve the setting `data.path`. Raises DataError that names the path and what to do."""
    entries = [paths] if isinstance(paths, str) else list(paths)
    if entries in ([], [""]):
        return Source(python_sources())
    if len(entries) == 1 and entries[0].startswith(HUB_PREFIX):
        return Source((), hub_name=entries[0].removeprefix(HUB_PREFIX))
    files: list[Path] = []
    if "" in entries:
        raise DataError(f"{setting}: an empty name among others; remove it, or name the file")
    for entry in entries:
        files.extend(_expand(entry, setting))
    source = Source(tuple(files))
    if source.is_tokens and not all(path.suffix in TOKEN_SUFFIXES for path in files):
        raise DataError(f"{setting}: token files (.bin, .npy) and text files cannot be mixed; name one kind")
    return source


def _expand(entry: str, setting: str) -> list[Path]:
    path = user_path(entry, setting)
    if path.is_file():
        return [path]
    if path.is_dir():
        try:
            inside = [file for file in path.rglob("*") if _plain_suffix(file) in _FOLDER_SUFFIXES and file.is_file()]
        except OSError as error:
            raise DataError(f"{setting}: {error.filename}: {error.strerror}; name the files or a glob") from None
        found = sorted(inside)
        if not found:
            raise DataError(
                f"{setting}: folder {entry} holds no {', '.join(_FOLDER_SUFFIXES)} file; name the files or a glob"
            )
        return found
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - absolute globs
    found = [match for match in matches if match.is_file()]
    if not found:
        raise DataError(f"{setting}: {entry} does not exist; name a file, a folder or a glob that matches something")
    return found


def _plain_suffix(path: Path) -> str:
    """Return the suffix below a compression suffix."""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def python_sources() -> tuple[Path, ...]:
    """Return the standard library's own source files, without its tests: real text on every machine that runs
    Python."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
    found = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts[:-1])]
    if not found:
        raise DataError(
            f"data.path is empty and this Python has no library sources in {root}; set data.path to a text file"
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


Piece = tuple[str, bool]
"""Text, and whether a document ends with it."""


def read(source: Source, text_field: str, limit: int | None = None) -> Iterator[str]:
    """Yield every document of the source, in order, at most `limit` of them."""
    document: list[str] = []
    for text, last in pieces(source, text_field, limit):
        document.append(text)
        if last:
            yield "".join(document)
            document.clear()


def pieces(source: Source, text_field: str, limit: int | None = None) -> Iterator[Piece]:
    """Yield the documents piece by piece, so that no file has to fit into memory."""
    for number, document in enumerate(_documents(source, text_field), start=1):
        yield from document
        if number == limit:
            return


def _documents(source: Source, text_field: str) -> Iterator[Iterable[Piece]]:
    if source.hub_name:
        yield from ([(text, True)] for text in _read_hub(source.hub_name, text_field))
    for path in source.files:
        suffix = _plain_suffix(path)
        if suffix in _RECORDS:
            yield from ([(text, True)] for text in _RECORDS[suffix](path, text_field))
        else:
            yield _read_text(path)


def count(source: Source) -> int | None:
    """Return how many documents there are, where it is known without reading them."""
    records = source.hub_name or any(_plain_suffix(path) in _RECORDS for path in source.files)
    return None if records else len(source.files)


def _read_text(path: Path) -> Iterator[Piece]:
    """Raises DataError for what is not UTF-8: a letter that is read wrong would be lost, and learned as noise."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = zeros = 0
    text = ""
    try:
        for content in _read_bytes(path):
            size, zeros = size + len(content), zeros + content.count(0)
            if text:
                yield text, False
            text = decoder.decode(content)
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if zeros > _MOST_ZEROS * size:
        raise _not_text(path, zeros, size)
    yield text, True


def _read_bytes(path: Path) -> Iterator[bytes]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            first = True
            while content := file.read(_PIECE):
                if first and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}: UTF-16, not UTF-8; convert it: {_iconv(path, 'utf-16')}")
                yield content
                first = False
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and its permissions") from None


def _not_text(path: Path, zeros: int, size: int) -> DataError:
    return DataError(
        f"{path}: not a text file ({zeros:,} of its {size:,} bytes are zero); leave it out, or convert it "
        "to UTF-8 if it is text in another encoding"
    )


def _not_utf8(path: Path) -> DataError:
    """Return how much of it cannot be read, and what to do about it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    size = zeros = wrong = 0
    first: int | None = None
    decoded = 0
    for content in itertools.chain(_read_bytes(path), [b""]):
        size, zeros = size + len(content), zeros + content.count(0)
        text = decoder.decode(content, final=not content)
        places = [place for place, letter in enumerate(text) if "\udc80" <= letter <= "\udcff"]
        if places and first is None:
            first = decoded + len(text[: places[0]].encode("utf-8"))
        wrong += len(places)
        decoded += len(text.encode("utf-8", "surrogateescape"))
    if zeros > _MOST_ZEROS * size:
        return _not_text(path, zeros, size)
    return DataError(
        f"{path}: not UTF-8 ({wrong:,} of its {size:,} bytes cannot be read, the first at byte "
        f"{first or 0:,}); convert it, if its encoding is latin1: {_iconv(path, 'latin1')}; or drop those bytes: "
        f"{_iconv(path, 'utf-8', '-c ')}; leave it out if it is not text"
    )


def _iconv(path: Path, encoding: str, option: str = "") -> str:
    """Return the command that makes UTF-8 of it."""
    plain = Path(path.name).stem if path.suffix in _OPENERS else path.name
    unpack = {".gz": "gzip -dc", ".xz": "xz -dc"}.get(path.suffix)
    source = shlex.quote(str(path))
    target = shlex.quote(str(path.with_name(f"utf8-{plain}")))
    command = f"iconv {option}-f {encoding} -t utf-8"
    return f"{unpack} {source} | {command} > {target}" if unpack else f"{command} {source} > {target}"


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record_text(from_json(line), field, f"{path}, line {number}")
    except (ValueError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: not JSON lines ({error}); each line must be an object") from None


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow; {how_to_install('pyarrow')}") from None
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: no column {field!r}; it has {names}. Set data.text_field to one of them")
        for batch in file.iter_batches(columns=[field]):
            yield from (_record_text({field: value}, field, str(path)) for value in batch.column(0).to_pylist())
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def _read_hub(name: str, field: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"hf:{name}: needs Hugging Face's datasets; {how_to_install('datasets')}") from None
    name, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:  # what a missing data set, split or network raises
        raise DataError(f"hf:{name}: cannot be loaded ({error}); check the name, the split and the network") from None
    for number, row in enumerate(rows, start=1):
        yield _record_text(row, field, f"hf:{name}, row {number}")


def _record_text(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no text in field {field!r} (found: {has}); set data.text_field")
    return whole(record[field])


_RECORDS: dict[str, Callable[[Path, str], Iterator[str]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
"""Files that hold many documents, by suffix."""
