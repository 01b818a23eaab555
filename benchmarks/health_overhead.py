"""What looking at a run costs, interleaved: nothing at all beside logging and events, and beside health too.

python benchmarks/health_overhead.py --device cpu        # tiny GPT
python benchmarks/health_overhead.py --device cuda       # tiny GPT (recorded as a CUDA graph) and GPT-2 124M

Three arms of the plain loop: `bare` only trains; `logged` reads its meters every 10 steps and hands what `fit` would
tell to a log file and to the console, by line; `watched` also looks at its health every 100 steps. Blocks of exactly
one look's interval, each arm in turn, the order reversed every round, so that drift of the machine hits all. The
overhead is the median of the ratios of neighbouring blocks, with a bootstrap interval.
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
from rich.console import Console as RichConsole

from foretrain import environment
from foretrain.config import parse_override
from foretrain.loop.evaluator import Evaluator
from foretrain.loop.run import Loop
from foretrain.persist.signals import StopRequest
from foretrain.show.console import Console
from foretrain.show.jsonl import JsonlLog
from foretrain.trainer import HybridTrainer
from idle_overhead import SMALL, TINY, Arm

ARMS = {"bare": (False, False), "logged": (True, False), "watched": (True, True)}
"""Whether it logs, and whether it looks at its health."""


class Watched(Arm):
    """The plain loop, with as much of what `fit` adds to it as is wanted."""

    def __init__(self, device: str, logs: Path | None, interval: int, **settings: Any) -> None:
        settings = {"hybrid.mode": "off", "health.interval": interval, **settings}
        super().__init__(device, settings["model.vocab_size"], **settings)
        self.run: Loop | None = None
        if logs is not None:
            trainer = self.trainer
            evaluator = Evaluator(
                *(trainer.engine, [], {}, trainer.memory, trainer.rescue, trainer.bus.emit), evaluated=trainer.evaluated
            )
            self.run = Loop(trainer, evaluator, None, StopRequest())
            shown = logs.with_suffix(".txt").open("w", encoding="utf-8")
            self.trainer.bus.subscribe(Console(RichConsole(file=shown, width=120), level="verbose"))
            self.trainer.bus.subscribe(JsonlLog(logs))

    def train(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            result = self.trainer.step(next(self.batches))
            if self.run is not None and self.trainer.global_step % 10 == 0:
                self.run._log(result)
        _wait(self.trainer)
        return time.perf_counter() - started


def compare(device: str, model: dict[str, Any], interval: int, rounds: int, folder: Path) -> dict[str, Any]:
    arms = {
        name: Watched(device, folder / f"{name}.jsonl" if logs else None, interval if looks else 0, **model)
        for name, (logs, looks) in ARMS.items()
    }
    for arm in arms.values():
        arm.train(interval)  # warm-up: kernels, compilation, the graph, the first look
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
            seconds[name].append(arms[name].train(interval))
    weights = [torch.nn.utils.parameters_to_vector(arm.trainer.model.parameters()) for arm in arms.values()]
    return {
        "model": model["model.type"],
        "interval": interval,
        "rounds": rounds,
        "looks": arms["watched"].trainer.checkup.measurements,
        "look_milliseconds": round(1e3 * one_look(arms["watched"], rounds), 4),
        "milliseconds_per_step": round(1e3 * statistics.median(seconds["bare"]) / interval, 4),
        "health": overhead(seconds["watched"], seconds["logged"]),
        "together": overhead(seconds["watched"], seconds["bare"]),
        "same_weights": all(torch.equal(weights[0], other) for other in weights[1:]),
        "seconds": {name: [round(value, 5) for value in values] for name, values in seconds.items()},
    }


def overhead(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [one / other - 1 for one, other in zip(ours, theirs, strict=True)]
    draw = np.random.default_rng(1)
    medians = [np.median(draw.choice(ratios, len(ratios))) for _ in range(2000)]
    return {
        "percent": round(100 * statistics.median(ratios), 3),
        "interval": [round(100 * float(value), 3) for value in np.quantile(medians, [0.025, 0.975])],
    }


def one_look(arm: Arm, times: int) -> float:
    """Seconds of a look by itself, with the judging and the event, everything waited for: more than it can cost."""
    trainer, batch = arm.trainer, next(arm.batches)
    batch = trainer.engine.to_device(batch)
    output = trainer.engine.full(batch)
    spent = []
    for _ in range(times):
        _wait(trainer)
        started = time.perf_counter()
        trainer.checkup.layers.begin()
        trainer.checkup.layers.end(trainer.global_step, output)
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
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=["tiny", "small"])
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for all")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    known = {"tiny": TINY, "small": SMALL}
    given = dict(parse_override(text) for text in chosen.set)
    names = ["tiny"] if chosen.device == "cpu" else chosen.models
    report: dict[str, Any] = {
        "benchmark": "health overhead",
        "command": " ".join(["python", "benchmarks/health_overhead.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(chosen.device),
        "results": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            result = compare(chosen.device, {**known[name], **given}, chosen.interval, chosen.rounds, Path(folder))
            report["results"].append(result)
            said = ", ".join(
                f"{what} {result[what]['percent']:+.2f} % {result[what]['interval']}" for what in ("health", "together")
            )
            print(
                f"{result['model']}: {said}; {result['milliseconds_per_step']} ms a step, one look "
                f"{result['look_milliseconds']} ms, same weights: {result['same_weights']}",
                flush=True,
            )
            if chosen.out:
                chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
