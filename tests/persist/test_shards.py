"""Checkpoints of several ranks: written together, read by any number of ranks, and whole or not there."""

from __future__ import annotations

import errno
import json
import marshal  # noqa: TID251 - to forbid it
import os
import pickle  # noqa: TID251 - to forbid it
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.gloo import fewer, in_forks, results
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from foretrain.engine.ranks import world_of_ranks
from foretrain.errors import CheckpointError
from foretrain.persist import checkpoint, shards
from foretrain.persist.checkpoint import CheckpointStore, read, verify
from foretrain.persist.codec import OfRank, random_state, random_state_anew, seed_random
from foretrain.persist.files import digest
from foretrain.persist.pieces import Layouts, ReadBy

pytestmark = pytest.mark.xdist_group("shards")  # what is below is made once

SIZES = (1, 2, 3)
SHAPES = {"embed": (7, 4), "square": (4, 4), "vector": (5,), "one": (1,), "long": (2, 3, 2), "none": (0, 3)}
"""Rows that do not divide by the ranks, ranks without a row, and nothing at all."""
ROWS = 3
"""Rows of a batch that each rank has."""


# --- states that do not depend on who holds them ---------------------------------------------------------------------


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return (100 * torch.randn(shape, generator=generator)).to(dtype)


def spread(tensor: Tensor, size: int, dimension: int = 0) -> Tensor:
    """Each rank takes its part of what all of them know."""
    if size == 1:
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", (size,)), [Shard(dimension)], src_data_rank=None)


spread_for_state = spread
"""How states of a test are spread."""


def weights() -> dict[str, Tensor]:
    return {name: whole(name, shape) for name, shape in SHAPES.items()}


def directions() -> dict[str, Tensor]:
    return {name: whole(f"basis {name}", (3, *shape), torch.bfloat16) for name, shape in SHAPES.items()}


def batch(rank: int, size: int) -> Tensor:
    """A rank's rows of a batch of six."""
    return torch.arange(12).view(6, 2).tensor_split(size)[rank]


def state(rank: int, size: int) -> dict[str, Any]:
    seed_random(100 + rank)
    moments = {
        number: {"step": torch.tensor(3.0), "exp_avg": spread_for_state(whole(f"moment {name}", shape), size)}
        for number, (name, shape) in enumerate(SHAPES.items())
    }
    return {
        "model": {name: spread_for_state(tensor, size) for name, tensor in weights().items()}
        | {"buffer": whole("buffer", (5,))},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "average": {
            "average": [spread_for_state(whole(f"mean {name}", shape), size) for name, shape in SHAPES.items()]
        },
        "random": random_state(),
        "look_ahead": {"m": [spread_for_state(whole("ahead", (7, 4)), size)]},
        "directions": {name: spread_for_state(tensor, size, 1) for name, tensor in directions().items()},
        "alike": whole("alike", (5,)),
        "safe": {"model": {"embed": spread_for_state(whole("safe", (7, 4)), size)}, "random": random_state()},
        "batches": OfRank([batch(rank, size)], rows=True),
        "sample": OfRank(torch.full((rank + 2,), float(rank)), rows=False),
        "loss": float("inf"),
    }


def store(folder: Path, size: int, keep: int = 9) -> CheckpointStore:
    world = world_of_ranks()
    layouts = Layouts({name: spread_for_state(tensor, size) for name, tensor in weights().items()})
    return CheckpointStore(
        folder,
        keep,
        world,
        lambda step: ReadBy(world.rank, world.size, layouts, lambda: random_state_anew(1, step, world.rank)),
    )


