"""The run folder: one run at a time, files that are whole, and nothing touched before it is sure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError, SaveError
from foretrain.events import Notice, RunEnded
from foretrain.persist import files
from foretrain.persist import folder as runfolder
from foretrain.persist.files import make_folder, remove, write_atomic
from foretrain.persist.folder import RunFolder
from foretrain.show import jsonl
from foretrain.show.jsonl import JsonlLog


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the lock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"resume": False}, {"resume": True}, {"resume": False, "overwrite": True}])
def test_two_runs_never_share_a_folder(options: dict[str, bool], tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", resume=False) as first:
        first.write("config.toml", "mine")
        with pytest.raises(InputError, match="another run is writing there; wait for it or choose another folder"):
            RunFolder(tmp_path / "run", **options).__enter__()
        assert (tmp_path / "run" / "config.toml").read_text() == "mine"
    with RunFolder(tmp_path / "run", resume=True):
        pass


def test_the_lock_ends_with_the_run_even_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunFolder(tmp_path, resume=False):
        raise RuntimeError
    with RunFolder(tmp_path, resume=False):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunFolder(tmp_path / "run", resume=False) as folder:
        folder.write("config.toml", "")


# --- a folder that holds a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["metrics.jsonl", "checkpoints"])
def test_a_run_is_not_overwritten_unasked(sign: str, tmp_path: Path) -> None:
    (tmp_path / sign).mkdir()
    with pytest.raises(InputError, match=r"already holds a run; go on with --resume, replace it with --overwrite"):
        RunFolder(tmp_path, resume=False).__enter__()
    with RunFolder(tmp_path, resume=True), pytest.raises(InputError, match="another run is writing"):
        RunFolder(tmp_path, resume=True).__enter__()


def test_overwriting_removes_the_files_of_a_run_and_no_other(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000001", "model", "tensorboard", "wandb", "mlflow", "trackio", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "summary.json", "tokenizer.json", "notes.txt", "model/x", "mine/y"):
        (tmp_path / name).write_text("")
    (tmp_path / "trackers.json").write_text("{}")
    with RunFolder(tmp_path, resume=False, overwrite=True) as folder:
        assert folder.holds_run()  # nothing is removed before the new run is sure to begin
        folder.clear()
        assert not folder.holds_run()
    assert names(tmp_path) == [".lock", "mine", "notes.txt"]
    assert names(tmp_path / "mine") == ["y"]


@pytest.mark.parametrize("deleted", range(15))
def test_a_run_that_is_half_deleted_still_counts_as_one(
    deleted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwriting that breaks off after any number of files leaves a run that is not taken for an empty folder, and
    that --resume goes on with: its checkpoints go last."""
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "summary.json", "tokenizer.json", "report.html", "model.safetensors"):
        (tmp_path / name).write_text("")
    left = iter(range(deleted))

    def remove_some(path: Path) -> None:
        if path.name != "checkpoints" and next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        remove(path)

    monkeypatch.setattr(runfolder, "remove", remove_some)
    with RunFolder(tmp_path, resume=False, overwrite=True) as folder, contextlib.suppress(InputError):
        folder.clear()
    emptied = names(tmp_path) == [".lock"]
    assert emptied or (tmp_path / "checkpoints" / "step-00000001").is_dir()
    refused = contextlib.nullcontext() if emptied else pytest.raises(InputError, match="already holds a run")
    with refused, RunFolder(tmp_path, resume=False):
        pass


def test_overwriting_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "precious")
    with RunFolder(tmp_path / "run", resume=False, overwrite=True) as folder:
        folder.clear()
    assert names(tmp_path / "precious") == ["file"]
    assert names(tmp_path / "run") == [".lock"]


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(runfolder, "remove", refuse)
    with (
        RunFolder(tmp_path, resume=False, overwrite=True) as folder,
        pytest.raises(InputError, match="cannot delete the earlier run \\(Permission denied\\); choose another folder"),
    ):
        folder.clear()


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunFolder(tmp_path / "new", resume=False):
        raise RuntimeError
    assert not (tmp_path / "new").exists()


