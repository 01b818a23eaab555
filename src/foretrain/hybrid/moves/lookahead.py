"""Look-ahead: full steps take their gradients where the average motion will have carried the weights.

Every k steps:   w' = w + beta m;   w+ = k steps from w';   m+ = g m + (1 - g)(w+ - w),   g = gamma^k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.host import copy_each
from foretrain.engine.step import StepOutput


class LookAhead(StepHook):
    """`m` is the average displacement per `stride` steps. Two buffers of the size of the weights, no host waits.

    share: how much of the full look-ahead the next step moves ahead by; 0 only measures the motion.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        beta: float,
        gamma: float,
        stride: int = 1,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.beta = beta
        self.share = share
        self.stride = stride
        self.g = gamma**stride
        self.cover(parameters)

    def cover(self, parameters: Sequence[Tensor]) -> None:
        """Watch these from now on, of whose motion nothing is known yet."""
        self.parameters = [p.detach() for p in parameters]
        self.steps = 0
        """Since the last move ahead."""
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self._before = [torch.zeros_like(p) for p in self.parameters]
        self._ahead = False
        """Moved ahead for a step that is not done yet."""

    @torch.no_grad()
    def before_step(self) -> None:
        if self.steps:
            return
        share = self.share()
        torch._foreach_copy_(self._before, self.parameters)
        self._ahead = True
        if share > 0:
            torch._foreach_add_(self.parameters, self.m, alpha=self.beta * share)

    @torch.no_grad()
    def after_step(self, output: StepOutput) -> None:
        self.steps += 1
        self._ahead = False
        if self.steps < self.stride:
            return
        self.steps = 0
        torch._foreach_sub_(self._before, self.parameters)
        torch._foreach_mul_(self.m, self.g)
        torch._foreach_sub_(self.m, self._before, alpha=1 - self.g)

    @torch.no_grad()
    def take_back(self) -> None:
        if self._ahead:
            torch._foreach_copy_(self.parameters, self._before)
        self._ahead = False

    def restart(self) -> None:
        """Something else moved the weights: these steps do not show their motion."""
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"m": list(self.m), "before": list(self._before), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_each(self.m, state["m"])
        before = state.get("before")
        self.steps = int(state["steps"]) if before is not None else 0
        if before is not None:
            copy_each(self._before, before)
