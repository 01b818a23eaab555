"""What has stopping missed? The audited trials are drawn by lot among the stopped ones, so they tell: how many of them
ended below the best of those that were never stopped, by how much, and how many of all stopped ones would have.

How far the best of the others would have ended below the winner is not told: a tenth of them says too little about
their extreme (benchmarks/results has what was tried)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.sweep.policy import HalvingPolicy
from foretrain.sweep.records import TrialRecord

LEVEL = 0.9


@dataclass(frozen=True)
class RegretReport:
    """The sweep's account of its own mistakes."""

    stopped: int
    audited: int
    """Stopped trials that ran to their end: references, and others by lot."""
    better: int
    """How many of these ended below the best of the trials that were never stopped."""
    by: float
    """How far the best of them did, as a share of that loss; 0 where none did."""
    mean_gain: float | None
    """How far they did as a mean over all audited ones, those that gained nothing included; None without any."""
    share: float | None
    """Share of the stopped trials that would have ended below: as many as of the audited ones."""
    share_at_most: float | None
    """It is not more than this, with the confidence `level`."""
    level: float = LEVEL


def report_regret(policy: HalvingPolicy, records: Sequence[TrialRecord]) -> RegretReport | None:
    """Return what the audit says; None before any trial has come to its end."""
    ends = {one.number: one.final for one in records if one.final is not None and math.isfinite(one.final)}
    if not ends:
        return None
    stopped = policy.stopped(records)
    drawn = [one for one in stopped if one.state in ("finished", "failed")]
    passed = {one.number for one in stopped}
    chosen = min((end for number, end in ends.items() if number not in passed), default=math.inf)
    gains = [max(0.0, (chosen - ends.get(one.number, math.inf)) / abs(chosen)) if chosen else 0.0 for one in drawn]
    better = sum(gain > 0 for gain in gains)
    count, seen = len(stopped), len(drawn)
    return RegretReport(
        count,
        seen,
        better,
        max(gains, default=0.0),
        sum(gains) / seen if seen else None,
        better / seen if seen else None,
        most_of(count, seen, better) / count if seen else None,
    )


def most_of(count: int, drawn: int, found: int, level: float = LEVEL) -> int:
    """Return the largest number of marked ones among `count` that is not refuted where `found` of `drawn` are marked:
    with more of them, so few would be drawn with a probability below 1 - level only."""
    for marked in range(count - (drawn - found), found - 1, -1):
        few = sum(math.comb(marked, n) * math.comb(count - marked, drawn - n) for n in range(found + 1))
        if few >= (1 - level) * math.comb(count, drawn):
            return marked
    return found
