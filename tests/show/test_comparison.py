"""A comparison on the console: what each level shows."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from foretrain.events import PhaseChanged, Progress
from foretrain.show.comparison import ComparisonConsole


def shown(level: Any, terminal: bool = False) -> str:
    text = io.StringIO()
    seconds = iter(range(0, 100, 8))
    screen = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    console = ComparisonConsole(screen, level, lambda: next(seconds))
    spec = SimpleNamespace(arm="plain", rate_factor=1.0, max_steps=10, seed=1)
    console.planned(20, (2, 4))
    console.begins(spec)
    console.happens(PhaseChanged(4, "full", "it has settled"))
    console.happens(Progress(10, 2.5, 1.0, 1e-3, 100, 50.0, 2.0, 0))
    console.ended(spec, {"loss": 2.5, "seconds": 2.0})
    console.ended(spec, {"loss": None, "failed": "the loss is [nan]"})
    console.close()
    return text.getvalue()


def test_how_far_it_is_and_how_long_it_will_take() -> None:
    lines = shown("normal").splitlines()
    assert lines[0] == "about 4 runs, 2 of them done before; 20 steps to do"
    assert lines[1] == f"run 3 of about 4: {GOOD}; about 0:08 left"
    assert "left" not in lines[2]
    assert "run 3 of about 4" in shown("normal", terminal=True)
    assert "runs" not in shown("quiet")


GOOD, BAD = "plain, rate x 1, 10 steps, seed 1: loss 2.5000, 2.0 s", "seed 1: failed: the loss is [nan]"


@pytest.mark.parametrize(("level", "good", "phases"), [("quiet", 0, 0), ("normal", 1, 0), ("verbose", 1, 1)])
def test_levels(level: str, good: int, phases: int) -> None:
    for terminal in (False, True):
        text = shown(level, terminal)
        assert (text.count(GOOD), text.count(BAD), text.count("step 4: FULL (it has settled)")) == (good, 1, phases)
        assert ("\x1b" in text) is (terminal and level != "quiet")
