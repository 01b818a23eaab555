"""What a plan of learning rates says: what was learned by a step, how much of the decay is done, other plans."""

from __future__ import annotations

import numpy as np

from foretrain.forecast.records import Numbers, RatePlan

_FALLS_BY = 0.02
"""A rate that stays within this share of its highest counts as constant."""
_PIECES = 96
"""Falls of the rate are cut into this many equal pieces."""


def area(plan: RatePlan, steps: Numbers, power: float = 1.0) -> Numbers:
    """Return the sum of the multipliers, each to this power, up to each step: how much was learned by then."""
    at, values = plan.knots
    steps = np.asarray(steps, dtype=np.float64)
    inside = np.clip(steps, 0.0, at[-1])
    piece = np.clip(np.searchsorted(at, inside, side="right") - 1, 0, len(at) - 2)
    sums = np.concatenate([[0.0], np.cumsum(_under_line(values[:-1], values[1:], np.diff(at), power))])
    rest = _under_line(values[piece], np.interp(inside, at, values), inside - at[piece], power)
    return np.asarray(sums[piece] + rest + np.maximum(steps - at[-1], 0.0) * values[-1] ** power)


def _under_line(left: Numbers, right: Numbers, width: Numbers, power: float) -> Numbers:
    """Return the area under a straight line to this power."""
    rise = right - left
    flat = np.abs(rise) < 1e-6
    mean = (right ** (power + 1) - left ** (power + 1)) / ((power + 1) * np.where(flat, 1.0, rise))
    return np.asarray(width * np.where(flat, ((left + right) / 2) ** power, mean))


def warm_up_end(plan: RatePlan) -> float:
    """Return the first step at which the rate is (nearly) at its highest."""
    at, values = plan.knots
    reached = int(np.argmax(values >= 1 - _FALLS_BY))
    return float(at[reached])


def decay_start(plan: RatePlan) -> float:
    """Return the last step at which the rate is still (nearly) at its highest: the plan's last if it stays there."""
    at, values = plan.knots
    last = len(values) - 1 - int(np.argmax(values[::-1] >= 1 - _FALLS_BY))
    return float(at[last])


def decays(plan: RatePlan) -> bool:
    """Say whether the rate ends lower than its highest."""
    return bool(plan.known and plan.knots[1][-1] < 1 - _FALLS_BY)


def decay_done(plan: RatePlan, step: float) -> float:
    """Return the share of the whole fall of the rate that is done at this step; 1 where nothing is to fall."""
    at, values = plan.knots
    whole = 1 - values[-1]
    if whole <= _FALLS_BY or step < warm_up_end(plan):
        return 0.0 if whole > _FALLS_BY else 1.0
    return float(np.clip((1 - np.interp(step, at, values)) / whole, 0, 1))


def falls(plan: RatePlan) -> tuple[Numbers, Numbers, Numbers]:
    """Return the changes of the rate after the warm-up in small pieces: when, to what, and by how much it fell."""
    at, values = plan.knots
    begin = warm_up_end(plan)
    change = np.abs(np.diff(values)) * (at[1:] > begin)
    whole = float(change.sum())
    if whole <= 0:
        return np.empty(0), np.empty(0), np.empty(0)
    pieces = np.ceil(change / whole * _PIECES).astype(np.int64)
    edges = [np.linspace(0, 1, count + 1)[1:] for count in pieces if count]
    which = np.repeat(np.arange(len(pieces)), pieces)
    share = np.concatenate(edges)
    size = np.diff(values)[which] / pieces[which]
    when = at[which] + (at[which + 1] - at[which]) * (share - 0.5 / pieces[which])
    level = values[which] + np.diff(values)[which] * share
    return when, level, -size


def fall_share(plan: RatePlan) -> float:
    """Return the share of the run over which the rate falls: of a straight fall its length, of a sudden one 0."""
    when, _, size = falls(plan)
    weight = np.abs(size)
    if not weight.sum() > 0:
        return 0.0
    apart = when - np.average(when, weights=weight)
    wide = float(np.sqrt(12.0 * np.average(apart**2, weights=weight)))  # 12: a straight fall is as long as that
    return min(wide / max(plan.total_steps, 1), 1.0)


def resized(plan: RatePlan, total_steps: int) -> RatePlan:
    """Return the plan for another length: the same steps of warm-up, the same share of decay, the same shape."""
    total = max(int(total_steps), 1)
    at, values = plan.knots
    if not plan.known:
        return RatePlan(total, np.empty(0), np.empty(0))
    warm = min(warm_up_end(plan), at[-1])
    kept = min(warm, total / 2)
    scale = (total - kept) / max(at[-1] - warm, 1e-9)
    before = at * (kept / max(warm, 1e-9))
    after = kept + (at - warm) * scale
    return RatePlan(total, np.where(at <= warm, before, after), values)


def cut(plan: RatePlan, total_steps: int) -> RatePlan:
    """Return the plan up to this step, as the rate was in a run that ended there."""
    if not plan.known:
        return RatePlan(total_steps, np.empty(0), np.empty(0))
    at, values = plan.knots
    kept = at < total_steps
    last = float(np.interp(total_steps, at, values))
    return RatePlan(total_steps, np.append(at[kept], float(total_steps)), np.append(values[kept], last))


def decaying_from(plan: RatePlan, step: int, steps: int) -> RatePlan:
    """Return the plan that follows this one up to `step`, and then falls to 0 in a straight line over `steps`."""
    at, values = plan.knots
    end = step + max(int(steps), 1)
    before = at < step
    return RatePlan(
        end,
        np.concatenate([at[before], [float(step), float(end)]]),
        np.concatenate([values[before], [float(np.interp(step, at, values)), 0.0]]),
    )


def same_shape(one: RatePlan, other: RatePlan, until: float = 1.0) -> bool:
    """Say whether two plans of nearly one length have the same rate everywhere up to this share of the run."""
    if not (one.known and other.known) or abs(one.total_steps - other.total_steps) > 0.03 * one.total_steps:
        return False
    places = np.linspace(0.0, until, 65)
    first, second = (np.interp(places * max(plan.total_steps, 1), *plan.knots) for plan in (one, other))
    return bool(np.mean(np.abs(first - second)) < 0.02)
