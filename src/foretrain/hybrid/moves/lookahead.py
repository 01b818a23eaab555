"""Look-ahead: full steps take their gradients where the average motion will have carried the weights.

Every k steps:   w' = w + beta m;   w+ = k steps from w';   m+ = g m + (1 - g)(w+ - w),   g = gamma^k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.events import Phase
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.moves.base import Move
from foretrain.persist.parts import local, spread_like
from foretrain.persist.stateful import Buffer


class LookAhead(StepHook, Move):
    """An excursion around `stride` full steps, over and over; it costs no step, and a step that fails undoes it.

    `m` is the average displacement per `stride` steps. Two buffers of the size of the weights, no host waits.
    share: how much of the full look-ahead the next excursion moves ahead by; 0 only measures the motion.
    """

    kind = "look-ahead"
    phase = Phase.FULL
    saved = ("m", "_before", "steps")
    m: list[Buffer]
    _before: list[Buffer]

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
        self._whole = list(parameters)
        self.parameters = [local(p) for p in parameters]
        self.steps = 0
        """Since the last move ahead."""
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self._before = [torch.zeros_like(p) for p in self.parameters]
        self._ahead = False
        """Moved ahead for a step that is not done yet."""

    def state_dict(self) -> dict[str, Any]:
        parts = {"m": spread_like(self.m, self._whole), "before": spread_like(self._before, self._whole)}
        return super().state_dict() | parts

    def before_step(self) -> None:
        if self.over:
            self.begin()

    @torch.no_grad()
    def begin(self, batch: Any = None) -> None:
        share = self.share()
        torch._foreach_copy_(self._before, self.parameters)
        self._ahead = True
        if share > 0:
            torch._foreach_add_(self.parameters, self.m, alpha=self.beta * share)

    def after_step(self, output: StepOutput) -> None:
        self.advance()

    @torch.no_grad()
    def advance(self, batch: Any = None) -> StepOutput | None:
        """A full step of the excursion is done."""
        self.steps += 1
        self._ahead = False
        if self.steps == self.stride:
            self.judge()
        return None

    @property
    def over(self) -> bool:
        return self.steps == 0

    def judge(self) -> Judgement:
        """It always stays: what is measured is the motion, for the next one."""
        self.steps = 0
        torch._foreach_sub_(self._before, self.parameters)
        torch._foreach_mul_(self.m, self.g)
        torch._foreach_sub_(self.m, self._before, alpha=1 - self.g)
        return Judgement(kept=True, worth_steps=0.0, cost_steps=0.0)

    @torch.no_grad()
    def undo(self) -> None:
        if self._ahead:
            torch._foreach_copy_(self.parameters, self._before)
        self._ahead = False

    def take_back(self) -> None:
        self.undo()

    def restart(self) -> None:
        """Something else moved the weights: these steps do not show their motion."""
        self.steps = 0
