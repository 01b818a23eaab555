"""Rows are doubled and halved where that should pay, and a change that did not pay is taken back."""

from __future__ import annotations

import pytest

from foretrain.hybrid.linearised.row_count import ALWAYS_TAKEN, RowCount


def by_rows(rows: int) -> float:
    return rows / 100


def after(count: RowCount, leaps: int, own: float, whole: float) -> int:
    for _ in range(leaps):
        count.note(own, whole)
        count.think_over(by_rows)
    return count.now


def test_rows_that_overfit_are_doubled_and_those_that_agree_halved() -> None:
    assert after(RowCount(160, 1000), 6, own=2.0, whole=0.1) == 320
    assert after(RowCount(160, 1000), 6, own=0.1, whole=0.1) == 80
    assert after(RowCount(160, 1000), 5, own=2.0, whole=0.1) == 160  # not yet
    assert after(RowCount(ALWAYS_TAKEN, 1000), 6, own=0.1, whole=0.1) == ALWAYS_TAKEN


def test_there_are_never_more_than_there_is_memory_for() -> None:
    assert RowCount(160, 100).now == 100
    assert after(RowCount(160, 200), 6, own=2.0, whole=0.1) == 200
    assert after(RowCount(200, 200), 60, own=2.0, whole=0.1) == 200


def test_a_change_that_did_not_pay_is_taken_back_and_waits_longer() -> None:
    count = RowCount(160, 1000)
    assert after(count, 6, own=2.0, whole=0.1) == 320
    assert after(count, 6, own=2.0, whole=0.11) == 160  # far from twice as much for twice the price
    assert after(count, 11, own=2.0, whole=0.1) == 160
    assert after(count, 1, own=2.0, whole=0.1) == 320


def test_a_change_that_paid_stays() -> None:
    count = RowCount(160, 10_000)
    assert after(count, 6, own=2.0, whole=0.1) == 320
    assert after(count, 6, own=2.0, whole=0.3) == 640


def test_leaps_that_win_nothing_are_not_waited_for() -> None:
    count = RowCount(160, 10_000)
    assert after(count, 6, own=2.0, whole=0.1) == 320
    assert after(count, 6, own=2.0, whole=0.01) == 160
    assert after(count, 6, own=2.0, whole=-0.1) == 320  # not after twelve


def test_where_changes_are_recorded_they_are_fewer() -> None:
    count = RowCount(160, 10_000, recorded=True)
    assert after(count, 11, own=2.0, whole=0.1) == 160
    assert after(count, 1, own=2.0, whole=0.1) == 320
    count.begin(lambda rows: float(rows) ** 0.6, 10_000)  # twice the rows for half as much again
    assert count.now == 10_000


@pytest.mark.parametrize(("outputs", "begins"), [(10_000, 640), (300, 320)])
def test_it_begins_with_more_where_they_cost_hardly_more(outputs: int, begins: int) -> None:
    count = RowCount(160, 10_000)
    count.begin(lambda rows: 10.0 if rows <= 640 else rows / 10, outputs)
    assert count.now == begins
