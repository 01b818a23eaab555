"""SIGKILL at random moments: the end is, bit for bit, that of a run nobody disturbed."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

KILLS = 20
STEPS = 60


def content(run: Path) -> dict[str, bytes]:
    """Everything the end of a run consists of, apart from its times."""
    files = [run / "model" / "model.safetensors", *(run / f"checkpoints/step-{STEPS:08d}").glob("*.safetensors")]
    return {path.name if path.parent.name != "model" else "export": path.read_bytes() for path in files}


def test_twenty_kills_at_random_moments_change_nothing(crash_matrix: Any, warm: Any, tmp_path: Path) -> None:
    crash_matrix.write_inputs(tmp_path, keep=2, steps=STEPS)
    moments = random.Random(20)  # noqa: S311

    def start(out: str) -> Any:
        return warm.start(tmp_path, "train", "tiny.toml", "--out", out, "--resume", log=f"{out}.txt")

    assert start("warm-up").wait() == 0  # tokenises
    began = time.monotonic()
    assert start("undisturbed").wait() == 0
    duration = time.monotonic() - began
    expected = content(tmp_path / "undisturbed")
    assert len(expected) == 7

    kills, runs = 0, 0
    while kills < KILLS:
        runs += 1
        out = f"run-{runs}"
        while True:
            command = start(out)
            try:
                assert command.wait(moments.uniform(0, duration) if kills < KILLS else None) == 0
                break
            except TimeoutError:
                command.kill()
                kills += command.wait() == 128 + 9
        assert content(tmp_path / out) == expected
        assert not list((tmp_path / out).rglob(".tmp-*"))

    printed = "".join(log.read_text() for log in tmp_path.glob("run-*.txt"))
    assert max(int(step) for step in re.findall(r"resumed from step (\d+)", printed)) > 3
