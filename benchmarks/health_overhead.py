"""What looking at a run's health costs: with looks every 100 steps beside none at all, interleaved.

python benchmarks/health_overhead.py --device cpu        # tiny GPT
python benchmarks/health_overhead.py --device cuda       # tiny GPT (recorded as a CUDA graph) and GPT-2 124M

Blocks of exactly one look's interval, each arm in turn, the order reversed every round, so that drift of the machine
hits both. The overhead is the median of the ratios of neighbouring blocks, with a bootstrap interval. Both arms read
their meters every 10 steps, as `fit` does, and hand events to a log file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import environment
from foretrain.show.jsonl import JsonlLog
from foretrain.trainer import HybridTrainer
from idle_overhead import SMALL, TINY, Arm


class Logged(Arm):
    """The plain loop with its log."""

    def __init__(self, device: str, log: Path, **settings: Any) -> None:
        super().__init__(device, settings["model.vocab_size"], **{"hybrid.mode": "off"}, **settings)
        self.trainer.bus.subscribe(JsonlLog(log))


def compare(device: str, model: dict[str, Any], interval: int, rounds: int, folder: Path) -> dict[str, Any]:
    arms = {
        name: Logged(device, folder / f"{name}.jsonl", **model, **{"health.interval": every})
        for name, every in (("without", 0), ("with", interval))
    }
    for arm in arms.values():
        arm.train(interval)  # warm-up: kernels, compilation, the graph, the first look
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
            seconds[name].append(arms[name].train(interval))
    ratios = [one / other - 1 for one, other in zip(seconds["with"], seconds["without"], strict=True)]
    draw = np.random.default_rng(1)
    medians = [np.median(draw.choice(ratios, len(ratios))) for _ in range(2000)]
    low, high = np.quantile(medians, [0.025, 0.975])
    weights = [torch.nn.utils.parameters_to_vector(arm.trainer.model.parameters()) for arm in arms.values()]
    return {
        "model": model["model.type"],
        "interval": interval,
        "rounds": rounds,
        "looks": arms["with"].trainer.checkup.looks,
        "look_milliseconds": round(1e3 * one_look(arms["with"], rounds), 4),
        "milliseconds_per_step": round(1e3 * statistics.median(seconds["without"]) / interval, 4),
        "overhead_percent": round(100 * statistics.median(ratios), 3),
        "interval_percent": [round(100 * float(low), 3), round(100 * float(high), 3)],
        "same_weights": bool(torch.equal(*weights)),
        "seconds": {name: [round(value, 5) for value in values] for name, values in seconds.items()},
    }


def one_look(arm: Arm, times: int) -> float:
    """Seconds of a look by itself, with the judging and the event, everything waited for: more than it can cost."""
    trainer, batch = arm.trainer, next(arm.batches)
    batch = trainer.to_device(batch)
    output = trainer.full(batch)
    spent = []
    for _ in range(times):
        _wait(trainer)
        started = time.perf_counter()
        trainer.checkup.look.begin()
        trainer.checkup.look.end(trainer.global_step, output)
        trainer.checkup.judge()
        _wait(trainer)
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def _wait(trainer: HybridTrainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", default="")
    chosen = parser.parse_args()
    models = [TINY] if chosen.device == "cpu" else [TINY, SMALL]
    with tempfile.TemporaryDirectory() as folder:
        results = [compare(chosen.device, model, chosen.interval, chosen.rounds, Path(folder)) for model in models]
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.now().astimezone().date().isoformat(),
        "environment": environment.describe(chosen.device),
        "results": results,
    }
    for result in results:
        low, high = result["interval_percent"]
        steps = f"{result['milliseconds_per_step']} ms per step, one look {result['look_milliseconds']} ms"
        print(f"{result['model']}: {result['overhead_percent']} % [{low}, {high}] ({steps}); same weights: ", end="")
        print(result["same_weights"])
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
