"""The law of a loss under any plan of learning rates: a power law in what was learned, less what a falling rate gives.

    L(t) = floor + scale (S(t) / S_now)^-exponent - drop D(t)
    D(t) = (1 + f) sum over falls of the rate d_k, to level m_k at step k,
           of d_k (1 - (1 + c m_k^-g (R(t) - R_k) / R_k)^-b)

R is the sum of the rates so far, S that of the rates to the power 0.6: a small rate learns more than its share. f is
the share of the run over which the rate falls: a fall over the whole run is worth twice a sudden one. This is the form
of the multi-power law (Luo et al., ICLR 2025), which knows no f, and in which the lag of a fall counts in steps; here
it counts in shares of the run so far, so that the unit of a step does not matter. c, g and b are constants. For each
exponent of a grid floor, scale and drop follow from least squares with what is known before (`LawPrior`); exponents are
averaged by their fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrain.forecast import plans
from foretrain.forecast.points import MOST, cleaned, tail
from foretrain.forecast.records import AnnealedPoint, LossCurve, Numbers, RatePlan

_LEARNED_POWER = 0.6
_LAG = 250.0
_LAG_POWER = 0.7
_LEVEL_POWER = 0.9
_LOWEST_LEVEL = 1e-3
_LONGER = 1.0
"""A fall of the rate over the whole run is worth more than a sudden one by this share. Four families of public language
models agree on it, each forecast by what was chosen on the three others (docs/forecast.md)."""
_EXPONENTS = np.geomspace(0.05, 2.0, 24)
_SKIPPED = 0.1
"""Share of the steps so far whose losses are not fitted: no law holds at the beginning."""
_RECENT = 3.0
"""A loss weighs as the share of the steps so far at which it was measured, to this power."""
_NOISE = 2e-4
_MISFIT = 0.1
"""The law misses losses by this times the square of their slope against the logarithm of steps, in shares of them."""
_FLOOR, _FLOOR_SPREAD = -0.05, 0.2
"""The floor of the power law seen from the last loss, in shares of it, before anything is fitted."""
_ANNEALED_SPREAD = 0.1
"""How wrong the law may be on the fall of an annealed copy, as a share of it. Of copies that have newer ones beside
them this grows by the logarithm of how much earlier they were: early ones show less than the drop at the end."""
_ANNEALED_NOISE = 0.5
"""How wrong chance makes the fall of a copy, by how far single losses of the run scatter: a copy of few steps falls by
hardly more than that. Chosen on copies of 10 to 100 steps in 16 own runs, checked on others (docs/forecast.md)."""
_SETTLING = 30.0
"""Steps in which half of the benefit of a lower rate comes, however long the run is: a copy of few steps shows a part
of what a long decay is worth. Fitted on copies of 10 to 100 steps of own runs of 480 and 1,000 (docs/forecast.md)."""
_ANCHOR = 1.25
"""How much of the latest misses is carried to the end."""
_FREEDOM = 4.0


@dataclass(frozen=True)
class LawPrior:
    """What is known of drop and exponent before the rate falls; these values are of public runs of language models."""

    drop: float = 0.033
    """Drop as a share of the loss, for a sudden fall of the rate."""
    drop_spread: float = 0.025
    exponent: float = 0.9
    exponent_spread: float = 0.4
    """How far its logarithm may lie from that."""


PUBLIC = LawPrior()


def annealing(plan: RatePlan, steps: Numbers) -> Numbers:
    """Return D at these steps: the share of a full, sudden fall of the rate whose benefit has come."""
    steps = np.atleast_1d(np.asarray(steps, dtype=np.float64))
    when, level, size = plans.falls(plan)
    if len(when) == 0:
        return np.zeros(len(steps))
    then = np.maximum(plans.area(plan, when), 1e-9)
    since = np.maximum(plans.area(plan, steps)[:, None] / then[None, :] - 1.0, 0.0)
    gains = 1.0 - (1.0 + _LAG * np.maximum(level, _LOWEST_LEVEL) ** -_LEVEL_POWER * since) ** -_LAG_POWER
    longer = 1.0 + _LONGER * plans.fall_share(plan)
    return np.asarray(longer * (np.where(steps[:, None] > when[None, :], gains, 0.0) @ size))


@dataclass(frozen=True)
class FittedLaw:
    """The law with the numbers of one run: one set of them for each exponent, and how much each counts."""

    exponents: Numbers
    weights: Numbers
    """How much each exponent counts; their sum is 1."""
    floors: Numbers
    scales: Numbers
    drops: Numbers
    learned: float
    """S where the run is now."""
    shift: float
    """What is added to all losses, because the latest ones were missed by as much."""
    error: float
    """Root of the mean squared error of the fit."""
    level: float
    """What the loss is measured by (`loss_level`)."""

    @classmethod
    def of(cls, floor: float, scale: float, exponent: float, drop: float, learned: float) -> FittedLaw:
        """Return the law with these numbers: one exponent, no error."""
        one = np.ones(1)
        return cls(exponent * one, one, floor * one, scale * one, drop * one, learned, 0.0, 0.0, abs(floor))

    @property
    def drop(self) -> float:
        return float(self.weights @ self.drops)

    @property
    def drop_share(self) -> float:
        """Return the drop as `LawPrior` has it."""
        return self.drop / self.level

    @property
    def exponent(self) -> float:
        return float(np.exp(self.weights @ np.log(self.exponents)))

    def losses_at(self, plan: RatePlan, steps: Numbers) -> Numbers:
        """Return the losses that the law gives at these steps of any plan."""
        steps = np.atleast_1d(np.asarray(steps, dtype=np.float64))
        grown = _grown(plan, steps, self.learned)
        powers = grown[:, None] ** -self.exponents[None, :]
        falling = powers @ (self.weights * self.scales) - annealing(plan, steps) * self.drop
        return np.asarray(float(self.weights @ self.floors) + self.shift + falling)

    def loss_at(self, plan: RatePlan, step: float) -> float:
        """Return the loss that the law gives at this step of any plan."""
        return float(self.losses_at(plan, np.array([float(step)]))[0])


def fit(curve: LossCurve, prior: LawPrior = PUBLIC) -> FittedLaw | None:
    """Fit the law to what was seen of a run; None if that is less than three losses after its first step."""
    steps, losses = cleaned(curve, MOST, _SKIPPED)
    if len(steps) < 3:
        return None
    level = loss_level(losses)
    learned = max(float(plans.area(curve.plan, steps[-1:], _LEARNED_POWER)[0]), 1e-9)
    grown = _grown(curve.plan, steps, learned)
    line = tail(steps, losses)
    noise = float(np.hypot(_NOISE, _MISFIT * (line.slope / level) ** 2))
    weight = (steps / max(steps[-1], 1e-9)) ** _RECENT
    weight = np.sqrt(weight * len(steps) / weight.sum()) / noise
    powers = grown[None, :] ** -_EXPONENTS[:, None]
    columns = np.stack(
        [np.ones_like(powers), powers - 1, np.broadcast_to(-annealing(curve.plan, steps), powers.shape)], 2
    )
    targets = (losses - losses[-1]) / level
    blocks = [columns * weight[None, :, None]]
    values = [targets * weight]
    for row, value in _annealed_rows(curve, learned, level, line.noise / level):
        blocks.append(row)
        values.append(np.array([value]))
    before = np.zeros((len(_EXPONENTS), 2, 3))
    before[:, 0] = np.array([1.0, -1.0, 0.0]) / _FLOOR_SPREAD
    before[:, 1, 2] = 1 / prior.drop_spread
    blocks.append(before)
    values.append(np.array([_FLOOR / _FLOOR_SPREAD, prior.drop / prior.drop_spread]))
    solutions, misses, spread = _without_negatives(np.concatenate(blocks, axis=1), np.concatenate(values))
    likely = -0.5 * (len(steps) + _FREEDOM) * np.log(_FREEDOM + misses) - 0.5 * spread
    likely -= 0.5 * (np.log(_EXPONENTS / prior.exponent) / prior.exponent_spread) ** 2
    weights = np.exp(likely - likely.max())
    weights /= weights.sum()
    left = targets - np.einsum("e,eni,ei->n", weights, columns, solutions)
    return FittedLaw(
        exponents=_EXPONENTS,
        weights=weights,
        floors=losses[-1] + (solutions[:, 0] - solutions[:, 1]) * level,
        scales=solutions[:, 1] * level,
        drops=solutions[:, 2] * level,
        learned=learned,
        shift=_ANCHOR * float(np.mean(left[-3:])) * level,
        error=float(np.sqrt(np.mean(left**2))) * level,
        level=level,
    )


def loss_level(losses: Numbers) -> float:
    """Return what a loss is measured by: its size, or how far it moved where it is near 0 or below."""
    return float(max(abs(losses[-1]), 0.5 * np.ptp(losses), 1e-12))


def _grown(plan: RatePlan, steps: Numbers, learned: float) -> Numbers:
    return np.maximum(plans.area(plan, steps, _LEARNED_POWER) / learned, 1e-3)


def _annealed_rows(curve: LossCurve, learned: float, level: float, noise: float) -> list[tuple[Numbers, float]]:
    """Return what annealed copies say of scale and drop, as rows of the least squares. noise: of single losses."""
    falls = [(point, (point.loss - point.before) / level) for point in curve.annealed]
    usable = [(point, fall) for point, fall in falls if np.isfinite(fall) and point.steps > 0 and point.step > 0]
    if not usable:
        return []
    newest = max(point.step for point, _ in usable)
    rows = np.stack([_annealed_row(curve, point, learned) for point, _ in usable])
    values = np.array([fall for _, fall in usable])
    share = abs(float(values.sum())) / max(abs(float(rows[:, 0, 2].sum())), 1e-12)
    found = []
    for (point, fall), row in zip(usable, rows, strict=True):
        usual = share * float(row[0, 2])  # by its own fall, one that fell too little by chance would count the most
        doubt = usual * np.hypot(_ANNEALED_SPREAD, np.log(newest / point.step))
        sure = 1 / float(np.linalg.norm([1e-3, doubt, _ANNEALED_NOISE * noise]))
        found.append((row[:, None, :] * sure, fall * sure))
    return found


def _annealed_row(curve: LossCurve, point: AnnealedPoint, learned: float) -> Numbers:
    """Return how much of scale and drop the fall of a copy shows, for each exponent."""
    bent = plans.decaying_from(curve.plan, point.step, point.steps)
    at, end = np.array([float(point.step)]), np.array([float(bent.total_steps)])
    before, after = _grown(curve.plan, at, learned)[0], _grown(bent, end, learned)[0]
    fallen = annealing(curve.plan, at)[0] - annealing(bent, end)[0]
    row = np.zeros((len(_EXPONENTS), 3))
    row[:, 1] = after**-_EXPONENTS - before**-_EXPONENTS
    row[:, 2] = shown_share(curve.plan, point.steps) * fallen
    return row


def shown_share(plan: RatePlan, steps: int) -> float:
    """Return how much of what the plan's own decay is worth a decay over so few steps shows."""
    when, _, size = plans.falls(plan)
    own = 2.0 * (plan.total_steps - float(np.average(when, weights=size))) if len(when) else 0.0
    return _settled(steps) / _settled(max(own, steps))


def _settled(steps: float) -> float:
    """Return the share of the benefit of a decay over so many steps, in a straight line, that has come at its end."""
    return 1.0 - _SETTLING / steps * float(np.log1p(steps / _SETTLING))


def _without_negatives(columns: Numbers, targets: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Solve least squares for each exponent with scale and drop not negative, by trying every set of columns."""
    gram = np.einsum("eni,enj->eij", columns, columns)
    right = np.einsum("eni,n->ei", columns, targets)
    square = float(targets @ targets)
    best = np.full(len(columns), np.inf)
    solutions = np.zeros((len(columns), 3))
    for used in ([0], [0, 1], [0, 2], [0, 1, 2]):
        found = np.linalg.solve(gram[:, used][:, :, used], right[:, used, None])[:, :, 0]
        misses = square - np.einsum("ei,ei->e", found, right[:, used])
        better = np.all(found[:, 1:] >= 0, axis=1) & (misses < best)
        best = np.where(better, misses, best)
        solutions[better] = 0.0
        solutions[np.ix_(better, used)] = found[better]
    return solutions, np.maximum(best, 0.0), np.linalg.slogdet(gram)[1]
