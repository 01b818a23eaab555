"""Halving, audits and the account of what stopping has missed, on trials whose losses are all known."""

from __future__ import annotations

import math
import random

import pytest

from foretrain.sweep.policy import HalvingPolicy, cannot_win
from foretrain.sweep.records import Standing, TrialRecord
from foretrain.sweep.regret import most_of, report_regret

RUNGS = (0.25, 0.5)


def advance(policy: HalvingPolicy, record: TrialRecord, rung: int, losses: dict[int, list[float]]) -> TrialRecord:
    """Train a trial up to a rung. losses: by trial, at each rung and at the end."""
    loss = losses[record.number][rung]
    if rung >= policy.rungs:
        return record.with_changes(state="finished", rung=rung, final=loss, step=100)
    stands = {**record.standings, rung: Standing(loss)}
    return record.with_changes(state="paused", rung=rung, standings=stands, step=round(100 * RUNGS[rung]))


def play(policy: HalvingPolicy, losses: dict[int, list[float]], workers: int = 1, seed: int = 0) -> list[TrialRecord]:
    """Play a sweep with workers that end their pieces in a random order."""
    records: list[TrialRecord] = []
    busy: list[tuple[int, int]] = []
    lot = random.Random(seed)  # noqa: S311
    while True:
        piece = policy.next_piece(records) if len(busy) < workers else None
        if piece is not None:
            number = len(records) if piece.number is None else piece.number
            if piece.number is None:
                records.append(TrialRecord(number, total_steps=100))
            record = records[number].with_changes(state="running")
            if piece.why == "audit" and not record.audited:
                record = record.with_changes(audited_from=record.rung)
            records[number] = record
            busy.append((number, piece.rung))
        elif busy:
            number, rung = busy.pop(lot.randrange(len(busy)))
            records[number] = advance(policy, records[number], rung, losses)
        else:
            return records


def even(count: int, rungs: int = 2) -> dict[int, list[float]]:
    """Trials that keep their order: 0 is the worst."""
    return {number: [2.0 + count - number - 0.1 * rung for rung in range(rungs + 1)] for number in range(count)}


def test_half_of_each_rung_goes_on() -> None:
    policy = HalvingPolicy(16, 2, references=0, audit_share=0)
    records = play(policy, even(16))
    assert [record.number for record in records if record.rung >= 1] == list(range(8, 16))
    assert [record.number for record in records if record.state == "finished"] == list(range(12, 16))


def test_as_many_come_to_the_end_as_planned() -> None:
    for count, reduction in ((24, 3.0), (32, 2.0), (7, 2.0)):
        policy = HalvingPolicy(count, 2, reduction, references=0, audit_share=0)
        records = play(policy, even(count))
        assert sum(record.state == "finished" for record in records) == policy.planned(1)
        assert sum(record.rung >= 1 for record in records) == policy.planned(0)


def test_references_run_to_the_end_and_audits_are_a_tenth_of_the_stopped() -> None:
    policy = HalvingPolicy(16, 2, references=2, audit_share=0.1)
    records = play(policy, even(16))
    assert all(record.state == "finished" for record in records[:2])
    assert len(policy.stopped(records)) == 12, "the references too: they are the worst"
    assert sum(record.audited for record in records) == 0, "they are two of twelve, and audit enough"
    more = HalvingPolicy(16, 2, references=2, audit_share=0.25)
    records = play(more, even(16))
    assert sum(record.audited for record in records) == 1
    assert all(record.state == "finished" for record in records if record.audited)
    assert more.audit_runs(records, RUNGS) == pytest.approx(0.75 + 0.75 + 0.75, abs=0.26)


def test_every_stopped_trial_can_be_the_one_that_is_audited() -> None:
    found = {
        record.number
        for seed in range(40)
        for record in play(HalvingPolicy(8, 2, references=0, audit_share=0.1, seed=seed), even(8))
        if record.audited
    }
    assert found == set(range(6))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_workers_change_the_order_and_never_the_winner(workers: int) -> None:
    policy = HalvingPolicy(12, 2)
    for seed in range(10):
        records = play(policy, even(12), workers, seed)
        best = min((one for one in records if one.final is not None), key=lambda one: one.final or 0)
        assert best.number == 11
        going = sum(record.rung >= 1 and not record.audited and record.number >= 2 for record in records)
        assert going <= policy.planned(0) + workers, "idle workers may promote a few more, not all"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_trials_come_to_an_end(count: int) -> None:
    for references in (0, 2):
        records = play(HalvingPolicy(count, 2, references=references), even(count))
        assert any(record.state == "finished" for record in records)


