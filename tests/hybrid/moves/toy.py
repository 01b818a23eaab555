"""A toy move: all weights become a little smaller, if that lowers the loss. docs/moves.md shows it."""

from typing import Any

import torch

from foretrain.engine.step import StepOutput
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
        self.cost += self.tools.probes.price(self.batch)
        if not loss < self.anchor:
            self.refuse("smaller weights do not lower the loss")
            return None
        if self.tools.engine.average is not None:
            self.tools.engine.average.follow(self.tools.snapshots.weights())
        self.went(1)
        self.arrive(loss)
        return forward_only(loss)


class ShrinkKind(MoveKind):
    name = Shrink.kind

    def propose(self, outlook: Outlook) -> Decision | None:
        audited = not outlook.low_noise
        return Decision(self.name, horizon=1, audited=audited, longest=1, reason="smaller weights are tried")

    def make(self, plan: Plan) -> Shrink:
        return Shrink(self.tools, plan)
