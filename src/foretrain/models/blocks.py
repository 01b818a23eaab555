"""The blocks that a model goes through one after the other, whoever wrote it."""

from __future__ import annotations

from collections import Counter

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, each of which can be compiled and sharded by itself; none where it has no list of
    them.

    Ours call the list `blocks`; in models of transformers it has many names, and lies somewhere inside. It is the list
    of modules that holds the most numbers. A block that shares weights with another part of the model is left out.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=())
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return [block for block in largest if all(uses[id(p)] == 1 for p in block.parameters())]
