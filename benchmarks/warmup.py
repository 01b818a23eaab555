"""How long the warm-up of a run should be: the final loss by warm-up and learning rate.

python benchmarks/warmup.py words-adamw words-muon --data FOLDER --rates 2e-3 4e-3 --out result.json    # one CPU core
python benchmarks/warmup.py lm30m-wiki-adamw --data FOLDER --device cuda --rates 1e-3 2e-3 --out result.json

Tasks and FOLDER are those of `auto_rate.py`. A warm-up is a share of the run. All runs of a seed begin with the same
weights and see the same batches. What --out holds is not run again, so calls add up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import auto_rate
from auto_rate_tasks import TASKS
from foretrain import environment

SHARES = (0.025, 0.05, 0.1, 0.2, 0.4)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Return a line per rate: mean loss on the test set by warm-up."""
    lines = []
    for task in dict.fromkeys(one["task"] for one in runs):
        for steps in sorted({one["steps"] for one in runs if one["task"] == task}):
            own = [one for one in runs if (one["task"], one["steps"]) == (task, steps)]
            shares = sorted({one["warmup"] for one in own})
            lines.append(f"{task}, {steps} steps".ljust(28) + "".join(f"{share:>9.1%}" for share in shares))
            for rate in sorted({one["rate"] for one in own}):
                losses = [[one["test"] for one in own if (one["rate"], one["warmup"]) == (rate, s)] for s in shares]
                told = (f"{statistics.fmean(some):9.4f}" if some else " " * 9 for some in losses)
                lines.append(f"  {rate:<26.3g}" + "".join(told))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=list(TASKS), metavar="TASK")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rates", nargs="+", type=float, required=True)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.looks, options.copies = 1, None
    if options.device == "cpu":
        torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    kept |= {
        "benchmark": "length of the warm-up",
        "command": " ".join(["python", "benchmarks/warmup.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(__file__).parents[1] / "src"),
        "environment": environment.describe(options.device),
    }
    for seed in options.seeds:
        for name in options.tasks:
            for rate in options.rates:
                for share in options.shares:
                    steps = options.steps or int(TASKS[name].settings["max_steps"])
                    told = {"task": name, "rate": rate, "warmup": share, "seed": seed, "steps": steps}
                    if any(told.items() <= one.items() for one in kept["runs"]):
                        continue
                    options.warmup = share
                    result = auto_rate.run(TASKS[name], options, rate, seed)
                    kept["runs"].append(told | {key: result[key] for key in ("test", "held_out", "seconds")})
                    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
                    print(f"{name} {rate:.3g}, {share:.1%}, seed {seed}: {result['test']:.4f}", flush=True)
    print("\n".join(table(kept["runs"])))


if __name__ == "__main__":
    main()
