"""kill -9 inside a chain of leaps: no more than one save interval is lost, and the end is the same to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from tests.faults.test_resume_hybrid import assert_same_state, saved
from tests.test_loop_chain import EVEN, fit, steps, trainer_of

from foretrain.events import Resumed

ROOT = Path(__file__).parents[2]
SETTINGS = {"evaluation__interval": 10, "checkpoint__interval": 10, "max_steps": 120}


def die_in_a_chain(out: str, step: int) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    trainer, _ = trainer_of(**SETTINGS)
    taken = trainer.step

    def killed(batch: object) -> object:
        result = taken(batch)
        if trainer.hybrid.chaining and trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.step = killed  # type: ignore[method-assign,assignment]
    trainer.fit([EVEN[0]], [EVEN[1]], out=out, progress=False)


def test_killed_inside_a_chain(tmp_path: Path) -> None:
    script = f"from {__name__} import die_in_a_chain; die_in_a_chain({str(tmp_path / 'killed')!r}, 57)"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole, _, _ = fit(tmp_path / "whole", noisy=False, **SETTINGS)
        resumed, events, _ = fit(tmp_path / "killed", noisy=False, how={"resume": True}, **SETTINGS)
    finally:
        torch.set_num_threads(threads)
    assert steps(events, Resumed) == [50]
    assert_same_state(saved(resumed), saved(whole))
