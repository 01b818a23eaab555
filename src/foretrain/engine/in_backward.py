"""Updates inside the backward pass: each gradient is used and freed as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.engine.optim import supports_device_skip
from foretrain.errors import ConfigError


class UpdatesInBackward:
    """Makes the backward pass update the parameters, so that gradients never all exist at once.

    Every parameter is updated by the optimizer itself, as if it were its only one; the result is that of one update at
    the end, bit for bit (Muon's up to rounding: it takes one matrix at a time instead of a batch). A loss that is
    not finite changes nothing. A gradient that is not finite leaves its own parameter and moments as they are, and
    the step counts as skipped; but parameters whose gradients were finite have been updated by then. What limits
    gradients in an emergency (`limit`) acts on each parameter by itself: the norm of all is not known in time.
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
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        self._groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._norms: dict[int, Tensor] = {}
        self._loss_is_finite: Tensor | None = None
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_complete)  # type: ignore[no-untyped-call]

    @contextmanager
    def during(self, loss: Tensor) -> Iterator[None]:
        """Inside the block a backward pass updates; elsewhere it only leaves gradients, as always."""
        self._norms.clear()
        self._loss_is_finite = torch.isfinite(loss.detach())
        try:
            yield
        finally:
            self._loss_is_finite = None

    def norm(self) -> Tensor:
        """Of all gradients of the last backward pass together."""
        norms = [self._norms[place] for place in sorted(self._norms)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def norms(self, absent: Tensor) -> list[Tensor]:
        """Of the gradient of each parameter; `absent` for one that had none."""
        return [self._norms.get(place, absent) for place in range(len(self._places))]

    @torch.no_grad()
    def _gradient_is_complete(self, parameter: Any) -> None:
        if self._loss_is_finite is None or parameter.grad is None:
            return
        for watcher in self.watchers:
            watcher(parameter)
        norm = torch._foreach_norm([parameter.grad])[0]  # the same bits as among all others
        self._norms[self._places[parameter]] = norm
        if parameter in self._groups:
            self._update(parameter, norm, self._loss_is_finite)
        parameter.grad = None

    def _update(self, parameter: nn.Parameter, norm: Tensor, loss_is_finite: Tensor) -> None:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if self.limit > 0:
            optimizer.grad_scale = (norm / self.limit).clamp(min=1.0).float()
        if self.nan_check:
            optimizer.found_inf = torch.logical_not(torch.isfinite(norm) & loss_is_finite).float()
        optimizer.param_groups = [{**groups[self._groups[parameter]], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            optimizer.grad_scale = optimizer.found_inf = None
