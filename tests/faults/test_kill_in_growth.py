"""kill -9 around the moment of growth: the run that goes on ends with the bits of one that was not disturbed."""

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
from foretrain.events import Event, Grown, Progress
from foretrain.recipes.train import train

ROOT = Path(__file__).parents[2]


def config_of(text: str) -> Any:
    model = {"type": "gpt2-tiny", "layers": 4, "width": 16, "heads": 2, "context": 16}
    given = {f"model.{name}": value for name, value in model.items()}
    given |= {"data.path": text, "max_steps": 60, "batch_size": 4, "growth.layers": 2, "device": "cpu"}
    return from_mapping(given | {"checkpoint.interval": 7, "evaluation.interval": 30, "log.interval": 1})


def die(text: str, out: str, moment: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)

    def listen(event: Event) -> None:
        grown = isinstance(event, Grown) and event.verdict == moment
        if grown or (isinstance(event, Progress) and str(event.step) == moment):
            os.kill(os.getpid(), signal.SIGKILL)

    train(config_of(text), out, progress=False, listeners=[listen])


def _weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("moment", ["made", "34", "kept"])
def test_killed_around_growth(moment: str, tmp_path: Path, make_text: Any) -> None:
    """At the moment itself, in its trial, and when it is kept."""
    text = tmp_path / "text.txt"
    text.write_text(make_text(8000))
    script = f"from {__name__} import die; die({str(text)!r}, {str(tmp_path / 'killed')!r}, {moment!r})"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(config_of(str(text)), tmp_path / "whole", progress=False)
        resumed = train(config_of(str(text)), tmp_path / "killed", resume=True, progress=False)
    finally:
        torch.set_num_threads(threads)
    assert [move["verdict"] for move in whole["growth"]["moves"]] == ["made", "kept"]
    assert whole["growth"] == resumed["growth"]
    assert _weights(tmp_path / "whole") == _weights(tmp_path / "killed")
