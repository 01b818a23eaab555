"""A rollout: one predicted step at a time; forward passes on the incoming batches watch it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foretrain.engine.memory.host import add_each
from foretrain.engine.step import StepOutput
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.moves.base import MoveKind
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.leap import forward_only
from foretrain.hybrid.plan import FORECAST, Decision, Plan


class Rollout(JudgedMove):
    """Follows the forecast step by step up to its horizon. The guard watches it and may end it before."""

    kind = "rollout"

    def predict(self, batch: Any) -> StepOutput | None:
        self._step_ahead()
        loss, expected, last = math.nan, None, self.moved >= self.plan.horizon
        if self.moved % self.tools.engine.config.hybrid.monitor_interval == 0 or last:
            loss = self.probe(batch)
            self.cost += FORWARD
            expected = self._expected_loss()
        view, leaving = self.tools.monitor(self, loss, expected, last)
        if not leaving.changed:
            return forward_only(loss)
        if leaving.undo:
            self.refuse(leaving.reason)
            return None
        arrived = self.probe()
        self.cost += self.tools.probes.price(self.batch)
        if self.judge_of_move.exact and not arrived < self.anchor:
            self.refuse("the exact loss is no lower than before")
            return None
        self.arrive(arrived, view)
        return forward_only(loss if math.isfinite(loss) else arrived)

    def _step_ahead(self) -> None:
        """Move the weights by the next predicted step."""
        engine, probes, forecast = self.tools.engine, self.tools.probes, self.plan.forecast
        if forecast is None:
            raise RuntimeError("nothing is forecast")  # a rollout is planned with a forecast only
        config, steps_left = engine.config, self.plan.horizon - self.moved - 1
        if steps_left >= config.memory.return_ahead:
            probes.offload()  # it is here after a resumption
        probes.bring_back(steps_left)
        step = forecast.at(self.moved + 1) - forecast.at(self.moved)
        interval = config.hybrid.correction_interval
        if interval and (self.moved + 1) % interval == 0:
            step = step + self.tools.suggestion(step * interval, interval)
        displacement = self.tools.trajectory.displacement(step)
        engine.full_step.changing = True
        add_each(self.tools.trajectory.parameters, displacement)
        if engine.average is not None:
            engine.average.shift(displacement, 1.0)
        self.went(1)

    def _expected_loss(self) -> float:
        forecast = self.plan.forecast
        if forecast is None:
            return math.nan
        return float(np.interp(self.moved, (0, *forecast.horizons), (self.anchor, *forecast.loss)))


class RolloutKind(MoveKind):
    """Makes rollouts where `hybrid.mode` asks for them."""

    name = Rollout.kind

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        wanted = decision.kind == FORECAST and self.tools.engine.config.hybrid.mode == "rollout"
        return wanted or decision.kind == self.name, 0.0

    def make(self, plan: Plan) -> Rollout:
        return Rollout(self.tools, plan)
