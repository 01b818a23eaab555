"""What keeping snapshots, directions and the optimizer's state in host memory costs, and what it saves on the device.

python benchmarks/offload_cost.py                                      # tiny GPT on the CPU: time only
python benchmarks/offload_cost.py --device cuda --model gpt2-small
python benchmarks/offload_cost.py --device cuda --model gpt2-xl --switch --rounds 2   # memory.offload alone

Hybrid runs in which every cycle has a move that is kept, whatever it is worth, in rounds that alternate between the
arms. Models other than tiny and small are in memory one at a time, so each round builds them anew.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import environment
from foretrain.config import from_mapping, parse_override
from foretrain.data.loader import Loader, TokenWindows
from foretrain.engine.memory.host import host_bytes
from foretrain.hybrid.gate import Answer
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"model.type": "gpt2-tiny", "model.vocab_size": 256, "batch_size": 16},
    "gpt2-small": {"model.type": "gpt2-small", "model.vocab_size": 50257, "batch_size": 32},
    "gpt2-medium": {"model.type": "gpt2-medium", "model.vocab_size": 50257, "batch_size": 16},
    "gpt2-large": {"model.type": "gpt2-large", "model.vocab_size": 50257, "batch_size": 16},
    "gpt2-xl": {"model.type": "gpt2-xl", "model.vocab_size": 50257, "batch_size": 8},
}
TOGETHER = ("tiny", "gpt2-small")
"""Models of which every arm fits beside the others."""
ARMS: dict[str, dict[str, Any]] = {
    "device": {},
    "snapshots": {"memory.snapshots": "pinned"},
    "basis": {"memory.basis": "pinned"},
    "offload": {"memory.offload": True},
    "offload, return_ahead 0": {"memory.offload": True, "memory.return_ahead": 0},
    "everything": {"memory.snapshots": "pinned", "memory.basis": "pinned", "memory.offload": True},
    "everything, return_ahead 0": {
        "memory.snapshots": "pinned",
        "memory.basis": "pinned",
        "memory.offload": True,
        "memory.return_ahead": 0,
    },
}
CYCLE = {"hybrid.warmup_steps": 20, "hybrid.full_steps": 20, "hybrid.correct_steps": 5, "hybrid.max_predict_steps": 10}
HORIZON = 10
STEPS = {"rollout": 20 + HORIZON + 5, "leap": 20 + 1 + 5}
"""Calls of `step` in one cycle."""
SHARE = 0.01


class Timid(Predictor):
    """A hundredth of the last window's motion: harmless, so that moves go through all phases."""

    name = "timid"

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        coefficients = np.zeros((len(horizons), *situation.gram.shape[:2]))
        coefficients[:, :, 1] = SHARE * np.asarray(horizons)[:, None] / situation.window
        return Forecast(tuple(horizons), coefficients, np.full(len(horizons), 1e9), np.zeros(len(horizons)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        """It knows what it says."""

    def reset(self) -> None:
        """There is nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


class Arm:
    """A trainer that makes a move in every cycle."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = from_mapping(settings)
        model = run.build_model(config)
        self.trainer = trainer = HybridTrainer(model, config=config, predictor=Timid())
        policy: Any = trainer.policy
        policy.gate.ask = lambda ask: Answer(ask.horizon >= 1, False, "this is a benchmark")
        policy.bandit.choose = lambda context, confidence, limit: min(HORIZON, limit)
        policy.confidence.estimate = lambda features: 0.99
        self._always_keep()
        vocabulary = settings["model.vocab_size"]
        tokens = np.random.default_rng(1).zipf(1.2, 2_000_000).clip(max=vocabulary - 1).astype(np.uint16)
        windows = TokenWindows(tokens, model.shape.context, 1)
        self.batches = iter(Loader(windows, config.batch_size, 1, pin_memory=trainer.device.type == "cuda"))
        while not sum(policy.score.counts.moves.values()):  # also what is compiled and allocated once
            self.trainer.step(next(self.batches))

    def _always_keep(self) -> None:
        """Probes are made, and each says that the loss is lower than the one before."""
        probes: Any = self.trainer.policy.tools.probes
        probe, made = probes.loss, itertools.count(2)

        def lower(move: Any, batch: Any = None) -> float:
            probe(move, batch)
            return 1 / next(made)

        probes.loss = lower

    def train(self, steps: int) -> float:
        """Seconds."""
        self._finish()
        started = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(next(self.batches))
        self._finish()
        return time.perf_counter() - started

    def peaks(self, steps: int) -> dict[str, float]:
        """Highest memory on the device in each phase, in MB."""
        highest: dict[str, float] = {}
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            phase = self.trainer.step(next(self.batches)).phase
            used = torch.cuda.max_memory_allocated() / 2**20
            highest[phase] = round(max(highest.get(phase, 0.0), used), 1)
        return highest

    def _finish(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()


def measure(settings: dict[str, Any], mode: str, arms: list[str], rounds: int, cycles: int, together: bool) -> Any:
    """Seconds per round and arm; memory per phase and arm, where it can be known."""
    settings = {**settings, **CYCLE, "hybrid.mode": mode}
    steps = cycles * STEPS[mode]
    kept: dict[str, Arm] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    memories: dict[str, Any] = {}
    moves: dict[str, Any] = {}
    for turn in range(rounds):
        for name in arms if turn % 2 == 0 else arms[::-1]:
            before = host_bytes()
            arm = kept.get(name) or Arm({**settings, **ARMS[name]})
            seconds[name].append(arm.train(steps))
            if together:
                kept[name] = arm
            elif name not in memories:
                memories[name] = memory(arm, mode, before)
            moves[name] = dict(arm.trainer.policy.score.counts.moves) if arm.trainer.policy else {}
            del arm
            clear(settings["device"])
    kept.clear()
    for name in arms if together else ():
        clear(settings["device"])
        before = host_bytes()
        memories[name] = memory(Arm({**settings, **ARMS[name]}), mode, before)
    return steps, seconds, moves, memories


def switched(settings: dict[str, Any], mode: str, rounds: int, cycles: int) -> Any:
    """The same of one trainer whose optimizer state leaves in every other round: for models that take long to build."""
    settings = {**settings, **CYCLE, "hybrid.mode": mode, **ARMS["offload"]}
    steps, before = cycles * STEPS[mode], host_bytes()
    arm = Arm(settings)
    trainer, leaving = arm.trainer, arm.trainer.engine.away
    seconds: dict[str, list[float]] = {"device": [], "offload": []}
    memories: dict[str, Any] = {}
    for turn in range(rounds):
        for name in seconds if turn % 2 == 0 else list(seconds)[::-1]:
            while trainer.phase.value != "full":
                trainer.step(next(arm.batches))
            trainer.engine.away = leaving if name == "offload" else None
            seconds[name].append(arm.train(steps))
    for name in seconds:
        while trainer.phase.value != "full":
            trainer.step(next(arm.batches))
        trainer.engine.away = leaving if name == "offload" else None
        memories[name] = memory(arm, mode, before)
    if leaving is not None and trainer.device.type == "cuda":
        memories["offload"]["copied_gb_per_second"] = round(leaving.parking.lane.rate / 1e9, 2)
        memories["offload"]["probe_seconds"] = round(trainer.policy.tools.probes.seconds, 4)
    return steps, seconds, dict(trainer.policy.score.counts.moves) if trainer.policy else {}, memories


def memory(arm: Arm, mode: str, before: int) -> dict[str, Any]:
    """Of an arm that is alone on the device. before: host memory that others use."""
    peaks = arm.peaks(STEPS[mode]) if arm.trainer.device.type == "cuda" else {}
    return {"peak_mb": peaks, "host_mb": round((host_bytes() - before) / 2**20, 1)}


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def report(mode: str, steps: int, seconds: dict[str, list[float]], memories: dict[str, Any]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for name, times in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(times, seconds["device"], strict=True)]
        lines[name] = {
            "milliseconds_per_step": round(1000 * statistics.median(times) / steps, 3),
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "seconds": [round(value, 4) for value in times],
            **memories[name],
        }
        phases = ", ".join(f"{phase} {used:,.0f}" for phase, used in memories[name]["peak_mb"].items())
        print(
            f"{mode:<8} {name:<24} {lines[name]['milliseconds_per_step']:>9.2f} ms a step, "
            f"{100 * (lines[name]['ratio'] - 1):+6.2f} %, host {memories[name]['host_mb']:,.0f} MB"
            + (f", peak MB: {phases}" if phases else ""),
            flush=True,
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="tiny", choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["rollout", "leap"], choices=["rollout", "leap"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cycles", type=int, default=2, help="moves per round")
    parser.add_argument("--switch", action="store_true", help="one trainer, whose state leaves in every other round")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for every arm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arms = ["device", *[name for name in options.arms if name != "device"]]
    usual = {"optimizer.type": "adamw", "schedule.type": "constant", "max_steps": 100_000, "seed": 1}
    given = dict(parse_override(text) for text in options.set)
    settings = {"device": options.device, **usual, **MODELS[options.model], **given}
    results = {}
    for mode in options.modes:
        together = options.model in TOGETHER
        if options.switch:
            steps, seconds, moves, memories = switched(settings, mode, options.rounds, options.cycles)
        else:
            steps, seconds, moves, memories = measure(settings, mode, arms, options.rounds, options.cycles, together)
        results[mode] = {
            "steps_per_round": steps,
            "moves": moves,
            "arms": report(mode, steps, seconds, memories),
        }
    found = {
        "benchmark": "cost of host memory",
        "command": " ".join(["python", "benchmarks/offload_cost.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "settings": settings,
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
