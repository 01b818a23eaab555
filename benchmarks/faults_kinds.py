"""What a fault of `thousand_faults.py` is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults_setups import Setup
from faults_work import Work


@dataclass(frozen=True)
class Kind:
    """One fault."""

    name: str
    promise: str
    happen: Callable[[Work], None]
    """Nothing where the run has come to its end already."""
    fits: Callable[[Setup], bool] = lambda setup: True
    place: int = 1
    """When it happens among several: 0 wrong from the beginning, 1 in mid-run, 2 through to the end."""
    waits: bool = False
    """It happens at a moment that may not come."""
    weight: int = 1
    """How often it is drawn, relative to others."""


KINDS: dict[str, Kind] = {}


def kind(name: str, promise: str, **options: Any) -> Callable[[Callable[[Work], None]], Callable[[Work], None]]:
    def add(happen: Callable[[Work], None]) -> Callable[[Work], None]:
        def unless_finished(work: Work) -> None:
            if work.finished:
                return
            work.fired = False
            happen(work)
            if work.fired or not options.get("waits"):
                work.happened.append(name)

        KINDS[name] = Kind(name, promise, unless_finished, **options)
        return happen

    return add


def is_text(setup: Setup) -> bool:
    return setup.command == "train"


def is_command(setup: Setup) -> bool:
    return setup.command != "fit"


def is_own(setup: Setup) -> bool:
    return setup.command == "fit"
