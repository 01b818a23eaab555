"""The order of samples is a bijection for every seed and epoch, and differs between them."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.data.order import random_integer, shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 255, 256, 257, 1000, 4097])
def test_every_sample_has_exactly_one_place(count: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (1, 7), (2**63 - 1, 2**31)):
        assert sorted(shuffled(np.arange(count), count, seed, epoch)) == list(range(count))


def test_the_order_at_a_place_does_not_depend_on_what_else_is_asked() -> None:
    whole = shuffled(np.arange(1000), 1000, seed=3, epoch=2)
    for places in ([0], [999], [5, 5, 5], [700, 3, 41]):
        assert list(shuffled(np.array(places), 1000, seed=3, epoch=2)) == [whole[place] for place in places]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36
    assert tuple(range(50)) not in orders


def test_no_epoch_of_a_seed_repeats_an_epoch_of_another_seed() -> None:
    """Runs that differ in their seed only must not see each other's order one epoch later."""
    first = [tuple(shuffled(np.arange(30), 30, seed=1, epoch=epoch)) for epoch in range(5)]
    second = [tuple(shuffled(np.arange(30), 30, seed=2, epoch=epoch)) for epoch in range(5)]
    assert not set(first) & set(second)


def test_the_offsets_are_the_same_on_every_machine_and_in_every_version() -> None:
    """A checkpoint stores no order: changing it would change what a resumed run sees."""
    assert [random_integer(1, stream, 1000) for stream in range(5)] == [210, 158, 110, 345, 829]


def test_places_are_spread_over_the_whole_range() -> None:
    """Neighbours end up far apart: the mean distance of a random order is a third of its length."""
    order = shuffled(np.arange(3000), 3000, seed=4, epoch=0)
    assert np.abs(np.diff(order)).mean() == pytest.approx(1000, rel=0.05)
    assert abs(np.corrcoef(np.arange(3000), order)[0, 1]) < 0.06


def test_no_indices_give_no_places() -> None:
    assert len(shuffled(np.arange(0), 10, 1, 1)) == 0


def test_random_integers_are_below_their_limit_and_reproducible() -> None:
    values = [random_integer(5, stream, 16) for stream in range(400)]
    assert values == [random_integer(5, stream, 16) for stream in range(400)]
    assert set(values) == set(range(16))
    assert random_integer(5, 3, 1) == 0
