"""The bus: order, removal, and listeners that fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from foretrain import events
from foretrain.events import Bus, Event, Notice


def test_every_listener_gets_every_event_in_order_of_subscription() -> None:
    bus, seen = Bus(), []
    bus.subscribe(lambda event: seen.append(("first", event)))
    bus.subscribe(lambda event: seen.append(("second", event)))
    one, two = Notice("one"), Notice("two")
    bus.emit(one)
    bus.emit(two)
    assert seen == [("first", one), ("second", one), ("first", two), ("second", two)]


def test_unsubscribing_stops_the_events_and_may_be_repeated() -> None:
    bus, seen = Bus(), []
    unsubscribe = bus.subscribe(seen.append)
    bus.emit(Notice("before"))
    unsubscribe()
    unsubscribe()
    bus.emit(Notice("after"))
    assert [event.message for event in seen] == ["before"]


def test_a_listener_that_raises_is_dropped_and_the_others_are_told() -> None:
    bus, seen, calls = Bus(), [], []

    def broken(event: Event) -> None:
        calls.append(event)
        raise OSError("connection lost")

    bus.subscribe(broken)
    bus.subscribe(seen.append)
    bus.emit(Notice("one"))
    bus.emit(Notice("two"))
    assert len(calls) == 1
    assert (seen[0].message, seen[3].message) == ("one", "two")
    assert "broken" in seen[2].message
    assert "OSError: connection lost" in seen[2].message
    assert "broken" in seen[1].where
    assert 'raise OSError("connection lost")' in seen[1].traceback


def test_two_listeners_that_raise_are_both_dropped() -> None:
    bus = Bus()

    def broken(event: Event) -> None:
        raise ValueError("no")

    def broken_too(event: Event) -> None:
        raise OSError("no")

    bus.subscribe(broken)
    bus.subscribe(broken_too)
    bus.emit(Notice("one"))
    seen: list[Event] = []
    bus.subscribe(seen.append)
    bus.emit(Notice("two"))
    assert seen == [Notice("two")]


def test_a_listener_that_leaves_and_then_raises_does_not_stop_the_run() -> None:
    bus, seen = Bus(), []
    leave: list[Callable[[], None]] = []

    def tired(event: Event) -> None:
        leave[0]()
        raise RuntimeError("closed")

    leave.append(bus.subscribe(tired))
    bus.subscribe(seen.append)
    bus.emit(Notice("one"))
    bus.emit(Notice("two"))
    told = [event.message for event in seen if isinstance(event, Notice)]
    assert [message for message in told if "tired" not in message] == ["one", "two"]


def test_a_keyboard_interrupt_in_a_listener_is_not_swallowed() -> None:
    bus = Bus()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(Notice("one"))


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
)
def test_events_cannot_be_changed(kind: Any) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
