"""Averaged weights equal their formula, and the weights themselves come back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.engine.average import WeightAverage
from foretrain.trainer import HybridTrainer

Make = Callable[..., Any]


def moved(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_average_is_its_formula(decay: float) -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, decay)
    reference, total = torch.zeros(2, 3, dtype=torch.float64), 0.0
    for step in range(1, 12):
        moved(model, step)
        average.update()
        reference = decay * reference + (1 - decay) * model.weight.detach().double()
        total = decay * total + (1 - decay)
        with average.applied():
            torch.testing.assert_close(model.weight.double(), reference / total, rtol=1e-5, atol=1e-6)


def test_after_one_step_the_average_is_the_weights() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    average.update()
    weight = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight, weight, rtol=1e-6, atol=1e-7)


def test_the_weights_come_back_bit_for_bit_even_after_an_error() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    for step in range(3):
        moved(model, step)
        average.update()
    before = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]

    def fail() -> None:
        with average.applied():
            assert not torch.equal(model.weight, before[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == places


def test_before_the_first_step_nothing_is_averaged() -> None:
    model = nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    with WeightAverage(model, 0.9).applied():
        assert torch.equal(model.weight, weight)


def test_frozen_weights_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = WeightAverage(model, 0.9)
    assert [weight.shape for weight in average.weights] == [(2, 3)]


def test_the_state_comes_back() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    for step in range(3):
        moved(model, step)
        average.update()
    twin = copy.deepcopy(model)
    again = WeightAverage(twin, 0.9)
    places = [tensor.data_ptr() for tensor in again.average]
    again.load_state_dict(average.state_dict())
    assert [tensor.data_ptr() for tensor in again.average] == places
    for both in ((model, average), (twin, again)):
        moved(both[0], 7)
        both[1].update()
    with average.applied(), again.applied():
        assert torch.equal(model.weight, twin.weight)


# --- in a trainer --------------------------------------------------------------------------------------------------


def test_evaluation_uses_the_average_and_training_does_not(
    make_model: Make, make_batch: Make, make_config: Make
) -> None:
    settings = {"optimizer.learning_rate": 0.02, "schedule.type": "constant"}
    averaged = HybridTrainer(make_model(), config=make_config({**settings, "evaluation.ema_decay": 0.8}))
    plain = HybridTrainer(make_model(), config=make_config(settings))
    history = []
    for number in range(5):
        averaged.step(make_batch(seed=number))
        plain.step(make_batch(seed=number))
        history.append([p.detach().clone() for p in plain.model.parameters()])
    for p, q in zip(averaged.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)

    shares = [0.2 * 0.8 ** (4 - number) for number in range(5)]
    with torch.no_grad():
        for index, p in enumerate(plain.model.parameters()):
            weighed = sum(share * weights[index] for share, weights in zip(shares, history, strict=True))
            p.copy_(weighed / sum(shares))
    held_out = [make_batch(seed=77)]
    before = [p.detach().clone() for p in averaged.model.parameters()]
    assert averaged.evaluate(held_out) == pytest.approx(plain.evaluate(held_out), rel=1e-5)
    for p, kept in zip(averaged.model.parameters(), before, strict=True):
        assert torch.equal(p, kept)
    with averaged.averaged_weights():
        torch.testing.assert_close(
            averaged.model.token_embedding.weight, plain.model.token_embedding.weight, rtol=1e-4, atol=1e-6
        )
