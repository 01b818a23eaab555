"""The time left of a run whose steps cost more later on."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import pytest
from rich.console import Console as RichConsole

from foretrain.events import Event, Grown, Progress, RunStarted
from foretrain.show.console import Console
from foretrain.show.remaining import after_growth, costs_in, weighed

COSTS = [(0, 0.5), (100, 0.75), (200, 1.0)]


@pytest.mark.parametrize(
    ("first", "last", "cost"),
    [(0, 100, 50), (50, 150, 62.5), (0, 300, 225), (250, 300, 50), (100, 101, 0.75), (20, 20, 0), (30, 20, 0)],
)
def test_steps_are_weighed_by_what_they_cost(first: int, last: int, cost: float) -> None:
    assert weighed(COSTS, first, last) == pytest.approx(cost)


def test_without_growth_all_steps_cost_the_same() -> None:
    assert weighed((), 10, 30) == 20


def test_what_becomes_of_a_growth_is_followed() -> None:
    assert after_growth(COSTS, 100, "kept", 0.75) == COSTS
    assert after_growth(COSTS, 100, "made", 0.75) == COSTS
    assert weighed(after_growth(COSTS, 110, "made", 0.75), 110, 300) == pytest.approx(0.75 * 90 + 100)
    assert weighed(after_growth(COSTS, 110, "undone", 0.5), 110, 300) == pytest.approx(95)
    assert weighed(after_growth(COSTS, 100, "refused", 0.5), 50, 300) == pytest.approx(125)


@pytest.mark.parametrize("said", [None, "text", {"a": 1}, [None], [[1]], [[1, None]], [["a", 1.0]], [[0, -1.0]], [5]])
def test_a_log_that_says_nonsense_of_costs_is_not_believed(said: Any) -> None:
    assert costs_in(said) == []


def test_costs_are_read_as_they_were_written() -> None:
    assert costs_in([list(one) for one in COSTS]) == COSTS


def _etas(*events: Event) -> list[str]:
    """Return each time left that the console shows."""
    text, now = io.StringIO(), 0.0
    console = Console(RichConsole(file=text, width=200, color_system=None), clock=lambda: now)
    for event in events:
        now = event.seconds if isinstance(event, Progress) else now
        console(event)
    return re.findall(r"eta (\S+)", text.getvalue())


def test_the_console_knows_that_later_steps_are_slower() -> None:
    """A step takes one second with half of the blocks, and two with all."""
    started = RunStarted(0, 400, 1, 1, "cpu", "fp32", "toy", costs=[(0, 0.5), (200, 1.0)])

    def at(step: int, seconds: float) -> Progress:
        return Progress(step, 2.5, 1.0, 1e-3, 0, 1.0, seconds, 0)

    before = (started, at(100, 100.0), at(150, 150.0))
    assert _etas(*before) == ["8:20", "7:30"]
    made = Grown(200, "made", 4, 4, 2.0, None, "", 1.0)
    assert _etas(*before, at(200, 200.0), made, at(250, 300.0))[2:] == ["6:40", "5:00"]
    undone = dataclasses.replace(made, verdict="undone", layers=2, cost=0.5)
    assert _etas(*before, at(200, 200.0), made, undone, at(250, 250.0))[2:] == ["6:40", "2:30"]
