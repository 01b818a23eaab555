"""Do parts of weights on any mesh of 4 gloo ranks see and move what one process does? Prints a table, writes JSON.
Exit code 1: on some mesh they do not.

Run: python benchmarks/ranks_checks.py
Each rank holds the same weights twice: as the mesh spreads them, and whole, as one process has them. Both go one path,
and their dot products, moves and probes are compared; then a whole run on the mesh with one in one process.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from foretrain import HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.engine.ranks import local, world_of_ranks
from foretrain.engine.world import ALONE
from foretrain.motion.trajectory import Trajectory

RANKS = 4
RESULTS = Path(__file__).parent / "results" / "2026-11-19-ranks-checks.json"
SETTINGS = {
    "device": "cpu",
    "max_steps": 80,
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.0,
    "schedule.type": "constant",
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": 5,
    "hybrid.max_predict_steps": 20,
    "hybrid.secant_pairs": 0,
    "hybrid.linear_rows": 0,
    "audit.time_budget": 0.5,
}


class Block(nn.Module):
    """Two layers that tensor parallelism splits, and a norm that it does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 24), Block(24), Block(24), nn.Linear(24, 1))


def blocks(of: nn.Sequential) -> list[nn.Module]:
    return [module for module in of if isinstance(module, Block)]


def sharded(of: nn.Sequential, mesh: Any) -> nn.Module:
    for block in blocks(of):
        fully_shard(block, mesh=mesh)
    fully_shard(of, mesh=mesh)
    return of


def split(of: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in blocks(of):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return of


def ddp(of: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(of)


def fsdp2(of: nn.Sequential) -> nn.Module:
    return sharded(of, init_device_mesh("cpu", (RANKS,)))


def hsdp(of: nn.Sequential) -> nn.Module:
    return sharded(of, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp2_tp(of: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return sharded(split(of, mesh["tensor"]), mesh["data"])


def tp(of: nn.Sequential) -> nn.Module:
    return split(of, init_device_mesh("cpu", (RANKS,)))


MESHES: dict[str, tuple[Callable[[nn.Sequential], nn.Module], int]] = {
    "DDP 4": (ddp, 4),
    "FSDP2 4": (fsdp2, 4),
    "HSDP 2x2": (hsdp, 4),
    "FSDP2 x TP 2x2": (fsdp2_tp, 2),
    "TP 4": (tp, 1),
}
"""How a model is spread, and how many groups of ranks see rows of their own."""


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
    return x, torch.sin(x.sum(1, keepdim=True)) + x[:, :1].square()


def own_rows(groups: int) -> tuple[Tensor, Tensor]:
    place, rows = dist.get_rank() * groups // RANKS, 64 // groups
    x, y = batch()
    return x[place * rows : (place + 1) * rows], y[place * rows : (place + 1) * rows]


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return local(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def one_path(spread: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """The largest difference of dot products, and whether moved weights have the same bits."""
    world = world_of_ranks()
    pairs = [
        (list(spread.parameters()), Trajectory(list(spread.parameters()), window=2, world=world)),
        (list(plain.parameters()), Trajectory(list(plain.parameters()), window=2, world=ALONE)),
    ]
    motions = []
    for parameters, trajectory in pairs:
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            trajectory.before_step()
            for p in parameters:
                local(p).add_(part_of(0.01 * torch.randn(p.shape, generator=generator), p))
            if trajectory.after_step():
                motion = trajectory.close()
        motions.append(motion)
        groups = len(trajectory.groups)
        displacement = trajectory.displacement(np.linspace(-1, 1, groups * 5).reshape(groups, 5))
        trajectory.place(None, displacement, 1.0)
    ours, theirs = (np.concatenate([m.gram.ravel(), m.window.dots.ravel(), m.window.square]) for m in motions)
    same = all(torch.equal(whole(a), b.detach()) for a, b in zip(*(p for p, _ in pairs), strict=True))
    told = torch.from_numpy(ours).clone()
    dist.broadcast(told, 0)
    return {
        "dots_relative": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        "same_bits_on_all_ranks": bool(torch.equal(told, torch.from_numpy(ours))),
        "move_bit_equal": same,
    }


def one_run(made: HybridTrainer, rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
    phases = ""
    while made.global_step < 80 or made.judging:
        phases += made.step(rows).phase[0]
    return {"phases": phases, "moves": made.summary()["moves"], "loss": made.evaluate([rows])}


def work(folder: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    loss, config, found = supervised(nn.functional.mse_loss), from_mapping(SETTINGS), {}
    for name, (spread, groups) in MESHES.items():
        found[name] = one_path(spread(model()), model())
        if name == "TP 4":  # torch's optimizers take no mixture of spread and plain weights in one group
            continue
        found[name] |= one_run(HybridTrainer(spread(model()), None, loss, config), own_rows(groups))
    dist.barrier()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that takes its groups down


def main() -> None:
    if len(sys.argv) > 1:
        work(sys.argv[1])
    torch.set_num_threads(1)
    alone = one_run(HybridTrainer(model(), None, supervised(nn.functional.mse_loss), from_mapping(SETTINGS)), batch())
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([sys.executable, __file__, folder], env={**environment, "RANK": str(rank)})
            for rank in range(RANKS)
        ]
        codes = [process.wait(timeout=600) for process in running]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found = json.loads(Path(folder, "found.json").read_text())
    print(f"{'mesh':16} {'dots differ by':>15} {'same bits':>10} {'move':>10}  {'phases':8} {'loss':>10}")
    for name, row in found.items():
        row["same_phases"] = row.get("phases") == alone["phases"] if "phases" in row else None
        phases = {None: "-", True: "equal", False: "differ"}[row["same_phases"]]
        move = "bit-equal" if row["move_bit_equal"] else "differs"
        line = f"{name:16} {row['dots_relative']:15.1e} {row['same_bits_on_all_ranks']!s:>10} {move:>10}"
        print(f"{line}  {phases:8} {row.get('loss', float('nan')):10.7f}")
    well = [row["dots_relative"] < 1e-6 and row["move_bit_equal"] for row in found.values()]
    well += [row["same_bits_on_all_ranks"] and row["same_phases"] is not False for row in found.values()]
    runs = [row for row in found.values() if "loss" in row]
    well += [abs(row["loss"] - alone["loss"]) < 1e-5 and row["moves"] == alone["moves"] for row in runs]
    print(f"{'one process':16} {'':15} {'':10} {'':10}  {alone['phases'].count('p')} moves  {alone['loss']:10.7f}")
    about = {"torch": torch.__version__, "python": platform.python_version(), "ranks": RANKS, "backend": "gloo"}
    RESULTS.write_text(json.dumps({"about": about, "one process": alone, "meshes": found}, indent=1) + "\n")
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
