"""Hooks around full steps: their order, what they see, and what an undone step means to them."""

from __future__ import annotations

from typing import Any

import torch
from tests.worlds import QUICK, Bowl, Net, Regression, still
from tests.worlds import Told as Predicted
from torch import Tensor, nn

from foretrain import HybridTrainer
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


def engine(**settings: Any) -> Engine:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    return Engine(model, optimizer, loss, from_mapping({"device": "cpu", **settings}))


def test_hooks_of_one_step_stand_around_those_of_every_step() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.add_hook(Told("always", one, told))
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
    assert one.progress.global_step == 2


def test_gradients_are_shown_to_those_who_want_them_only() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.full(BATCH, Told("incurious", one, told))
    assert [what for _, what, _ in told] == ["before", "after"]


def test_a_step_that_is_taken_back_is_told_to_the_hooks() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    one.add_hook(Told("always", one, told))
    one.take_back_step()
    assert told == [("always", "back", 3.0)]


def test_a_hook_that_is_removed_is_told_nothing_and_the_others_stay() -> None:
    one, told = engine(), list[tuple[str, str, float]]()
    first, second = Told("first", one, told), Told("second", one, told)
    one.add_hook(first)
    one.add_hook(second)
    one.remove_hook(first)
    one.full(BATCH)
    assert {name for name, _, _ in told} == {"second"}


class Steps(StepHook):
    """Notes the number of the step that it is told of."""

    wants_gradients = True

    def __init__(self, one: Engine) -> None:
        self.engine = one
        self.before: list[int] = []
        self.gradients: list[int] = []
        self.after: list[int] = []

    def before_step(self) -> None:
        self.before.append(self.engine.progress.global_step)

    def gradients_ready(self) -> None:
        self.gradients.append(self.engine.progress.global_step)

    def after_step(self, output: StepOutput) -> None:
        self.after.append(self.engine.progress.global_step)


def test_a_step_is_counted_after_its_hooks() -> None:
    one = engine()
    hook = Steps(one)
    one.add_hook(hook)
    one.full(BATCH)
    one.full(BATCH)
    assert hook.before == hook.gradients == hook.after == [0, 1]


def test_updates_in_the_backward_pass_leave_no_time_for_gradients() -> None:
    one = engine(**{"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0})
    hook = Steps(one)
    one.add_hook(hook)
    one.full(BATCH)
    assert (hook.before, hook.gradients, hook.after) == ([0], [], [0])


def test_leaps_of_a_chain_are_no_full_steps_and_forks_of_an_audit_are() -> None:
    chain = from_mapping({**QUICK, "hybrid.secant_pairs": 20, "optimizer.learning_rate": 0.01, "max_steps": 80})
    trainer = HybridTrainer(Bowl(), config=chain)
    hook = Steps(trainer.engine)
    trainer.engine.add_hook(hook)
    trainer.fit([still(0)] * 80, progress=False)
    leaps = trainer.summary()["steps"]["predict"]
    assert leaps > 0
    assert len(hook.after) == trainer.global_step - leaps
    audited = from_mapping({**QUICK, "audit.time_budget": 1.0, "audit.steps": 8, "optimizer.learning_rate": 1e-3})
    data = Regression()
    trainer = HybridTrainer(Net(), config=audited, predictor=Predicted("repeat"))
    hook = Steps(trainer.engine)
    trainer.engine.add_hook(hook)
    trainer.fit((data(position) for position in range(400)), progress=False)
    assert len(hook.after) == trainer.backward_passes > trainer.global_step
    assert any(later <= earlier for earlier, later in zip(hook.after, hook.after[1:], strict=False)), "forks go back"
