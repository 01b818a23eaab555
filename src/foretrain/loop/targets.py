"""What a run is to reach: an end in time (`max_time`), a held-out loss (`until_loss`), or both. It plans the end of the
run and the decay of its learning rate, and revises the plan while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from foretrain.config import Config, ScheduleConfig
from foretrain.config.kinds import MOST
from foretrain.config.units import clock, loss_text
from foretrain.engine.engine import Engine
from foretrain.engine.rates import FollowedRates
from foretrain.engine.schedule import DECAY_SHARE, LONGEST_WARMUP, DecayPlan, planned_decay, warmup_of
from foretrain.errors import ConfigError
from foretrain.events import Event, Notice, Planned
from foretrain.forecast import plans
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import LossCurve, LossForecast, RatePlan
from foretrain.hybrid.annealing import AnnealedCopies
from foretrain.loop.deadline import Deadline
from foretrain.loop.forecaster import LossForecaster
from foretrain.loop.goal import Goal, GoalOutlook
from foretrain.persist.stateful import Stateful

_SURELY = 3
"""Evaluations in a row that must say that a goal is out of reach before it is told."""
_UNSURE = 2.0
"""What an interval that is not calibrated is widened by, before a goal is said to be out of reach. Chosen: one of ten
runs was told so wrongly without."""
_EARLIEST = 0.1
"""Share of the run before which nothing is said of that: a law needs something to go by, and an annealed copy."""

_EXPECTED = 0.4
"""Share of its limit that a run to a goal is taken to have, for its warm-up: 2 % of the limit. Chosen: a warm-up for
the whole limit took more than half of the steps that easy goals need."""


class Targets(Stateful):
    """The part of a trainer that knows `max_time` and `until_loss`. Without `fit` nothing follows them."""

    saved = ("max_time", "until_loss", "usual", "end", "limited", "settled", "unreachable", "deadline", "goal")
    max_time: float | None
    until_loss: float | None
    usual: DecayPlan
    deadline: Deadline | None
    goal: Goal | None

    def __init__(self, engine: Engine, emit: Callable[[Event], None]) -> None:
        config, rate = engine.config, engine.rate
        self.engine, self.emit = engine, emit
        self.max_time, self.until_loss = config.max_time, config.until_loss
        self.own_rate = isinstance(rate, FollowedRates)
        self.limit = config.max_steps if config.steps_are_limited and config.epochs is None else None
        """Steps of the run at the most, where somebody has said so."""
        warmup = config.schedule.warmup_steps
        self.settled = warmup is not None
        """The length of the warm-up is decided: until the pace is known it is the longest one."""
        self.usual = DecayPlan(LONGEST_WARMUP if warmup is None else warmup, MOST - 1, 0.0, MOST)
        """The decay towards the end of the run."""
        self.end = self.limit or MOST
        """Steps of the run, as far as can be told by now."""
        self.limited = self.limit is not None
        """They are limited by `max_steps` or `epochs`, not by the clock."""
        self.unreachable = 0
        self.clock: Callable[[], float] | None = None
        """A clock instead of the one that `begin` is given: seconds of all parts of the run."""
        self.racing: Callable[[], bool] = lambda: False
        """Tells whether learning rates are still tried: nothing is decided by what the run shows then. Set by the
        trainer."""
        self.begun = False
        self.copies: AnnealedCopies | None = None
        self.deadline = None if self.max_time is None else Deadline(self.max_time)
        self.goal = None
        engine.world.compare(lambda: {"planned_end": self.end, "decay": self.plan})
        if self.until_loss is not None:
            kept = config.schedule.model_copy(update={"type": "constant"}) if self.own_rate else config.schedule
            self.goal = Goal(self.until_loss, kept, kept.final_rate / rate.peak if rate.peak else 0.0)
            self.goal.world = engine.world

    def learn_from(self, copies: AnnealedCopies, forecaster: LossForecaster | None) -> None:
        """Use what annealed copies measure, and what finished runs of the same kind have shown."""
        if self.goal is None:
            return
        self.goal.annealed = lambda: copies.points
        self.copies = copies
        if forecaster is not None:
            known = forecaster

            def with_others(curve: LossCurve, plan: RatePlan) -> LossForecast | None:
                curve = replace(curve, kind=known.kind)
                return forecast(curve, known.siblings, known.level, known.history, plan=plan)

            self.goal.forecast = with_others

    # --- the beginning -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse steps of a loop of one's own: nobody would end them."""
        if not self.begun:
            name = "max_time" if self.max_time is not None else "until_loss"
            raise ConfigError(f"{name} is for fit(), which plans the run; in a loop of your own leave it out")

    def begin(self, spent: Callable[[], float], batches: int, saves: bool) -> None:
        """The run begins, or goes on. spent: the seconds of all its parts. batches: held-out ones. saves: it has a
        folder."""
        self.begun = True
        step = self.engine.progress.global_step
        total = getattr(getattr(self.engine.rate, "scheduler", None), "total_steps", None)
        if total is not None:  # OneCycleLR cannot go on after them
            self.limit = min(total, self.limit or total)
        if self.goal is not None:
            if not batches:
                raise ConfigError("until_loss is a held-out loss: give held-out data, or use max_steps or max_time")
            self.goal.batches = batches
        if self.deadline is not None:
            self.deadline.clock = self.clock or spent
            if self.engine.world.size > 1:
                self.deadline.of_first = self.engine.world.of_first
            self._begin_clock(self.deadline, step, batches, saves)
        if self.own_rate:
            self.emit(Notice(f"{self._names}: the run ends there; its learning rate is that of your own optimizer"))
        self._plan_from(step)
        self._apply()

    def _begin_clock(self, deadline: Deadline, step: int, batches: int, saves: bool) -> None:
        deadline.batches, deadline.saves = batches, saves
        deadline.begin(step)
        if step == 0 and deadline.left <= 0:
            raise ConfigError(
                f"max_time = {clock(deadline.seconds)} is over before the first step: the start took "
                f"{clock(deadline.spent)}; give more"
            )

    @property
    def _names(self) -> str:
        given = {"max_time": self.max_time, "until_loss": self.until_loss}
        return " and ".join(name for name, value in given.items() if value is not None)

    # --- while it goes on --------------------------------------------------------------------------------------------

    def aside(self, what: str) -> AbstractContextManager[None]:
        """Time inside the block is that of an evaluation ("evaluating") or of a checkpoint ("saving")."""
        return nullcontext() if self.deadline is None else self.deadline.aside(what)

    def after_step(self) -> None:
        """Look at the clock when that is due. The device is waited for, so that no step is counted that it still has
        to do."""
        step, deadline = self.engine.progress.global_step, self.deadline
        if deadline is None or step >= self.end or not deadline.due(step):
            return
        self.engine.wait()
        deadline.look(step)
        if deadline.pace:
            self._plan_by_clock(deadline, step)
            self._apply()
        deadline.look_again(step, self.end, self.usual.begin)

    def evaluated(self, loss: float) -> None:
        """A held-out loss is known."""
        if self.goal is None or self.met:  # the last evaluation of a run that has met its goal says nothing new
            return
        step, before, tries = self.engine.progress.global_step, self.goal.decay, self.goal.tries
        racing = self.racing()
        self.goal.evaluated(step, loss, self.plan, self.end, racing)
        self._tell(step, loss, before, tries)
        if self.goal.decay != before:
            self._apply()
        copies, schedule = self.copies, self.engine.config.schedule.type
        if copies is None or copies.busy or copies.off or self.met or self.own_rate or schedule != "wsd":
            return
        if racing or step <= self.plan.warmup:
            return
        if steps := self.goal.copy_due(step, self.end):
            copies.ask(steps)

    def taken_back(self) -> None:
        """The run went back: forget what the goal saw at steps that are undone."""
        if self.goal is None:
            return
        before = self.goal.decay
        self.goal.taken_back(self.engine.progress.global_step)
        if self.goal.decay != before:
            self._apply()

    @property
    def plan(self) -> DecayPlan:
        """Return how the learning rate falls by now: towards the goal, or towards the end of the run."""
        return self.usual if self.goal is None or self.goal.decay is None else self.goal.decay

    @property
    def met(self) -> bool:
        """Return whether the goal is met: the run can end."""
        return self.goal is not None and self.goal.met_at is not None

    def as_it_was(self, planned: RatePlan) -> RatePlan:
        """Return what the rate was in a run that has met its goal, up to there; else what is planned."""
        step, goal = self.engine.progress.global_step, self.goal
        if goal is None or not self.met or not step:
            return planned
        if self.own_rate or goal.schedule.type != "wsd":  # it was never changed for the goal
            return plans.cut(planned, step)
        knots = [*([(0, 0.0)] if self.usual.warmup else []), *goal.knots]
        at, levels = (np.array([knot[part] for knot in knots], dtype=np.float64) for part in (0, 1))
        return plans.cut(RatePlan(step, at, levels), step)

    @property
    def evaluation_due(self) -> bool:
        """Return whether the goal wants to know the held-out loss now."""
        step = self.engine.progress.global_step
        return self.goal is not None and not self.met and step >= self.goal.next_evaluation

    @property
    def share(self) -> float | None:
        """Return the share of the run's time that is over; None: it does not go by the clock."""
        deadline = self.deadline
        return None if deadline is None or self.limited else deadline.spent / deadline.seconds

    # --- plans -------------------------------------------------------------------------------------------------------

    def _plan_from(self, step: int) -> None:
        """Plan when a run begins or goes on. One that was finished stays so, unless it may have more steps now."""
        if self.deadline is None:
            self.end, self.settled = self.limit or MOST, True
            self.usual = planned_decay(self._with_warmup(self._warmup), self.end)
        elif step and self.deadline.left <= 0:
            self.end, self.limited = step, False
        elif step >= self.end and (not self.limited or (self.limit is not None and self.limit <= self.end)):
            return
        elif self.deadline.pace:
            self._plan_by_clock(self.deadline, step)

    def _plan_by_clock(self, deadline: Deadline, step: int) -> None:
        """Plan for the steps that the time allows, or for fewer where they are limited. The last step is known before
        it is made; while the decay is still to come it is not the next one."""
        wanted, left = self.engine.config.schedule, deadline.left
        by_share = wanted.type == "wsd" and wanted.decay_steps is None and wanted.stable_steps is None
        to_decay = left - DECAY_SHARE * (deadline.seconds - deadline.reserve)
        fewest = 1 if to_decay <= 0 else 2
        end = min(step + max(fewest, deadline.steps_in(left)), MOST)
        self.limited = self.limit is not None and end >= self.limit
        self.end = min(end, self.limit or MOST)
        if not self.settled and deadline.steady:
            self.settled = deadline.surely_steady
            self.usual = replace(self.usual, warmup=self._warmup)
        standard = planned_decay(self._with_warmup(self.usual.warmup), self.end)
        begin = step + deadline.steps_in(to_decay) if by_share and not self.limited else standard.begin
        self.usual = self.usual.revised(step, min(begin, self.end - 1), standard.end)

    @property
    def _warmup(self) -> int:
        """Return the steps of warm-up for the end that is known. A run to a goal may end long before it."""
        expected = self.end if self.goal is None else round(_EXPECTED * self.end)
        return warmup_of(self.engine.config.schedule, expected)

    def _with_warmup(self, steps: int) -> ScheduleConfig:
        return self.engine.config.schedule.model_copy(update={"warmup_steps": steps})

    def _apply(self) -> None:
        """Hand the plan to the engine."""
        if self.end < MOST:
            self.engine.end_at(self.end, self.plan)
        else:
            self.engine.rate.end_at(self.end, self.plan)

    # --- what is said ------------------------------------------------------------------------------------------------

    def _tell(self, step: int, loss: float, before: DecayPlan | None, tries: int) -> None:
        goal = self.goal
        if goal is None:
            return
        outlook, what = goal.outlook, ""
        if goal.met_at is not None:
            what = "met"
            text = f"held-out loss {loss_text(loss)} meets until_loss = {loss_text(goal.target)}"
        elif goal.tries > tries and goal.decay is not None:
            what = "decay"
            text = f"the learning rate falls from here to step {goal.decay.end:,}, where {self._goal} is forecast"
        elif before is not None and goal.decay is None:
            what = "above"
            text = (
                f"the decay ended at {loss_text(loss)}, above {self._goal}: the learning rate goes back, and another "
                "decay follows"
            )
        elif outlook is not None and outlook.at_limit is not None:
            there, told = outlook.at_limit, self.unreachable >= _SURELY
            missed = there.loss - (1.0 if there.calibrated else _UNSURE) * (there.loss - there.low) > goal.target
            known = step >= _EARLIEST * self.end and bool(goal.annealed())
            self.unreachable = self.unreachable + 1 if missed and known else 0
            if self.unreachable == _SURELY:
                what, text = "out of reach", self._missed(outlook)
            elif told and not self.unreachable:
                what, text = "in reach", f"{self._goal} is in reach again, by what the forecast says now"
        if what:
            end = goal.decay.end if goal.decay is not None else outlook.end if outlook is not None else None
            self.emit(Planned(step, what, text, end))

    @property
    def _goal(self) -> str:
        return f"until_loss = {loss_text(self.until_loss or 0.0)}"

    def _missed(self, outlook: GoalOutlook) -> str:
        """Say that the goal cannot be met, and what it would take."""
        there = outlook.at_limit
        limit = "max_time" if self.deadline is not None and self.share is not None else f"max_steps = {self.end:,}"
        seen = "" if there is None else f" ({loss_text(there.low)} to {loss_text(there.high)} is forecast)"
        needed = (
            f"about {outlook.end:,} steps would be needed"
            if outlook.end is not None
            else f"not even {outlook.farthest:,} steps would do; a larger model or more data might"
        )
        return f"{self._goal} is out of reach within {limit}{seen}: {needed}"

    def progress(self, seconds_per_step: float) -> dict[str, Any]:
        """Return what the progress line says: the end as far as it is known, and the time that is left."""
        step, goal, deadline = self.engine.progress.global_step, self.goal, self.deadline
        if self.end >= MOST:
            return {}
        found: dict[str, Any] = {"planned_end": self.end}
        end = None if goal is None else goal.decay.end if goal.decay else goal.outlook.end if goal.outlook else None
        if end is not None and end < self.end:
            found = {"planned_end": end, "seconds_left": round(max(0, end - step) * seconds_per_step, 1)}
            if goal is not None and goal.outlook is not None and goal.outlook.earliest and goal.outlook.latest:
                found |= {"earliest_end": goal.outlook.earliest, "latest_end": goal.outlook.latest}
        elif deadline is not None and not self.limited:
            found["seconds_left"] = round(max(0.0, deadline.seconds - deadline.shown), 1)
        return found

    def summary(self) -> dict[str, Any]:
        """Return what was asked for, and what came of it."""
        found: dict[str, Any] = {}
        if self.deadline is not None:
            found |= {"max_time": self.max_time, "spent": round(self.deadline.shown, 3)}
        if self.goal is not None:
            found |= {"until_loss": self.until_loss, "met_at": self.goal.met_at, "decays": self.goal.tries}
        return found

    # --- state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Any) -> None:
        """Put a state back. What was planned for other targets is not: the plan is made anew from here."""
        asked = self.max_time, self.until_loss
        same = isinstance(state, dict) and (state.get("max_time"), state.get("until_loss")) == asked
        if same:
            super().load_state_dict(state)


def length_in_words(config: Config) -> str:
    """Say how long a run is to be: 800 steps; 2h00m; 800 steps or 2h00m, until a held-out loss of 3.2000."""
    parts = [f"{config.max_steps:,} steps"] if config.steps_are_limited else []
    parts += [clock(config.max_time)] if config.max_time is not None else []
    goal = "" if config.until_loss is None else f", until a held-out loss of {loss_text(config.until_loss)}"
    return f"{' or '.join(parts)}{goal}"
