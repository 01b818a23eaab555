"""Damaged checkpoints: noticed, named, put aside; the one before is used and the run ends as if nothing had been."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain.persist import reading

FILES = [
    *("average.safetensors", "hybrid.safetensors", "model.safetensors", "optimizer.safetensors"),
    *("precision.safetensors", "random.safetensors", "state.json", "manifest.json"),
]


def flip(place: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return damage


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE = {
    "first byte": flip(0.0),
    "middle": flip(0.5),
    "last byte": flip(1.0),
    "empty": cut(lambda size: 0),
    "one byte": cut(lambda size: 1),
    "half": cut(lambda size: size // 2),
    "missing": Path.unlink,
}


def test_these_are_all_the_files(workshop: Any) -> None:
    assert sorted(path.name for path in workshop.newest.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file(name: str, damage: str, workshop: Any) -> None:
    DAMAGE[damage](workshop.newest / name)
    code, printed = workshop.resume()
    assert code == 0
    assert "damaged checkpoint put aside as killed/checkpoints/bad-step-00000009" in printed
    assert name in printed
    assert "resumed from step 6 (killed/checkpoints/step-00000006)" in printed
    assert (workshop.checkpoints / "bad-step-00000009").is_dir()
    assert workshop.is_as_undisturbed()


def test_a_file_of_another_step(workshop: Any) -> None:
    shutil.copy(workshop.checkpoints / "step-00000006" / "model.safetensors", workshop.newest)
    code, printed = workshop.resume()
    assert code == 0
    assert "step-00000009/model.safetensors is damaged: its checksum is not that in manifest.json" in printed
    assert "resumed from step 6" in printed
    assert workshop.is_as_undisturbed()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", ""])
def test_files_of_two_steps_swapped(name: str, workshop: Any) -> None:
    """Both are damaged then; without a name: the whole folders."""
    first, second = workshop.newest / name, workshop.checkpoints / "step-00000006" / name
    first.rename(workshop.folder / "held")
    second.rename(first)
    (workshop.folder / "held").rename(second)
    code, printed = workshop.resume()
    assert code == 0
    assert "bad-step-00000009" in printed
    assert "bad-step-00000006" in printed
    assert "resumed from step 3" in printed
    assert workshop.is_as_undisturbed()


def test_a_file_too_many(workshop: Any) -> None:
    shutil.copy(workshop.newest / "model.safetensors", workshop.newest / "other.safetensors")
    code, printed = workshop.resume()
    assert code == 0
    assert "other.safetensors does not belong to this checkpoint" in printed
    assert "resumed from step 6" in printed
    assert workshop.is_as_undisturbed()


def test_an_empty_folder_in_place_of_a_checkpoint(workshop: Any) -> None:
    shutil.rmtree(workshop.newest)
    workshop.newest.mkdir()
    code, printed = workshop.resume()
    assert code == 0
    assert "step-00000009 is incomplete: it has no manifest.json" in printed
    assert workshop.is_as_undisturbed()


def test_only_damaged_ones_is_an_error_and_never_a_new_start(workshop: Any) -> None:
    before = sorted(workshop.checkpoints.iterdir())
    for folder in before:
        flip(0.9)(folder / "model.safetensors")
    for _ in range(2):
        code, printed = workshop.resume("--quiet")
        assert code == 2
        assert printed.startswith("error: killed/checkpoints: no checkpoint can be used")
        assert printed.count("\n") == 1
        for step in (3, 6, 9):
            assert f"step-{step:08d}/model.safetensors is damaged" in printed
        assert "start anew in another folder" in printed
    assert sorted(workshop.checkpoints.iterdir()) == before


def test_what_cannot_be_read_once_for_a_lack_of_memory_is_not_damaged(
    workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So safetensors says it."""
    load, failed = reading.load_file, []

    def short_of_memory(path: Path) -> Any:
        if not failed:
            failed.append(path.parent.name)
            raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")
        return load(path)

    monkeypatch.setattr(reading, "load_file", short_of_memory)
    code, printed = workshop.resume()
    assert (code, failed) == (0, ["step-00000009"])
    assert "resumed from step 9" in printed
    assert not list(workshop.checkpoints.glob("bad-*"))
    assert workshop.is_as_undisturbed()


def test_the_end_of_a_damaged_last_checkpoint_is_trained_again(workshop: Any) -> None:
    """A finished run whose last checkpoint is damaged later."""
    flip(0.5)(workshop.folder / "undisturbed" / "checkpoints" / "step-00000011" / "optimizer.safetensors")
    expected = (workshop.folder / "undisturbed" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(workshop.folder / "undisturbed" / "model")
    code, printed = workshop.foretrain("train", "--out", "undisturbed", "--resume")
    assert code == 0
    assert "resumed from step 9" in printed
    assert (workshop.folder / "undisturbed" / "model" / "model.safetensors").read_bytes() == expected


def test_export_refuses_a_damaged_checkpoint(workshop: Any) -> None:
    assert workshop.foretrain("export", "killed", "exported")[0] == 0
    flip(0.5)(workshop.newest / "model.safetensors")
    code, printed = workshop.foretrain("export", "killed", "refused")
    assert code == 2
    assert "step-00000009/model.safetensors is damaged" in printed
    assert not (workshop.folder / "refused").exists()


def test_a_quiet_run_still_says_that_a_checkpoint_is_damaged(workshop: Any) -> None:
    (workshop.newest / "model.safetensors").write_bytes(b"")
    code, printed = workshop.resume("--quiet")
    assert code == 0
    assert "model.safetensors is damaged" in printed
    assert "held-out loss" not in printed
    assert workshop.is_as_undisturbed()
