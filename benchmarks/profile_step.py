"""Where the milliseconds of a training step go on a CUDA GPU: every kernel, and the kinds they are of.

python benchmarks/profile_step.py --out result.json                          # GPT-2 124M, context 1024, batch 64
python benchmarks/profile_step.py --arms default coordinate_descent_tuning   # beside it with an option of inductor
python benchmarks/profile_step.py --model 30m --arms optimizer.type=muon optimizer.type=muon,optimizer.row_beta2=0

Arms are timed in turns, forwards and backwards (A B B A), then five steps of each are profiled. An arm is a list of
settings of the configuration, or the name of a switch in `torch._inductor.config` that is on while it is compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import _inductor  # type: ignore[attr-defined]

from foretrain import environment
from foretrain.config.loading import parse_override
from plain_loop import Size
from throughput import Train, engine

KINDS = (
    ("matrix products", r"gemm|cutlass|nvjet|cublas|xmma|splitK"),
    ("attention", r"fmha|flash|sdpa|attention|cudnn"),
    ("loss", r"softmax_gradient"),
    ("optimizer and clipping", r"adam|multi_tensor|lpnorm|foreach"),
    ("norms", r"layer_norm|rms_norm"),
    ("GELU", r"gelu|tanh"),
    ("other fused kernels", r"^triton"),
    ("copies", r"mem(cpy|set)|copy"),
)
STEPS = 5
MODELS = {"124m": (Size(12, 12, 768, 1024, 50257), 64), "30m": (Size(6, 6, 384, 256, 50257), 64)}
"""The size of a model, and its batch."""


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def profiled(train: Train) -> list[dict[str, Any]]:
    """Return every kernel of a step, the dearest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(STEPS)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    return [
        {
            "kernel": event.key[:160],
            "kind": kind_of(event.key),
            "milliseconds": round(event.self_device_time_total / 1000 / STEPS, 4),
            "calls": event.count / STEPS,
        }
        for event in sorted(events, key=lambda event: -event.self_device_time_total)
    ]


def build(arm: str, size: Size, batch: int, data: np.ndarray[Any, Any]) -> Train:
    if arm == "default" or "=" in arm:
        told = dict(parse_override(setting) for setting in arm.split(",") if "=" in setting)
        train = engine(size, batch, "cuda", data, **told)
        train(6)
        return train
    torch._dynamo.reset()
    setattr(_inductor.config, arm, True)  # and not for this thread alone: the backward pass is compiled in another
    try:
        train = engine(size, batch, "cuda", data)
        train(6)
    finally:
        setattr(_inductor.config, arm, False)
    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=["default"])
    parser.add_argument("--model", choices=MODELS, default="124m")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: there is nothing to measure")
    size, usual = MODELS[options.model]
    batch = options.batch or usual
    data = np.random.default_rng(1).integers(0, 50257, 2_000_000).astype(np.uint16)
    arms: dict[str, Train] = {}
    for arm in options.arms:
        started = time.perf_counter()
        arms[arm] = build(arm, size, batch, data)
        torch.cuda.synchronize()
        print(f"{arm}: compiled in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(options.rounds):
        for arm in list(arms) if turn % 2 == 0 else list(reversed(arms)):
            torch.cuda.synchronize()
            started = time.perf_counter()
            arms[arm](options.steps)
            torch.cuda.synchronize()
            seconds[arm].append(time.perf_counter() - started)
    results = {}
    for arm, train in arms.items():
        kernels = profiled(train)
        kinds: dict[str, float] = {}
        for kernel in kernels:
            kinds[kernel["kind"]] = round(kinds.get(kernel["kind"], 0.0) + kernel["milliseconds"], 3)
        step = statistics.median(seconds[arm]) / options.steps
        results[arm] = {
            "milliseconds": round(1000 * step, 3),
            "tokens_per_second": round(size.context * batch / step),
            "seconds": seconds[arm],
            "kinds": kinds,
            "kernels": kernels,
        }
        print(f"\n{arm}: {1000 * step:.2f} ms a step, {size.context * batch / step:,.0f} tokens/s, of which")
        for kind, milliseconds in sorted(kinds.items(), key=lambda item: -item[1]):
            print(f"  {kind:<24} {milliseconds:8.3f} ms")
        for kernel in kernels[:40]:
            print(f"  {kernel['milliseconds']:8.3f} ms {kernel['calls']:6.1f} x  {kernel['kernel'][:110]}")
    if options.out:
        found = {
            "benchmark": "kernels of a step",
            "command": " ".join(["python", "benchmarks/profile_step.py", *sys.argv[1:]]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "commit": environment.commit_of(Path(__file__).parents[1] / "src"),
            "environment": environment.describe("cuda"),
            "results": results,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
