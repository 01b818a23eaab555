"""Batches by number: the same whatever happens around them, every window once an epoch, any place at once."""

from __future__ import annotations

import random
import threading
from collections import namedtuple
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from foretrain.data import loader as loading
from foretrain.data.loader import Loader, MappedSamples, TokenWindows, held_out_batches
from foretrain.errors import DataError
from foretrain.models import loss
from foretrain.models.loss import IGNORED


def windows(count: int = 500, context: int = 8, seed: int = 1) -> TokenWindows:
    return TokenWindows(np.arange(count, dtype=np.uint16), context, seed)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ignored_targets_are_the_loss_functions() -> None:
    assert IGNORED == loss.IGNORED


# --- windows -------------------------------------------------------------------------------------------------------


def test_targets_are_the_tokens_one_later() -> None:
    inputs, targets = windows().fetch(np.array([0, 3]), epoch=0)
    assert inputs.shape == targets.shape == (2, 8)
    assert inputs.dtype is targets.dtype is torch.int64
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("count", [9, 10, 16, 17, 24, 25, 100, 501])
def test_the_windows_of_an_epoch_do_not_overlap_and_stay_inside(count: int) -> None:
    samples = windows(count)
    for epoch in range(20):
        inputs, targets = samples.fetch(np.arange(len(samples)), epoch)
        seen = inputs.flatten().tolist()
        assert len(seen) == len(set(seen)) == 8 * len(samples)
        assert targets.max() < count
        assert count - len(seen) < 2 * 8  # at most the slack of one window is left out


def test_the_cuts_move_with_the_epoch() -> None:
    samples = windows()
    starts = {int(samples.fetch(np.array([0]), epoch)[0][0, 0]) for epoch in range(200)}
    assert starts == set(range(8))


def test_every_token_but_the_last_few_is_a_target_in_some_epoch() -> None:
    samples = windows(100)
    epochs = [samples.fetch(np.arange(len(samples)), epoch)[1] for epoch in range(60)]
    seen = set(torch.cat(epochs).flatten().tolist())
    assert seen == set(range(1, len(seen) + 1))
    assert 100 - len(seen) <= 8


def test_too_few_tokens_are_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(DataError, match=r"8 tokens are too few for model\.context = 8 \(at least 9"):
        windows(8)
    assert len(windows(9)) == 1


