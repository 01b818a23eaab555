"""StopRequest: the first signal asks, the second acts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foretrain.persist.signals import StopRequest

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


class Struck(Exception):
    pass


def strike(number: int, frame: Any) -> None:
    raise Struck


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever the surroundings have made of these signals, here they raise Struck."""
    before = {number: signal.signal(number, strike) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_only_asks(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.requested == ""
        os.kill(os.getpid(), number)
        assert stop.requested == number.name


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_second_signal_acts_as_it_always_did(first: signal.Signals, second: signal.Signals) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), first)
        with pytest.raises(Struck):
            os.kill(os.getpid(), second)
        assert stop.requested == first.name


def test_afterwards_everything_is_as_before() -> None:
    for strikes in (0, 1):
        with StopRequest():
            for _ in range(strikes):
                os.kill(os.getpid(), signal.SIGTERM)
        assert all(signal.getsignal(number) is strike for number in NUMBERS)


def test_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="as any"), StopRequest():
        raise ValueError("as any")
    assert all(signal.getsignal(number) is strike for number in NUMBERS)


def test_an_ignored_signal_stays_ignored() -> None:
    """As `nohup` has it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested == ""
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[Any] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("", strike)]


def test_one_inside_another_asks_only_the_inner_one() -> None:
    with StopRequest() as outer:
        with StopRequest() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (outer.requested, inner.requested) == ("", "SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.requested == "SIGTERM"
