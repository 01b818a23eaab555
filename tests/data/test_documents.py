"""Where text comes from: files, folders, globs, compressed files, JSONL, Parquet, Hugging Face data sets."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from foretrain.data import documents
from foretrain.errors import DataError


def texts(path: str | Path | list[str], field: str = "text", limit: int | None = None) -> list[str]:
    return list(documents.read(documents.find(path if isinstance(path, list) else str(path)), field, limit))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_jsonl(path: Path, records: list[Any]) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_one_document_with_every_character_kept(tmp_path: Path) -> None:
    text = "line one\r\nline two\n\ttab — é 漢字 🙂"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    assert texts(tmp_path / "a.txt") == [text]


def test_any_suffix_is_text_when_the_file_is_named(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "notes.log", "a log")) == ["a log"]


def test_text_of_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "my text.txt"
    file.write_bytes("Grüße aus Köln. ".encode("latin1"))
    with pytest.raises(DataError, match=r"3 of its 16 bytes cannot be read, the first at byte 2") as raised:
        texts(file)
    commands = re.findall(r"iconv [^;]*", str(raised.value))
    assert len(commands) == 2
    for command, wanted in zip(commands, ["Grüße aus Köln. ", "Gre aus Kln. "], strict=True):
        subprocess.run(["bash", "-c", command])  # iconv -c says by its exit code that it left something out
        assert texts(tmp_path / "utf8-my text.txt") == [wanted]


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_so_is_a_compressed_one(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.txt{suffix}"
    with {".gz": gzip.open, ".xz": lzma.open}[suffix](file, "wb") as target:
        target.write("Köln".encode("latin1"))
    with pytest.raises(DataError, match="not UTF-8") as raised:
        texts(file)
    command = re.search(r"latin1: ([^;]*)", str(raised.value))
    assert command is not None
    subprocess.run(["bash", "-c", command[1]], check=True)
    assert texts(tmp_path / "utf8-a.txt") == ["Köln"]


def test_utf16_and_what_is_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("hello".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8"):
        texts(file)
    file.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(DataError, match=r"not a text file \(60 of its 64 bytes are zero\)"):
        texts(file)


def test_globs_are_sorted_and_may_go_deep(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "deep/er/d.txt"):
        write(tmp_path / name, name)
    assert texts(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "deep/er/d.txt"]


def test_a_name_with_glob_characters_is_the_file_of_that_name(tmp_path: Path) -> None:
    write(tmp_path / "book [draft].txt", "the draft")
    assert texts(tmp_path / "book [draft].txt") == ["the draft"]


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "z.py", "sub/c.txt", "picture.png", "notes.log"):
        write(tmp_path / name, name)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"d.txt.gz"))
    assert sorted(texts(tmp_path)) == ["a.md", "b.txt", "d.txt.gz", "sub/c.txt", "z.py"]
    assert texts(tmp_path) == texts(tmp_path)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "book.txt", "at home")
    assert texts("~/book.txt") == texts("~/*.txt") == ["at home"]


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")
    assert texts([str(two), str(one)]) == ["two", "one"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_text_and_jsonl(suffix: str, pack: Any, tmp_path: Path) -> None:
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("grüße\r\n".encode()))
    assert texts(tmp_path / f"a.txt{suffix}") == ["grüße\r\n"]
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(b'{"text": "x"}\n{"text": "y"}\n'))
    assert texts(tmp_path / f"b.jsonl{suffix}") == ["x", "y"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_damaged_compressed_file_is_named(name: str, damage: str, suffix: str, pack: Any, tmp_path: Path) -> None:
    content = pack(b'{"text": "something to read"}\n' * 200)
    changed = bytearray(content)
    for place in range(len(content) // 2, len(content) // 2 + 6):
        changed[place] ^= 0xFF
    damaged = {"cut": content[:-8], "changed": bytes(changed), "foreign": b"not compressed at all"}[damage]
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=path.name):
        texts(path)


def test_limit_stops_the_reading(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(5)])
    with path.open("a", encoding="utf-8") as file:
        file.write("this line is never read\n")
    assert texts(path, limit=3) == ["0", "1", "2"]
    assert texts(path, limit=5) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("entry", ["missing.txt", "missing/*.txt"])
def test_what_does_not_exist_is_named(entry: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*does not exist"):
        texts(tmp_path / entry)


def test_a_folder_without_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.txt"):
        texts(tmp_path)


def test_tokens_and_text_cannot_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match="cannot be mixed"):
        texts([str(tmp_path / "a.bin"), str(write(tmp_path / "a.txt", "x"))])


def test_with_no_path_the_standard_library_is_read() -> None:
    source = documents.find("")
    names = [path.name for path in source.files]
    assert len(names) > 100
    assert "abc.py" in names
    assert not any("site-packages" in path.parts or "test" in path.parts[-3:-1] for path in source.files)
    assert source == documents.find([])
    first = next(documents.read(source, "text"))
    assert first == source.files[0].read_bytes().decode("utf-8", errors="replace")


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one")
    before = documents.find(str(path)).fingerprint()
    assert documents.find(str(path)).fingerprint() == before
    write(path, "other")
    assert documents.find(str(path)).fingerprint() != before


# --- records -------------------------------------------------------------------------------------------------------


def test_jsonl_lines_are_documents_and_blank_lines_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one\\ntwo"}\n\n   \n{"text": "", "more": 3}\n{"text": "last"}')
    assert texts(path) == ["one\ntwo", "", "last"]


def test_jsonl_reads_the_named_field(tmp_path: Path) -> None:
    assert texts(write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "body": "y"}]), field="body") == ["y"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"body": "x"}', "line 2: no text in field 'text' (found: body); set data.text_field"),
        ('{"text": 3}', "no text in field 'text'"),
        ('{"text": null}', "no text in field 'text'"),
        ('["text"]', "no text in field 'text' (found: list)"),
        ("{broken", "not JSON lines"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "zwei ü", ""], "body": ["a", "b", "c"], "number": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == ["one", "zwei ü", ""]
    assert texts(tmp_path / "a.parquet", field="body") == ["a", "b", "c"]
    with pytest.raises(DataError, match=r"no column 'title'; it has text, body, number\. Set data\.text_field"):
        texts(tmp_path / "a.parquet", field="title")
    with pytest.raises(DataError, match="no text in field 'number'"):
        texts(tmp_path / "a.parquet", field="number")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        texts(tmp_path / "a.parquet")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"-m pip install pyarrow$"):
        texts(tmp_path / "a.parquet")


# --- Hugging Face data sets ----------------------------------------------------------------------------------------


def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        calls.append((name, split))
        if name == "no/such":
            raise FileNotFoundError("Couldn't find any data file")
        if split == "nosplit":
            raise ValueError('Unknown split "nosplit"')
        return [{"text": f"{split} {number}", "title": "t"} for number in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


@pytest.mark.parametrize(("path", "split"), [("hf:some/set", "train"), ("hf:some/set:test", "test")])
def test_a_hub_data_set_is_read_by_name_and_split(path: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_datasets(monkeypatch)
    assert texts(path) == [f"{split} 0", f"{split} 1", f"{split} 2"]
    assert calls == [("some/set", split)]
    assert texts([path], limit=1) == [f"{split} 0"]
    assert texts(path, field="title") == ["t", "t", "t"]


@pytest.mark.parametrize("path", ["hf:no/such", "hf:some/set:nosplit"])
def test_a_hub_data_set_that_cannot_be_loaded_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch)
    with pytest.raises(DataError, match=r"hf:\w+/\w+: cannot be loaded .* check the name, the split and the network"):
        texts(path)


def test_a_hub_row_without_the_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch)
    with pytest.raises(DataError, match=r"hf:some/set, row 1: no text in field 'body' \(found: text, title\)"):
        texts("hf:some/set", field="body")


def test_without_datasets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"-m pip install datasets$"):
        texts("hf:some/set")


def test_a_hub_data_set_beside_files_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hf:"):
        texts(["hf:some/set", str(write(tmp_path / "a.txt", "x"))])
