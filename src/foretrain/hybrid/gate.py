"""The gate: prediction must earn its place. All costs and gains are counted in full steps, so decisions repeat."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretrain.config import Config
from foretrain.persist.stateful import Stateful

FORWARD = 1 / 3
"""A forward pass in full steps. Chosen: a backward pass takes about as long as two forward passes."""
_QUANTILE = 1.28
"""The gate opens when a move gains with one-sided confidence of 90 %. Chosen: an audit follows on every eighth move, so
that one wrong yes in ten costs little."""
_MOST_BACKOFF = 64
"""Cycles that the gate stays shut at the most. Chosen: six doublings, so that a long run looks again now and then."""
_OVERFITTED = 4
"""A move that raises the held-out loss shuts the gate for this many cycles, the next one for its square, and so on.
Chosen: what is learned by heart once is hardly unlearned within a few cycles."""

PRIORS: dict[str, tuple[float, float, float]] = {
    # kind of run: worth of a predicted step in full steps, its deviation, and how many audits this counts for.
    "full weights": (0.02, 0.2, 2.0),  # noisy gradients, any rate: a handful of steps per leap at best
    "adapters": (0.3, 0.3, 1.0),  # leaps repair a rate that is too small and are refused at a good one
}
"""What is known before the run's own audits, from the measurements behind docs/results.md."""


_COST_OF_PROBES = 16 * FORWARD
"""Full steps that the forward passes of an audited move cost. Chosen to cover the anchor, three
lengths of a leap and both forks on four batches each, with some to spare."""


def steps_of_audit(config: Config, max_steps: int) -> int:
    """Full steps that follow on an audited move; a short run can afford few only."""
    affordable = int(config.audit.time_budget * max_steps - _COST_OF_PROBES)
    return max(min(config.audit.steps, affordable), config.hybrid.correct_steps)


def cost_of_audit(config: Config, max_steps: int) -> float:
    """In full steps."""
    return steps_of_audit(config, max_steps) + _COST_OF_PROBES


def no_audit_is_affordable(config: Config, max_steps: int) -> bool:
    """Nothing will be tried then, unless moves can be judged without an audit."""
    return cost_of_audit(config, max_steps) > config.audit.time_budget * max_steps


@dataclass(frozen=True, slots=True)
class Ask:
    """What the gate looks at."""

    horizon: int
    steps_left: int
    """Virtual steps to the end of the run."""
    needed_after: int
    """Full steps that must follow a move."""
    trusted: bool
    """The predictor beats both baselines at this horizon."""
    low_noise: bool
    """The loss right after a move can be trusted."""
    decaying: bool
    """The learning rate falls towards its end."""
    cost: float
    """What an audited move costs, in full steps."""
    judge: str = "batches hardly differ"
    """Why it can be trusted."""
    chained: bool = False
    """It would be a chain of quasi-Newton leaps, which hold at any learning rate."""
    rising: bool = False
    """The learning rate warms up: steps are short on purpose, and a leap that undoes that seems to gain."""
    for_good: bool = False
    """A learning rate that falls does not rise again, and there will be no chains."""


@dataclass(frozen=True, slots=True)
class Answer:
    open: bool
    audited: bool
    """The move must be made as an audit: with and without it, from one snapshot."""
    reason: str
    rest: bool = False
    """Nothing will change that soon: watching the weights can pause."""
    long: bool = False
    """Nothing will change later either, as far as can be seen."""


