"""Who goes on? Successive halving in which nothing is thrown away: whoever is passed over is paused, and may go on
later. Decisions follow from the records alone, so a sweep that was killed decides as it would have done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foretrain.sweep.records import Standing, TrialRecord

Why = Literal["new", "reference", "promoted", "audit"]


@dataclass(frozen=True)
class NextPiece:
    """The piece of a run that a worker is to do next. number: None asks for a new trial."""

    number: int | None
    rung: int
    """Up to which rung; as many as there are rungs: to the end."""
    why: Why


@dataclass(frozen=True)
class HalvingPolicy:
    """Ranks the trials at each rung and lets one of `reduction` go on.

    New trials come before promotions, so that with few workers every rung is ranked when all have reached it. A worker
    with nothing else to do promotes the best among those ranked so far, as asynchronous halving does.
    """

    trials: int
    rungs: int
    reduction: float = 2.0
    references: int = 2
    audit_share: float = 0.1
    seed: int = 1

    def next_piece(
        self, records: Sequence[TrialRecord], mine: Callable[[TrialRecord], bool] = lambda _: True
    ) -> NextPiece | None:
        """Return what a free worker does next; None: nothing now. mine: trials that this worker can go on with."""
        for record in records[: self.references]:
            if record.state == "paused" and mine(record):
                return NextPiece(record.number, record.rung + 1, "reference")
        if len(records) < self.trials:
            return NextPiece(None, 0, "new")
        for rung, going in enumerate(self.promotions(records)):
            for record in going:
                if record.state == "paused" and record.rung == rung and mine(record):
                    return NextPiece(record.number, rung + 1, "promoted")
        if any(record.open and not record.audited for record in records):
            return None  # what becomes of them decides who is audited
        for record in self.audits(records):
            if record.state == "paused" and mine(record):
                return NextPiece(record.number, record.rung + 1, "audit")
        return None

    def is_complete(self, records: Sequence[TrialRecord]) -> bool:
        """Say whether nothing is left to do, here or elsewhere."""
        return self.next_piece(records) is None and not any(record.open for record in records)

    # --- halving -----------------------------------------------------------------------------------------------------

    def planned(self, rung: int) -> int:
        """Return how many trials go on from this rung when all have reached it."""
        count = self.trials
        for _ in range(rung + 1):
            count = max(1, math.ceil(count / self.reduction))
        return count

    def promotions(self, records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
        """Return for each rung who goes on from it, as far as it is known now, best first."""
        return self._halve(records)[0]

    def _halve(self, records: Sequence[TrialRecord]) -> tuple[list[list[TrialRecord]], dict[int, int]]:
        """Return who goes on from each rung, and the rungs at which references were passed over, by their numbers.
        These run to the end all the same, and count as audited."""
        made: list[list[TrialRecord]] = []
        passed: dict[int, int] = {}
        best, complete = self.best_end(records), len(records) >= self.trials
        # Who will come to a later rung: a worker has them, or they go on from the rung where they are now.
        on_their_way = {record.number for record in records if record.open or self._is_reference(record)}
        for rung in range(self.rungs):
            ranked = [record for record in self.ranked(records, rung) if record.number not in passed]
            arriving = any(record.number in on_their_way and self._can_reach(record, rung) for record in records)
            quota = self.planned(rung)
            if arriving or not complete:
                quota = min(quota, math.floor(len(ranked) / self.reduction))
            made.append([record for record in ranked[:quota] if not cannot_win(record.standings[rung], best)])
            going = {record.number for record in made[-1]}
            passed |= {one.number: rung for one in ranked if self._is_reference(one) and one.number not in going}
            on_their_way |= {record.number for record in made[-1] if record.rung == rung}
        return made, passed

    def ranked(self, records: Iterable[TrialRecord], rung: int) -> list[TrialRecord]:
        """Return the trials that stood at this rung, best first; not those that came to it only as an audit."""
        reached = [record for record in records if rung in record.standings]
        found = [one for one in reached if one.audited_from is None or rung <= one.audited_from]
        finite = [record for record in found if math.isfinite(record.standings[rung].score)]
        return sorted(finite, key=lambda record: (record.standings[rung].score, record.number))

    def _is_reference(self, record: TrialRecord) -> bool:
        return record.number < self.references

    def _can_reach(self, record: TrialRecord, rung: int) -> bool:
        """Say whether a trial has not come to this rung yet, and is not at its end."""
        ended = record.audited or record.state in ("finished", "failed")
        return not ended and rung not in record.standings and record.rung < rung

    def best_end(self, records: Iterable[TrialRecord]) -> float | None:
        """Return the lowest last loss of those that came to their end."""
        ends = [record.final for record in records if record.final is not None and math.isfinite(record.final)]
        return min(ends, default=None)

    # --- the audit ---------------------------------------------------------------------------------------------------

    def stopped_at(self, records: Sequence[TrialRecord]) -> dict[int, int]:
        """Return the trials that halving has passed over, references among them, and the rungs where it did. It is for
        good once halving is done."""
        paused = {one.number: one.rung for one in records if one.state == "paused"}
        audited = {one.number: one.audited_from for one in records if one.audited_from is not None}
        return paused | audited | self._halve(records)[1]

    def stopped(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that halving has passed over."""
        numbers = self.stopped_at(records)
        return [record for record in records if record.number in numbers]

    def audit_runs(self, records: Sequence[TrialRecord], shares: Sequence[float]) -> float:
        """Return what stopped trials cost after they were stopped, in whole runs. shares: of a run, at each rung."""
        stopped = self.stopped_at(records)
        return sum(max(0.0, one.cost - shares[stopped[one.number]]) for one in records if one.number in stopped)

    def audits(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return the stopped trials that go to the end: references that were passed over, and others by lot."""
        stopped = sorted(self.stopped(records), key=lambda record: record.number)
        count = math.ceil(self.audit_share * len(stopped)) if self.audit_share else 0
        drawn = [record for record in stopped if record.audited or self._is_reference(record)]
        rest = [record for record in stopped if record not in drawn]
        order = np.random.default_rng(self.seed).permutation(len(rest))
        return [*drawn, *(rest[place] for place in order)][: max(count, len(drawn))]


def cannot_win(standing: Standing, best: float | None) -> bool:
    """Say whether even the lower end of a trial's interval is above what another trial has ended with. Intervals that
    no trial of this sweep has confirmed are not asked: on curves of others they were too narrow."""
    return best is not None and standing.calibrated and standing.low is not None and standing.low > best
