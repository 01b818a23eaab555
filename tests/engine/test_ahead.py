"""The plan of the learning rate ahead: of schedules, and of schedulers that are stepped through without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler

from foretrain.config import ScheduleConfig
from foretrain.engine.ahead import plan_ahead, shortened_plan
from foretrain.engine.rates import FollowedRates, ScheduledRates

STEPS = 200


def optimizer(rate: float = 0.1) -> SGD:
    return SGD([torch.zeros(2, requires_grad=True)], lr=rate, momentum=0.9)


def sequence(one: Optimizer) -> lr_scheduler.LRScheduler:
    rises = lr_scheduler.LinearLR(one, 0.1, total_iters=20)
    falls = lr_scheduler.CosineAnnealingLR(one, STEPS - 20)
    return lr_scheduler.SequentialLR(one, [rises, falls], [20])


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant", "warmup"])
def test_the_plan_of_a_schedule_is_the_schedule(kind: Any) -> None:
    rates = ScheduledRates(optimizer(), ScheduleConfig(type=kind, warmup_steps=10), STEPS, STEPS)
    plan = plan_ahead(rates, STEPS)
    wanted = [rates.at(step) / 0.1 for step in range(STEPS + 1)]
    assert np.abs(plan.at(np.arange(STEPS + 1)) - wanted).max() < 1e-3
    assert len(plan.steps) < (60 if kind == "cosine" else 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: lr_scheduler.OneCycleLR(one, 0.3, total_steps=STEPS + 1),
        lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
        lambda one: lr_scheduler.StepLR(one, 50),
        sequence,
    ],
)
def test_a_scheduler_is_stepped_through_and_does_not_notice(make: Callable[[Optimizer], Any]) -> None:
    own = optimizer()
    scheduler = make(own)
    before = (own.param_groups[0]["lr"], scheduler.last_epoch, own.param_groups[0]["momentum"])
    plan = plan_ahead(FollowedRates(own, scheduler), STEPS)
    assert (own.param_groups[0]["lr"], scheduler.last_epoch, own.param_groups[0]["momentum"]) == before
    rates = FollowedRates(own, scheduler)
    followed = []
    for step in range(STEPS):
        with rates.during(step, 1.0):
            followed.append(float(rates.used))
    assert plan.known
    assert np.abs(plan.at(np.arange(STEPS)) - np.array(followed) / max(followed)).max() < 2e-3


def test_what_nobody_knows_is_no_plan() -> None:
    own = optimizer()
    assert not plan_ahead(FollowedRates(own, lr_scheduler.ReduceLROnPlateau(own)), STEPS).known

    class Failing(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch > 3:
                raise RuntimeError("no more")
            return [0.1]

    assert not plan_ahead(FollowedRates(own, Failing(own)), STEPS).known
    assert not shortened_plan(10, np.arange(11.0), np.zeros(11)).known


def test_a_rate_without_a_scheduler_is_taken_to_stay() -> None:
    assert plan_ahead(FollowedRates(optimizer()), STEPS).at(np.array([0.0, 150.0])).tolist() == [1.0, 1.0]


def test_a_resumed_scheduler_goes_by_the_plan_of_the_beginning() -> None:
    own = optimizer()
    scheduler = lr_scheduler.StepLR(own, 50)
    rates = FollowedRates(own, scheduler)
    plan = plan_ahead(rates, STEPS)
    rates.advance(120)
    assert plan_ahead(rates, STEPS, plan) is plan
    assert not plan_ahead(rates, STEPS).known  # what it did before nobody remembers
