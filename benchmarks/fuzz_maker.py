"""What an input of the fuzzer is, and what all makers of inputs share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz_mutations as spoil
from fuzz_examples import TINY
from fuzz_mutations import Random


@dataclass
class Input:
    """One call of the program, in a folder that `make` has filled."""

    arguments: list[str]
    writes: tuple[str, ...] = ()
    """What it may write, below the current folder; everything else must stay as it is."""
    stdin: bytes = b""
    serves: bool = False
    """It goes on until it is stopped."""


@dataclass(frozen=True)
class Target:
    """A command and a kind of what it is given."""

    command: str
    kind: str
    make: Callable[[Maker], Input] = field(repr=False)
    weight: int = 1

    @property
    def name(self) -> str:
        return f"{self.command} / {self.kind}"


class Maker:
    """Makes one input: `rng` decides, `good` holds the examples, the current folder takes what is made."""

    def __init__(self, rng: Random, good: Path) -> None:
        self.rng = rng
        self.good = good
        self.legal = rng.choice([0.5, 0.95, 1.0])
        """Share of settings with a value that is allowed."""

    def take(self, *names: str) -> None:
        """Copy examples into the current folder."""
        for name in names:
            if (self.good / name).is_dir():
                shutil.copytree(self.good / name, name, symlinks=True)
            else:
                shutil.copy(self.good / name, name)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def name(self, *good: str) -> str:
        """One of these names, or rarely one that leads nowhere."""
        return self.rng.choice(good) if self.chance(0.95) else self.rng.choice(spoil.LOST_NAMES)

    def options(self, **choices: tuple[Any, ...]) -> list[str]:
        """Some options with one of their values, or rarely any value at all."""
        given = []
        for name, values in choices.items():
            if self.chance(0.12):
                value = self.rng.choice(values)
                if self.chance(0.02 if value is True else 0.1):
                    value = self.rng.choice([*spoil.STRANGE, *spoil.NUMBERS])
                text = "" if value is True else f"={plain(value)}"
                given.append(f"--{name.replace('_', '-')}{text}")
        return given

    def json(self) -> list[str]:
        return ["--json"] if self.chance(0.2) else []


def plain(value: Any) -> str:
    """A value as somebody would type it on a command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


def tiny_settings(**more: Any) -> list[str]:
    """`--set` for a run of two steps with these settings changed."""
    values = {**TINY, "max_steps": 2, **{name.replace("__", "."): value for name, value in more.items()}}
    return [part for name, value in values.items() for part in ("--set", f"{name}={plain(value)}")]
