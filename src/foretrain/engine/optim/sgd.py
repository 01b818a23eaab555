"""SGD on parts of weights: torch's fused step knows no tensors that are spread over processes, but it knows parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd

from foretrain.persist.parts import local


class SGDOnParts(SGD):
    """Takes torch's own fused step on what this process holds of each weight. Its state is spread as they are."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            momenta = [self.state[p].get("momentum_buffer") for p in trained]
            sgd(
                [local(p) for p in trained],
                [local(p.grad) for p in trained],
                [None if momentum is None else local(momentum) for momentum in momenta],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                has_sparse_grad=False,
                foreach=False,
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
        return loss
