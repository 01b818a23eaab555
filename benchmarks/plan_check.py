"""The memory plan against the allocator's own counters: predicted and measured peak of full steps, probes, evaluation.

python benchmarks/plan_check.py --out result.json      # on a CUDA GPU, a few minutes
python benchmarks/plan_check.py --levers               # also checkpointed shares, narrow states, offload and the like
python benchmarks/plan_check.py --predict-only         # anywhere: what would be compared

Exits with 1 when a peak of full steps is more than 5 % above the plan, or more than 10 % below it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from foretrain import environment
from foretrain.config import Config, from_mapping
from foretrain.models.gpt2 import shape_from_config
from foretrain.persist.codec import random_state
from foretrain.planning.estimate import Target, estimate, target_of
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

COMMON: dict[str, Any] = {
    "max_steps": 100_000,
    "schedule.type": "constant",
    "optimizer.learning_rate": 1e-4,
    "hybrid.warmup_steps": 100_000,  # nothing is tried, but it could be: directions are kept
    "engine.compile": False,
    "model.vocab_size": 50257,
    "hybrid.mode": "off",
    "optimizer.type": "adamw",
}
TINY, SMALL, MEDIUM = ({"model.type": f"gpt2-{size}"} for size in ("tiny", "small", "medium"))
HYBRID = {"hybrid.mode": "leap"}
COMPILED = {"engine.compile": True}
CASES: list[dict[str, Any]] = [
    SMALL | {"batch_size": 8},
    SMALL | {"batch_size": 32},
    SMALL | {"batch_size": 32, "accumulation_steps": 4},
    SMALL | {"batch_size": 16, "precision.type": "fp32"},
    SMALL | {"batch_size": 16, "precision.narrow_residual": False},
    SMALL | {"batch_size": 4, "engine.fused_loss": False},
    SMALL | {"batch_size": 16, "engine.fused_loss": False, "engine.cuda_graph": False},
    SMALL | {"batch_size": 32, "engine.activation_checkpointing": True},
    SMALL | {"batch_size": 64, "model.context": 256, "optimizer.type": "muon"},
    SMALL | {"batch_size": 16, "optimizer.type": "muon"} | HYBRID,
    SMALL | {"batch_size": 16, "evaluation.ema_decay": 0.99} | HYBRID,
    SMALL | {"batch_size": 2, "optimizer.type": "sgd"},
    SMALL | {"batch_size": 16} | COMPILED,
    SMALL | {"batch_size": 32, "accumulation_steps": 2} | HYBRID | COMPILED,
    MEDIUM | {"batch_size": 8},
    MEDIUM | {"batch_size": 16, "engine.activation_checkpointing": True, "optimizer.type": "muon"},
    MEDIUM | {"batch_size": 8, "accumulation_steps": 8} | HYBRID,
    TINY | {"batch_size": 64},
    TINY | {"batch_size": 256, "precision.type": "fp32"} | HYBRID,
]
LEVERS: list[dict[str, Any]] = [
    SMALL | {"batch_size": 32, "engine.activation_checkpointing": 0.5},
    MEDIUM | {"batch_size": 8, "engine.activation_checkpointing": 0.25, "optimizer.state_type": "bf16"} | HYBRID,
    SMALL | {"batch_size": 16, "optimizer.state_type": "8bit"},
    SMALL | {"batch_size": 16, "optimizer.type": "muon", "optimizer.state_type": "8bit"},
    MEDIUM | {"batch_size": 4, "engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0},
    SMALL | {"batch_size": 16, "memory.snapshots": "pinned", "memory.basis": "pinned"} | HYBRID,
    SMALL | {"batch_size": 16, "memory.offload": True} | HYBRID,
    SMALL | {"batch_size": 16, "precision.predict": "fp32"} | HYBRID,
    SMALL | {"batch_size": 16, "engine.loss_rows": 1024},
    SMALL | {"batch_size": 16, "memory.offload": True, "memory.return_ahead": 0} | HYBRID,
]


def configured(case: dict[str, Any], device: str) -> Config:
    return from_mapping(COMMON | {"device": device} | case)


def planned(config: Config) -> dict[str, int]:
    shape = shape_from_config(config.model)
    if torch.cuda.is_available():
        return estimate(config, target_of(config, shape)).peaks
    precision = "bf16" if config.precision.type == "auto" else config.precision.type
    return estimate(config, Target(shape, True, precision, shape.context)).peaks


def measured(config: Config, steps: int) -> dict[str, int]:
    """Peaks of the allocator. The snapshot that a run takes after a while is taken before counting begins."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = HybridTrainer(run.build_model(config), config=config)
    length = trainer.model.shape.context
    generator = torch.Generator().manual_seed(1)

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(50257, (rows, length + 1), generator=generator).cuda()
        return drawn[:, :-1], drawn[:, 1:]

    trainer.step(batch(config.batch_size))
    if trainer.policy is not None:
        trainer.policy.tools.snapshots.take(for_move=False)
    found = {}
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        trainer.step(batch(config.batch_size))
    found["full"] = peak(before)
    if trainer.policy is not None:
        found["predict"] = probe(trainer, batch(config.batch_size), before)
    trainer.evaluate([batch(config.batch_size // config.accumulation_steps)])
    found["evaluate"] = peak(before)
    return found


def probe(trainer: HybridTrainer, batch: Any, before: int) -> int:
    """What PREDICT does: a snapshot, the optimizer's state leaves, a probe, the weights moved, the state begins to come
    back, another probe. All of it twice: how much leaves depends on how long the last probe took."""
    safety, probes, trajectory = (
        trainer.policy.tools.snapshots,
        trainer.policy.tools.probes,
        trainer.policy.tools.trajectory,
    )
    move: Any = SimpleNamespace(batch=batch, random=random_state())
    size = 0
    for _ in range(2):
        peak(before)
        safety.take()
        probes.offload()
        probes.loss(move)
        safety.wait()
        displacement = trajectory.displacement(np.zeros((len(trajectory.groups), len(trajectory.basis))))
        trajectory.place(safety.weights(), displacement, 1.0)
        probes.bring_back(0)
        probes.loss(move)
        size = peak(before)
        probes.bring_back(-1)
        if trainer.engine.away is not None:
            trainer.engine.away.back()
    peak(before)
    return size


def peak(before: int) -> int:
    torch.cuda.synchronize()
    size = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    return size


def name_of(case: dict[str, Any]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in case.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levers", action="store_true", help="further settings that save memory")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--steps", type=int, default=12, help="full steps per case, one window at the least")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.predict_only and not torch.cuda.is_available():
        sys.exit("no CUDA GPU: only --predict-only is possible")
    cases = CASES + (LEVERS if arguments.levers else [])
    rows: list[dict[str, Any]] = []
    result = {
        "when": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cpu" if arguments.predict_only else "cuda"),
        "rows": rows,
    }
    for number, case in enumerate(cases):
        if arguments.only and number not in arguments.only:
            continue
        config = configured(case, "cpu" if arguments.predict_only else "cuda")
        expected, started = planned(config), time.perf_counter()
        real: dict[str, int] = {}
        if not arguments.predict_only:
            real = measured(config, arguments.steps)
            torch._dynamo.reset()
        ratios = {phase: round(expected[phase] / size, 4) for phase, size in real.items()}
        rows.append({"case": case, "predicted": expected, "measured": real, "ratio": ratios})
        print(f"{number:2d} {name_of(case)}")
        for phase, size in expected.items():
            shown = f"measured {real[phase] / 1e9:7.3f} GB, ratio {ratios[phase]:.3f}" if phase in real else ""
            print(f"     {phase:<9} predicted {size / 1e9:7.3f} GB  {shown}")
        print(f"     {time.perf_counter() - started:.1f} s", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    full = [row["ratio"]["full"] for row in rows if "full" in row["ratio"]]
    if full:
        print(f"{len(full)} cases, ratio of full steps from {min(full):.3f} to {max(full):.3f}")
        sys.exit(0 if min(full) >= 0.95 and max(full) <= 1.10 else 1)


if __name__ == "__main__":
    main()
