"""What a long run keeps does not grow. `benchmarks/long_run.py` looks at 20,000 steps with the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import HERE, load_script


@pytest.fixture(scope="module")
def long_run() -> Any:
    return load_script(HERE.parents[1] / "benchmarks" / "long_run.py")


@pytest.mark.parametrize("arm", ["rollout", "exact"])
def test_files_threads_and_the_log_of_a_run_with_everything_on(arm: str, long_run: Any, tmp_path: Path) -> None:
    samples, summary = long_run.train(arm, 240, 40, tmp_path / "run")
    assert sum(summary["moves"].values()) > 2
    assert summary["metrics"]
    half, end = samples[2], samples[-1]
    assert (half.step, end.step) >= (120, 240)
    assert end.files <= half.files
    assert end.threads <= half.threads
    assert end.log_bytes - half.log_bytes <= long_run.MOST_LOG * (end.step - half.step)
    assert (tmp_path / "run" / "tensorboard").is_dir()
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(name.partition("-")[0] for name in saved) == ["best", "step"]


def test_growth_is_found(long_run: Any) -> None:
    def samples(**growth: float) -> list[Any]:
        flat = {"memory_mb": 300.0, "objects": 1000, "files": 7, "threads": 3, "log_bytes": 0, "other_bytes": 0}
        return [
            long_run.Sample(
                step=step,
                cpu_seconds=0.004 * step + growth.get("time", 0.0) * step**2,
                reference_ms=20.0,
                **{name: value + growth.get(name, 0.0) * step for name, value in flat.items()},
            )
            for step in range(500, 20_500, 500)
        ]

    def judged(**growth: float) -> list[str]:
        within = long_run.judge(samples(**growth))["within"]
        return [name for name, good in within.items() if not good]

    assert judged(log_bytes=80.0, other_bytes=100.0, memory_mb=1e-4) == []
    assert judged(memory_mb=5e-4) == ["memory"]
    assert judged(files=1e-3) == ["files"]
    assert judged(threads=1e-3) == ["threads"]
    assert judged(log_bytes=1000.0) == ["log"]
    assert judged(time=2e-7) == ["time"]