def of_all(value: Any) -> Any:
    """The tree with whole tensors, and whether they were spread."""
    if isinstance(value, DTensor):
        return "spread", value.full_tensor()
    if isinstance(value, Tensor):
        return "alike", value
    if isinstance(value, dict):
        return {key: of_all(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [of_all(item) for item in value]
    return value


def difference(first: Any, second: Any, place: str = "") -> str:
    """The first place where two trees differ."""
    if isinstance(first, Tensor):
        same = isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
        return "" if same else f"{place}: {first} {second}"
    if isinstance(first, dict):
        if not isinstance(second, dict) or first.keys() != second.keys():
            return f"{place}: {first} {second}"
        return next((text for key in first if (text := difference(first[key], second[key], f"{place}.{key}"))), "")
    if isinstance(first, (list, tuple)):
        pairs = enumerate(zip(first, second, strict=True))
        return next((text for key, pair in pairs if (text := difference(*pair, f"{place}.{key}"))), "")
    return "" if first == second else f"{place}: {first!r} {second!r}"


# --- what ranks do ---------------------------------------------------------------------------------------------------


@contextmanager
def nothing_is_pickled() -> Iterator[None]:
    """Whatever pickles, on the disk or between ranks, raises."""

    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickled")

    places: list[tuple[Any, str]] = [(module, name) for module in (pickle, marshal) for name in ("dump", "dumps")]
    places += [(module, name) for module in (pickle, marshal) for name in ("load", "loads")]
    places += [(pickle, "Pickler"), (pickle, "Unpickler"), (torch, "save"), (torch, "load")]
    on_the_wire = ("_pickler", "_unpickler", "_object_to_tensor", "_tensor_to_object")
    places += [(distributed_c10d, name) for name in on_the_wire]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            patch.setattr(module, name, refused)
        yield


def save_steps(rank: int, folder: str, size: int, *steps: int) -> list[str]:
    """The first one without a guard: Python unmarshals the modules that it imports."""
    saver, saved = store(Path(folder), size), state(rank, size)
    paths = [saver.save(steps[0], saved)]
    with nothing_is_pickled():
        paths += [saver.save(step, saved) for step in steps[1:]]
    return [str(path) for path in paths]


def load(rank: int, folder: str, size: int, saved_by: int) -> str:
    """Words for the first difference between what is loaded and what was saved."""
    reader = store(Path(folder), size)
    first = reader.load_newest()
    with nothing_is_pickled():
        loaded = reader.load_newest()
    assert first is not None
    assert loaded is not None
    found, expected = loaded.state, state(rank, size)
    batches, sample = found.pop("batches"), found.pop("sample")
    randoms = [found.pop("random"), found["safe"].pop("random")]
    del expected["batches"], expected["sample"]
    own = [expected.pop("random"), expected["safe"].pop("random")]
    if saved_by == 1:  # nothing says which tensors are cut: all but these are known by their names
        assert not any(isinstance(tensor, DTensor) for tensor in found["directions"].values())
        expected["directions"] = directions()
    text = difference(of_all(found), of_all(expected))
    rows = batch(rank, size) if saved_by > 1 else batch(0, 1)  # of one process all ranks get all rows
    if size == saved_by:
        return text or difference(randoms, own) or difference(sample, torch.full((rank + 2,), float(rank)))
    anew = random_state_anew(1, loaded.step, rank)
    text = text or difference(batches, [rows]) or difference(randoms, [anew, anew])
    return text if text or (sample is None or saved_by == 1) else f"sample: {sample}"


def save_and_load(rank: int, folder: str) -> dict[str, str]:
    """All numbers of ranks save, and all of them load what each of them saved. Words for what differs."""
    told: dict[str, str] = {}
    for by in SIZES:
        with fewer(by) as saves:
            if saves:
                save_steps(rank, f"{folder}/{by}", by, 5, 7)
        for size in SIZES:
            with fewer(size) as loads:
                if loads:
                    told[f"{by} to {size}"] = load(rank, f"{folder}/{by}", size, by)
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """A folder with checkpoints of the steps 5 and 7 for each number of ranks, and what ranks found in them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, results(max(SIZES), save_and_load, str(folder))


def test_any_number_of_ranks_reads_what_any_number_saved(saved: tuple[Path, list[dict[str, str]]]) -> None:
    _, told = saved
    assert {key: text for rank in told for key, text in rank.items() if text} == {}
    assert [len(rank) for rank in told] == [9, 6, 3]


def test_one_process_reads_weights_by_their_names(saved: tuple[Path, list[dict[str, str]]]) -> None:
    folder = saved[0] / "3" / "step-00000007"
    verify(folder)
    assert difference(checkpoint.read_weights(folder)["model"], weights() | {"buffer": whole("buffer", (5,))}) == ""
    loaded = read(folder)
    assert loaded["loss"] == float("inf")
    assert loaded["sample"] is None
    assert loaded["random"].keys() == random_state().keys()


def test_each_rank_writes_one_file_and_nothing_is_written_twice(saved: tuple[Path, list[dict[str, str]]]) -> None:
    folder = saved[0] / "3" / "step-00000007"
    files = [*(f"rank-0000{rank}.safetensors" for rank in range(3)), "manifest.json", "state.json", "where.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    where = json.loads((folder / "where.json").read_text())
    assert where["ranks"] == 3
    pieces = where["patterns"][where["tensors"]["model.embed"]["pieces"]]
    assert pieces == [[0, [0, 0], [3, 4]], [1, [3, 0], [3, 4]], [2, [6, 0], [1, 4]]]
    assert where["patterns"][where["tensors"]["alike"]["pieces"]] == [[0, [0], [5]]]
    numbers = sum(load_file(folder / name)["model.embed"].numel() for name in files[:3])
    assert numbers == 28
    assert "alike" not in load_file(folder / files[1])
    one = saved[0] / "1" / "step-00000007"
    assert "where.json" not in [path.name for path in one.iterdir()]
    assert json.loads((one / "manifest.json").read_text())["format"] == 2


# --- meshes of two dimensions ----------------------------------------------------------------------------------------


def replicated(tensor: Tensor, size: int, dimension: int = 0) -> Tensor:
    """Two replicas of two shards (HSDP)."""
    if size != 4:
        return spread(tensor, size, dimension)
    return distribute_tensor(
        tensor, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(dimension)], src_data_rank=None
    )


def crossed(tensor: Tensor, size: int, dimension: int = 0) -> Tensor:
    """Shards of two dimensions (FSDP2 and tensor parallelism)."""
    if size != 4 or tensor.ndim <= dimension + 1:
        return spread(tensor, size, dimension)
    placed = [Shard(dimension), Shard(dimension + 1)]
    return distribute_tensor(tensor, init_device_mesh("cpu", (2, 2)), placed, src_data_rank=None)


def pass_through_meshes(rank: int, folder: str) -> dict[str, str]:
    """Four ranks save by mesh, and as many, and fewer, load."""
    told: dict[str, str] = {}
    for how in (replicated, crossed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "spread_for_state", how)
            save_steps(rank, f"{folder}/{how.__name__}", 4, 5)
            for size in (4, 3, 1):
                with fewer(size) as loads:
                    if loads:
                        told[f"{how.__name__} to {size}"] = load(rank, f"{folder}/{how.__name__}", size, 4)
    return told


def test_meshes_of_two_dimensions_save_each_number_once(tmp_path: Path) -> None:
    told = results(4, pass_through_meshes, str(tmp_path))
    assert {key: text for rank in told for key, text in rank.items() if text} == {}
    assert [len(rank) for rank in told] == [6, 4, 4, 2]
    where = json.loads((tmp_path / "replicated" / "step-00000005" / "where.json").read_text())
    pieces = where["patterns"][where["tensors"]["model.embed"]["pieces"]]
    assert pieces == [[0, [0, 0], [4, 4]], [1, [4, 0], [3, 4]]]  # ranks 2 and 3 hold the same, and write none of it


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def as_if_of_three(path: Path) -> None:
    """The manifest says what that of three ranks would say."""
    manifest = json.loads(path.read_text())
    manifest["files"]["rank-00002.safetensors"] = manifest["files"]["rank-00001.safetensors"]
    path.write_text(json.dumps(manifest))


def of_fewer(path: Path) -> None:
    """where.json, and its checksum, are those of one rank."""
    content = json.loads(path.read_text()) | {"ranks": 1}
    path.write_text(json.dumps(content))
    forge(path)


def forge(path: Path) -> None:
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": digest(path)}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("rank-00001.safetensors", flip, "is damaged: its checksum is not that in manifest.json"),
    "missing": ("rank-00001.safetensors", Path.unlink, "is missing, but manifest.json names it"),
    "cut off": ("rank-00000.safetensors", lambda path: os.truncate(path, 99), "is damaged: 99 bytes, not"),
    "where": ("where.json", flip, "is damaged: its checksum is not that in manifest.json"),
    "no manifest": ("manifest.json", Path.unlink, "is incomplete: it has no manifest.json"),
    "another manifest": ("manifest.json", as_if_of_three, "rank-00002.safetensors is missing"),
    "another where": ("where.json", of_fewer, "is of 1 ranks, and the manifest names files of others"),
    "another format": (
        "manifest.json",
        lambda path: change(path, '"format": 3', '"format": 2'),
        "format 2 is not that",
    ),
}


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def load_damaged(rank: int, folder: str) -> list[tuple[int, list[str], list[str]]]:
    """Step, what was put aside, and why, for each damage; and what is said when nothing can be used."""
    told = []
    for name in DAMAGES:
        loaded = store(Path(folder, name), 2).load_newest()
        assert loaded is not None
        told.append((loaded.step, [path.name for path, _ in loaded.rejected], [text for _, text in loaded.rejected]))
    try:
        store(Path(folder, "nothing"), 2).load_newest()
    except CheckpointError as error:
        told.append((-1, [], [str(error)]))
    return told


def test_what_is_damaged_is_put_aside_by_all_ranks_and_the_one_before_is_used(
    saved: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    for name, (file, damage, _) in DAMAGES.items():
        shutil.copytree(saved[0] / "2", tmp_path / name)
        damage(tmp_path / name / "step-00000007" / file)
    shutil.copytree(tmp_path / "missing", tmp_path / "nothing")
    flip(tmp_path / "nothing" / "step-00000005" / "rank-00000.safetensors")
    one, other = results(2, load_damaged, str(tmp_path))
    assert one == other
    *found, nothing = one
    for (_, _, words), (step, aside, reasons) in zip(DAMAGES.values(), found, strict=True):
        assert (step, aside) == (5, ["bad-step-00000007"])
        assert words in reasons[0]
    assert "no checkpoint can be used" in nothing[2][0]
    assert sorted(path.name for path in (tmp_path / "nothing").iterdir()) == ["step-00000005", "step-00000007"]


# --- saves that fail -------------------------------------------------------------------------------------------------


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def short_of_memory(*arguments: Any, **options: Any) -> None:
    raise MemoryError("not enough")


def fail_to_save(rank: int, folder: str) -> list[str]:
    """What each of several ways to fail says, on rank 1 but for the last one. In between saving works."""
    told = []
    places: list[tuple[int, Any, str, Any]] = [
        (1, shards, "save_file", no_space),
        (1, shards, "save_file", short_of_memory),
        (0, checkpoint, "write_synced", no_space),
        (1, shards, "digest", lambda path: {}["unforeseen"]),
    ]
    for step, (where, module, name, failing) in enumerate(places, 10):
        with pytest.MonkeyPatch.context() as patch:
            if rank == where:
                patch.setattr(module, name, failing)
            try:
                store(Path(folder), 2).save(step, state(rank, 2))
            except Exception as error:  # noqa: BLE001 - the test is told
                told.append(f"{type(error).__name__}: {error}")
        torch.distributed.barrier()
        told.append(" ".join(sorted(path.name for path in Path(folder).iterdir())))
        torch.distributed.barrier()
        store(Path(folder), 2, keep=2).save(step, state(rank, 2))
    return told


def test_where_one_rank_fails_to_save_none_does(tmp_path: Path) -> None:
    outcomes = results(2, fail_to_save, str(tmp_path))
    (full, _, memory, at_11, disk, at_12, broken, at_13), other = outcomes
    words = f"SaveError: {tmp_path}: cannot save the checkpoint of step"
    cause = "the disk is full (No space left on device)"
    assert full == f"{words} 10: rank 1: {cause}; no earlier checkpoint was touched. Free some space"
    assert memory == "SaveError: memory ran out while a checkpoint was saved (not enough)"
    assert disk == f"{words} 12: rank 0: {cause}; the checkpoint of step 11 is intact. Free some space"
    assert broken == "RanksError: rank 1 failed: KeyError: 'unforeseen'"
    assert [other[0], other[2], other[4], other[6]] == [full, "MemoryError: not enough", disk, "KeyError: 'unforeseen'"]
    assert [at_11, at_12, at_13] == ["step-00000010", "step-00000010 step-00000011", "step-00000011 step-00000012"]
    for path in tmp_path.iterdir():
        verify(path)


# --- kills -----------------------------------------------------------------------------------------------------------

KILLS = {
    "before the file of rank 1": (1, "save_file", "rank-00001.safetensors"),
    "before the note of rank 1": (1, "write_synced", ".rank-00001.json"),
    "before the file of rank 0": (0, "save_file", "rank-00000.safetensors"),
    "before where.json": (0, "write_synced", "where.json"),
    "before the manifest": (0, "write_synced", "manifest.json"),
    "before the rename": (0, "_put_in_place", ""),
}


def die_at(rank: int, folder: str, who: int, function: str, file: str) -> None:
    """A rank is killed in the middle of its second save."""

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not file or any(isinstance(one, Path) and one.name == file for one in arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    save_steps(rank, folder, 2, 5)
    if rank == who:
        for place in (shards, checkpoint, CheckpointStore):
            if hasattr(place, function):
                setattr(place, function, deadly(getattr(place, function)))
    save_steps(rank, folder, 2, 7)


def be_killed(rank: int, folder: str) -> list[list[Any]]:
    """How this rank ended, and step, difference and what is left when it is resumed."""
    found = []
    for name, (who, function, file) in KILLS.items():
        code = in_forks(partial(die_at, rank, f"{folder}/{name}", who, function, file))
        loaded = store(Path(folder, name), 2).load_newest()
        assert loaded is not None
        differs = load(rank, str(Path(folder, name)), 2, 2)
        found.append([code, loaded.step, differs, sorted(path.name for path in Path(folder, name).iterdir())])
    return found


def test_a_rank_that_is_killed_while_it_saves_leaves_the_newest_complete_one(tmp_path: Path) -> None:
    outcomes = results(2, be_killed, str(tmp_path))
    for rank, found in enumerate(outcomes):
        codes = [-signal.SIGKILL if who == rank else 1 for who, _, _ in KILLS.values()]
        assert found == [[code, 5, "", ["step-00000005"]] for code in codes]
