"""Tokens per second of foretrain's engine beside a straightforward loop, interleaved in one run.

python benchmarks/throughput.py --device cpu            # tiny GPT, nanoGPT's CPU setting
python benchmarks/throughput.py --device cuda           # GPT-2 124M, context 1024, and batch 4 x 64
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import config as configuration
from foretrain import environment
from foretrain.data.loader import Loader, TokenWindows
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer
from plain_loop import Size, plain_loop

Train = Callable[[int], None]
CASES = ["ladder", "ladder-30m", "large", "launches"]


def engine(size: Size, batch: int, device: str, data: np.ndarray, **settings: Any) -> Train:
    """foretrain's whole step: loader, schedule, forward, backward, check, clip, update, metering every ten steps."""
    values = {
        "max_steps": 10_000,
        "hybrid.mode": "off",
        "batch_size": batch,
        "device": device,
        "engine.compile": device == "cuda",  # its time is not measured, so "auto" must not weigh it
        "model.layers": size.layers,
        "model.heads": size.heads,
        "model.width": size.width,
        "model.context": size.context,
        "model.vocab_size": size.vocab,
        "optimizer.type": "adamw",
        "optimizer.learning_rate": 6e-4,
        **settings,
    }
    config = configuration.from_mapping(values)
    model = run.build_model(config)
    trainer = HybridTrainer(model, config=config)
    samples = TokenWindows(data, size.context, seed=1)
    batches = iter(Loader(samples, batch, seed=1, pin_memory=device == "cuda"))

    def train(steps: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # plain loops change it
        for _ in range(steps):
            trainer.step(next(batches))
            if trainer.global_step % 10 == 0:
                trainer.engine.meter.read()

    return train


def measure(
    arms: dict[str, Callable[[], Train]], tokens: int, steps: int, warmup: int, rounds: int, device: str
) -> dict[str, Any]:
    """Build every arm, then time them in turns, forwards and backwards (A B B A)."""
    built: dict[str, Train] = {}
    results: dict[str, Any] = {}
    for name, build in arms.items():
        built[name] = build()
        built[name](warmup)
        synchronize(device)
        results[name] = {"seconds": []}
        print(f"  warmed up: {name}", file=sys.stderr, flush=True)
    names = list(built)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            started = time.perf_counter()
            built[name](steps)
            synchronize(device)
            results[name]["seconds"].append(time.perf_counter() - started)
    for entry in results.values():
        entry["steps_per_round"] = steps
        entry["steps_per_second"] = steps / statistics.median(entry["seconds"])
        entry["tokens_per_second"] = tokens * entry["steps_per_second"]
    built.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return results


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(title: str, results: dict[str, Any], reference: str) -> None:
    base = results[reference]["tokens_per_second"]
    print(f"\n{title}")
    print(f"{'':44} {'tokens/s':>12} {'steps/s':>10} {'ratio':>7}")
    for name, entry in results.items():
        ratio = entry["tokens_per_second"] / base
        print(f"{name:44} {entry['tokens_per_second']:12,.0f} {entry['steps_per_second']:10.2f} {ratio:7.3f}")


def cuda(cases: Sequence[str], data: np.ndarray, rounds: int, batch: int) -> dict[str, Any]:
    """Two ladders from PyTorch as it comes to our engine, the large case, and one where launches dominate."""
    big = Size(12, 12, 768, 1024, 50257)
    aligned = Size(12, 12, 768, 1024, 50304)
    short = Size(12, 12, 768, 64, 50257)
    small = Size(6, 6, 384, 256, 50257)
    eager = {"engine.compile": False, "engine.cuda_graph": False}

    def plain(size: Size, rows: int, dtype: torch.dtype, compiled: bool, tf32: bool) -> Callable[[], Train]:
        return lambda: plain_loop(size, rows, "cuda", dtype=dtype, compiled=compiled, tf32=tf32, data=data)

    def ours(size: Size, rows: int, **settings: Any) -> Callable[[], Train]:
        return lambda: engine(size, rows, "cuda", data, **settings)

    def ladder(size: Size, rows: int, steps: int) -> dict[str, Any]:
        return measure(
            {
                "plain loop, fp32 eager": plain(size, rows, torch.float32, False, False),
                "plain loop, tf32 eager": plain(size, rows, torch.float32, False, True),
                "plain loop, bf16 eager": plain(size, rows, torch.bfloat16, False, True),
                "plain loop, bf16 compiled": plain(size, rows, torch.bfloat16, True, True),
                "foretrain": ours(size, rows),
            },
            tokens=rows * size.context,
            steps=steps,
            warmup=6,
            rounds=4,
            device="cuda",
        )

    report = {}
    name = "plain loop, bf16 compiled"
    if "ladder" in cases:
        report["ladder, batch 16"] = ladder(big, 16, 4)
        table("GPT-2 124M, context 1024, batch 16: the ladder", report["ladder, batch 16"], "plain loop, fp32 eager")
    if "ladder-30m" in cases:
        found = report["ladder of 30M, batch 64"] = ladder(small, 64, 10)
        table("30M, context 256, batch 64: the ladder", found, "plain loop, fp32 eager")
    if "large" in cases:
        report[f"batch {batch}"] = measure(
            {
                name: plain(big, batch, torch.bfloat16, True, True),
                "plain loop, bf16 compiled, vocabulary 50304": plain(aligned, batch, torch.bfloat16, True, True),
                "foretrain": ours(big, batch),
            },
            tokens=batch * 1024,
            steps=20,
            warmup=6,
            rounds=rounds,
            device="cuda",
        )
        table(f"GPT-2 124M, context 1024, batch {batch}", report[f"batch {batch}"], name)
    if "launches" in cases:
        report["batch 4 x 64"] = measure(
            {
                "plain loop, fp32 eager": plain(short, 4, torch.float32, False, False),
                "plain loop, bf16 eager": plain(short, 4, torch.bfloat16, False, True),
                "plain loop, bf16 compiled": plain(short, 4, torch.bfloat16, True, True),
                "foretrain, eager": ours(short, 4, **eager),
                "foretrain": ours(short, 4),
            },
            tokens=4 * 64,
            steps=100,
            warmup=10,
            rounds=rounds,
            device="cuda",
        )
        table("GPT-2 124M, batch 4 x 64 tokens: launches dominate", report["batch 4 x 64"], "plain loop, fp32 eager")
    return report


def cpu(data: np.ndarray, rounds: int) -> dict[str, Any]:
    """nanoGPT's CPU setting: 4 layers, 4 heads, 128 wide, context 64, batch 12."""
    size = Size(4, 4, 128, 64, 65)
    data = data % 65
    results = measure(
        {
            "plain loop": lambda: plain_loop(
                size, 12, "cpu", dtype=torch.float32, compiled=False, tf32=False, data=data
            ),
            "foretrain": lambda: engine(size, 12, "cpu", data),
        },
        tokens=12 * 64,
        steps=60,
        warmup=20,
        rounds=rounds,
        device="cpu",
    )
    table("tiny GPT, context 64, batch 12, CPU", results, "plain loop")
    return {"tiny": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help="of a GPU: %(choices)s"
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per arm")
    parser.add_argument("--batch", type=int, default=64, help="batch size of the large GPU case")
    parser.add_argument("--data", type=Path, help="GPT-2 tokens as little-endian uint16; unset: random tokens")
    parser.add_argument("--out", type=Path, help="folder for a dated JSON file with every raw number")
    arguments = parser.parse_args()
    data = (
        np.fromfile(arguments.data, dtype="<u2")
        if arguments.data
        else np.random.default_rng(1).integers(0, 50257, 2_000_000).astype(np.uint16)
    )
    report = (
        cuda(arguments.cases, data, arguments.rounds, arguments.batch)
        if arguments.device == "cuda"
        else cpu(data, arguments.rounds)
    )
    if arguments.out:
        record = {
            "command": "python benchmarks/throughput.py " + " ".join(sys.argv[1:]),
            "date": f"{datetime.now().astimezone():%Y-%m-%d}",
            "environment": environment.describe(arguments.device),
            "results": report,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{record['date']}-throughput-{arguments.device}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
