"""Runs of several gloo ranks for tests: one start for many checks, each of which says what it found as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from foretrain import HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import random_state_anew
from foretrain.persist.parts import flat_forms
from foretrain.persist.pieces import Layouts, ReadBy

Found = dict[str, Any]
Check = Callable[[], Found]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "optimizer.weight_decay": 0.0,
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 20,
    "hybrid.window_steps": 5,
    "hybrid.max_predict_steps": 40,
    "hybrid.correct_steps": 5,
    "hybrid.linear_rows": 0,
    "schedule.type": "constant",
    "audit.time_budget": 0.3,
}


def ranks() -> tuple[int, int]:
    """This process's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def tiny(dropout: float = 0.0) -> GPT2:
    """A GPT-2 whose vocabulary does not divide by 2 or 3."""
    torch.manual_seed(1)
    return GPT2(GPT2Shape(layers=2, heads=2, width=24, context=16, vocab_size=97, dropout=dropout), seed=1)


def curve() -> nn.Sequential:
    """A regression on a full batch."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """kind: "one" (as it is), "ddp" or "fsdp2"."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks()[1],))
        blocks = model.blocks if isinstance(model, GPT2) else [m for m in model.modules() if isinstance(m, nn.Linear)]
        for module in blocks:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach()


def words(position: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens with an order to learn."""
    generator = torch.Generator().manual_seed(1000 + position)
    starts = torch.randint(0, 5000, (rows,), generator=generator)
    text = (starts[:, None] + torch.arange(17)) * 7919 % 97
    return text[:, :-1], text[:, 1:]


def points(position: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 5, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True)) + x[:, :1].square()


def own_rows(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The rows of a batch that this rank trains on."""
    rank, size = ranks()
    each = len(batch[0]) // size
    return tuple(tensor[rank * each : (rank + 1) * each] for tensor in batch)


def trainer(kind: str, noisy: bool, settings: dict[str, Any], **options: Any) -> HybridTrainer:
    dropout = settings.pop("dropout", 0.0)
    model = wrapped(tiny(dropout) if noisy else curve(), kind)
    usual = {"optimizer.type": "adamw" if noisy else "adam", "optimizer.learning_rate": 1e-4 if noisy else 1e-3}
    config = from_mapping({**SETTINGS, **usual, **settings})
    loss = None if noisy else supervised(nn.functional.mse_loss)
    return HybridTrainer(model, config=config, loss_fn=loss, **options)


def run(made: HybridTrainer, steps: int, batches: Callable[[int], tuple[Tensor, Tensor]]) -> Found:
    """Train to a step, and tell how it went."""
    phases, losses = "", []
    while made.global_step < steps or made.judging:
        result = made.step(own_rows(batches(made.position)))
        phases += result.phase[0]
        losses.append(result.loss)
    summary = made.summary()
    return {
        "phases": phases,
        "moves": summary.get("moves"),
        "global_step": made.global_step,
        "position": made.position,
        "loss": made.evaluate([own_rows(batches(5000))]),
        "losses": losses,
        "weights": [float(whole(p).double().norm()) for p in made.model.parameters()],
        "hash": digest(made),
    }


def digest(made: HybridTrainer) -> str:
    """The bits of all weights."""
    import hashlib

    found = hashlib.sha256()
    for p in made.model.parameters():
        found.update(whole(p).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def store_of(trainer: HybridTrainer, folder: str) -> CheckpointStore:
    """The checkpoints that all ranks write and read together."""
    world = trainer.engine.world
    shared = flat_forms(world.size, "cpu") if trainer.engine.shares_directions else None
    layouts = Layouts(dict(trainer.engine.model.named_parameters()), shared)
    return CheckpointStore(
        folder,
        9,
        world,
        lambda step: ReadBy(world.rank, world.size, layouts, lambda: random_state_anew(1, step, world.rank)),
    )


def bits_of(tensors: Iterable[Tensor]) -> int:
    """A number that knows every bit of some tensors, wherever their parts are."""
    sums = [whole(tensor).contiguous().reshape(-1).view(torch.uint8).long() for tensor in tensors]
    return sum(place * int((part * torch.arange(1, len(part) + 1)).sum()) for place, part in enumerate(sums, 1))


def start(module: str, names: list[str], size: int, folder: Path, limit: float = 600) -> list[dict[str, Found]]:
    """Run functions of a module by name on so many ranks, and return what each rank found."""
    code = f"from tests.ranked import work; work({module!r}, {names!r}, {str(folder)!r})"
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
            env={**environment, "RANK": str(rank)},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=limit)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for rank, (process, text) in enumerate(zip(running, told, strict=True)):
        if process.returncode:
            raise AssertionError(f"rank {rank} of {size} ended with {process.returncode}:\n{text[-4000:]}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def work(module: str, names: list[str], folder: str) -> None:
    """What a rank does. Its checks find a folder that all ranks share in RANKS_FOLDER."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.environ["RANKS_FOLDER"] = folder
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found: dict[str, Found] = {}
    for name in names:
        check: Check = getattr(__import__(module, fromlist=[name]), name)
        found[name] = check()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that takes its groups down while another still reads from them
