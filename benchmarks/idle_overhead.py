"""What watching costs while nothing is predicted: hybrid with the gate shut beside the plain loop, interleaved.

python benchmarks/idle_overhead.py --device cpu        # tiny GPT
python benchmarks/idle_overhead.py --device cuda       # tiny GPT and GPT-2 124M

Also says whether all end with the same weights, bit for bit (on a GPU attention itself is not the same twice; there
benchmarks/gpu_checks.py checks it with deterministic operations).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.data.loader import Loader, TokenWindows
from foretrain.motion.predictors.registry import NAMES
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

TINY = {"model.type": "gpt2-tiny", "model.vocab_size": 256, "batch_size": 16}
WATCHING = {"hybrid.warmup_steps": 90_000, "audit.time_budget": 0.005}
"""For ever; an audit could be afforded, so that directions are kept."""
SMALL = {"model.type": "gpt2-small", "model.vocab_size": 50257, "batch_size": 64}


class Arm:
    """One trainer with its own copy of the same data."""

    def __init__(self, device: str, vocabulary: int, **settings: Any) -> None:
        idle = {"audit.time_budget": 0.0, "schedule.type": "constant", "max_steps": 100_000, "hybrid.warmup_steps": 20}
        config = from_mapping({"device": device, "optimizer.type": "adamw", **idle, **settings})
        tokens = np.random.default_rng(1).zipf(1.2, 2_000_000).clip(max=vocabulary - 1).astype(np.uint16)
        model = run.build_model(config)
        self.trainer = HybridTrainer(model, config=config)
        windows = TokenWindows(tokens, model.shape.context, 1)
        self.batches = iter(Loader(windows, config.batch_size, 1, pin_memory=device == "cuda"))

    def train(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(next(self.batches))
            if self.trainer.global_step % 10 == 0:
                self.trainer.engine.meter.read()
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def compare(device: str, model: dict[str, Any], predictor: str, steps: int, rounds: int) -> dict[str, Any]:
    """Three arms: the plain loop; idle (the gate is shut, so watching rests most of the time); always watching."""
    vocabulary = model["model.vocab_size"]
    arms = {
        "plain": Arm(device, vocabulary, **model, **{"hybrid.mode": "off"}),
        "idle": Arm(device, vocabulary, **model, **{"predictor.type": predictor}),
        "watching": Arm(device, vocabulary, **model, **{"predictor.type": predictor, **WATCHING}),
    }
    for arm in arms.values():
        arm.train(60)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in list(arms) if turn % 2 == 0 else list(reversed(arms)):
            seconds[name].append(arms[name].train(steps))
    ratios = {
        name: [mine / plain for mine, plain in zip(seconds[name], seconds["plain"], strict=True)]
        for name in ("idle", "watching")
    }
    weights = {name: list(arm.trainer.model.parameters()) for name, arm in arms.items()}
    policies = [arm.trainer.policy for arm in arms.values() if arm.trainer.policy is not None]
    assert all(policy.score.counts.tried == 0 for policy in policies), "something was predicted: this is not idle"
    return {
        "model": model["model.type"],
        "predictor": predictor,
        "device": device,
        "milliseconds_per_step": round(1000 * statistics.median(seconds["plain"]) / steps, 3),
        "idle_percent": round(100 * (statistics.median(ratios["idle"]) - 1), 2),
        "watching_percent": round(100 * (statistics.median(ratios["watching"]) - 1), 2),
        "ratios": {name: [round(ratio, 4) for ratio in values] for name, values in ratios.items()},
        "seconds": seconds,
        "same_weights": {
            name: all(torch.equal(a, b) for a, b in zip(weights["plain"], weights[name], strict=True))
            for name in ("idle", "watching")
        },
        "basis_mb": round(arms["watching"].trainer.observer.trajectory.bytes / 2**20, 1),
        "steps_per_round": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--predictors", nargs="+", default=["linear", "rssm"], choices=NAMES)
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=["tiny", "small"])
    parser.add_argument("--steps", type=int, default=20, help="per round; a multiple of hybrid.window_steps")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = {"tiny": TINY, "small": SMALL}
    chosen = ["tiny"] if options.device == "cpu" else options.models
    results = []
    for name in chosen:
        for predictor in options.predictors:
            result = compare(options.device, models[name], predictor, options.steps, options.rounds)
            results.append(result)
            print({k: v for k, v in result.items() if k not in ("seconds", "ratios")}, file=sys.stderr, flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    report = {
        "benchmark": "idle overhead",
        "command": " ".join(["python", "benchmarks/idle_overhead.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(
            f"{result['model']:<11} {result['predictor']:<9} idle {result['idle_percent']:+.2f} %, "
            f"always watching {result['watching_percent']:+.2f} %, {result['milliseconds_per_step']} ms a step"
        )


if __name__ == "__main__":
    main()
