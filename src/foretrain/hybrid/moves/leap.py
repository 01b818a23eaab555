"""A leap: the whole forecast displacement at once, or as much of it as probes allow."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.engine.step import StepOutput
from foretrain.hybrid.moves import search
from foretrain.hybrid.moves.base import MoveKind
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.products import Products
from foretrain.hybrid.plan import FORECAST, Decision, Plan

_FIRST_HELD_OUT = 0.25
"""Share with which a search on held-out examples begins. Chosen: where not even that helps the rate is good, and two
probes are all that is lost."""


class Leap(JudgedMove):
    """Goes to the horizon in one step. `products`: low-rank factors that move as their product does."""

    kind = "leap"
    products: Products | None = None

    def predict(self, batch: Any) -> StepOutput | None:
        tools, plan = self.tools, self.plan
        if plan.coefficients is None:
            raise RuntimeError("nothing is forecast")  # a leap is planned with a forecast only
        start = tools.snapshots.weights()
        displacement = tools.trajectory.displacement(plan.coefficients)
        moved, probes = False, 0
        tools.engine.full_step.changing = True

        def place(share: float) -> None:
            nonlocal moved
            tools.trajectory.place(start if moved else None, displacement, share)
            moved = True
            if self.products is not None and share:
                self.products.place(start, displacement, share)

        def probe() -> float:
            nonlocal probes
            probes += 1
            if probes > plan.searched:  # a search hardly ends with its first probe; any other may be the last
                tools.probes.bring_back(0)
            return self.probe()

        if plan.searched and tools.probes.batches:
            found = search.search(place, probe, self.anchor, _FIRST_HELD_OUT, shorter=())
        elif plan.searched:
            found = search.search(place, probe, self.anchor)
        else:
            found = search.careful(place, probe, plan.disaster_limit(self.anchor))
        self.cost += tools.probes.price(self.batch) * found.probes
        if found.share == 0:
            self.refuse("no length of the move lowers the loss" if plan.searched else "the loss rose beyond noise")
            return None
        if tools.engine.average is not None:
            tools.engine.average.follow(start)
        self.share = found.share
        self.went(max(1, min(round(found.share * plan.horizon), plan.longest)))
        self.arrive(found.loss)
        return forward_only(found.loss)


class LeapKind(MoveKind):
    """Makes leaps where `hybrid.mode` asks for them."""

    name = Leap.kind

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        wanted = decision.kind == FORECAST and self.tools.engine.config.hybrid.mode == "leap"
        return wanted or decision.kind == self.name, 0.0

    def make(self, plan: Plan) -> Leap:
        move = Leap(self.tools, plan)
        move.products = self.products
        return move

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.products: Products | None = None
        self.cover()

    def cover(self) -> None:
        engine = self.tools.engine
        if engine.config.hybrid.space == "product":
            self.products = Products.of(engine.named, self.tools.trajectory.parameters)


def forward_only(loss: float) -> StepOutput:
    """The output of a step without a gradient."""
    return StepOutput(torch.tensor(loss), torch.tensor(torch.nan), torch.zeros(()))
