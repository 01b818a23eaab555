"""What several ranks bring to linearised leaps: one process on all points, and ranks that share them, in turns.

python benchmarks/ranks_leaps.py --out result.json    # two gloo ranks, a thread each

Burgers' equation. An arm is a new run: the optimizer's first window is not timed, then come as many leaps as asked for.
Both arms make the same leaps, to rounding. While one works the other waits for its turn. Beside seconds of the clock
stand seconds of the processor, which other programs on the machine disturb less: those of the busiest rank. "fastest"
is by the clock, too: of each leap the fastest that any round made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn

from foretrain import HybridTrainer, environment
from foretrain.config import from_mapping
from foretrain.hybrid.moves.linearised import LinearisedKind

ARMS = ("one process", "ranks")
WAYS = ("all_reduce", "all_gather")


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))


def residuals(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """u_t + u u_x = 0.01 u_xx, and u = -sin(pi x) at t = 0."""
    points, edge = batch
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    equation = slope[:, :1] + u * slope[:, 1:] - 0.01 * bend[:, 1:]
    return {"equation": equation, "edge": model(edge) + torch.sin(torch.pi * edge[:, 1:])}


def batch_of(points: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's points (t, x), and its part of the edge."""
    drawn = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(points)
    pool = drawn * torch.tensor([1, 2]) - torch.tensor([0, 1])
    edge = pool[: points // 8] * torch.tensor([0, 1])
    return tuple(part[len(part) * rank // ranks : len(part) * (rank + 1) // ranks] for part in (pool, edge))  # type: ignore[return-value]


def leap(options: argparse.Namespace, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Make a run up to its first leap, and time so many leaps from there."""
    alone = ranks == 1
    model = network(options.width)
    settings = {"hybrid.linear_rows": options.rows, "hybrid.linear_memory_mb": 2000.0, "health.interval": 0}
    settings |= {"device": "cpu", "max_steps": 100_000, "schedule.type": "constant", "hybrid.warmup_steps": 20}
    shared = model if alone else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(shared.parameters(), lr=3e-3)
    trainer = HybridTrainer(shared, optimizer, residuals=residuals, config=from_mapping(settings))
    batch = batch_of(options.points, rank, ranks)
    leaps = next(kind.leaps for kind in trainer.policy.kinds if isinstance(kind, LinearisedKind))
    while not (trainer.hybrid.chaining and leaps.leaps >= 1):  # the first one also finds out how rows are taken
        trainer.step(batch)
    sent = Counter[str]()
    before = {name: getattr(distributed, name) for name in WAYS}
    for name in WAYS:
        setattr(distributed, name, counting(before[name], name, sent))
    if not alone:
        distributed.barrier()
    busy, each = time.process_time(), []
    for _ in range(options.leaps):
        began = time.perf_counter()
        trainer.step(batch)
        each.append(time.perf_counter() - began)
    busy = time.process_time() - busy
    for name, function in before.items():
        setattr(distributed, name, function)
    told = {
        "seconds": sum(each),
        "each": each,
        "processor": busy,
        "leaps": leaps.leaps - 1,
        "rows": leaps.rows,
        "loss": leaps.loss,
    }
    return told | {"sent": dict(sent)}


def counting(function: Any, name: str, sent: Counter[str]) -> Any:
    def call(*given: Any, **options: Any) -> Any:
        tensor = given[1] if name == "all_gather" else given[0]
        sent[f"{name} calls"] += 1
        sent[f"{name} bytes"] += tensor.numel() * tensor.element_size()
        return function(*given, **options)

    return call


def rank_of(rank: int, options: argparse.Namespace, folder: str, pipes: Any) -> None:
    """What a rank does: a run each time that it is asked for one."""
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=options.ranks)
    while pipes[rank].recv():
        pipes[rank].send(leap(options, rank, options.ranks))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A B B A, and so on."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(options.ranks)), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        given = (options, folder, theirs)
        running = multiprocessing.spawn(rank_of, given, nprocs=options.ranks, join=False)
        for turn in range(options.rounds):
            for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
                if arm == "one process":
                    found[arm].append(leap(options))
                    continue
                for pipe in ours:
                    pipe.send(True)
                told = [pipe.recv() for pipe in ours]
                found[arm].append(told[0] | {"processor": max(one["processor"] for one in told)})
        for pipe in ours:
            pipe.send(False)
        while not running.join():
            pass
    ratios = {}
    for what in ("seconds", "processor"):
        pairs = zip(*([one[what] for one in found[arm]] for arm in ARMS), strict=True)
        ratios[what] = [round(alone / shared, 3) for alone, shared in pairs]
    summed = {what: round(statistics.median(each), 3) for what, each in ratios.items()}
    fastest = [sum(map(min, zip(*(one["each"] for one in found[arm]), strict=True))) for arm in ARMS]
    summed["fastest"] = round(fastest[0] / fastest[1], 3)
    return {"rounds": found, "one process over ranks": ratios, "median": summed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--points", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=640, help="that a leap takes at first")
    parser.add_argument("--leaps", type=int, default=5, help="in each round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a report that is there is gone on with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": " ".join(["python benchmarks/ranks_leaps.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "load before": round(os.getloadavg()[0], 1),
        "weights": sum(p.numel() for p in network(options.width).parameters()),
        **{name: getattr(options, name) for name in ("ranks", "width", "points", "rows", "leaps")},
        **measure(options),
    }
    for arm, rounds in report["rounds"].items():
        each = statistics.median(one["seconds"] / options.leaps for one in rounds)
        print(f"{arm:<12} {1000 * each:8.1f} ms a leap, loss {rounds[-1]['loss']:.4g}, rows {rounds[-1]['rows']}")
    print("one process over ranks:", report["median"])
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*known, report], indent=1) + "\n")


if __name__ == "__main__":
    main()
