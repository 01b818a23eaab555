"""A loop of somebody else's on two ranks: replicas stay equal, and decide as one process does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gloo import results
from torch import Tensor, nn

import foretrain
from foretrain.config import from_mapping
from foretrain.errors import ConfigError
from foretrain.events import Event, Moved

QUICK = {"hybrid.warmup_steps": 15, "hybrid.full_steps": 10, "hybrid.window_steps": 5, "forecast.enabled": False}
STEPS = 60
DATA = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
HELD_OUT = torch.randn(32, 8, generator=torch.Generator().manual_seed(4))
HOST: dict[str, Any] = {}
"""What the host has saved by itself."""


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))


def train(rank: int, size: int, folder: str, *, resume: bool = False, rising: bool = False) -> dict[str, Any]:
    """A loop in which each rank sees its rows of every batch. Returns what it came to."""
    inner = net()
    model = nn.parallel.DistributedDataParallel(inner) if size > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    looks = iter(range(1, 1000))
    probe: Any = (lambda: float(next(looks))) if rising else [HELD_OUT.chunk(size)[rank]]
    events: list[Event] = []
    bus = foretrain.Bus()
    bus.subscribe(events.append)
    options: dict[str, Any] = {"config": from_mapping(QUICK), "max_steps": STEPS, "bus": bus}
    out = None if resume or rising else f"{folder}/log{size}"
    saved, start = Path(folder) / f"at{size}", 0
    with foretrain.wrap(model, optimizer, probe=probe, loss_fn=None if rising else loss_fn, out=out, **options) as run:
        if resume:
            inner.load_state_dict(HOST["model"])
            optimizer.load_state_dict(HOST["optimizer"])
            start = 30
            assert run.load(saved)
        for step in range(start, STEPS):
            batch = DATA[(torch.arange(32) + 32 * step) % 256].chunk(size)[rank]
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.between_steps(loss)
            if step == 29 and out is not None:
                run.save(saved)
                HOST.update(copy.deepcopy({"model": inner.state_dict(), "optimizer": optimizer.state_dict()}))
    moves = [(event.step, event.verdict, event.share) for event in events if isinstance(event, Moved)]
    weights = torch.cat([p.detach().flatten() for p in inner.parameters()])
    return {
        "weights": weights.tolist(),
        "moves": moves,
        "loss": run.summary()["final_val_loss"],
        "train_loss": run.summary()["final_train_loss"],
    }


def in_two(rank: int, folder: str) -> dict[str, Any]:
    with pytest.raises(ConfigError, match="one of 2 processes, and Sequential is not in DistributedDataParallel"):
        foretrain.wrap(model := net(), torch.optim.SGD(model.parameters(), lr=1.0), probe=None)
    found = {"whole": train(rank, 2, folder), "resumed": train(rank, 2, folder, resume=True)}
    return {**found, "rising": train(rank, 2, folder, rising=True)}


def test_two_ranks_stay_equal_and_decide_as_one_process(tmp_path: Path) -> None:
    one, other = results(2, in_two, str(tmp_path))
    alone = train(0, 1, str(tmp_path))
    assert one == other, "replicas are equal, bit for bit, and so is all that is told"
    assert one["resumed"]["weights"] == one["whole"]["weights"]
    assert [tuple(move) for move in one["whole"]["moves"]] == alone["moves"]
    assert any(verdict in ("kept", "shrunk") for _, verdict, _ in alone["moves"])
    assert one["whole"]["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert one["whole"]["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4), "the mean over all ranks"
    assert {verdict for _, verdict, _ in one["rising"]["moves"]} == {"refused"}
    assert {path.name for path in (tmp_path / "log2").iterdir()} >= {"metrics.jsonl", "summary.json", "report.html"}
