"""kill -9 while learning rates are tried, and around an annealed copy: the run that goes on ends with the bits and the
rates of one that was not disturbed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config import from_mapping
from foretrain.events import Annealed, Event, Progress, RateTried
from foretrain.recipes.train import train

ROOT = Path(__file__).parents[2]


def config_of(text: str) -> Any:
    model = {"type": "gpt2-tiny", "layers": 1, "width": 16, "heads": 2, "context": 16}
    given = {f"model.{name}": value for name, value in model.items()}
    given |= {"data.path": text, "max_steps": 60, "batch_size": 4, "device": "cpu", "optimizer.learning_rate": "auto"}
    given |= {"checkpoint.interval": 7, "evaluation.interval": 30, "log.interval": 1, "hybrid.mode": "off"}
    return from_mapping(given | {"forecast.copies": [0.6], "forecast.copy_steps": 0.1})


def die(text: str, out: str, moment: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    told: list[Event] = []

    def listen(event: Event) -> None:
        told.append(event)
        tried = sum(isinstance(one, RateTried) for one in told)
        reached = (moment == "in the race" and tried == 2) or (moment == "copied" and isinstance(event, Annealed))
        if reached or (isinstance(event, Progress) and str(event.step) == moment):
            os.kill(os.getpid(), signal.SIGKILL)

    train(config_of(text), out, progress=False, listeners=[listen])


def _weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("moment", ["in the race", "39", "copied"])
def test_killed_in_the_race_and_around_a_copy(moment: str, tmp_path: Path, make_text: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text(make_text(8000))
    script = f"from {__name__} import die; die({str(text)!r}, {str(tmp_path / 'killed' / 'run')!r}, {moment!r})"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(config_of(str(text)), tmp_path / "whole" / "run", progress=False)
        resumed = train(config_of(str(text)), tmp_path / "killed" / "run", resume=True, progress=False)
    finally:
        torch.set_num_threads(threads)
    assert len(whole["learning_rate"]["tried"]) >= 3
    assert len(whole["annealed"]["copies"]) == 1
    for name in ("learning_rate", "annealed", "backward_passes", "tokens", "final_val_loss"):
        assert whole[name] == resumed[name]
    assert _weights(tmp_path / "whole" / "run") == _weights(tmp_path / "killed" / "run")
