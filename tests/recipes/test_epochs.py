"""How often the examples are seen, and whether a run ended too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.finetuning import config_for, write_base, write_colors
from tests.recipes.test_newest import command, stop_at

from foretrain.events import Event, RunStarted
from foretrain.recipes.epochs import in_words, still_falling
from foretrain.recipes.finetune import finetune


def test_epochs_in_words() -> None:
    assert in_words(300, 16, 13484) == "0.36 (300 steps x 16 are 36% of 13,484 examples, once)"
    assert in_words(300, 16, 2264) == "2.12 (300 steps x 16 of 2,264 examples)"


def curve(*losses: float) -> list[tuple[int, float]]:
    return [(30 * place, loss) for place, loss in enumerate(losses, start=1)]


def test_a_loss_that_still_falls_is_found() -> None:
    falling = curve(3.2, 2.9, 2.7, 2.5, 2.4, 2.3, 2.2, 2.1, 2.07, 1.9)
    assert still_falling(falling, 300) == {"from": 2.1, "to": 1.9, "steps": 60, "max_steps": 900}


@pytest.mark.parametrize(
    "losses",
    [
        (3.2, 1.0, 0.8, 0.75, 0.74, 0.735, 0.733, 0.732, 0.731, 0.73),  # it has settled
        (3.2, 1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.21),  # the last is not the lowest
        (3.2, 1.0, 0.1, 0.02, 0.009, 0.004, 0.002, 0.001),  # there is nothing left to learn
        (1.0, 1.0, 1.0, 1.0, 1.0),
        (3.0, 2.0, 1.0),  # too few to tell
        (1.0, 1.2, 1.4, 1.6),
    ],
)
def test_one_that_does_not_is_left_alone(losses: tuple[float, ...]) -> None:
    assert still_falling(curve(*losses), 300) is None


def test_a_run_says_what_it_sees_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    details: dict[str, str] = {}

    def listen(event: Event) -> None:
        if isinstance(event, RunStarted):
            details.update(event.details)

    changes: dict[str, Any] = {"evaluation__interval": 1, "hybrid__mode": "off", "schedule__type": "constant"}
    config = config_for(base, data, max_steps=10, log__interval=1, **changes)
    run = tmp_path / "run"
    finetune(config, run, progress=False, listeners=[listen, stop_at(9)])
    assert details["epochs"] == "0.37 (10 steps x 8 are 37% of 216 examples, once)"
    arguments = ("finetune", "--out", run, "--resume", "--set", "max_steps=10")
    assert command(*arguments) == 0  # the evaluations before the stop count too
    printed = capsys.readouterr().out
    assert "the held-out loss was still falling (" in printed
    longer = f"foretrain finetune --out {run} --resume --set max_steps=30"
    assert longer in printed
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["epochs"], summary["still_falling"]["max_steps"]) == (0.37, 30)
    assert command(*longer.split()[1:], "--json") == 0
    assert json.loads(capsys.readouterr().out)["global_step"] == 30