# --- the loader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 4, 16])
def test_batches_do_not_depend_on_prefetching(prefetch: int) -> None:
    expected = [Loader(windows(), 7, seed=3).batch(number) for number in range(30)]
    got = list(islice(Loader(windows(), 7, seed=3, prefetch=prefetch), 30))
    assert all(same(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_seek_goes_anywhere(prefetch: int) -> None:
    expected = [Loader(windows(), 7, seed=3).batch(number) for number in range(40)]
    loader = Loader(windows(), 7, seed=3, prefetch=prefetch)
    for position in (25, 0, 39, 8):
        loader.seek(position)
        assert same(next(iter(loader)), expected[position])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_position_counts_the_batches_handed_out(prefetch: int) -> None:
    loader = Loader(windows(), 7, seed=3, prefetch=prefetch)
    batches = list(islice(loader, 5))
    assert loader.position == 5
    assert same(next(iter(loader)), loader.batch(5))
    assert loader.position == 6
    assert same(batches[4], loader.batch(4))


@pytest.mark.parametrize("batch_size", [1, 7, 61, 62])
def test_every_window_is_visited_exactly_once_an_epoch(batch_size: int) -> None:
    samples = windows(500)
    assert len(samples) == 61
    loader = Loader(samples, batch_size, seed=5, prefetch=0)
    rows = torch.cat([batch[0] for batch in islice(loader, 3 * 61)])
    for epoch in range(3 if batch_size > 1 else 2):
        starts = rows[61 * epoch : 61 * (epoch + 1), 0].tolist()
        offset = min(starts)
        assert sorted(starts) == [offset + 8 * number for number in range(61)]
    assert rows[:61, 0].tolist() != sorted(rows[:61, 0].tolist())


def test_a_batch_may_span_two_epochs_and_more() -> None:
    samples = windows(500)
    single = Loader(samples, 1, seed=5)
    for size, number in ((7, 8), (40, 1), (200, 0), (200, 3)):
        batch = Loader(samples, size, seed=5).batch(number)
        expected = torch.cat([single.batch(row)[0] for row in range(size * number, size * (number + 1))])
        assert torch.equal(batch[0], expected)


def test_another_seed_is_another_order() -> None:
    assert not same(Loader(windows(seed=1), 7, seed=1).batch(0), Loader(windows(seed=1), 7, seed=2).batch(0))


def test_epochs_longer_than_one_block_of_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [Loader(windows(), 7, seed=3).batch(number) for number in range(30)]
    monkeypatch.setattr(loading, "ORDER_BLOCK", 5)
    small_blocks = Loader(windows(), 7, seed=3)
    assert all(same(small_blocks.batch(number), expected[number]) for number in (*range(30), 3, 17, 0))


def loader_threads() -> int:
    return sum(thread.name == "foretrain-loader" for thread in threading.enumerate())


def test_the_background_thread_ends_with_the_iteration() -> None:
    before = loader_threads()
    batches = iter(Loader(windows(), 7, seed=3, prefetch=2))
    next(batches)
    assert loader_threads() == before + 1
    batches.close()
    assert loader_threads() == before


class Broken(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        raise OSError(f"sample {index} cannot be read")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_data_reaches_the_reader(prefetch: int) -> None:
    before = loader_threads()
    with pytest.raises(OSError, match="cannot be read"):
        next(iter(Loader(MappedSamples(Broken()), 4, seed=1, prefetch=prefetch)))
    assert loader_threads() == before


# --- map-style data sets -------------------------------------------------------------------------------------------


def test_a_data_set_with_numbered_samples() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2.0)
    loader = Loader(MappedSamples(data), 4, seed=2, prefetch=2)
    batches = list(islice(loader, 5))
    numbers = torch.cat([batch[0] for batch in batches])
    assert torch.equal(torch.cat([batch[1] for batch in batches]), numbers * 2.0)
    assert sorted(numbers[:10].tolist()) == sorted(numbers[10:].tolist()) == list(range(10))
    assert numbers[:10].tolist() != numbers[10:].tolist()


def test_a_plain_list_is_a_data_set() -> None:
    loader = Loader(MappedSamples([10.0, 20.0, 30.0]), 3, seed=1)
    assert sorted(loader.batch(0).tolist()) == [10.0, 20.0, 30.0]


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "sample",
    [
        lambda n: {"x": torch.tensor(n), "y": torch.tensor([n, n])},
        lambda n: (torch.tensor(n), {"y": torch.tensor([n, n])}),
        lambda n: [torch.tensor(n), torch.tensor([n, n])],
        lambda n: Pair(torch.tensor(n), torch.tensor([n, n])),
    ],
    ids=["dict", "nested", "list", "namedtuple"],
)
def test_batches_of_any_form_span_epochs(sample: Any) -> None:
    loader = Loader(MappedSamples([sample(number) for number in range(5)]), 4, seed=1)
    batch, first = loader.batch(1), loader.batch(0)
    assert type(batch) is type(first)
    rows = batch["x"] if isinstance(batch, dict) else batch[0]
    assert rows.shape == (4,)


def test_a_collate_function_of_ones_own() -> None:
    samples = MappedSamples(["a", "bb", "ccc"], collate=lambda texts: torch.tensor([len(text) for text in texts]))
    assert sorted(Loader(samples, 3, seed=1).batch(0).tolist()) == [1, 2, 3]


def test_a_batch_that_cannot_be_joined_is_an_error_that_says_so() -> None:
    samples = MappedSamples(["a", "b", "c"], collate="".join)
    with pytest.raises(DataError, match="a batch of str cannot span two epochs"):
        Loader(samples, 2, seed=1).batch(1)


def test_an_empty_data_set_is_an_error() -> None:
    with pytest.raises(DataError, match="empty"):
        MappedSamples([])


# --- data sets that draw random numbers ----------------------------------------------------------------------------


class Augmented(Dataset):
    """Each sample: its number, and a number from each of the generators that data sets draw from."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)  # noqa: NPY002, S311


def drawing(rows: list[Tensor]) -> Tensor:
    """A collate function that draws too."""
    return torch.stack(rows) * (1 + torch.rand(()))


class DrawingSamples:
    """Samples of the user's own, without MappedSamples."""

    def __len__(self) -> int:
        return 10

    def fetch(self, indices: np.ndarray, epoch: int) -> Tensor:
        return torch.from_numpy(indices) + torch.rand(len(indices))


DRAWING = {
    "samples": lambda: MappedSamples(Augmented()),
    "collate": lambda: MappedSamples(Augmented(), collate=drawing),
    "collate of values": lambda: MappedSamples(torch.arange(10.0).unbind(), collate=drawing),
    "own samples": DrawingSamples,
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of fork, from Python 3.12 on
@pytest.mark.parametrize("options", [{"prefetch": 4}, {"prefetch": 0}, {"prefetch": 4, "workers": 2}])
@pytest.mark.parametrize("name", DRAWING)
def test_what_samples_draw_follows_from_seed_epoch_and_index(name: str, options: dict[str, int]) -> None:
    expected = [Loader(DRAWING[name](), 4, seed=3).batch(number) for number in range(12)]
    loader = Loader(DRAWING[name](), 4, seed=3, **options)
    for position in (0, 5):
        loader.seek(position)
        with closing(iter(loader)) as batches:
            for number in range(position, position + 6):
                torch.rand(3)  # as dropout does
                assert torch.equal(next(batches), expected[number])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of fork, from Python 3.12 on
@pytest.mark.parametrize("options", [{"prefetch": 4}, {"prefetch": 4, "workers": 1}])
def test_samples_leave_the_generators_of_the_model_alone(options: dict[str, int]) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002, S311

    def start() -> None:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)

    start()
    expected = [draw() for _ in range(8)]
    start()
    with closing(iter(Loader(MappedSamples(Augmented()), 4, seed=3, **options))) as batches:
        got = [(next(batches), draw())[1] for _ in range(8)]
    assert got == expected


def test_what_is_drawn_differs_by_sample_epoch_seed_and_generator() -> None:
    def drawn(seed: int, batch_size: int) -> Tensor:
        rows = torch.cat(list(islice(Loader(MappedSamples(Augmented()), batch_size, seed), 20 // batch_size)))
        first = rows[:10][rows[:10, 0].argsort()]
        return torch.cat([first, rows[10:][rows[10:, 0].argsort()]])[:, 1:]

    rows = drawn(3, 5)
    everything = torch.cat([rows, drawn(4, 5)]).flatten()
    assert len(everything.unique()) == len(everything) == 120
    assert torch.equal(rows, drawn(3, 2))  # whatever the batches are


def test_an_error_of_a_sample_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="cannot be read"):
        Loader(MappedSamples(Broken()), 4, seed=1).batch(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("samples", "ahead"),
    [
        (lambda: MappedSamples(TensorDataset(torch.arange(10))), True),
        (lambda: MappedSamples(Subset(TensorDataset(torch.arange(10)), range(5))), True),
        (lambda: MappedSamples(ConcatDataset([Augmented(), Augmented()])), False),
        (lambda: MappedSamples([torch.ones(1)] * 10, collate=torch.stack), False),
        (lambda: MappedSamples([torch.ones(1)] * 10, collate=torch.stack, deterministic=True), True),
        (lambda: MappedSamples(Augmented()), False),
        (DrawingSamples, False),
        (windows, True),
    ],
)
def test_only_what_draws_nothing_is_fetched_by_a_thread(samples: Any, ahead: bool) -> None:
    before = loader_threads()
    with closing(iter(Loader(samples(), 2, seed=1))) as batches:
        next(batches)
        assert loader_threads() == before + ahead


# --- held-out batches ----------------------------------------------------------------------------------------------


def test_held_out_batches_are_always_the_same_and_of_one_shape() -> None:
    tokens = np.arange(100, dtype=np.uint16)
    one, other = (held_out_batches(tokens, 8, 5, 40) for _ in range(2))
    assert all(same(a, b) for a, b in zip(one, other, strict=True))
    assert [batch[0].shape for batch in one] == [(5, 8)] * 3
    counted = torch.cat([targets.flatten() for _, targets in one])
    counted = counted[counted != IGNORED]
    assert counted.tolist() == list(range(1, 97))  # 12 windows of 8, each target once


def test_a_limit_spreads_the_windows_over_the_whole_text() -> None:
    batches = held_out_batches(np.arange(10001), 10, 4, 5)
    assert len(batches) == 5
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert starts[0] == 0
    assert starts[-1] == 9990
    gaps = starts.diff()
    assert gaps.min() > 500
    assert gaps.max() < 560


def test_what_is_missing_in_the_last_batch_does_not_count() -> None:
    batches = held_out_batches(np.arange(25), 8, 2, 40)
    assert len(batches) == 2
    inputs, targets = batches[1]
    assert inputs[1].tolist() == [0] * 8
    assert targets[1].tolist() == [IGNORED] * 8
    assert targets[0].tolist() == list(range(17, 25))


def test_too_little_held_out_text_is_an_error() -> None:
    with pytest.raises(DataError, match=r"held-out data: 8 tokens are too few .* larger data\.held_out"):
        held_out_batches(np.arange(8), 8, 2, 4)
    assert len(held_out_batches(np.arange(9), 8, 2, 4)) == 1
