"""Each of several processes fetches its rows of the same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from foretrain.data.loader import Loader, MappedSamples, TokenWindows
from foretrain.data.nested import rows_of_rank
from foretrain.engine.batches import Batches
from foretrain.errors import ConfigError

TEXT = np.arange(1000, dtype=np.int64)


def batches(rank: int, world: int, count: int, position: int = 0, samples: Any = None) -> list[Any]:
    windows = samples or TokenWindows(TEXT, 8, seed=3)
    loader = Loader(windows, 12, seed=3, rank=rank, world=world)
    loader.seek(position)
    source = iter(loader)
    return [next(source) for _ in range(count)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_of_all_ranks_are_the_batch(world: int) -> None:
    whole = batches(0, 1, 25)  # beyond the end of an epoch, in the middle of a batch
    parts = [batches(rank, world, 25) for rank in range(world)]
    for number, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([part[number][0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[number][1] for part in parts]), targets)


def test_a_position_means_the_same_on_any_number_of_ranks() -> None:
    ((inputs, _),) = batches(0, 1, 1, position=17)
    for world in (2, 3, 6):
        parts = [batches(rank, world, 1, position=17)[0][0] for rank in range(world)]
        assert torch.equal(torch.cat(parts), inputs)


def test_samples_that_draw_random_numbers_draw_the_same_in_each_place() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> Any:
            return torch.rand(2) + index

    whole = batches(0, 1, 3, samples=MappedSamples(Noisy()))
    parts = [batches(rank, 2, 3, samples=MappedSamples(Noisy())) for rank in range(2)]
    for number, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[number] for part in parts]), batch)


def test_rows_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size = 10 rows cannot be shared by 4 ranks"):
        Loader(TokenWindows(TEXT, 8, seed=1), 10, seed=1, rank=0, world=4)


def test_held_out_batches_are_shared_whatever_their_form() -> None:
    batch = {"x": torch.arange(6), "y": (torch.arange(12).view(6, 2), "name")}
    parts = [rows_of_rank(batch, rank, 3) for rank in range(3)]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["y"][0].tolist() == [[8, 9], [10, 11]]
    assert parts[2]["y"][1] == "name"
    assert rows_of_rank(batch, 0, 1) is batch


def test_a_distributed_sampler_gets_the_number_of_each_pass() -> None:
    data = TensorDataset(torch.arange(20))
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0, seed=5)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    source = Batches(loader, lambda event: None).after(0)
    passes = [torch.cat([next(source)[0] for _ in range(2)]).tolist() for _ in range(3)]
    for number, seen in enumerate(passes):
        sampler.set_epoch(number)
        assert seen == [data[index][0].item() for index in sampler]
    assert passes[0] != passes[1]
