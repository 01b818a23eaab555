"""The goal of a run with `until_loss`: when its decay should begin, how long it is, and whether the goal is met."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretrain.config import ScheduleConfig
from foretrain.config.kinds import MOST
from foretrain.engine.schedule import DecayPlan, height
from foretrain.engine.world import ALONE, World
from foretrain.forecast.forecasting import FEWEST, forecast
from foretrain.forecast.law import FittedLaw, fit
from foretrain.forecast.plans import decaying_from
from foretrain.forecast.records import AnnealedPoint, LossCurve, LossForecast, RatePlan
from foretrain.persist.stateful import Stateful

_DECAY = 0.25
"""Length of the decay as a share of the steps before it: a fifth of the run. Chosen: longer ones win little, and the
plan can be stretched."""
_LONGEST_DECAY = 2.0
"""A decay that is to be stretched beyond so many times its length has come too early: another one follows later."""
_SPARSE, _DENSE = 12, 16
"""Evaluations while the steps so far are doubled (about), and in a decay. Chosen: in a decay the loss falls by some
percent, so that one evaluation to the next is a fraction of one."""
_FORWARD = 3
"""Held-out batches that cost as much as a step."""
_FARTHEST = 64
"""Lengths up to this many times the steps so far are looked at."""
_COPY, _SHORTEST_COPY = 0.03, 8
"""Steps of an annealed copy as a share of the steps so far, and at least. Chosen: all copies of a run together cost
less than 5 % of it; in fewer than eight steps a fall of the loss is not to be told from noise."""
_FIRST_COPY, _COPY_BEFORE = 0.1, 0.3
"""The first copy is made at this share of the longest run, or of the one that the forecast gives, if that is sooner."""
_KNOTS = 8
"""Straight pieces that a curved decay is cut into, where it is forecast."""


Forecast = Callable[[LossCurve, RatePlan], LossForecast | None]
"""Forecasts the end of a plan from what was seen."""


@dataclass(frozen=True)
class Ahead:
    """Says where a run would end under other plans: one fit of the law for all of them, so that many can be tried."""

    curve: LossCurve
    law: FittedLaw
    shift: float
    """What the forecast of the present plan says beyond the law."""
    _forecast: Forecast

    @classmethod
    def of(cls, curve: LossCurve, make: Forecast) -> Ahead | None:
        """Fit the law to what was seen, and let it meet the forecast of a usual decay from here on."""
        law = fit(curve)
        if law is None:
            return None
        step = int(curve.steps[-1])
        usual = decaying_from(curve.plan, step, _end_of(step) - step)
        made = make(curve, usual)
        said = law.loss_at(usual, usual.total_steps)
        return cls(curve, law, 0.0 if made is None else made.loss - said, make)

    def loss(self, plan: RatePlan) -> float:
        """Return the loss at the end of a plan."""
        return self.law.loss_at(plan, plan.total_steps) + self.shift

    def forecast(self, plan: RatePlan) -> LossForecast | None:
        """Return the forecast of the end of a plan, with its interval."""
        return self._forecast(self.curve, plan)


class ExpectedEnd(NamedTuple):
    """Where a run would end, with the interval that this should lie in."""

    loss: float
    low: float
    high: float
    calibrated: bool


@dataclass(frozen=True)
class GoalOutlook:
    """Says at which step the goal will be met, as far as the forecast can tell."""

    end: int | None
    """None: not within `farthest` steps."""
    earliest: int | None
    latest: int | None
    farthest: int
    at_limit: ExpectedEnd | None
    """Where the run ends if it goes on to its limit."""


class Foresight(NamedTuple):
    """What follows from forecasts at one point of the run."""

    outlook: GoalOutlook | None = None
    end: int | None = None
    """Where the decay that is under way should end."""

    def numbers(self) -> list[float | None]:
        """Return it as numbers that one process can tell the others."""
        outlook = self.outlook
        if outlook is None:
            return [self.end, *[None] * 8]
        at_limit = outlook.at_limit or (None,) * 4
        return [self.end, outlook.end, outlook.earliest, outlook.latest, outlook.farthest, *at_limit]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Foresight:
        """Return what has these numbers; one that is none stands for nothing."""
        end, shortest, earliest, latest, farthest = (None if math.isnan(one) else round(one) for one in numbers[:5])
        if farthest is None:
            return cls(None, end)
        loss, low, high, calibrated = numbers[5:]
        at_limit = None if math.isnan(calibrated) else ExpectedEnd(loss, low, high, bool(calibrated))
        return cls(GoalOutlook(shortest, earliest, latest, farthest, at_limit), end)


class Goal(Stateful):
    """Decides by steps and held-out losses alone, so that a resumed run decides alike.

    Forecasts are the work of the host, which rounds in its own way: of several processes rank 0 makes them for all.
    """

    saved = ("steps", "losses", "knots", "decay", "length", "tries", "copied", "met_at", "next_evaluation")
    steps: list[int]
    losses: list[float]
    knots: list[tuple[int, float]]
    decay: DecayPlan | None
    met_at: int | None

    def __init__(self, target: float, schedule: ScheduleConfig, lowest: float, batches: int = 1) -> None:
        """lowest: the final rate as a share of the peak."""
        self.target = target
        self.schedule = schedule
        self.lowest = lowest
        self.batches = batches
        """Held-out batches of an evaluation."""
        self.steps, self.losses = [], []
        self.knots = []
        """What the learning rate was, as a share of its peak, where it was seen or changed."""
        self.decay = None
        """The decay that is to end at the goal; None: the run goes by its usual schedule."""
        self.length = 0
        """Length that the decay had when it began."""
        self.tries = 0
        """Decays so far."""
        self.copied = 0
        """Step at which the last annealed copy was asked for; 0: none was."""
        self.met_at = None
        self.next_evaluation = 0
        self.world: World = ALONE
        self.outlook: GoalOutlook | None = None
        self.forecast: Forecast = lambda curve, plan: forecast(curve, plan=plan)
        """Set by the trainer where it knows finished runs of the same kind."""
        self.annealed: Callable[[], Sequence[AnnealedPoint]] = lambda: ()
        """Gives what annealed copies have come to. Set by the trainer."""

    # --- what is seen ------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, loss: float, plan: DecayPlan, limit: int, racing: bool = False) -> None:
        """A held-out loss is known. plan: how the rate goes by now. limit: the run ends there at the latest. racing:
        other steps may replace these, so that they say nothing but whether the goal is met."""
        self.taken_back(step)
        if self.steps and self.steps[-1] == step:  # it is measured again
            self.steps.pop()
            self.losses.pop()
        if racing and not loss <= self.target:  # NaN too
            self.next_evaluation = self._next(step)
            return
        self.steps.append(step)
        self.losses.append(loss)
        self._note(step, plan)
        if loss <= self.target:
            self.met_at = step
            return
        self.outlook = None
        if self.schedule.type == "wsd":
            self._decide(self._told_by_first(step, plan, limit), step, plan, limit)
        self.next_evaluation = self._next(step)

    def taken_back(self, step: int) -> None:
        """Drop what was seen, and decided, at steps after this one: a rollback took them back."""
        if self.decay is not None:
            self._take_back_decay(self.decay, step)
        if self.met_at is not None and self.met_at > step:
            self.met_at = None
        if self.copied > step:
            self.copied = max((point.step for point in self.annealed() if point.step <= step), default=0)
        kept = [index for index, one in enumerate(self.steps) if one <= step]
        if len(kept) < len(self.steps):
            self.next_evaluation, self.outlook = step, None
        self.steps, self.losses = [self.steps[i] for i in kept], [self.losses[i] for i in kept]
        self.knots = [knot for knot in self.knots if knot[0] <= step]

    def _take_back_decay(self, decay: DecayPlan, step: int) -> None:
        began = self._at_peak if decay.progress > 0 else decay.begin
        if began > step:
            self.decay, self.tries = None, self.tries - 1
        elif decay.begin > step:  # it was stretched there
            self.decay = DecayPlan(decay.warmup, began, 0.0, began + self.length)

    def _note(self, step: int, plan: DecayPlan) -> None:
        for at in (plan.warmup, plan.begin, step):
            if at <= step and (not self.knots or at > self.knots[-1][0]):
                self.knots.append((at, self._level(plan, at)))

    def _level(self, plan: DecayPlan, step: int) -> float:
        """Return the rate as a share of its peak."""
        if step < plan.warmup:
            return step / plan.warmup
        if self.schedule.type not in ("wsd", "cosine"):
            return 1.0
        return self.lowest + (1.0 - self.lowest) * height(self.schedule, plan.at(step))

    def _next(self, step: int) -> int:
        """Return when the next loss is wanted: rarely far from the goal, often in the decay, and before the last two
        losses, drawn on, reach the goal."""
        cost = math.ceil(self.batches / _FORWARD)
        gap = max(4 * cost, step // _SPARSE) if self.decay is None else max(2 * cost, self.length // _DENSE)
        if self.outlook is not None and self.outlook.end is not None:
            gap = min(gap, max(2 * cost, round(self.outlook.end / (1 + _DECAY)) - step))
        if len(self.steps) > 1:
            fall = (self.losses[-2] - self.losses[-1]) / (self.steps[-1] - self.steps[-2])
            if fall > 0:
                gap = min(gap, max(1, cost // 2, int((self.losses[-1] - self.target) / fall)))
        return step + gap if self.decay is None else min(step + gap, max(self.decay.end, step + 1))

    def copy_due(self, step: int, limit: int) -> int:
        """Return how many steps an annealed copy should have that is made here; 0: none is wanted. One says what a
        decay is worth; when the run has become twice as long another one looks whether that is still so."""
        end = None if self.outlook is None else self.outlook.end
        first = min(_FIRST_COPY * limit, math.inf if end is None else _COPY_BEFORE * end)
        if self.decay is not None or len(self.steps) < FEWEST or step < max(first, 2 * self.copied):
            return 0
        self.copied = step
        return max(_SHORTEST_COPY, round(_COPY * step))

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _told_by_first(self, step: int, plan: DecayPlan, limit: int) -> Foresight:
        """Return what follows from forecasts; of several processes the first one makes them."""
        found = self._foresee(step, plan, limit) if self.world.rank == 0 else Foresight()
        if self.world.size == 1:
            return found
        numbers = [math.nan if number is None else float(number) for number in found.numbers()]
        return Foresight.of([float(number) for number in self.world.of_first(np.array(numbers))])

    def _foresee(self, step: int, plan: DecayPlan, limit: int) -> Foresight:
        with suppress(ArithmeticError, ValueError, LookupError, np.linalg.LinAlgError):  # losses that fit no law
            ahead = self._ahead()
            if ahead is not None and self.decay is not None:
                return Foresight(end=self._revised(ahead, self.decay, step, limit))
            if ahead is not None and step > plan.warmup and plan.at(step) == 0.0:
                return Foresight(self._look(ahead, step, limit))
        return Foresight()

    def _decide(self, foreseen: Foresight, step: int, plan: DecayPlan, limit: int) -> None:
        decay, self.outlook = self.decay, foreseen.outlook
        if decay is None:
            if self.outlook is not None and self.outlook.end is not None and self.outlook.end <= _end_of(step):
                self._begin_decay(step, plan.warmup, min(_end_of(step), limit))
        elif foreseen.end is not None and step >= decay.end:
            self.decay = None
            self.knots.append((step + 1, 1.0))
        elif foreseen.end is not None and foreseen.end > decay.end:
            self.decay = decay.revised(step, step, foreseen.end)

    def _begin_decay(self, step: int, warmup: int, end: int) -> None:
        self.length, self.tries = max(1, end - step), self.tries + 1
        self.decay = DecayPlan(warmup, step, 0.0, step + self.length)

    def _revised(self, ahead: Ahead, decay: DecayPlan, step: int, limit: int) -> int:
        """Return where the decay should end: one that would end above the goal is stretched, if that is enough.
        Otherwise it ends as it was planned; then the rate goes back to its peak, and another decay follows."""

        def meets(end: int) -> bool:
            return ahead.loss(self._falling(ahead.curve.plan, decay.revised(step, step, end), step)) <= self.target

        longest = min(self._at_peak + round(_LONGEST_DECAY * self.length), limit)
        if step < decay.end < longest and meets(longest) and not meets(decay.end):
            return _first(meets, decay.end, longest)
        return decay.end

    @property
    def _at_peak(self) -> int:
        """Return the step at which the rate was at its peak for the last time."""
        return max((step for step, level in self.knots if level >= 1.0), default=0)

    def _look(self, ahead: Ahead, step: int, limit: int) -> GoalOutlook | None:
        """Find the shortest run that ends at the goal, and one for each end of the forecast's interval there."""

        def plan(begin: int) -> RatePlan:
            return self._falling(ahead.curve.plan, DecayPlan(0, begin, 0.0, _end_of(begin)), step)

        farthest = min(max(_FARTHEST * step, limit), MOST // 2)

        def shortest(target: float) -> int | None:
            def meets(begin: int) -> bool:
                return ahead.loss(plan(begin)) <= target

            return _end_of(_first(meets, step, farthest)) if meets(farthest) else None

        end = shortest(self.target)
        found = ahead.forecast(plan(max(step, round(limit / (1 + _DECAY)))))
        at_limit = None if found is None else ExpectedEnd(found.loss, found.low, found.high, found.calibrated)
        there = None if end is None else ahead.forecast(plan(round(end / (1 + _DECAY))))
        if there is None:
            return GoalOutlook(end, None, None, _end_of(farthest), at_limit)
        low, high = shortest(self.target + there.loss - there.low), shortest(self.target + there.loss - there.high)
        return GoalOutlook(end, low, high, _end_of(farthest), at_limit)

    def _ahead(self) -> Ahead | None:
        """Return what forecasts losses under other plans; None while too little was seen."""
        curve = self._curve()
        return None if len(curve.steps) < FEWEST else Ahead.of(curve, self.forecast)

    def _curve(self) -> LossCurve:
        finite = [(step, loss) for step, loss in zip(self.steps, self.losses, strict=True) if math.isfinite(loss)]
        steps, losses = (np.array([one[part] for one in finite], dtype=np.float64) for part in (0, 1))
        at, levels = (np.array([knot[part] for knot in self.knots], dtype=np.float64) for part in (0, 1))
        plan = RatePlan(max(1, self.steps[-1]), at, levels)
        copies = tuple(point for point in self.annealed() if point.step <= self.steps[-1])
        return LossCurve(steps, losses, plan, copies)

    def _falling(self, so_far: RatePlan, decay: DecayPlan, step: int) -> RatePlan:
        """Return what the rate was so far, and how it would go on with this decay."""
        cuts = np.linspace(max(decay.begin, step), decay.end, _KNOTS + 1)
        levels = [self._level(decay, round(cut)) for cut in cuts]
        before = so_far.steps < cuts[0]
        return RatePlan(
            decay.end,
            np.concatenate([so_far.steps[before], cuts]),
            np.concatenate([so_far.multipliers[before], levels]),
        )


def _end_of(begin: int) -> int:
    """Return where a decay ends that begins here."""
    return begin + max(1, round(_DECAY * begin))


def _first(meets: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first of these numbers that meets a condition, which `high` and all after the first do."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle + 1, high)
    return high
