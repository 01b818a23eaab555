"""Muon's step against AdamW's in CPU time, on this CPU as it is and as if it had no bf16 instructions.

python benchmarks/muon_cost.py                    # the demo's model, one thread, a minute; writes benchmarks/results
python benchmarks/muon_cost.py --threads 2
python benchmarks/muon_cost.py --device cuda      # the matrices of GPT-2 124M: with kernels, in torch, AdamW; seconds

CPU time hardly depends on other programs beside it. "Emulated" is what Muon cost before it chose its number format by
what the CPU can do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AIM = 1.6
"""Muon's whole step, as a multiple of AdamW's, on a CPU without bf16 instructions."""


def milliseconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


def work(steps: int, rounds: int) -> dict[str, Any]:
    """Both optimizers in turn, in this process: whole steps, and updates alone."""
    import torch

    from foretrain import environment
    from foretrain.config import from_mapping
    from foretrain.engine import precision
    from foretrain.engine.optim.muon import iteration_type
    from foretrain.recipes import train as run
    from foretrain.trainer import HybridTrainer

    chosen = iteration_type(torch.device("cpu"))
    arms: dict[str, tuple[HybridTrainer, bool]] = {}
    for name, kind, bf16 in (("adamw", "adamw", True), ("muon", "muon", chosen == "bf16"), ("emulated", "muon", True)):
        if name == "emulated" and chosen == "bf16":
            continue
        settings = {"device": "cpu", "model.vocab_size": 512, "hybrid.mode": "off", "max_steps": 10**6}
        config = from_mapping({**settings, "optimizer.type": kind})
        arms[name] = HybridTrainer(run.build_model(config), config=config), bf16
    shape = next(iter(arms.values()))[0].model.shape
    tokens = torch.randint(512, (config.batch_size, shape.context + 1), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    whole: dict[str, list[float]] = {name: [] for name in arms}
    update: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, (trainer, bf16) in arms.items():
            precision.cpu_has_bf16_products = lambda bf16=bf16: bf16  # type: ignore[assignment,misc]
            spent = [milliseconds(lambda trainer=trainer: trainer.step(batch)) for _ in range(steps)]
            model, optimizer = trainer.model, trainer.optimizer
            model.loss(batch).backward()
            alone = [milliseconds(optimizer.step) for _ in range(steps)]
            optimizer.zero_grad()
            if turn:  # the first is for warming up
                whole[name].append(statistics.median(spent))
                update[name].append(statistics.median(alone))
    return {
        "muon_type": chosen,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "environment": environment.describe("cpu"),
        "step_ms": {name: round(statistics.median(values), 3) for name, values in whole.items()},
        "update_ms": {name: round(statistics.median(values), 3) for name, values in update.items()},
        "ratio_to_adamw": {
            name: round(statistics.median(a / b for a, b in zip(whole[name], whole["adamw"], strict=True)), 3)
            for name in arms
        },
        "steps_ms": whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="in a row")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: a dated file in benchmarks/results")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.steps, options.rounds)))
        return
    results, told = (on_cuda if options.device == "cuda" else on_cpu)(options)
    now = datetime.now().astimezone()
    report = {
        "benchmark": "Muon's cost",
        "command": " ".join(["python", "benchmarks/muon_cost.py", *sys.argv[1:]]),
        "date": now.isoformat(timespec="seconds"),
        **told,
        "results": results,
    }
    name = f"{now.date().isoformat()}-muon-cost-{options.device}.json"
    out = options.out or Path(__file__).parent / "results" / name
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}")


def on_cuda(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure updates alone, in this process."""
    import muon_cost_cuda

    result = muon_cost_cuda.measure(options.steps, options.rounds)
    muon_cost_cuda.tell(result)
    return result, {}


def on_cpu(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure whole steps in a process for each kind of CPU."""
    results = {}
    for name, variables in (("this CPU", {}), ("without bf16 instructions", WITHOUT_BF16)):
        command = [sys.executable, __file__, "--work", "--steps", str(options.steps), "--rounds", str(options.rounds)]
        told = {**os.environ, "OMP_NUM_THREADS": str(options.threads), **variables}
        answer = subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True, check=True)
        result = results[name] = json.loads(answer.stdout)
        print(f"{name} ({result['cpu_capability']}), Muon in {result['muon_type']}; CPU time:")
        for arm, ratio in result["ratio_to_adamw"].items():
            step, update = result["step_ms"][arm], result["update_ms"][arm]
            print(f"  {arm:<9} {step:8.1f} ms a step, {update:7.1f} ms of it the update, {ratio:.2f} x AdamW's step")
    ratio = results["without bf16 instructions"]["ratio_to_adamw"]["muon"]
    print(f"without bf16 instructions Muon's step is {ratio:.2f} x AdamW's (aim: at most {AIM})")
    return results, {"aim": AIM}


if __name__ == "__main__":
    main()