class Gate(Stateful):
    """Keeps account of what moves were worth and what they cost."""

    saved = ("spent", "count", "mean", "scatter", "refusals", "wait", "since_audit")

    def __init__(self, max_steps: int, budget: float, kind: str = "full weights") -> None:
        self.prior = PRIORS[kind]
        self.budget = budget
        self.allowed = budget * max_steps
        """Full steps that unproven moves may cost in all."""
        self.spent = 0.0
        self.count = 0
        self.mean = 0.0
        self.scatter = 0.0
        """Count, mean and sum of squared deviations of what a predicted step was worth in audits."""
        self.refusals = 0
        """In a row."""
        self.wait = 0
        """Cycles to sit out."""
        self.since_audit = 0
        self.first_wait, self.backoff = 1, 2
        """Cycles to sit out after the first move that does not pay, and how much longer each wait is than the last."""

    def plan_for(self, max_steps: int) -> None:
        """The run is so long, as far as is known now."""
        self.allowed = self.budget * max_steps

    # --- deciding ----------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> Answer:
        """May a move be made now?"""
        if ask.horizon < 1 or ask.steps_left <= ask.needed_after:
            return Answer(False, False, "the run is nearly over", rest=True, long=ask.for_good)
        if self.wait > 0:
            return Answer(False, False, f"moves did not pay lately, {self.wait} more cycles without", rest=True)
        affordable = self.spent + ask.cost <= self.allowed
        low = self.interval()[0]
        if not (ask.low_noise or affordable or low > 0):
            return Answer(False, False, self.too_dear(ask.cost), rest=True, long=True)
        if not ask.trusted:
            reason = "forecasts do not beat 'nothing moves' and 'all moves on as before'"
            return Answer(False, False, reason, rest=True)
        if ask.decaying and not ask.chained:
            reason = "forward moves harm while the learning rate decays"
            return Answer(False, False, reason, rest=True, long=ask.for_good)
        if ask.rising and not ask.chained:
            return Answer(False, False, "steps are short on purpose while the learning rate warms up", rest=True)
        if ask.low_noise:
            due = affordable and (self.count < 2 or self.since_audit >= 8)
            return Answer(True, due, f"{ask.judge}: each move is judged at once")
        if affordable and not (low > 0 and self.since_audit < 8):
            return Answer(True, True, "an audit is due and affordable")
        return Answer(True, False, f"a predicted step was worth at least {low:.2f} full steps")

    def too_dear(self, cost: float) -> str:
        """Why nothing is tried."""
        if self.count:
            return "moves did not pay in audits, and the budget for trying is used up"
        if self.allowed <= 0:
            return "not tried: audit.time_budget = 0 leaves nothing to check a move with"
        steps = f"checking one move costs {cost:.0f} full steps, audit.time_budget allows {self.allowed:.0f}"
        return f"not tried: the run is too short for it to pay ({steps})"

    def new_cycle(self, count: int = 1) -> None:
        self.wait = max(0, self.wait - count)

    def posterior(self) -> tuple[float, float, float]:
        """Mean, deviation and weight of the worth of a predicted step, prior and audits together."""
        mean, deviation, weight = self.prior
        total = weight + self.count
        joint = (weight * mean + self.count * self.mean) / total
        between = weight * self.count / total * (self.mean - mean) ** 2
        variance = (weight * deviation**2 + self.scatter + between) / total
        return joint, math.sqrt(variance), total

    def interval(self) -> tuple[float, float]:
        mean, deviation, weight = self.posterior()
        half = _QUANTILE * deviation / math.sqrt(weight)
        return mean - half, mean + half

    @property
    def likely_worth(self) -> float:
        """Full steps that a predicted step is worth, by prior and audits together."""
        return max(0.0, self.posterior()[0])

    # --- learning ----------------------------------------------------------------------------------------------------

    def audited(self, horizon: int, gain_steps: float, cost: float, exact: bool = False) -> None:
        """An audit found that a move over `horizon` gained so many full steps (may be negative).

        exact: its two losses were, so that a gain is no lucky look.
        """
        self.spend(cost)
        self.since_audit = 0
        if not math.isfinite(gain_steps):
            gain_steps = -float(horizon)
        worth = max(-1.0, min(2.0, gain_steps / max(1, horizon)))
        self.count += 1
        before = self.mean
        self.mean += (worth - before) / self.count
        self.scatter += (worth - before) * (worth - self.mean)
        if worth > 0:  # what moves gain on average pays for further audits; one lucky look does not
            paid = gain_steps if exact else max(0.0, self.interval()[0]) * horizon
            self.spent = max(0.0, self.spent - paid)
        self._settle(worth > 0)

    def moved(self, paid: bool) -> None:
        """An unaudited move was judged."""
        self.since_audit += 1
        self._settle(paid)

    def overfitted(self) -> None:
        """A move raised the held-out loss: what is left to learn would be learned by heart, only sooner."""
        self.since_audit += 1
        self.refusals += 1
        self.wait = min(_MOST_BACKOFF, _OVERFITTED**self.refusals)

    def spend(self, cost: float) -> None:
        self.spent += cost

    def _settle(self, paid: bool) -> None:
        """Back off 1, 2, 4 ... cycles while moves do not pay."""
        if paid:
            self.refusals = self.wait = 0
            return
        self.wait = min(_MOST_BACKOFF, self.first_wait * self.backoff**self.refusals)
        self.refusals += 1
