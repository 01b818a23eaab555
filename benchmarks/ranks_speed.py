"""What FSDP2 and foretrain on top of it cost per step: arms in turns, forwards and backwards (A B B A).

python benchmarks/ranks_speed.py --device cuda --model small --out result.json     # one rank over NCCL, GPT-2 124M
torchrun --nproc-per-node 2 benchmarks/ranks_speed.py --device cpu --out result.json    # two gloo ranks, a tiny GPT

Every arm is eager (`--compile` compiles its blocks one by one) and has the same weights, rows and optimizer. "one
process" is foretrain's engine without torch.distributed, where there is one rank; "plain loop" is FSDP2 with clipping
as most people write it, nothing of foretrain in it; "off", "idle" and "watching" are foretrain on FSDP2: without
prediction, with the gate shut, and with every window watched. On a CPU that other programs use only the losses count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from foretrain import environment
from foretrain.config import Config, from_mapping
from foretrain.data.loader import Loader, TokenWindows
from foretrain.recipes import spreading
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer
from idle_overhead import WATCHING

MODELS = {
    "tiny": {"model.type": "gpt2-tiny", "model.vocab_size": 256, "batch_size": 16},
    "small": {"model.type": "gpt2-small", "model.vocab_size": 50257, "batch_size": 32},
}
MODES: dict[str, dict[str, Any]] = {"off": {"hybrid.mode": "off"}, "idle": {}, "watching": WATCHING}
Train = Callable[[int], float]
"""Makes so many steps, and returns the last loss."""


def config_of(options: argparse.Namespace, kind: str, ranks: int, **settings: Any) -> Config:
    alike = {"schedule.type": "constant", "max_steps": 100_000, "hybrid.warmup_steps": 20, "audit.time_budget": 0.0}
    alike |= {"optimizer.type": "adamw", "optimizer.learning_rate": 6e-4, "hybrid.linear_rows": 0, "health.interval": 0}
    eager = {"engine.compile": "auto", "engine.cuda_graph": "auto"} if ranks > 1 or kind == "fsdp2" else {}
    eager = eager or {"engine.compile": False, "engine.cuda_graph": False}
    model = MODELS[options.model]
    rows = {"batch_size": options.batch} if options.batch else {}
    return from_mapping({"device": options.device, **alike, **eager, **model, **rows, **settings})


def batches_of(config: Config, vocabulary: int, context: int, rank: int, ranks: int) -> Iterator[Any]:
    tokens = np.random.default_rng(1).zipf(1.2, 2_000_000).clip(max=vocabulary - 1).astype(np.uint16)
    windows = TokenWindows(tokens, context, 1)
    pinned = config.device != "cpu"
    return iter(Loader(windows, config.batch_size, 1, pin_memory=pinned, rank=rank, world=ranks))


def sharded(config: Config, ranks: int, compiled: bool) -> Any:
    """Return a model whose weights FSDP2 shares among the ranks."""
    model = run.build_model(config)
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    spreading.spread(model, spreading.Spreading("fsdp2", shard=ranks), config)
    return model


def ours(options: argparse.Namespace, kind: str, place: tuple[int, int], **settings: Any) -> Train:
    """foretrain's whole step: loader, schedule, forward, backward, check, clip, update."""
    rank, ranks = place
    config = config_of(options, kind, ranks, **settings)
    model = sharded(config, ranks, options.compile) if kind == "fsdp2" else run.build_model(config)
    if kind != "fsdp2" and options.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    trainer = HybridTrainer(model, config=config)
    batches = batches_of(config, config.model.vocab_size, model.shape.context, rank, ranks)

    def train(steps: int) -> float:
        for _ in range(steps):
            result = trainer.step(next(batches))
            if trainer.global_step % 10 == 0:
                trainer.engine.meter.read()
        return float(result.loss)

    return train


def plain(options: argparse.Namespace, place: tuple[int, int]) -> Train:
    """FSDP2 as most people write it: AdamW, clipping, one look at the loss every ten steps."""
    rank, ranks = place
    config = config_of(options, "fsdp2", ranks)
    model = sharded(config, ranks, options.compile)
    batches = batches_of(config, config.model.vocab_size, model.shape.context, rank, ranks)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)

    def train(steps: int) -> float:
        for step in range(steps):
            x, y = (part.to(options.device, non_blocking=True) for part in next(batches))
            loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 9:
                float(loss.detach())
        return float(loss.detach())

    return train


def measure(options: argparse.Namespace, place: tuple[int, int]) -> dict[str, Any]:
    """Build every arm, then time them in turns."""
    arms: dict[str, Callable[[], Train]] = {"FSDP2, plain loop": lambda: plain(options, place)}
    if place[1] == 1:
        arms["one process"] = lambda: ours(options, "alone", place, **{"hybrid.mode": "off"})
    for name, settings in MODES.items():
        arms[f"FSDP2, {name}"] = lambda settings=settings: ours(options, "fsdp2", place, **settings)
    built: dict[str, Train] = {}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for name, build in arms.items():
        built[name] = build()
        losses[name] = [built[name](options.warmup)]
        seconds[name] = []
    for turn in range(options.rounds):
        for name in list(built) if turn % 2 == 0 else list(reversed(built)):
            wait(options.device)
            started = time.perf_counter()
            losses[name].append(built[name](options.steps))
            wait(options.device)
            seconds[name].append(time.perf_counter() - started)
    return {"seconds": seconds, "losses": losses, "ratios": ratios(seconds)}


def wait(device: str) -> None:
    """Wait for the device and for the other ranks: nobody's clock starts before all are there."""
    if device == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return medians over rounds: how many times as long an arm takes as another one in the same round."""
    pairs = {"foretrain over a plain loop, both FSDP2": ("FSDP2, off", "FSDP2, plain loop")}
    pairs |= {f"{name} over off, both FSDP2": (f"FSDP2, {name}", "FSDP2, off") for name in ("idle", "watching")}
    pairs["throughput: FSDP2 over one process"] = ("one process", "FSDP2, off")
    return {
        title: round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 4)
        for title, (one, other) in pairs.items()
        if one in seconds
    }


def join(device: str) -> tuple[int, int]:
    """Return rank and number of ranks; one process alone is a group of one."""
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group(backend)
    else:
        with tempfile.NamedTemporaryFile(delete=False) as meeting:
            pass
        distributed.init_process_group(backend, init_method=f"file://{meeting.name}", rank=0, world_size=1)
    return distributed.get_rank(), distributed.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, help="rows of all ranks; unset: 16 (tiny) or 32 (small)")
    parser.add_argument("--steps", type=int, default=20, help="per round; a multiple of hybrid.window_steps")
    parser.add_argument("--warmup", type=int, default=40, help="steps that are not timed")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="compile each block by itself, in every arm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    place = join(options.device)
    report = {
        "command": " ".join(["python", "benchmarks/ranks_speed.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "ranks": place[1],
        **measure(options, place),
    }
    if place[0] == 0:
        for name, found in report["seconds"].items():
            milliseconds = 1000 * statistics.median(found) / options.steps
            print(f"{name:<20} {milliseconds:9.2f} ms a step, loss {report['losses'][name][-1]:.4f}")
        for title, ratio in report["ratios"].items():
            print(f"{title}: {ratio:.3f}")
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
