"""Blocks that are computed again in the backward pass: which ones, and how a block of any kind is made to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed_blocks(layers: int, share: float) -> frozenset[int]:
    """Return which blocks are computed again in the backward pass: a share of them, at least one, evenly spread."""
    count = max(1, round(share * layers)) if share > 0 else 0
    return frozenset(layer for layer in range(layers) if (layer + 1) * count // layers > layer * count // layers)


def of_transformers(module: nn.Module) -> bool:
    """Return whether it is a block as transformers marks them: it recomputes itself, and leaves out its cache then."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def check_block(block: nn.Module, name: str) -> str:
    """Return why a block cannot be recomputed; empty where it can."""
    if isinstance(block, torch.jit.ScriptModule):
        return f"{name} is compiled by torch.jit"
    return ""


_OWN = ("resting", "used")


class Recomputed(nn.Module):
    """A block of somebody's own that keeps its inputs only. It becomes one while it is trained, by `recompute`."""

    resting: bool
    """Computed once all the same, while somebody watches what happens inside."""
    used: bool
    """It was asked to compute something that has gradients, as far as code that is not compiled can tell."""

    def forward(self, *given: Any, **named: Any) -> Any:
        plain = super().forward
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.used = True  # compiled code would be compiled anew when this changes
        if self.resting or not (self.training and torch.is_grad_enabled()):
            return plain(*given, **named)
        return _checkpointed(partial(_called, plain, len(given), tuple(named)), (*given, *named.values()), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, and what is pickled, is the block as it was."""
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in _OWN}
        return object.__new__, (_kind_before(self),), state


def _called(plain: Callable[..., Any], places: int, names: tuple[str, ...], *values: Any) -> Any:
    """Call a block with arguments by name, which came by place: whose device is a GPU's is seen by place only."""
    return plain(*values[:places], **dict(zip(names, values[places:], strict=True)))


def _checkpointed(function: Callable[..., Any], given: tuple[Any, ...], block: nn.Module) -> Any:
    """Compute now, and once more in the backward pass with the same random numbers."""
    changing = [buffer for buffer in block.buffers() if buffer is not None]
    if not changing or torch.compiler.is_compiling():
        return checkpoint(function, *given, use_reentrant=False)
    contexts = partial(_counted_once, changing)
    return checkpoint(function, *given, use_reentrant=False, context_fn=contexts)


def _counted_once(buffers: list[Tensor]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Running statistics have seen the batch in the forward pass."""
    return nullcontext(), _kept(buffers)


@contextmanager
def _kept(buffers: list[Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # autograd has it, and counts what changes it


def _kind_before(block: nn.Module) -> type[nn.Module]:
    return type(block).__mro__[2]


@cache
def _recomputed_kind(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def recompute(block: nn.Module, wanted: bool) -> None:
    """Let a block of somebody's own be computed again in the backward pass, or once only as it was."""
    if of_transformers(block):
        block.gradient_checkpointing = wanted  # type: ignore[assignment]
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        return
    if isinstance(block, Recomputed) == wanted:
        return
    if wanted:
        kind: Any = type(block)
        block.__class__ = _recomputed_kind(kind)
        block.__dict__.update(resting=False, used=False)
    else:
        block.__class__ = _kind_before(block)
        for name in _OWN:
            del block.__dict__[name]


@contextmanager
def computed_once(model: nn.Module) -> Iterator[None]:
    """Compute all blocks of a model only once inside the block: what is recorded there would be recorded twice."""
    put_back: list[tuple[nn.Module, str, Any]] = []
    name: str
    resting: Any
    for module in model.modules():
        if isinstance(module, Recomputed):
            name, resting = "resting", True
        elif of_transformers(module):
            name, resting = "gradient_checkpointing", False
        elif isinstance(module.__dict__.get("recomputed"), frozenset):  # numbers of blocks, of a GPT-2 of ours
            name, resting = "recomputed", frozenset()
        else:
            continue
        put_back.append((module, name, getattr(module, name)))
        setattr(module, name, resting)
    try:
        yield
    finally:
        for module, name, before in put_back:
            setattr(module, name, before)
