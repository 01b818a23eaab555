"""A world of one process changes nothing."""

import torch

from foretrain.engine.world import World


def test_world_of_one_process_returns_what_it_is_given() -> None:
    world, vector = World(), torch.tensor([1.0, 2.0])
    decision = ("stop", 3)

    assert (world.rank, world.size) == (0, 1)
    assert world.reduce(vector, "replicated") is vector
    assert world.agree(decision) is decision


def test_numbers_come_to_the_host_as_a_flat_list() -> None:
    world = World()

    assert world.to_host(torch.tensor(2.5)) == [2.5]
    assert world.to_host(torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == [1.0, 2.0, 3.0, 4.0]
