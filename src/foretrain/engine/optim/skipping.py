"""Optimizers that skip a bad step on the device, as torch's fused ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SkippingOptimizer(Optimizer):
    """Takes part in loss scaling and in skipping of non-finite steps as torch's fused optimizers do: through the
    attributes `grad_scale` and `found_inf`, on the device, without a host synchronisation."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step for those parameters of a group that have gradients."""
        raise NotImplementedError
