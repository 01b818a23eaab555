"""A loop with the real Accelerate: watched, leapt in, saved and resumed by its own calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from foretrain.errors import ConfigError
from foretrain.events import Notice
from foretrain.guest.run import GuestRun
from foretrain.integrations import accelerate as integration

from .hosts import WORDS, Heard, RisingLoss, forget_accelerate, sentences, settings, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the host's own
    pytest.mark.xdist_group("hosts"),  # they take seconds to import
]
STEPS = 40
TRAIN, HELD_OUT = sentences(320, 1), sentences(32, 2)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Host:
    """A loop as people write it, with gradient accumulation."""

    def __init__(self, probe: Any = None, mode: str = "leap", bus: Any = None) -> None:
        forget_accelerate()
        torch.manual_seed(7)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, WORDS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.run: GuestRun | None = None
        if probe is not None:
            self.run = integration.prepare(
                self.accelerator,
                self.model,
                self.optimizer,
                probe=probe,
                loss_fn=None if callable(probe) else loss_fn,
                config=settings(hybrid__mode=mode),
                max_steps=STEPS,
                bus=bus,
            )
        self.step = 0

    def go(self, until: int) -> Tensor:
        skipped = 2 * self.step
        for number, batch in enumerate(TRAIN.repeat(2, 1).split(8)):
            if number < skipped:
                continue
            if self.step == until:
                break
            with self.accelerator.accumulate(self.model):
                loss = loss_fn(self.model, batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.run is not None:
                    self.run.between_steps(loss)
            self.step += self.accelerator.sync_gradients
        return weights(self.model)


def moves(host: Host) -> dict[str, int]:
    assert host.run is not None
    found: dict[str, int] = host.run.summary()["moves"]
    return found


def test_idle_resumed_and_refused_are_exact(tmp_path: Path) -> None:
    plain = Host().go(STEPS)
    idle = Host([HELD_OUT], "off")
    assert torch.equal(idle.go(STEPS), plain)
    assert idle.run is not None
    assert idle.run.engine.progress.global_step == STEPS

    objecting = Host(RisingLoss())
    assert torch.equal(objecting.go(STEPS), plain)
    assert moves(objecting)["refused"] >= 1

    whole = Host([HELD_OUT])
    end = whole.go(STEPS)
    assert moves(whole)["kept"] >= 1
    assert not torch.equal(end, plain)

    half = Host([HELD_OUT])
    half.go(20)
    half.accelerator.save_state(str(tmp_path / "at"))
    ours = {path.suffix for path in (tmp_path / "at" / "foretrain").iterdir()}
    assert ours == {".json", ".safetensors"}
    other = Host([HELD_OUT])
    other.accelerator.load_state(str(tmp_path / "at"))
    other.step = 20
    assert torch.equal(other.go(STEPS), end)
    assert moves(other) == moves(whole)
    half.accelerator.load_state(str(tmp_path / "at"))  # right after it was saved, in one process
    assert torch.equal(half.go(STEPS), end)


def test_a_checkpoint_without_our_part_loads_and_a_closed_run_is_not_saved(tmp_path: Path) -> None:
    alone = Host()
    alone.go(5)
    alone.accelerator.save_state(str(tmp_path / "alone"))
    heard = Heard()
    host = Host([HELD_OUT], bus=heard.bus)
    host.accelerator.load_state(str(tmp_path / "alone"))
    assert [event.message.rpartition("/")[2] for event in heard.of(Notice)] == [
        "foretrain is not there: the run goes on, and is watched anew"
    ]
    host.go(15)
    assert host.run is not None
    host.run.close()
    host.accelerator.save_state(str(tmp_path / "closed"))
    assert not (tmp_path / "closed" / "foretrain").exists()


def test_weights_that_nobody_sees_whole_are_refused() -> None:
    model = nn.Linear(1, 1)
    for kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        host: Any = SimpleNamespace(distributed_type=kind)
        with pytest.raises(ConfigError, match=f"does not work with Accelerate's distributed type {kind.value}, which"):
            integration.prepare(host, model, torch.optim.SGD(model.parameters(), lr=0.1), probe=None)
