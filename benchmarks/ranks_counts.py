"""What one rank of many holds and sends: shards, collective operations per step and per window, bytes.

python benchmarks/ranks_counts.py                        # 2 to 1,024 ranks; --out FILE writes the results as JSON

torch's fake process group stands for the others: it sends nothing, so each sum is taken as if all ranks had the same
numbers. Counts and sizes are those of a real run; losses, times and bandwidths are not, and none is told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

STEPS, WINDOW = 20, 5
WATCHING = {"hybrid.mode": "leap", "hybrid.warmup_steps": 1000}
MODES = {"off": {"hybrid.mode": "off"}, "watching": {**WATCHING, "distributed.basis": "replicated"}}
MODES["shared"] = {**WATCHING, "distributed.basis": "sharded"}
"""The last one is of replicas, which share their directions."""


def measure(kind: str, mode: str, rank: int, ranks: int) -> dict[str, Any]:
    """Count what a rank does in some windows of full steps."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from foretrain import HybridTrainer
    from foretrain.config import from_mapping
    from foretrain.launch.group import Group, RankPlace
    from foretrain.models.gpt2 import GPT2, GPT2Shape
    from foretrain.planning.estimate import target_of
    from foretrain.recipes import spreading

    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    settings = {"max_steps": 1000, "device": "cpu", "optimizer.type": "adamw", "batch_size": ranks}
    settings |= {"hybrid.window_steps": WINDOW, "hybrid.linear_rows": 0, "health.interval": 0, "distributed.type": kind}
    config = from_mapping({**settings, **MODES[mode]})
    shape = GPT2Shape(layers=4, heads=4, width=128, context=64, vocab_size=1000)
    model = GPT2(shape, 1)
    whole = sum(p.numel() for p in model.parameters())
    chosen = spreading.choose(config, target_of(config, shape), Group(RankPlace(rank, ranks)))
    loss = spreading.spread(model, chosen, config)
    if isinstance(loss, spreading.ReplicatedLoss):
        loss.replicas.register_comm_hook(None, take_gradients_as_they_are)
    calls, sent = count_calls(ranks)
    trainer = HybridTrainer(model, loss_fn=loss, config=config)
    tokens = torch.randint(0, 1000, (1, 65))
    batch = tokens[:, :-1], tokens[:, 1:]
    for _ in range(WINDOW):
        trainer.step(batch)
    calls.clear()
    sent.clear()
    for _ in range(STEPS):
        trainer.step(batch)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return {
        "type": kind,
        "mode": mode,
        "rank": rank,
        "ranks": ranks,
        "parameters": whole,
        "held": sum(part.numel() for part in parts),
        "empty": sum(part.numel() == 0 for part in parts),
        "tensors": len(parts),
        "directions_bytes": 0 if mode == "off" else trainer.policy.observer.trajectory.bytes,
        "own_per_step": round(calls["own"] / STEPS, 3),
        "own_bytes_per_step": round(sent["own"] / STEPS, 1),
        "gathers_per_step": calls["gather"] / STEPS,
        "scatters_per_step": calls["scatter"] / STEPS,
    }


def count_calls(ranks: int) -> tuple[Counter[str], Counter[str]]:
    """Count the operations that foretrain asks for itself, and those of FSDP2."""
    from torch import distributed

    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def counted(name: str, function: Any, place: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            tensor = arguments[place] if len(arguments) > place else next(iter(named.values()))
            sent[name] += tensor.numel() * tensor.element_size()
            done = function(*arguments, **named)
            if name == "own" and function.__name__ == "all_reduce" and named.get("op") is None:
                tensor.mul_(ranks)
            return done

        return call

    names = {"all_reduce": "own", "broadcast": "own"}
    names |= {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}  # FSDP2 of torch 2.12
    names |= {"all_gather_single": "gather", "reduce_scatter_single": "scatter"}  # of torch 2.13
    for function, name in names.items():
        if hasattr(distributed, function):
            setattr(distributed, function, counted(name, getattr(distributed, function), 0))
    return calls, sent


def take_gradients_as_they_are(state, bucket):
    """Stand for the sum of gradients over replicas: the fake group gives the reducer nothing to wait for."""
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, help="type, mode, rank and ranks: this process measures them")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    chosen = parser.parse_args()
    if chosen.case:
        kind, mode, rank, ranks = chosen.case
        print(json.dumps(measure(kind, mode, int(rank), int(ranks))))
        return
    from foretrain import environment

    rows = []
    places = [(0, 2), (0, 8), (0, 1024), (700, 1024), (1023, 1024)]
    for kind in ("ddp", "fsdp2"):
        for mode in MODES if kind == "ddp" else ("off", "watching"):
            for rank, ranks in places if kind == "fsdp2" else places[:3]:
                case = [kind, mode, str(rank), str(ranks)]
                done = subprocess.run(
                    [sys.executable, __file__, "--case", *case], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    sys.exit(done.stderr[-3000:])
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                row = rows[-1]
                print(
                    f"{kind:<6}{mode:<9} rank {rank:>4} of {ranks:>4}: holds {row['held']:>8,} of "
                    f"{row['parameters']:,}, {row['empty']:>2} of {row['tensors']} shards empty, "
                    f"{row['directions_bytes'] / 2**20:.1f} MiB of directions; a step: "
                    f"{row['own_per_step']:.2f} own operations ({row['own_bytes_per_step']:,.0f} bytes), "
                    f"{row['gathers_per_step']:.2f} gathers, {row['scatters_per_step']:.2f} scatters",
                    flush=True,
                )
    if chosen.out is not None:
        facts = {**environment.describe(), "date": f"{datetime.now().astimezone():%Y-%m-%d}"}
        chosen.out.write_text(json.dumps({"environment": facts, "window": WINDOW, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
