"""A toy move: all weights become a little smaller, if that lowers the loss. docs/moves.md shows it."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.engine.step import StepOutput
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.moves.base import MoveKind, Outlook
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.leap import forward_only
from foretrain.hybrid.plan import Decision, Plan


class Shrink(JudgedMove):
    kind = "shrink"

    def predict(self, batch: Any) -> StepOutput | None:
        self.tools.engine.full_step.changing = True
        torch._foreach_mul_(self.tools.trajectory.parameters, 0.99)
        loss = self.probe()
        self.cost += FORWARD
        if not loss < self.anchor:
            self.refuse("smaller weights do not lower the loss")
            return None
        self.went(1)
        self.arrive(loss)
        return forward_only(loss)


class ShrinkKind(MoveKind):
    name = Shrink.kind

    def propose(self, outlook: Outlook) -> Decision | None:
        return Decision(self.name, horizon=1, audited=False, longest=1, reason="smaller weights are tried")

    def make(self, plan: Plan) -> Shrink:
        return Shrink(self.tools, plan)
