"""The blocks of a model, of which some may be hidden: a deep model that computes like a shallow one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from foretrain.errors import ConfigError
from foretrain.persist.parts import local

Pairs = list[tuple[str, str]]
"""Names of parameters: of a new block, and of the one that it is made from."""


def spread(layers: int, total: int) -> tuple[int, ...]:
    """Return which of `total` blocks are used where `layers` are: evenly spread, the first among them."""
    return tuple(-(-number * total // layers) for number in range(layers))


class _Some(nn.ModuleList):
    """A list that shows a part of its blocks to whoever goes through it. All of them are its modules."""

    active: tuple[int, ...]

    def _shown(self) -> list[nn.Module]:
        return [self._modules[str(number)] for number in self.active]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self.active)

    def __getitem__(self, place: Any) -> Any:
        shown = self._shown()[place]
        return nn.ModuleList(shown) if isinstance(shown, list) else shown


def show_all(model: nn.Module) -> None:
    """Give a model back the blocks that a run has hidden: it may have ended before they were wanted."""
    hidden: list[Any] = [module for module in model.modules() if isinstance(module, _Some)]
    for blocks in hidden:
        blocks.__class__ = nn.ModuleList
        blocks.requires_grad_(True)


class Depth:
    """Hides blocks of a `ModuleList` from the model, and makes them from others when they are wanted. A block that is
    hidden stays in the model under its name, and is not trained."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """name: of the list of blocks, such as "blocks" or "transformer.h"."""
        self.model, self.name = model, name
        show_all(model)
        self.list = _blocks(model, name)
        self.blocks = list(self.list)
        self.total = len(self.blocks)
        self.active: tuple[int, ...] = tuple(range(self.total))
        frozen = [own for own, p in self.list.named_parameters() if not p.requires_grad]
        if frozen:
            raise ConfigError(f"growth.layers needs all of {name} to be trained, but {name}.{frozen[0]} is frozen")
        _check_alike(self.blocks, name)

    @property
    def layers(self) -> int:
        """Blocks that are used."""
        return len(self.active)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all blocks."""
        return list(self.list.parameters())

    def use(self, active: Iterable[int]) -> None:
        """Show these blocks to the model; hide all others, and do not train them."""
        self.active = tuple(sorted(active))
        everything = self.layers == self.total
        self.list.__class__ = nn.ModuleList if everything else _Some
        self.list.__dict__["active"] = self.active
        for number, block in enumerate(self.blocks):
            used = number in self.active
            block.requires_grad_(used)
            for parameter in () if used else block.parameters():
                parameter.grad = None

    @property
    def can_be_silent(self) -> bool:
        """Blocks that are hidden add nothing, so that it makes no difference whether they are shown."""
        return all(hasattr(block, "silence") for block in self.blocks)

    @torch.no_grad()
    def silence(self) -> None:
        """Let blocks that are hidden add nothing where they can: then the whole model, wherever it is read, gives
        what the shallow one does."""
        for number, block in enumerate(self.blocks):
            silence = getattr(block, "silence", None)
            if number not in self.active and silence is not None:
                silence()

    def sources(self, active: Iterable[int]) -> dict[int, int]:
        """Return for each block that would be new which one it would be made from: the last one before it."""
        new = sorted(set(active) - set(self.active))
        return {number: max(one for one in self.active if one <= number) for number in new}

    @torch.no_grad()
    def copy(self, sources: dict[int, int]) -> Pairs:
        """Make new blocks from others, parameters and buffers. Returns the names of the parameters."""
        pairs: Pairs = []
        for number, source in sources.items():
            new, old = self.blocks[number], self.blocks[source]
            for here, there in zip(new.buffers(), old.buffers(), strict=True):
                local(here).copy_(local(there))
            for (name, here), there in zip(new.named_parameters(), old.parameters(), strict=True):
                local(here).copy_(local(there))
                pairs.append((f"{self.name}.{number}.{name}", f"{self.name}.{source}.{name}"))
        return pairs


@torch.no_grad()
def copy_state(optimizer: Optimizer, model: nn.Module, pairs: Pairs) -> None:
    """Give parameters the optimizer's state of those that they were made from, in memory of their own."""
    named = dict(model.named_parameters())
    for new, old in pairs:
        if (state := optimizer.state.get(named[old])) is not None:
            optimizer.state[named[new]] = copy.deepcopy(state)


def _blocks(model: nn.Module, name: str) -> nn.ModuleList:
    try:
        blocks = model.get_submodule(name)
    except AttributeError:
        blocks = None
    if type(blocks) is nn.ModuleList and len(blocks) > 1:
        return blocks
    lists = [own for own, module in model.named_modules() if type(module) is nn.ModuleList and len(module) > 1]
    what = f"growth.blocks = {name!r} names no nn.ModuleList of blocks in {type(model).__name__}"
    raise ConfigError(f"{what}; {'it has ' + ', '.join(map(repr, lists)) if lists else 'it has none to grow by'}")


def _check_alike(blocks: Sequence[nn.Module], name: str) -> None:
    """Refuse blocks that cannot be made from each other, and those that share weights."""
    first = [(own, p.shape) for own, p in blocks[0].named_parameters()]
    seen: set[int] = set()
    for number, block in enumerate(blocks):
        if [(own, p.shape) for own, p in block.named_parameters()] != first:
            raise ConfigError(f"growth.layers: {name}.{number} has other parameters than {name}.0, so it cannot grow")
        numbers = {id(p) for p in block.parameters()}
        if numbers & seen:
            raise ConfigError(f"growth.layers: {name}.{number} shares weights with a block before it")
        seen |= numbers
