"""Numbers from files that may hold anything."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from foretrain.show.numbers import finite, is_list, mapping, rounded


def test_what_cannot_be_drawn_is_no_number() -> None:
    assert [finite(value) for value in (None, math.nan, math.inf, "3", True, 10**400)] == [None] * 6
    assert finite(3) == 3.0


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e90, max_value=1e90))
def test_numbers_are_short_and_near(value: float) -> None:
    near = rounded(value)
    assert near is not None
    assert abs(near - value) <= 1e-5 * abs(value) + 1e-90


def test_what_is_no_mapping_or_list_is_none() -> None:
    assert mapping([1]) == {}
    assert mapping({"a": 1}) == {"a": 1}
    assert [is_list(value) for value in ([1], (1,), "text", None)] == [True, True, False, False]
