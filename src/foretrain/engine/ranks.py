"""Several processes that train together (ranks of torch.distributed): they sum their numbers and compare decisions.

Each rank computes every decision by itself, from numbers that were combined over all ranks before the host saw them,
and so have the same bits everywhere. Once per window ranks compare a hash of all they decided. Only tensors of numbers
are sent, never pickled objects.

Of a weight that several ranks hold parts of, `p` is for autograd and the optimizer, and `local(p)` for all that reads
or moves numbers. Each part counts with its `share`, so that every number counts once, whatever the mesh: there are no
cases for DDP, FSDP2, HSDP and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from foretrain.engine.agreement import SIGNATURE, Agreement, DecidedValue, all_the_same
from foretrain.engine.syncing import Syncing
from foretrain.engine.world import ALONE, Decision, FailedRank, ReduceKind, World
from foretrain.errors import RanksError
from foretrain.persist.parts import is_spread, like, local

__all__ = ["Ranks", "is_spread", "like", "local", "settle", "world_of_ranks"]

_WORDS = 1024
"""Bytes of a sentence that one rank tells the others. Chosen: a long sentence."""
_VOTES = 8
"""Votes that are counted at once."""
_NAMED = 3
"""Fields that a sentence names, of those that ranks disagree on."""


def world_of_ranks() -> World:
    """The world of the default process group; one process alone where there is none, or no other rank in it."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return Ranks() if several else ALONE


class _Told(NamedTuple):
    """Holds what a rank tells the others when they meet."""

    names: list[str]
    """Names of its votes."""
    decisions: int
    """How many decisions it stands for that were not compared yet."""
    numbers: list[float]


class _Underway(NamedTuple):
    """Holds what ranks have told each other, still on the device."""

    told: _Told
    sums: Tensor


