"""Every number that leaves the device goes through `World.to_host`, every decision made from it through `agree`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.world import World

from .worlds import QUICK, Bowl, Net, Regression, still

Decision = TypeVar("Decision")
ROOMS = tuple(f"{Path(sys.modules['foretrain'].__file__).parent}/{room}/" for room in ("engine", "motion", "health"))
ROOMS += tuple(room.replace("/engine/", f"/{other}/") for room in ROOMS[:1] for other in ("hybrid", "loop"))
READS = ("tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__")
OUTSIDE = {
    "engine/rates.py",  # rates that a user keeps as tensors
    "engine/fence.py",  # whether own code changed anything
    "engine/world.py",
    "hybrid/judges/audit.py",  # whether two batches are the same: what follows from it is agreed on
}


class Recording(World):
    """Counts what goes through it."""

    def __init__(self) -> None:
        self.numbers = 0
        self.decisions: list[Any] = []

    def to_host(self, tensor: Tensor) -> list[float]:
        self.numbers += tensor.numel()
        return super().to_host(tensor)

    def agree(self, decision: Decision, name: str = "the decision") -> Decision:
        self.decisions.append(decision)
        return decision


@pytest.fixture
def bypassing(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Places in the training path that read a tensor by themselves."""
    found: set[str] = set()

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if file.startswith(ROOMS) and "/".join(file.split("/foretrain/")[-1:]) not in OUTSIDE:
                found.add(f"{file.rpartition('/foretrain/')[2]}:{frame.f_lineno}")
            return read(tensor, *arguments, **options)

        return reading

    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(getattr(Tensor, name)))
    return found


SGD = {"optimizer.type": "sgd", "optimizer.momentum": 0.0, "optimizer.learning_rate": 0.05}
AUDITED = {"audit.time_budget": 1.0, "audit.steps": 8, "optimizer.learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("model", "data", "settings", "moves"),
    [
        (Net, Regression(), {"hybrid.mode": "off"}, False),
        (Net, Regression(), {**AUDITED, "max_steps": 250}, False),
        (Bowl, still, SGD, True),
        (Bowl, still, {**SGD, "hybrid.mode": "rollout"}, True),
        (Bowl, still, {**SGD, "hybrid.secant_pairs": 20}, True),
    ],
    ids=["off", "noisy leaps", "leaps", "rollouts", "chains"],
)
def test_nothing_on_the_training_path_bypasses_the_world(
    model: Any, data: Callable[[int], Any], settings: dict[str, Any], moves: bool, bypassing: set[str]
) -> None:
    world = Recording()
    config = from_mapping({**QUICK, "max_steps": 120, "optimizer.gradient_clip_norm": 0.0, **settings})
    trainer = HybridTrainer(model(), config=config, world=world)
    summary = trainer.fit((data(position) for position in range(400)), [data(1000)], progress=False)
    assert bypassing == set()
    assert world.numbers >= 3 * trainer.backward_passes  # the meter alone: loss, norm, skipped
    assert "finished" in world.decisions
    if moves:
        assert sum(summary["moves"].values()) > 0
    if config.hybrid.mode != "off":
        assert any(isinstance(decision, tuple) for decision in world.decisions)


def test_an_optimizer_that_cannot_skip_asks_through_the_world() -> None:
    world, model = Recording(), Net()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    config = from_mapping({"device": "cpu", "hybrid.mode": "off", "health.interval": 0})
    trainer = HybridTrainer(model, optimizer, config=config, world=world)
    trainer.step(Regression()(0))
    assert world.numbers == 1


def test_a_result_is_read_through_the_world() -> None:
    world = Recording()
    config = from_mapping({"device": "cpu", "hybrid.mode": "off"})
    result = HybridTrainer(Net(), config=config, world=world).step(Regression()(0))
    before = world.numbers
    assert result.loss > 0
    assert result.gradient_norm > 0
    assert result.skipped is False
    assert world.numbers == before + 3


class Stubborn(World):
    """Another process wants to stop early."""

    def agree(self, decision: Decision, name: str = "the decision") -> Decision:
        return "stopped early" if decision is None else decision  # type: ignore[return-value]


def test_what_is_agreed_on_is_what_is_done() -> None:
    config = from_mapping({**QUICK, "max_steps": 20, "hybrid.mode": "off"})
    trainer = HybridTrainer(Net(), config=config, world=Stubborn())
    summary = trainer.fit((Regression()(position) for position in range(20)), progress=False)
    assert (summary["reason"], trainer.global_step) == ("stopped early", 1)
