"""The processes that train together: where their numbers meet, and where they agree on what to do next.

A run of one process uses `World` itself, which does nothing. Whoever trains with several processes hands the engine a
subclass. Two rules make that enough: every number that leaves the device goes through `to_host`, and every decision
that is made from such numbers goes through `agree`. Two kinds of numbers are no measurements and stay outside: rates
that a user keeps as tensors in his optimizer, and whether memory has run out, which is a matter of each process alone.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import Tensor

ReduceKind = Literal["mean", "sum", "max"]
"""mean: each process holds an estimate of the same number; sum: each holds a part of it; max: one is enough."""
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