def test_trials_that_fail_are_not_promoted() -> None:
    policy = HalvingPolicy(4, 2, references=0, audit_share=0)
    failed = TrialRecord(0, state="failed", standings={0: Standing(math.inf)})
    ranked = [TrialRecord(n, state="paused", rung=0, standings={0: Standing(1.0 + n)}) for n in (1, 2, 3)]
    assert [one.number for one in policy.promotions([failed, *ranked])[0]] == [1, 2]
    waiting = [failed.with_changes(state="running", standings={}), *ranked]
    assert [one.number for one in policy.promotions(waiting)[0]] == [1], "one of three, while the fourth may come"


def test_who_cannot_win_does_not_go_on() -> None:
    assert cannot_win(Standing(3.0, 2.5, 3.5, calibrated=True), 2.4)
    assert not cannot_win(Standing(3.0, 2.5, 3.5, calibrated=False), 2.4), "nobody has confirmed the interval"
    assert not cannot_win(Standing(3.0, 2.3, 3.5, calibrated=True), 2.4)
    assert not cannot_win(Standing(3.0), 2.4)
    assert not cannot_win(Standing(3.0, 2.5, 3.5, calibrated=True), None)
    policy = HalvingPolicy(4, 1, references=1, audit_share=0)
    records = [
        TrialRecord(0, state="finished", rung=1, final=2.0, standings={0: Standing(2.5)}),
        *(
            TrialRecord(n, state="paused", rung=0, standings={0: Standing(2.0 + n / 10, 2.1, 3.0, True)})
            for n in (1, 2, 3)
        ),
    ]
    assert policy.next_piece(records) is None
    records[1] = records[1].with_changes(standings={0: Standing(2.1, 1.9, 3.0, True)})
    assert policy.next_piece(records) is not None


def test_only_own_trials_are_gone_on_with() -> None:
    policy = HalvingPolicy(2, 2, references=0)
    records = [TrialRecord(n, state="paused", rung=0, standings={0: Standing(1.0 + n)}, place="there") for n in (0, 1)]
    assert policy.next_piece(records) is not None
    assert policy.next_piece(records, lambda record: record.place == "here") is None


def test_a_record_survives_json() -> None:
    stands = {0: Standing(2.0, 1.0, 3.0, True, "annealed copy", 2.1)}
    record = TrialRecord(3, {"batch_size": 4}, "paused", 100, 25, 0, stands)
    record = record.with_changes(losses=((10, 2.5), (25, 2.1)), annealed=((20, 4, 2.0, 2.2),), audited_from=0)
    assert TrialRecord.from_json(3, {"batch_size": 4}, record.to_json()) == record


# --- regret ----------------------------------------------------------------------------------------------------------


def late_bloomers(count: int, better: int) -> dict[int, list[float]]:
    """Trials of which the first few look bad and end best."""
    return {n: [9.0, 8.0, 1.0] if n < better else [3.0 + n / 100, 2.5 + n / 100, 2.0 + n / 100] for n in range(count)}


def test_audits_find_what_stopping_missed() -> None:
    policy = HalvingPolicy(40, 2, references=0, audit_share=0.5, seed=3)
    report = report_regret(policy, play(policy, late_bloomers(40, 10)))
    assert report is not None
    assert report.audited == 15
    assert report.better > 0
    assert report.by == pytest.approx(0.5, abs=0.1)
    assert report.share == report.better / 15
    assert report.mean_gain == pytest.approx(report.by * report.share)
    assert report.share_at_most is not None
    assert report.share < report.share_at_most < 1


def test_nothing_missed_is_reported_as_nothing_seen() -> None:
    policy = HalvingPolicy(40, 2, references=2, audit_share=0.2)
    report = report_regret(policy, play(policy, even(40)))
    assert report is not None
    assert (report.better, report.by, report.share, report.mean_gain) == (0, 0.0, 0.0, 0.0)
    assert report.share_at_most is not None
    assert 0 < report.share_at_most < 0.5
    assert report_regret(policy, []) is None


def test_without_audits_nothing_is_claimed() -> None:
    policy = HalvingPolicy(8, 2, references=0, audit_share=0)
    report = report_regret(policy, play(policy, even(8)))
    assert report is not None
    assert (report.audited, report.share, report.share_at_most, report.mean_gain) == (0, None, None, None)


@pytest.mark.parametrize("marked", [0, 3, 20])
def test_the_bound_on_the_share_holds_as_often_as_it_says(marked: int) -> None:
    lot = random.Random(1)  # noqa: S311
    held = [marked <= most_of(60, 6, sum(n < marked for n in lot.sample(range(60), 6))) for _ in range(400)]
    assert sum(held) >= 0.88 * 400
    assert most_of(60, 60, marked) == marked
