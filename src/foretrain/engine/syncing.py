"""What DistributedDataParallel and FSDP2 do around passes: gradients are reduced, and weights are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from foretrain.errors import ConfigError


class Syncing:
    """Knows how a model is wrapped. For a model of one process it does nothing."""

    def __init__(self, model: nn.Module, loss_function: Any = None) -> None:
        self._replicated: Any = replicas_of(model, loss_function)
        self._reduced = self._trained()
        self._sharded: list[Any] = [module for module in model.modules() if _gathers(module)]

    def _trained(self) -> set[int]:
        parameters = () if self._replicated is None else self._replicated.parameters()
        return {id(parameter) for parameter in parameters if parameter.requires_grad}

    def follow_trained(self) -> None:
        """Other weights are trained than before. DistributedDataParallel goes by those that were trained when it was
        made: it would wait for a gradient of one that is frozen since, and leave out one that is trained since, so that
        replicas come apart. So its reducer is made anew, as it is when a copy of such a model is unpickled."""
        trained = self._trained()
        if trained == self._reduced:
            return
        replicas = self._replicated
        try:
            state = replicas.__getstate__()
        except RuntimeError as error:
            raise ConfigError(
                "DistributedDataParallel has a process group of its own, so it cannot follow when weights are frozen, "
                "unfrozen or grown in mid-run: make it without process_group"
            ) from error
        hooks, state["_comm_hooks"] = state.get("_comm_hooks", []), []
        self._reduced = set()
        replicas.reducer = replicas.logger = None  # its buckets make room for the new ones
        replicas.__setstate__(state)
        for hook, of_hook in hooks:
            replicas.register_comm_hook(of_hook, hook)
        self._reduced = trained

    def with_last(self, last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in the backward pass of the last part of a batch only, over all parts."""
        if self._replicated is not None and not last:
            quiet: AbstractContextManager[Any] = self._replicated.no_sync()
            return quiet
        return self._sharded_alone(last) if self._sharded else nullcontext()

    @contextmanager
    def _sharded_alone(self, last: bool) -> Iterator[None]:
        for module in self._sharded:
            module.set_requires_gradient_sync(last, recurse=False)
        try:
            yield
        finally:
            for module in self._sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Passes inside the block are each replica's own, be they as many as it wants: nothing is sent in them, no
        gradients and no buffers."""
        replicated = self._replicated
        if replicated is None:
            yield
            return
        before, replicated.require_forward_param_sync = replicated.require_forward_param_sync, False
        try:
            with replicated.no_sync():
                yield
        finally:
            replicated.require_forward_param_sync = before

    def settle(self) -> None:
        """Let go of weights that FSDP2 gathered for a forward pass without a backward pass: it would use them again in
        the next one, though they were moved meanwhile."""
        for module in self._sharded:
            module.reshard()


def replicas_of(model: nn.Module, loss_function: Any = None) -> nn.parallel.DistributedDataParallel | None:
    """Return what averages the gradients of replicas: the model itself, or what its loss goes through."""
    for found in (model, getattr(loss_function, "replicas", None)):
        if isinstance(found, nn.parallel.DistributedDataParallel):
            return found
    return None


def _gathers(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("reshard", "unshard", "set_requires_gradient_sync"))


def inside_replicas(model: nn.Module) -> nn.Module:
    """Return the module that DistributedDataParallel is around, or the module itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def prepared_for_loss(model: nn.Module) -> None:
    """A model that FSDP2 shards gathers its weights for `forward` only: also for its own method `loss` from now on."""
    if _gathers(model) and hasattr(model, "loss"):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, "loss")


def loss_through(model: nn.Module, batch: Any) -> Tensor | None:
    """The loss of a module inside DistributedDataParallel by the module's own method `loss`, through the wrapper's
    forward pass, which prepares the reduction of gradients; None where there is no such method."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
    method: Callable[[Any], Tensor] | None = getattr(inner, "loss", None)
    if inner is None or method is None:
        return None
    of_module = inner.__dict__.get("forward")

    def as_it_was() -> None:
        if of_module is None:
            inner.__dict__.pop("forward", None)
        else:
            inner.__dict__["forward"] = of_module

    def forward(batch: Any) -> Tensor:
        as_it_was()  # the method calls it
        return method(batch)

    inner.__dict__["forward"] = forward
    try:
        loss: Tensor = model(batch)
        return loss
    finally:
        as_it_was()
