"""Look-ahead: a full step takes its gradient at the point where the average motion will have carried the weights.

w' = w + beta m;   w+ = step(w');   m+ = gamma m + (1 - gamma)(w+ - w)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LookAhead:
    """`m` is the average displacement per step. Two buffers of the size of the weights, no host waits."""

    def __init__(self, parameters: Sequence[Tensor], beta: float, gamma: float) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.beta = beta
        self.gamma = gamma
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self._before = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def before_step(self, share: float) -> None:
        """Move ahead by `share` of the full look-ahead; 0 only measures the motion."""
        torch._foreach_copy_(self._before, self.parameters)
        if share > 0:
            torch._foreach_add_(self.parameters, self.m, alpha=self.beta * share)

    @torch.no_grad()
    def after_step(self) -> None:
        torch._foreach_sub_(self._before, self.parameters)
        torch._foreach_mul_(self.m, self.gamma)
        torch._foreach_sub_(self.m, self._before, alpha=1 - self.gamma)

    def state_dict(self) -> dict[str, Any]:
        return {"m": list(self.m)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch._foreach_copy_(self.m, [value.to(self.m[0].device) for value in state["m"]])
