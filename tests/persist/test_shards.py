"""Checkpoints of several ranks: written together, read by any number of ranks, and whole or not there."""

from __future__ import annotations

import marshal  # noqa: TID251 - to forbid it
import pickle  # noqa: TID251 - to forbid it
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gloo import results
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from foretrain.engine.ranks import world_of_ranks
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import OfRank, random_state, random_state_anew, seed_random
from foretrain.persist.pieces import Layouts, ReadBy

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
        number: {"step": torch.tensor(3.0), "exp_avg": spread(whole(f"moment {name}", shape), size)}
        for number, (name, shape) in enumerate(SHAPES.items())
    }
    return {
        "model": {name: spread(tensor, size) for name, tensor in weights().items()} | {"buffer": whole("buffer", (5,))},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "average": {"average": [spread(whole(f"mean {name}", shape), size) for name, shape in SHAPES.items()]},
        "random": random_state(),
        "look_ahead": {"m": [spread(whole("ahead", (7, 4)), size)]},
        "directions": {name: spread(tensor, size, 1) for name, tensor in directions().items()},
        "alike": whole("alike", (5,)),
        "safe": {"model": {"embed": spread(whole("safe", (7, 4)), size)}, "random": random_state()},
        "batches": OfRank([batch(rank, size)], rows=True),
        "sample": OfRank(torch.full((rank + 2,), float(rank)), rows=False),
        "loss": float("inf"),
    }


def store(folder: Path, size: int, keep: int = 9) -> CheckpointStore:
    world = world_of_ranks()
    layouts = Layouts({name: spread(tensor, size) for name, tensor in weights().items()})
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders with checkpoints of the steps 5 and 7, by the number of ranks that saved them."""
    folder = tmp_path_factory.mktemp("saved")
    for size in SIZES:
        results(size, save_steps, str(folder / str(size)), size, 5, 7)
    return lambda size: folder / str(size)


@pytest.mark.parametrize("by", SIZES)
def test_any_number_of_ranks_reads_what_any_number_saved(by: int, saved: Callable[[int], Path]) -> None:
    for size in SIZES:
        assert results(size, load, str(saved(by)), size, by) == [""] * size, size
