"""Updates inside the backward pass: gradients are used and freed soon after they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.engine.optim.build import supports_device_skip
from foretrain.errors import ConfigError

BATCHES = 32
"""Gradients wait until they are this part of all of them and are then used together: an update for each one alone
takes as long as a quarter of a step (124M on an H200), to launch it."""


def waiting_bytes(trained: int) -> int:
    """So much of all gradients may wait for their update. trained: bytes of all of them."""
    return trained // BATCHES


class UpdatesInBackward:
    """Makes the backward pass update the parameters, so that gradients never all exist at once.

    A few parameters at a time are updated by the optimizer itself, as if they were its only ones; the result is that of
    one update at the end, bit for bit (Muon's up to rounding: its batches of matrices are smaller). A loss that is not
    finite changes nothing. A gradient that is not finite leaves its own parameter and those updated with it as they
    are, and the step counts as skipped; but others have been updated by then. What limits gradients in an emergency
    (`limit`) acts on each parameter by itself: the norm of all is not known in time.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], nan_check: bool) -> None:
        if not supports_device_skip(optimizer):
            raise ConfigError(
                f"engine.update_in_backward = true needs an optimizer that can skip a bad gradient by itself, which "
                f"{type(optimizer).__name__} cannot; use a fused one (adamw, adam, sgd or muon), or set it to false"
            )
        self.optimizer: Any = optimizer
        self.nan_check = nan_check
        self.limit = 0.0
        """Largest norm of one parameter's gradient. 0: any."""
        self.watchers: list[Callable[[nn.Parameter], None]] = []
        """Called with each parameter while its gradient is there."""
        self._norms: dict[int, Tensor] = {}
        self._waiting: list[nn.Parameter] = []
        """Their gradients are complete and not used yet."""
        self._loss_is_finite: Tensor | None = None
        self._places: dict[nn.Parameter, int] = {}
        self._groups: dict[nn.Parameter, int] = {}
        self._enough = 0
        self._hooked: set[nn.Parameter] = set()
        self.cover(parameters)

    def cover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update these from now on."""
        groups = self.optimizer.param_groups
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        self._groups = {p: index for index, group in enumerate(groups) for p in group["params"]}
        self._enough = waiting_bytes(sum(p.numel() * p.element_size() for p in parameters))
        complete = WeakMethod(self._gradient_is_complete)  # a parameter would keep the optimizer, and so itself, alive

        def hook(parameter: nn.Parameter) -> None:
            if (act := complete()) is not None:
                act(parameter)

        for parameter in parameters:
            if parameter not in self._hooked:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked.add(parameter)

    @contextmanager
    def during(self, loss: Tensor) -> Iterator[None]:
        """Inside the block a backward pass updates; elsewhere it only leaves gradients, as always."""
        self._norms.clear()
        self._loss_is_finite = torch.isfinite(loss.detach())
        try:
            yield
            self._use()
        finally:
            self._waiting.clear()
            self._loss_is_finite = None

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the last backward pass together."""
        norms = [self._norms[place].float() for place in sorted(self._norms)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def norms(self, absent: Tensor) -> list[Tensor]:
        """Return the norm of each parameter's gradient; `absent` for one that had none."""
        return [self._norms.get(place, absent) for place in range(len(self._places))]

    @torch.no_grad()
    def _gradient_is_complete(self, parameter: nn.Parameter) -> None:
        if self._loss_is_finite is None or parameter.grad is None or parameter not in self._places:
            return
        for watcher in self.watchers:
            watcher(parameter)
        self._waiting.append(parameter)
        if sum(p.numel() * p.element_size() for p in self._waiting) >= self._enough:
            self._use()

    @torch.no_grad()
    def _use(self) -> None:
        """Update what waits, and free its gradients."""
        waiting, self._waiting = self._waiting, []
        gradients: list[Any] = [p.grad for p in waiting]
        norms = torch._foreach_norm(gradients) if waiting else ()  # the same bits as among all others
        self._norms |= {self._places[p]: norm for p, norm in zip(waiting, norms, strict=True)}
        known = [(p, norm) for p, norm in zip(waiting, norms, strict=True) if p in self._groups]
        together = [known] if known and self.limit <= 0 else [[one] for one in known]
        for some in together:
            self._update([p for p, _ in some], torch.stack([norm for _, norm in some]))
        for parameter in waiting:
            parameter.grad = None

    def _update(self, parameters: list[nn.Parameter], norms: Tensor) -> None:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if self.limit > 0:
            optimizer.grad_scale = (norms[0] / self.limit).clamp(min=1.0).float()
        if self.nan_check and self._loss_is_finite is not None:
            finite = torch.isfinite(norms).all() & self._loss_is_finite
            optimizer.found_inf = torch.logical_not(finite).float()
        places = {self._groups[p] for p in parameters}
        optimizer.param_groups = [
            {**groups[place], "params": [p for p in parameters if self._groups[p] == place]} for place in sorted(places)
        ]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            optimizer.grad_scale = optimizer.found_inf = None