def test_a_run_that_began_leaves_everything(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(RuntimeError), RunFolder(tmp_path / "there", resume=False):
        raise RuntimeError
    assert (tmp_path / "there").exists()
    with contextlib.suppress(RuntimeError), RunFolder(tmp_path / "new", resume=False) as folder:
        folder.write("config.toml", "")
        raise RuntimeError
    assert names(tmp_path / "new") == [".lock", "config.toml"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=r"cannot write there .*; choose another folder"):
            RunFolder(path, resume=False).__enter__()


# --- its files -------------------------------------------------------------------------------------------------------


def test_its_description_is_written_when_asked_for(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        folder.files["config.toml"] = "seed = 1"
        assert names(tmp_path) == [".lock"]
        folder.describe()
    assert (tmp_path / "config.toml").read_text() == "seed = 1"


def test_a_summary_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        folder.write_summary({"loss": math.nan, "more": {"best": -math.inf, "list": [1.5, math.inf]}, "steps": 3})

    def no_constant(text: str) -> float:
        raise AssertionError(text)

    content = json.loads((tmp_path / "summary.json").read_text(), parse_constant=no_constant)
    assert content == {"loss": None, "more": {"best": None, "list": [1.5, None]}, "steps": 3}


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str) -> None:
        path.write_text(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunFolder(tmp_path, resume=False) as folder:
        folder.write("config.toml", "old content")
        monkeypatch.setattr(files, "write_synced", half)
        with pytest.raises(SaveError, match=r"config\.toml: cannot write it: the disk is full .* Free some space"):
            folder.write("config.toml", "new content")
    assert (tmp_path / "config.toml").read_text() == "old content"
    assert names(tmp_path) == [".lock", "config.toml"]


def test_write_atomic_leaves_no_trace(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "ä")
    write_atomic(tmp_path / "a.txt", "ö")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "ö"
    assert names(tmp_path) == ["a.txt"]


def test_make_folder_and_remove(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").write_text("")
    remove(tmp_path / "link")
    assert (tmp_path / "a" / "b").is_dir()
    for name in ("a", "file", "none"):
        remove(tmp_path / name)
    assert names(tmp_path) == []


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2}\n{"c', b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a', b""),
        (b'{"a": 1}\n' + b"\x00" * 500, b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": "' + b"x" * 300_000, b'{"a": 1}\n'),
        (b"\n", b"\n"),
    ],
    ids=["empty", "whole", "torn", "torn first", "zeros", "long", "blank"],
)
def test_a_torn_line_of_the_log_is_cut_off(before: bytes, kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    log = JsonlLog(path)
    log(Notice("on it goes"))
    log.close()
    assert path.read_bytes().startswith(kept)
    assert json.loads(path.read_bytes()[len(kept) :])["message"] == "on it goes"


def test_the_log_holds_no_numbers_that_json_lacks(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log(RunEnded(3, "failed", {"loss": math.nan}))
    log.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("time")
    assert line == {"event": "RunEnded", "step": 3, "reason": "failed"}


def test_a_log_that_cannot_be_opened_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot write the log"):
        JsonlLog(tmp_path / "metrics.jsonl")


def test_closing_a_log_on_a_full_disk_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    close = os.close

    def full(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "close", full)
    log.close()


def test_of_lines_that_wait_too_long_the_oldest_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[Any] = []
    monkeypatch.setattr(jsonl, "_MOST_WAITING", 3)
    log = JsonlLog(tmp_path / "metrics.jsonl", emit=notices.append)
    log(Notice("before"))
    half = os.write

    def full(descriptor: int, content: bytes) -> int:
        half(descriptor, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for number in range(5):
            log(Notice(f"line {number}"))
    log(Notice("after"))
    log.close()
    lines = [json.loads(line)["message"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == ["before", "line 3", "line 4", "after"]
    assert [notice.level for notice in notices] == ["warning", "info"]
    assert notices[1].message.endswith("the log goes on; 3 lines are lost")


# --- links, and a folder that leaves ---------------------------------------------------------------------------------

WRITTEN = ["config.toml", "tokenizer.json", "summary.json", "report.html", "metrics.jsonl", ".lock", "trackers.json"]


@pytest.mark.parametrize("name", [*WRITTEN, "model", "adapter", "checkpoints", "tensorboard"])
def test_a_link_in_place_of_what_a_run_writes_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "theirs")
    for there in (False, True):
        if there:
            (tmp_path / "theirs").write_text("precious")
        with pytest.raises(InputError, match=f"{name} in it is a link, and a run writes into its own folder only"):
            RunFolder(tmp_path / "run", resume=True).__enter__()
    assert (tmp_path / "theirs").read_text() == "precious"
    assert names(tmp_path / "run") == [name]


def test_a_link_in_place_of_a_temporary_file_is_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    for there in (False, True):
        if there:
            theirs.write_text("precious")
        (tmp_path / ".tmp-report.html").symlink_to(theirs)
        write_atomic(tmp_path / "report.html", "mine")
        (tmp_path / ".tmp-mode-report.html").symlink_to(theirs)
        files.give_usual_mode(tmp_path / "report.html")
        assert theirs.exists() == there
    assert theirs.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "mine"
    assert names(tmp_path) == ["report.html", "theirs"]


def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious, without a line end")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match="cannot write the log"):
        JsonlLog(tmp_path / "metrics.jsonl")
    assert (tmp_path / "theirs").read_text() == "precious, without a line end"


def test_a_deleted_lock_lets_nobody_in(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", resume=False):
        (tmp_path / "run" / ".lock").unlink()
        with pytest.raises(InputError, match="another run is writing there"):
            RunFolder(tmp_path / "run", resume=True).__enter__()


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_nothing_is_saved_in_a_folder_that_took_the_name_of_the_runs(deleted: bool, anew: bool, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", resume=False) as folder:
        folder.check_place()
        if deleted:
            remove(tmp_path / "run")
        else:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        if anew:
            (tmp_path / "run").mkdir()
        with pytest.raises(SaveError, match="the run folder was moved or deleted"):
            folder.write("config.toml", "")
        assert not (tmp_path / "run" / "config.toml").exists()
        if not deleted and not anew:
            (tmp_path / "elsewhere").rename(tmp_path / "run")
            folder.write("config.toml", "")


def test_text_that_utf8_cannot_hold_is_written_as_an_escape(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "half: \ud800")
    assert (tmp_path / "a").read_text() == "half: \\ud800"
