"""Hooks around full steps: their order, what they see, and what an undone step means to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretrain.config import from_mapping
from foretrain.engine.engine import Engine
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput

BATCH = torch.ones(4, 3)


class Told(StepHook):
    """Notes what it is told, and the weight that it sees then."""

    def __init__(self, name: str, engine: Engine, told: list[tuple[str, str, float]], gradients: bool = False) -> None:
        self.name, self.engine, self.told = name, engine, told
        self.wants_gradients = gradients

    def _note(self, what: str) -> None:
        weight = next(self.engine.model.parameters())
        self.told.append((self.name, what, round(float(weight.detach().sum()), 4)))

    def before_step(self) -> None:
        self._note("before")

    def gradients_ready(self) -> None:
        self._note("gradients" if next(self.engine.model.parameters()).grad is not None else "no gradients")

    def after_step(self, output: StepOutput) -> None:
        self._note("after")

    def take_back(self) -> None:
        self._note("back")


def engine() -> Engine:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, from_mapping({"device": "cpu"}))


def test_hooks_of_one_step_stand_around_those_of_every_step() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.hooks = (Told("always", one, told),)
    one.full(BATCH, Told("once", one, told, gradients=True))
    assert told == [
        ("once", "before", 3.0),
        ("always", "before", 3.0),
        ("once", "gradients", 3.0),
        ("always", "after", 1.5),
        ("once", "after", 1.5),
    ]
    told.clear()
    one.full(BATCH)
    assert [name for name, _, _ in told] == ["always", "always"]
    assert one.global_step == 2


def test_gradients_are_shown_to_those_who_want_them_only() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.full(BATCH, Told("incurious", one, told))
    assert [what for _, what, _ in told] == ["before", "after"]


def test_a_step_that_is_taken_back_is_told_to_the_hooks() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.hooks = (Told("always", one, told),)
    one.take_back_step()
    assert told == [("always", "back", 3.0)]