class Ranks(World):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        cuda = torch.distributed.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.agreement = Agreement()
        self._later: list[Tensor] = []
        self._votes: dict[str, bool] = {}
        self._counted: dict[str, int] = {}
        self._steps: Callable[[], int] = lambda: 0
        self._often = 1
        self._compared: list[Callable[[], Mapping[str, Any]]] = []
        self._met_at = 0
        self._underway: _Underway | None = None
        """What came along with the sum of a step, and was not looked at yet."""

    # --- numbers -----------------------------------------------------------------------------------------------------

    def reduce(self, vector: Tensor, kind: ReduceKind) -> Tensor:
        """Combine a vector on the device over all ranks: their sum, or their mean. The same bits on each of them."""
        total = vector.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total.div_(self.size) if kind == "replicated" else total

    def gather(self, tensor: Tensor) -> Tensor:
        """Return what each rank holds, one after the other along a new first dimension."""
        sent = tensor.detach().to(self._device).contiguous()
        heard = sent.new_empty(self.size, *sent.shape)
        torch.distributed.all_gather(list(heard.unbind()), sent)
        return heard.to(tensor.device)

    def share(self, tensor: Tensor) -> float:
        """What this rank's part of a tensor counts in a sum over all ranks: 1 over the ranks that hold these numbers.

        A mesh may be smaller than the world: it knows only of the dimensions that shard the tensor.
        """
        parts = 1
        if is_spread(tensor):
            spread: Any = tensor
            for dimension, placement in enumerate(spread.placements):
                parts *= 1 if placement.is_replicate() else spread.device_mesh.size(dimension)
        return parts / self.size

    def is_parted(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ranks hold different parts of some of these; if not, all hold the same numbers."""
        return any(self.share(tensor) != 1 / self.size for tensor in tensors)

    def later(self, number: Tensor) -> None:
        """Put the mean over all ranks into a number on the device when ranks meet next; until then it is one's own."""
        self._later.append(number)

    def catch_up(self) -> None:
        """Meet now if `later` promised means: before numbers are read that are to be the same everywhere."""
        if self._later:
            self.meet()

    def sum_of_step(self, vector: Tensor) -> Tensor:
        """Add up a vector over all ranks, in every step. Where ranks are to meet after this step, what they tell each
        other comes along, so that they need no sum of its own."""
        if self._underway is not None or not self._is_due(self._steps() + 1):
            return self.reduce(vector, "sharded")
        told = self._told()
        total = self.reduce(torch.cat([vector.double(), self._sent(told.numbers)]), "sharded")
        self._underway = _Underway(told, total[vector.numel() :])
        return total[: vector.numel()]

    def read(self, tensors: Sequence[Tensor], kinds: Sequence[ReduceKind]) -> list[float]:
        """Combine tensors over all ranks, each by its kind, and bring all numbers to the host, in one transfer.

        Where anything is combined, ranks meet by the way.
        """
        flat = [tensor.detach().reshape(-1).double() for tensor in tensors]
        places = [place for place, kind in enumerate(kinds) if kind != "same"]
        if not places:
            return self.to_host(torch.cat(flat))
        self._take_in()
        told = self._told()
        total = self.reduce(torch.cat([*(flat[place] for place in places), self._sent(told.numbers)]), "sharded")
        *parts, heard = total.split_with_sizes([*(flat[place].numel() for place in places), len(told.numbers)])
        for place, part in zip(places, parts, strict=True):
            flat[place] = part / self.size if kinds[place] == "replicated" else part
        numbers = self.to_host(torch.cat([*flat, heard]))
        self._met(told, numbers[-len(told.numbers) :])
        return numbers[: -len(told.numbers)]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers of the host over all ranks."""
        sent = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return self.to_host(self.reduce(sent, "sharded"))

    def of_first(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What the rank with number 0 holds: for numbers that the host computes, in its own way of rounding."""
        sent = torch.from_numpy(np.array(numbers, dtype=np.float64)).to(self._device)
        torch.distributed.broadcast(sent, 0)
        return np.asarray(self.to_host(sent), dtype=np.float64).reshape(np.shape(numbers))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def agree(self, decision: Decision, name: str = "the decision") -> Decision:
        """Note what this rank decided. Ranks compare it when they meet next, and stop where they do not agree."""
        self.agreement.add(decision, name)
        return decision

    def follow(self, steps: Callable[[], int], often: int) -> None:
        """steps: tells how many were done. often: steps after which ranks meet, where nothing else makes them."""
        self._steps, self._often = steps, often

    def compare(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """state: tells numbers by name that must be the same on all ranks whenever they meet."""
        self._compared.append(state)

    def vote(self, name: str, yes: bool) -> None:
        """Say yes or no to a question that each rank has an own answer to. It is counted when ranks meet next."""
        self._votes[name] = yes

    def every(self, name: str, yes: bool) -> bool:
        """Whether all ranks say yes: by the count of `vote` where there was one since it was last asked for; else they
        meet now."""
        return self._count_of(name, yes) == self.size

    def anyone(self, name: str, yes: bool) -> bool:
        """Whether a rank says yes, in the same way."""
        return self._count_of(name, yes) > 0

    def _count_of(self, name: str, yes: bool) -> int:
        if name not in self._counted:
            self.vote(name, yes)
            self.meet()
        return self._counted.pop(name)

    # --- meeting -----------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """A step is over: ranks meet now where the last time is long ago."""
        if self._underway is not None:
            self._take_in()
        elif self._is_due(self._steps()):
            self.meet()

    def _is_due(self, step: int) -> bool:
        return not 0 <= step - self._met_at < self._often

    def meet(self) -> None:
        """Compare what was decided, count votes and put means where `later` promised them, in one sum that has the same
        length wherever a rank stands: so ranks that came apart find it out, and do not wait for each other."""
        self._take_in()
        told = self._told()
        size = len(told.numbers)
        first, rest = self._later[: self._often], self._later[self._often :]
        vector = torch.zeros(size + self._often, dtype=torch.float64, device=self._device)
        vector[:size].copy_(self._sent(told.numbers))
        if first:
            vector[size : size + len(first)] = torch.stack(first).to(vector)
        total = self.reduce(vector, "sharded")
        self._met(told, self.to_host(total[:size]))
        if first:
            torch._foreach_copy_(first, list((total[size : size + len(first)] / self.size).unbind()))
        if rest:
            means = self.reduce(torch.stack(rest).double(), "replicated")
            torch._foreach_copy_(rest, list(means.unbind()))
        self._later = []

    def _told(self) -> _Told:
        """Sum up what this rank has decided, and its votes."""
        for state in self._compared:
            self.agreement.add(state(), "the state")
        names = sorted(self._votes)
        self.agreement.add([*names, len(self._later)], "what ranks tell each other")
        votes = [float(self._votes.pop(name)) for name in names][:_VOTES]
        numbers = self.agreement.signature() + votes + [0.0] * (_VOTES - len(votes))
        return _Told(names, len(self.agreement.entries), numbers)

    def _sent(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)

    def _take_in(self) -> None:
        """Look at what came along with the sum of a step."""
        if self._underway is not None:
            underway, self._underway = self._underway, None
            self._met(underway.told, self.to_host(underway.sums))

    def _met(self, told: _Told, sums: Sequence[float]) -> None:
        """sums: those of signatures and votes over all ranks."""
        self._met_at = self._steps()
        if not all_the_same(sums[:SIGNATURE], self.size):
            raise RanksError(self._disagreement())
        self.agreement.forget(told.decisions)
        self._counted.update(zip(told.names, (round(count) for count in sums[SIGNATURE:]), strict=False))

    def _disagreement(self) -> str:
        """Say what ranks disagree on. All of them ask, at the same time."""
        entries, step = self.agreement.entries, self._steps()
        fewest = int(self._one_number(len(entries), torch.distributed.ReduceOp.MIN))
        known = torch.tensor([entry.hash for entry in entries[:fewest]], dtype=torch.int64, device=self._device)
        first = known.clone()
        torch.distributed.broadcast(first, 0)
        differs = (known != first).long()
        torch.distributed.all_reduce(differs, op=torch.distributed.ReduceOp.MAX)
        places = [place for place, yes in enumerate(differs.tolist()) if yes]
        found: list[DecidedValue] = [entries[place] for place in places] or entries[fewest : fewest + 1]
        names = ", ".join(dict.fromkeys(entry.name for entry in found[:_NAMED])) or "how many decisions there were"
        own = f" (rank {self.rank} has {found[0].value})" if found else ""
        return (
            f"ranks disagree on {names} after step {step}{own}: they must see the same settings, the same numbers of "
            "batches and the same code; resume from the last checkpoint"
        )

    def _one_number(self, value: int, kind: Any) -> int:
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(number, op=kind)
        return int(self.to_host(number)[0])

    def all_well(self, words: str | None = None) -> FailedRank | None:
        """words: what failed on this rank; None: nothing did. Returns the first rank on which something failed, and its
        words, on all ranks. All of them must ask."""
        found = self._one_number(self.size if words is None else self.rank, torch.distributed.ReduceOp.MIN)
        if found == self.size:
            return None
        text = (words or "").encode()[:_WORDS].ljust(_WORDS, b"\0")
        sent = torch.tensor(list(text), dtype=torch.uint8, device=self._device)
        torch.distributed.broadcast(sent, found)
        told = bytes(int(byte) for byte in self.to_host(sent)).rstrip(b"\0").decode(errors="ignore")
        return FailedRank(found, told)


def settle(model: nn.Module) -> None:
    """To be called after every forward pass that no backward pass follows: `Syncing.settle` says why."""
    Syncing(model).settle()
