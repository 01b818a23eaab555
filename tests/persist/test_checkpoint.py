"""CheckpointStore: what is written, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import CheckpointError, SaveError
from foretrain.persist import checkpoint, reading
from foretrain.persist.checkpoint import CheckpointStore, read, verify


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 2), value), "bias": torch.arange(3.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "progress": {"global_step": 7, "best": None, "loss": math.inf},
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- saving and loading ----------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(7, state())
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    loaded = CheckpointStore(tmp_path).load_newest()
    assert loaded is not None
    assert (loaded.step, loaded.path, loaded.rejected) == (7, path, [])
    assert same(loaded.state, state())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read_a_checkpoint(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = CheckpointStore(tmp_path).save(7, state())
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {mode}


def test_a_folder_that_is_not_there_holds_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").load_newest() is None
    assert not (tmp_path / "none").exists()


def test_the_manifest_names_every_other_file_with_size_and_checksum(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(3, state())
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert sorted([*manifest["files"], "manifest.json"]) == names(path)
    for name, entry in manifest["files"].items():
        assert entry["size"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {}, "optimizer": {"state": {}, "param_groups": []}},
        {"only": 1},
        {},
        {"a": torch.zeros(0, 3), "b": [torch.zeros(()), (torch.ones(2, dtype=torch.bfloat16),)]},
        {"a": {"b.c": torch.zeros(1), "b": {"c": torch.ones(1)}}},
        {"a": {0: torch.zeros(1), "0": torch.ones(1)}},
        {"a": {"$tensor": "x", "y": math.inf, "z": -math.inf}},
        {"a": torch.tensor([True, False]), "b": torch.tensor([2**40])},
    ],
    ids=["empty parts", "no tensor", "nothing", "empty tensors", "dots in names", "0 and '0'", "dollar", "dtypes"],
)
def test_odd_states_come_back(parts: dict[str, Any], tmp_path: Path) -> None:
    loaded = read(CheckpointStore(tmp_path).save(1, parts))
    assert same(loaded, parts)


def test_tied_tensors_and_views_are_saved_by_value(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    tied = {
        "model": {"first": shared, "second": shared, "row": shared[1], "turned": shared.t(), "part": shared[:, 1:3]}
    }
    loaded = read(CheckpointStore(tmp_path).save(1, tied))
    assert same(loaded, tied)


def test_a_component_whose_name_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name of a part"):
        CheckpointStore(tmp_path).save(1, {"../outside": {"x": torch.zeros(1)}})
    assert list(CheckpointStore(tmp_path).steps()) == []
    assert not (tmp_path.parent / "outside.safetensors").exists()


def test_a_state_that_could_not_be_read_again_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "JSON_LIMIT", 1000)
    with pytest.raises(ValueError, match="keep large values in tensors"):
        CheckpointStore(tmp_path).save(1, {"numbers": list(range(1000))})
    assert CheckpointStore(tmp_path).load_newest() is None


def test_what_is_no_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not object"):
        CheckpointStore(tmp_path).save(1, {"thing": object()})
    assert names(tmp_path) == []


# --- which ones stay -------------------------------------------------------------------------------------------------


def test_the_newest_ones_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 5, 9, 13, 100_000_000):
        store.save(step, state())
    assert [step for step, _ in store.steps()] == [100_000_000, 13, 9]


def test_at_least_two_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    for step in (1, 2, 3):
        store.save(step, state())
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_is_saved_after_a_rollback_is_the_newest(tmp_path: Path) -> None:
    """And what was saved before it stays until there are enough newer ones."""
    store = CheckpointStore(tmp_path, keep=2)
    for step, kept in (
        (150, ["step-00000150"]),
        (200, ["step-00000150", "step-00000200"]),
        (20, ["step-00000020-after-rollback-1", "step-00000200"]),
        (20, ["step-00000020-after-rollback-1", "step-00000200"]),
        (70, ["step-00000020-after-rollback-1", "step-00000070-after-rollback-1"]),
        (60, ["step-00000060-after-rollback-2", "step-00000070-after-rollback-1"]),
        (300, ["step-00000060-after-rollback-2", "step-00000300-after-rollback-2"]),
    ):
        path = store.save(step, state(step))
        assert path.is_dir()
        assert names(tmp_path) == kept
        loaded = store.load_newest()
        assert loaded is not None
        assert loaded.step == step


def test_steps_are_numbers_not_words(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (0, 99_999_999, 100_000_000):
        store.save(step, state(step))
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step == 100_000_000


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    others = ["step-5", "step-0000000x", "step-00000001-copy", "notes.txt", "step-٠٠٠٠٠٠٠١"]
    for name in others:
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, state())
    assert set(others) <= set(names(tmp_path))
    assert [step for step, _ in store.steps()] == [3, 2]


def test_a_delete_that_fails_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state())
    store.save(2, state())

    def refuse(path: Path) -> None:
        if path.name == "step-00000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        shutil.rmtree(path, ignore_errors=True)

    monkeypatch.setattr(checkpoint, "remove", refuse)
    store.save(3, state())
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step == 3


def test_a_kill_at_any_point_of_a_delete_costs_nothing(tmp_path: Path) -> None:
    """Every state a half-done deletion can leave: no manifest, and any number of the other files gone."""
    for gone in range(1, 5):
        root = tmp_path / str(gone)
        store = CheckpointStore(root, keep=9)
        for step in (1, 2, 3):
            store.save(step, state(step))
        for name in ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"][:gone]:
            (root / "step-00000001" / name).unlink()
        store = CheckpointStore(root, keep=2)
        loaded = store.load_newest()
        assert loaded is not None
        assert loaded.step == 3
        store.save(4, state())
        assert names(root) == ["step-00000003", "step-00000004"]


# --- the best one ----------------------------------------------------------------------------------------------------


def test_the_best_one_stays_beside_the_newest_and_is_never_resumed_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.save(step, state(step))
        if step in (2, 3):
            store.save_best(step, state(10 * step))
    assert names(tmp_path) == ["best-step-00000003", "step-00000004", "step-00000005"]
    assert store.best() == {3: tmp_path / "best-step-00000003"}
    assert same(read(tmp_path / "best-step-00000003"), state(30))
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step == 5


def test_the_one_before_stays_while_a_move_is_open(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.best() == {}
    store.save_best(20, state())
    for step in (30, 40):
        store.save_best(step, state(), keep_others=True)
    assert list(store.best()) == [40, 30, 20]
    store.prune_best(25)  # which is not there
    assert list(store.best()) == [40, 30, 20]
    store.prune_best(20)
    assert list(store.best()) == [20]
    store.prune_best(None)
    assert store.best() == {}


def test_a_kill_at_any_moment_leaves_a_whole_best_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save_best(20, state(1.0))
    shutil.copytree(tmp_path / "best-step-00000020", tmp_path / ".tmp-best-step-00000020")
    (tmp_path / "best-step-00000020").rename(tmp_path / ".old-best-step-00000020")  # between two renames
    store.load_newest()
    assert names(tmp_path) == ["best-step-00000020"]
    assert same(read(tmp_path / "best-step-00000020"), state(1.0))
    shutil.copytree(tmp_path / "best-step-00000020", tmp_path / "best-step-00000030")
    (tmp_path / "best-step-00000030" / "manifest.json").unlink()  # half deleted
    assert list(store.best()) == [20]
    store.prune_best(20)
    assert names(tmp_path) == ["best-step-00000020"]


def test_a_best_one_of_another_step_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save_best(20, state())
    path.rename(tmp_path / "best-step-00000021")
    with pytest.raises(CheckpointError, match="is of step 20"):
        verify(tmp_path / "best-step-00000021")


# --- what a kill leaves behind ---------------------------------------------------------------------------------------


def test_an_interrupted_save_is_swept_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state())
    (tmp_path / ".tmp-step-00000002").mkdir()
    (tmp_path / ".tmp-step-00000002" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-file").write_bytes(b"half")
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step == 1
    assert names(tmp_path) == ["step-00000001"]


def test_a_save_goes_over_what_an_interrupted_one_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / ".tmp-step-00000002").write_bytes(b"not even a folder")
    store.save(2, state())
    verify(tmp_path / "step-00000002")


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(1.0))
    store.save(1, state(2.0))
    assert names(tmp_path) == ["step-00000001"]
    assert same(read(tmp_path / "step-00000001"), state(2.0))


@pytest.mark.parametrize("moment", ["first rename", "second rename"])
def test_a_step_that_is_being_replaced_is_never_lost(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(1.0))
    real = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-") == (moment == "second rename"):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(1, state(2.0))
    loaded = store.load_newest()
    assert loaded is not None
    assert same(loaded.state, state(1.0))
    assert names(tmp_path) == ["step-00000001"]


def test_the_one_that_was_replaced_is_swept_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(2.0))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".old-step-00000001")
    loaded = store.load_newest()
    assert loaded is not None
    assert same(loaded.state, state(2.0))
    assert names(tmp_path) == ["step-00000001"]


# --- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ["the disk is full", "Free some space"]),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ["the disk is full", "Free some space"]),
        (OSError(errno.EROFS, "Read-only file system"), ["Read-only file system", "Check the folder"]),
        (OSError(errno.EIO, "Input/output error"), ["Input/output error", "Check the folder"]),
        (checkpoint.SafetensorError("I/O error: No space left on device (os error 28)"), ["the disk is full"]),
    ],
    ids=["full", "quota", "read-only", "broken", "full, in safetensors' words"],
)
@pytest.mark.parametrize("place", ["save_file", "write_synced", "sync_file", "make_folder"])
def test_a_failed_save_says_why_and_leaves_the_one_before(
    error: Exception, words: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(4, state(4.0))

    def fail(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, place, fail)
        with pytest.raises(SaveError) as caught:
            store.save(5, state(5.0))
    message = str(caught.value)
    assert "\n" not in message
    for word in [*words, "checkpoint of step 5", "the checkpoint of step 4 is intact", str(tmp_path)]:
        assert word in message
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step in (4, 5)  # 5: everything was written, only the last sync failed
    assert same(loaded.state, state(float(loaded.step)))
    assert not list(tmp_path.glob(".*"))


def test_a_failed_first_save_says_that_nothing_was_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveError, match="no earlier checkpoint was touched"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, state())
    with pytest.raises(SaveError, match="Check the folder"):
        CheckpointStore(tmp_path / "file").save(1, state())


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_single_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(10, {"a": torch.ones(2), "b": 1})
    verify(folder)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            flip(path, bit)
            with pytest.raises(CheckpointError, match=r"damaged|missing|format|step|belong|incomplete|names"):
                verify(folder)
            path.write_bytes(whole)
    verify(folder)


def test_the_newest_intact_one_is_used_and_the_damaged_ones_are_put_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        store.save(step, state(step))
    flip(tmp_path / "step-00000004" / "model.safetensors", 900)
    (tmp_path / "step-00000003" / "state.json").unlink()
    heard: list[tuple[Path, str]] = []
    loaded = store.load_newest(lambda path, reason: heard.append((path, reason)))
    assert loaded is not None
    assert loaded.step == 2
    assert loaded.rejected == heard
    assert [path.name for path, _ in heard] == ["bad-step-00000004", "bad-step-00000003"]
    assert "model.safetensors is damaged: its checksum is not that in manifest.json" in heard[0][1]
    assert "state.json is missing" in heard[1][1]
    assert names(tmp_path) == ["bad-step-00000003", "bad-step-00000004", "step-00000001", "step-00000002"]


def test_names_of_what_is_put_aside_never_collide(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state())
    for _ in range(3):
        flip(store.save(2, state()) / "state.json", 5)
        assert store.load_newest() is not None
    assert names(tmp_path) == ["bad-step-00000002", "bad-step-00000002-1", "bad-step-00000002-2", "step-00000001"]


def test_only_damaged_ones_is_an_error_that_touches_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip(store.save(step, state()) / "model.safetensors", 900)
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            store.load_newest()
        for word in ("step-00000001/model.safetensors", "step-00000002/model.safetensors", "start anew", "backup"):
            assert word in str(caught.value)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_was_put_aside_earlier_still_forbids_a_silent_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state())
    flip(store.save(2, state()) / "model.safetensors", 900)
    assert store.load_newest() is not None
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="only bad-step-00000002 is left"):
        store.load_newest()


def test_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 4)
        CheckpointStore(tmp_path).save(1, state())
    with pytest.raises(CheckpointError) as raised:
        CheckpointStore(tmp_path).load_newest()
    assert str(raised.value) == (
        f"{tmp_path / 'step-00000001'}: saved by a newer version (format 4, this one reads format 2); update foretrain"
    )
    with pytest.raises(CheckpointError, match="saved by a newer version"):
        checkpoint.read_weights(tmp_path / "step-00000001")
    assert names(tmp_path) == ["step-00000001"]


def test_an_earlier_format_is_refused_but_for_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 1)
        for step in (1, 2):
            CheckpointStore(tmp_path).save(step, state() | {"frozen": "", "hybrid": {"tensor": torch.ones(2)}})
    with pytest.raises(CheckpointError) as raised:
        CheckpointStore(tmp_path).load_newest()
    assert str(raised.value) == (
        f"{tmp_path / 'step-00000002'}: saved by an earlier development version (format 1, this one reads format 2); "
        "finish that run with the version that began it, or begin anew in another folder. Its weights alone can still "
        "be read: `foretrain export`, or load_weights"
    )
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    checkpoint.verify(tmp_path / "step-00000002")
    weights = checkpoint.read_weights(tmp_path / "step-00000002")
    assert weights.keys() == {"model", "frozen", "progress"}
    assert all(torch.equal(weights["model"][name], value) for name, value in state()["model"].items())


def test_a_damaged_one_that_cannot_be_renamed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(1.0))
    flip(store.save(2, state(2.0)) / "model.safetensors", 900)
    (tmp_path / ".tmp-step-00000003").mkdir()

    def read_only(*arguments: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", read_only)
        patch.setattr(checkpoint, "remove", read_only)
        loaded = store.load_newest()
    assert loaded is not None
    assert same(loaded.state, state(1.0))
    assert [path.name for path, _ in loaded.rejected] == ["step-00000002"]
    store.save(2, state(3.0))  # the damaged one does not stand in the way of the next
    assert same(read(tmp_path / "step-00000002"), state(3.0))


def test_hidden_files_of_file_managers_are_no_damage(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    (folder / ".DS_Store").write_bytes(b"")
    verify(folder)
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"more\.safetensors does not belong"):
        verify(folder)


def test_a_file_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(reading, "digest", broken)
    for function in (read, verify):
        with pytest.raises(CheckpointError, match="Input/output error"):
            function(folder)


# --- hostile ---------------------------------------------------------------------------------------------------------


def forge(folder: Path, **files: bytes | None) -> None:
    """Replace files and give the manifest their true checksums, as an attacker would."""
    for name, content in files.items():
        if content is not None:
            (folder / name.replace("__", ".")).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        entry = {"size": (folder / name).stat().st_size, "sha256": checkpoint.digest(folder / name)}
        manifest["files"][name] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest))


def nested(depth: int) -> bytes:
    return b'{"format": 2, "step": 1, "state": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'{"format": 2, "step": 1}',
        b'{"format": 2, "step": 1, "state": 5}',
        b'{"format": 2, "step": 2, "state": {}}',
        b'{"format": 9, "step": 1, "state": {}}',
        b'{"format": 2, "step": 1, "state": {"$tensor": "none"}}',
        b'{"format": 2, "step": 1, "state": {"$tensor": ["none"]}}',
        b'{"format": 2, "step": 1, "state": {"$entries": [[["a"], 1]]}}',
        b'{"format": 2, "step": 1, "state": {"$entries": 7}}',
        b'{"format": 2, "step": 1, "state": {"x": {"$float": "one"}}}',
        b'{"format": 2, "step": 1, "state": {"x": {"$tuple": 1}}}',
        b"\xff\xfe\x00",
        b'{"format": 2, "step": 1, "state": ' + b"9" * 5000 + b"}",
        nested(100_000),
    ],
)
def test_a_state_that_is_not_one_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    forge(folder, state__json=content)
    with pytest.raises(CheckpointError, match=str(folder)):
        read(folder)


HEADER = json.dumps({"model.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 16,
        (2**63).to_bytes(8, "little") + b"{}",
        (100_000_001).to_bytes(8, "little") + b"{}",
        len(HEADER).to_bytes(8, "little") + HEADER,
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"[-2]") + b"\x00" * 8,
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"[9]") + b"\x00" * 8,
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"F32", b"X32") + b"\x00" * 8,
        (2).to_bytes(8, "little") + b"{}" + b"trailing",
    ],
    ids=[
        *("empty", "zeros", "ones", "header of 2^63", "header of 100 MB", "no data"),
        *("negative shape", "wrong shape", "unknown type", "trailing"),
    ],
)
def test_a_tensor_file_that_is_not_one_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    forge(folder, model__safetensors=content)
    with pytest.raises(CheckpointError, match=str(folder)):
        read(folder)


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "a/b", "..", ".", "", "a\x00b", "state.json\n", "-rf"]
)
def test_a_manifest_that_names_other_places_is_refused(name: str, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    (tmp_path / "secret.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": 2, "sha256": checkpoint.digest(tmp_path / "secret.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a plain file of this folder"):
        read(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_link_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"link|plain file"):
        read(folder)


def test_a_link_in_place_of_a_checkpoint_is_put_aside_and_its_target_never_touched(tmp_path: Path) -> None:
    elsewhere = CheckpointStore(tmp_path / "elsewhere").save(9, state())
    store = CheckpointStore(tmp_path / "run")
    store.save(1, state())
    (tmp_path / "run" / "step-00000009").symlink_to(elsewhere)
    loaded = store.load_newest()
    assert loaded is not None
    assert loaded.step == 1
    (tmp_path / "run" / "step-00000000").symlink_to(elsewhere)
    store.save(2, state())  # removes the oldest, which is a link
    assert names(tmp_path / "run") == ["bad-step-00000009", "step-00000001", "step-00000002"]
    assert len(names(elsewhere)) == 4


def test_a_manifest_without_the_state_is_refused(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"does not name state\.json"):
        read(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_giant_json_is_refused_unread(name: str, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(1, state())
    os.truncate(folder / name, 2**40)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match=r"larger than|bytes, not"):
        read(folder)


def load_or_refuse(folder: Path) -> None:
    try:
        assert same(read(folder), state())
    except CheckpointError as error:
        assert str(folder) in str(error)  # noqa: PT017 - both outcomes are right
        assert "\n" not in str(error)  # noqa: PT017


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CheckpointStore(tmp_path_factory.mktemp("fuzz")).save(1, state())


@given(st.binary(max_size=200))
def test_any_bytes_for_a_manifest(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    load_or_refuse(saved)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries({"size": json_values, "sha256": json_values}) | json_values
file_names = st.sampled_from(["state.json", "model.safetensors", "..", "/", "x"]) | st.text(max_size=8)
manifests = st.fixed_dictionaries(
    {"format": st.just(2) | json_values, "step": st.just(1) | json_values},
    optional={"files": st.dictionaries(file_names, entries, max_size=4) | json_values, "more": json_values},
)


@given(manifests)
def test_any_json_for_a_manifest(saved: Path, content: Any) -> None:
    (saved / "manifest.json").write_text(json.dumps(content))
    load_or_refuse(saved)


@given(json_values)
def test_any_json_for_a_state(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = CheckpointStore(tmp_path_factory.mktemp("fuzz")).save(1, {"a": torch.ones(1)})
    forge(folder, state__json=json.dumps({"format": 2, "step": 1, "state": content}).encode())
    try:
        assert isinstance(read(folder), dict)
    except CheckpointError as error:
        assert str(folder) in str(error)  # noqa: PT017 - both outcomes are right
