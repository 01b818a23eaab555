"""The processes that train together: where their numbers meet, and where they agree on what to do next.

A run of one process uses `World` itself, which does nothing. It is a seam, and no more than that: the trainer refuses
several processes while anything is predicted (`check_processes`), and with `hybrid.mode = "off"` they train by
`DistributedDataParallel` and need none.

What the seam does today: in the training path every number that leaves the device goes through `to_host`, and the
decisions that are made from such numbers go through `agree`. Outside are rates that a user keeps as tensors in his
optimizer, whether two batches are the same, and whether memory has run out.

What several processes still need:

- Numbers have kinds, and `to_host` knows none. `reduce` is called in two places only: for probes and evaluations, and
  for the products of directions. The loss and the norm of a full step stay those of one process.
- Products of directions are summed, which is right where each process holds a shard of the weights. Where each holds a
  replica they are the same in all of them, and must not be summed.
- A chain compares losses of probes, which are reduced, with losses of gradients, which are not.
- An audit goes back to the better fork before its judgement is agreed on: processes could stand at different forks.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import Tensor

ReduceKind = Literal["replicated", "sharded"]
"""replicated: each process holds an estimate of the same number, and the mean is wanted; sharded: each holds a part of
it, and the sum is wanted."""
Decision = TypeVar("Decision")


class World:
    """A world of one process: nothing is reduced, and it agrees with itself."""

    rank = 0
    size = 1

    def reduce(self, vector: Tensor, kind: ReduceKind) -> Tensor:
        """Combine a vector on the device over all processes. Returns the same vector in each of them."""
        return vector

    def agree(self, decision: Decision) -> Decision:
        """Return the decision that all processes carry out: the one that the process with rank 0 made."""
        return decision

    def to_host(self, tensor: Tensor) -> list[float]:
        """Bring a tensor's numbers to the host, as a flat list. On a GPU this waits for the device."""
        numbers: list[float] = tensor.flatten().tolist()
        return numbers


ALONE = World()
