"""Properties of the damping of leaps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.hybrid.linearised.damping import Damping


def test_it_falls_fivefold_after_a_leap_as_good_as_predicted() -> None:
    damping = Damping()
    before = damping.value
    damping.ease(1.0)
    assert damping.value == pytest.approx(before / 5)


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_a_better_leap_never_leaves_more_damping(one: float, other: float) -> None:
    ends = []
    for ratio in sorted((one, other)):
        damping = Damping()
        damping.ease(ratio)
        ends.append(damping.value)
    assert ends[0] >= ends[1]


def test_it_rises_faster_and_faster_until_a_leap_is_good() -> None:
    damping = Damping()
    values = [damping.value]
    for _ in range(4):
        damping.rise()
        values.append(damping.value)
    assert [after / before for before, after in pairwise(values)] == [2, 4, 8, 16]
    damping.ease(1.0)
    eased = damping.value
    damping.rise()
    assert damping.value == 2 * eased


@given(st.lists(st.sampled_from(["good", "bad", "unsolved"]), max_size=60))
def test_it_stays_within_what_numbers_can_tell(found: list[str]) -> None:
    damping = Damping()
    for one in found:
        if one == "good":
            damping.ease(1.0)
        else:
            (damping.rise if one == "bad" else damping.rise_unsolved)()
        assert 1e-14 <= damping.value <= 1e8


def test_other_rows_begin_where_these_did() -> None:
    damping = Damping()
    first = damping.value
    damping.rise()
    damping.rise()
    damping.return_to(first)
    damping.rise()
    assert damping.value == 2 * first
