"""What each way to save memory saves: the peak of every phase and the speed of full steps, one setting after another.

python benchmarks/memory_ladder.py --model gpt2-small                     # on a CUDA GPU
python benchmarks/memory_ladder.py --model gpt2-xl --rungs everything --budget 14   # capped at 14 GB

Hybrid runs in which every cycle makes a move, as in offload_cost.py; every rung has the settings of those above it.
The reduction in PREDICT is that of its peak against the peak of full steps of the same rung, and of the first rung.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.config import from_mapping, parse_override
from foretrain.engine.memory.host import host_bytes
from foretrain.planning.budget import cap_allocator
from offload_cost import CYCLE, MODELS, STEPS, Arm

RUNGS: dict[str, dict[str, Any]] = {
    "plain": {"engine.fused_loss": False},
    "fused loss": {"engine.fused_loss": True},
    "half of the blocks recomputed": {"engine.activation_checkpointing": 0.5},
    "all blocks recomputed": {"engine.activation_checkpointing": True},
    "8-bit moments": {"optimizer.state_type": "8bit"},
    "updates in the backward pass": {"engine.update_in_backward": True},
    "snapshots in host memory": {"memory.snapshots": "pinned"},
    "directions in host memory": {"memory.basis": "pinned"},
    "everything": {"memory.offload": True, "memory.return_ahead": 0},
}
"""`everything`: the optimizer's state leaves the device in PREDICT, too."""


def settings_of(rung: str) -> dict[str, Any]:
    """Those of this rung and of all above it."""
    together: dict[str, Any] = {"optimizer.gradient_clip_norm": 0.0}  # updates in the backward pass cannot clip
    for name, settings in RUNGS.items():
        together |= settings
        if name == rung:
            break
    return together


def climb(settings: dict[str, Any], tokens: int, mode: str) -> dict[str, Any]:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    before = host_bytes()
    try:
        arm = Arm({**settings, **CYCLE, "hybrid.mode": mode})
        peaks = arm.peaks(STEPS[mode])
        cycle = arm.train(STEPS[mode])
        while arm.trainer.phase.value != "full":
            arm.trainer.step(next(arm.batches))
        seconds = arm.train(8)
    except torch.OutOfMemoryError as error:
        return {"does not fit": str(error).split(".")[0]}
    return {
        "peak_mb": peaks,
        "reserved_mb": round(torch.cuda.max_memory_reserved() / 2**20, 1),
        "host_mb": round((host_bytes() - before) / 2**20, 1),
        "tokens_per_second": round(8 * tokens / seconds),
        "milliseconds_per_step_of_a_cycle": round(1000 * cycle / STEPS[mode], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-small", choices=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--rungs", nargs="+", default=list(RUNGS), choices=list(RUNGS))
    parser.add_argument("--mode", default="rollout", choices=list(STEPS))
    parser.add_argument("--budget", type=float, help="GB (10^9 bytes) that the allocator may have")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for every rung")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: there is no memory to measure")
    if options.budget:
        cap_allocator(from_mapping({"device": "cuda"}), int(1e9 * options.budget), print)
    usual = {"device": "cuda", "optimizer.type": "adamw", "schedule.type": "constant", "max_steps": 100_000}
    given = {**usual, **MODELS[options.model], **dict(parse_override(text) for text in options.set)}
    results: dict[str, Any] = {}
    report = {
        "benchmark": "memory ladder",
        "command": " ".join(["python", "benchmarks/memory_ladder.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cuda"),
        "results": results,
    }
    for rung in options.rungs:
        found = results[rung] = climb({**given, **settings_of(rung)}, 1024 * given["batch_size"], options.mode)
        phases = ", ".join(f"{phase} {used:,.0f}" for phase, used in found.get("peak_mb", {}).items())
        print(f"{rung:<32} {phases or found} MB, {found.get('tokens_per_second', 0):,} tokens/s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
