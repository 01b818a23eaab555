"""What a linearised leap costs beside a step of Adam, by the number of points and by the width of the network.

python benchmarks/leap_cost.py --device cuda --out result.json
python benchmarks/leap_cost.py --device cpu --points 512 1024 2048 --widths 32 64 128

The problem is Burgers' equation of `low_noise.py`. Both are medians of steps of the trainer with its default settings,
after the first ones; on a GPU both are replayed from recorded graphs, the step with TF32, the leap without. The number
of rows is what the trainer takes by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.hybrid.moves.linearised import LinearisedKind
from foretrain.trainer import HybridTrainer
from low_noise_problems import Settings, burgers

FIRST_LEAPS = 20
"""They look for their rows, and are recorded."""


def trainer_of(settings: Settings, **changes: Any) -> tuple[HybridTrainer, Any]:
    problem = burgers(settings)
    torch.manual_seed(1)
    values = {
        "max_steps": 100_000,
        "device": settings.device,
        "precision.type": "fp32",
        "engine.compile": False,
        "optimizer.type": "adam",
        "optimizer.weight_decay": 0.0,
        "optimizer.learning_rate": 3e-3,
        "schedule.type": "constant",
        **changes,
    }
    trainer = HybridTrainer(problem.build(), config=from_mapping(values), **problem.handed_in)
    return trainer, problem.batch(0)


def median_step(settings: Settings, steps: int) -> float:
    """Seconds of a step of Adam."""
    trainer, batch = trainer_of(settings, **{"hybrid.mode": "off", "precision.tf32": True})
    for _ in range(20):
        trainer.step(batch)
    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        float(trainer.step(batch).loss)
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def median_leap(settings: Settings, leaps: int) -> tuple[float, int]:
    """Seconds of a leap, and the rows that most of them took."""
    trainer, batch = trainer_of(settings)
    assert trainer.policy is not None
    kind = next(kind for kind in trainer.policy.kinds if isinstance(kind, LinearisedKind))
    seconds: list[tuple[float, int]] = []
    for _ in range(3 * (FIRST_LEAPS + leaps)):
        before, made, rows = time.perf_counter(), kind.leaps.made, kind.leaps.rows
        float(trainer.step(batch).loss)
        if kind.leaps.made > made >= FIRST_LEAPS:
            seconds.append((time.perf_counter() - before, rows))
        if len(seconds) >= leaps:
            break
    usual = statistics.mode(rows for _, rows in seconds)
    return statistics.median(one for one, rows in seconds if rows == usual), usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--points", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument(
        "--usual", nargs=2, type=int, default=[8192, 256], help="points and width where the other varies"
    )
    parser.add_argument("--leaps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    points, width = options.usual
    sizes = [(some, width) for some in options.points] + [(points, some) for some in options.widths if some != width]
    results = []
    report = {
        "benchmark": "cost of a leap",
        "command": " ".join(["python", "benchmarks/leap_cost.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "results": results,
    }
    print(f"{'points':>8}{'width':>7}{'rows':>7}{'step ms':>10}{'leap ms':>10}{'leap/step':>11}")
    for points, width in sizes:
        settings = Settings(options.device, width, points, "wall")
        step = median_step(settings, 4 * options.leaps)
        leap, rows = median_leap(settings, options.leaps)
        results.append({**asdict(settings), "rows": rows, "step_seconds": step, "leap_seconds": leap})
        print(f"{points:>8}{width:>7}{rows:>7}{1e3 * step:>10.2f}{1e3 * leap:>10.2f}{leap / step:>11.1f}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
