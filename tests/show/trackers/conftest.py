"""A tiny run with a tracker: it crashes after a checkpoint and is resumed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.config import Config, from_mapping
from foretrain.events import Bus, Event, HealthFound, Notice, Progress
from foretrain.hybrid.summary import settings_of
from foretrain.show.trackers.entries import hyperparameters
from foretrain.trainer import HybridTrainer

OWN_VARIABLES = ("WANDB_", "MLFLOW_", "TRACKIO_", "HF_", "DO_NOT_TRACK", "CI")

FINDING = HealthFound(
    ailment="dead layer",
    step=7,
    measure="gradient norm",
    place="blocks.1",
    value=0.0,
    healthy="above 1e-8",
    level="warning",
    meaning="it learns nothing",
    change={"optimizer.learning_rate": 0.01},
)
AFTER, CRASH, LAST = 4, 6, 8
"""Saved after step 4, crashed in step 6, resumed to step 8."""


class Line(nn.Module):
    """The smallest thing that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Linear(3, 1)
        nn.init.constant_(self.slope.weight, 0.5)
        nn.init.zeros_(self.slope.bias)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.slope(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def tiny_config(**changes: Any) -> Config:
    settings: dict[str, Any] = {
        "max_steps": LAST,
        "batch_size": 4,
        "device": "cpu",
        "optimizer.type": "sgd",
        "optimizer.learning_rate": 0.05,
        "log.interval": 1,
        "evaluation.interval": 2,
        "checkpoint.interval": AFTER,
    }
    return from_mapping(settings | {name.replace("__", "."): value for name, value in changes.items()})


class Crash(BaseException):
    """What nobody swallows, and after which nothing is saved or told, as after a kill."""


def fit(config: Config, folder: Path, resume: bool = False, crash: bool = False) -> dict[str, Any]:
    """A run whose first entry after a resumption brings a finding and two warnings."""
    bus = Bus()

    def listen(event: Event) -> None:
        if isinstance(event, Progress) and event.step == CRASH and crash:
            trainer.rescue.sound = False
            bus._listeners.clear()
            raise Crash
        if isinstance(event, Progress) and event.step == FINDING.step:
            bus.emit(FINDING)
            bus.emit(Notice("the first warning"))
            bus.emit(Notice("the second warning"))

    bus.subscribe(listen, trusted=True)  # others cannot end a run
    trainer = HybridTrainer(Line(), config=config, bus=bus)
    return trainer.fit(batches(LAST), batches(2), out=folder, resume=resume, progress=False)


@dataclass
class Story:
    """A run that was resumed, and what it left."""

    folder: Path
    summary: dict[str, Any]
    settings: list[dict[str, Any]]
    """Of the first part, and of the resumed one."""
    calls_home: int
    """Connections that anything tried to make through a proxy, or past it."""

    def lines(self, event: str) -> list[dict[str, Any]]:
        log = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, log.splitlines()) if line["event"] == event]

    def lasting(self, event: str, field: str) -> dict[int, float]:
        """By step, as the resumed run did it."""
        return {line["step"]: line[field] for line in self.lines(event) if line[field] is not None}

    @property
    def ids(self) -> dict[str, str]:
        return json.loads((self.folder / "trackers.json").read_text(encoding="utf-8"))


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Story]]:
    """tell("wandb") runs, crashes and resumes with that tracker; whoever tries to reach the network is counted."""
    for name in list(os.environ):
        if name.startswith(OWN_VARIABLES):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        outside: list[Any] = []
        monkeypatch.setattr(socket.socket, "connect", _watched(outside))

        def run(tracker: str) -> Story:
            config = tiny_config(log__trackers=[tracker])
            with pytest.raises(Crash):
                fit(config, tmp_path / "mine", crash=True)
            changed = tiny_config(log__trackers=[tracker], checkpoint__keep=3)
            summary = fit(changed, tmp_path / "mine", resume=True)
            settings = [
                hyperparameters(settings_of(HybridTrainer(Line(), config=one).engine)) for one in (config, changed)
            ]
            return Story(tmp_path / "mine", summary, settings, len(outside) + _waiting(proxy))

        yield run


def _watched(outside: list[Any]) -> Callable[[socket.socket, Any], None]:
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            outside.append(address)
            raise OSError("there is no network here")
        connect(self, address)

    return watched


def _waiting(proxy: socket.socket) -> int:
    proxy.setblocking(False)
    try:
        proxy.accept()[0].close()
    except BlockingIOError:
        return 0
    return 1
