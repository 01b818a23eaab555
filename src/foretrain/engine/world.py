"""The processes that train together: where their numbers meet, and where they agree on what to do next.

A run of one process uses `World` itself, which does nothing; one of several uses `Ranks` (`foretrain.engine.ranks`).

Every number that decides anything goes through `read`, `reduce`, `gather` or `of_first` before the host looks at it,
and leaves the device through `to_host`; the decisions that are made from such numbers go through `agree`. Outside are
rates that a user keeps as tensors in his optimizer, whether two batches are the same (ranks vote on it), and whether
memory has run out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

ReduceKind = Literal["replicated", "sharded", "same"]
"""replicated: each process holds an estimate of the same number, and the mean is wanted; sharded: each holds a part of
it, and the sum is wanted; same: each holds the number itself."""
Decision = TypeVar("Decision")


class FailedRank(NamedTuple):
    """A process on which something failed, and what it says about it."""

    rank: int
    words: str


class World:
    """A world of one process: nothing is reduced, and it agrees with itself."""

    rank = 0
    size = 1

    # --- numbers -----------------------------------------------------------------------------------------------------

    def reduce(self, vector: Tensor, kind: ReduceKind) -> Tensor:
        """Combine a vector on the device over all processes. Returns the same vector in each of them."""
        return vector

    def gather(self, tensor: Tensor) -> Tensor:
        """Return what each process holds, one after the other along a new first dimension. All give the same form."""
        return tensor.unsqueeze(0)

    def sum_of_step(self, vector: Tensor) -> Tensor:
        """Add up a vector on the device over all processes, in every step; what they have to tell each other may come
        along."""
        return vector

    def share(self, tensor: Tensor) -> float:
        """What this process's part of a tensor counts in a sum over all processes."""
        return 1.0

    def is_parted(self, tensors: Sequence[Tensor]) -> bool:
        """Whether processes hold different parts of some of these."""
        return False

    def later(self, number: Tensor) -> None:
        """Put the mean over all processes into a number on the device when they meet next."""

    def catch_up(self) -> None:
        """Put means where `later` promised them, now."""

    def read(self, tensors: Sequence[Tensor], kinds: Sequence[ReduceKind]) -> list[float]:
        """Combine tensors over all processes, each by its kind, and bring all numbers to the host, in one transfer."""
        whole = [
            self.reduce(tensor, kind) if kind != "same" else tensor for tensor, kind in zip(tensors, kinds, strict=True)
        ]
        return self.to_host(torch.cat([tensor.reshape(-1).to(whole[0].dtype) for tensor in whole]))

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers of the host over all processes."""
        return list(numbers)

    def of_first(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What the process with rank 0 holds: for numbers that the host computes, in its own way of rounding."""
        return numbers

    def to_host(self, tensor: Tensor) -> list[float]:
        """Bring a tensor's numbers to the host, as a flat list. On a GPU this waits for the device."""
        numbers: list[float] = tensor.flatten().tolist()
        return numbers

    # --- decisions ---------------------------------------------------------------------------------------------------

    def agree(self, decision: Decision, name: str = "the decision") -> Decision:
        """Return the decision that all processes carry out: each makes it by itself, and they compare. name: what it is
        called where they do not agree."""
        return decision

    def follow(self, steps: Callable[[], int], often: int) -> None:
        """steps: tells how many were done. often: steps after which processes meet, where nothing else makes them."""

    def compare(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """state: tells numbers by name that must be the same in all processes whenever they meet."""

    def step_done(self) -> None:
        """A step is over: processes meet now where the last time is long ago."""

    def vote(self, name: str, yes: bool) -> None:
        """Say yes or no to a question that each process has an own answer to. It is counted when they meet next."""

    def every(self, name: str, yes: bool) -> bool:
        """Whether all processes say yes to what they voted on. yes: what this one says."""
        return yes

    def anyone(self, name: str, yes: bool) -> bool:
        """Whether one of them does."""
        return yes

    def meet(self) -> None:
        """Compare what was decided, count votes and put means where `later` promised them, now."""

    def all_well(self, words: str | None = None) -> FailedRank | None:
        """words: what failed in this process; None: nothing did. Returns the first process on which something failed,
        in all of them. All must ask."""
        return None if words is None else FailedRank(self.rank, words)


ALONE = World()
