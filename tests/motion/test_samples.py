"""Statistics of a few thousand gradients and moments, against the whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foretrain.engine.optim.narrow import NarrowAdamW
from foretrain.motion.samples import Sample, Statistics, bias_corrections


def parameters(*sizes: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for parameter in made:
        parameter.grad = 3.0 + torch.randn(parameter.shape, generator=generator)
    return made


def test_small_models_are_sampled_whole() -> None:
    weights = parameters(7, 300, 40)
    gradient = Sample(weights, torch.optim.SGD(weights)).gradient()
    expected = torch.cat([weights[index].grad for index in (1, 2, 0)])
    assert torch.equal(gradient, expected)


def test_large_models_are_sampled_in_fixed_places() -> None:
    weights = parameters(*[5000] * 20)
    sample = Sample(weights, torch.optim.SGD(weights))
    assert sample.gradient().numel() == 16 * 1024
    assert torch.equal(sample.gradient(), sample.gradient())
    assert sample.gradient().mean() == pytest.approx(3.0, abs=0.05)


def test_statistics_without_any_moment_are_those_of_the_gradient() -> None:
    weights = parameters(50, 20)
    sample = Sample(weights, torch.optim.SGD(weights))
    gradient = sample.gradient()
    found = Statistics(*sample.statistics().tolist())
    assert found.gradient_mean == pytest.approx(float(gradient.mean()))
    assert found.gradient_std == pytest.approx(float(gradient.std(unbiased=False)))
    assert found.gradient_cosine == pytest.approx(1.0)
    assert found.moment_mean == pytest.approx(float(gradient.abs().mean()))
    assert found.moment_std == pytest.approx(found.gradient_std)
    assert found.second_moment_mean == pytest.approx(float(gradient.square().mean().sqrt()))


def test_moments_of_adam_and_of_momentum() -> None:
    weights = parameters(50, 20)
    adam = torch.optim.AdamW(weights, lr=1e-3)
    sample = Sample(weights, adam)
    for _ in range(3):
        adam.step()
    found = sample.statistics().tolist()
    first = torch.cat([adam.state[p]["exp_avg"] for p in weights])
    second = torch.cat([adam.state[p]["exp_avg_sq"] for p in weights])
    assert found[3:] == pytest.approx(
        [float(first.abs().mean()), float(first.std(unbiased=False)), float(second.sqrt().mean())], rel=1e-5
    )
    sgd = torch.optim.SGD(weights, lr=1e-3, momentum=0.9)
    for _ in range(3):
        sgd.step()
    buffers = torch.cat([sgd.state[p]["momentum_buffer"] for p in weights])
    assert Sample(weights, sgd).statistics()[3] == pytest.approx(float(buffers.abs().mean()), rel=1e-5)


def test_cosine_is_that_with_the_remembered_gradient() -> None:
    weights = parameters(3)
    sample = Sample(weights, torch.optim.SGD(weights))
    weights[0].grad = torch.tensor([1.0, 0.0, 0.0])
    sample.remember()
    weights[0].grad = torch.tensor([3.0, 4.0, 0.0])
    assert sample.statistics()[2] == pytest.approx(0.6)
    assert sample.statistics()[2] == pytest.approx(1.0)  # what was remembered is used once


def test_without_gradients_there_are_numbers_all_the_same() -> None:
    weights = parameters(3, 4)
    for parameter in weights:
        parameter.grad = None
    assert torch.isfinite(Sample(weights, torch.optim.SGD(weights)).statistics()).all()


def test_nothing_is_changed_and_no_graph_is_kept() -> None:
    weights = parameters(30)
    before = weights[0].grad.clone()
    found = Sample(weights, torch.optim.SGD(weights)).statistics()
    assert torch.equal(weights[0].grad, before)
    assert not found.requires_grad


def test_the_remembered_gradient_survives_a_round_trip() -> None:
    weights = parameters(30)
    one = Sample(weights, torch.optim.SGD(weights))
    one.remember()
    other = Sample(weights, torch.optim.SGD(weights))
    other.load_state_dict(one.state_dict())
    weights[0].grad = torch.linspace(-1, 1, 30)
    assert torch.equal(one.statistics(), other.statistics())
    other.load_state_dict({"before": None})
    assert other.statistics()[2] == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_bias_corrections(steps: int) -> None:
    weights = parameters(3)
    adam = torch.optim.AdamW(weights, betas=(0.8, 0.95))
    assert bias_corrections(adam, steps) == pytest.approx((1 - 0.8**steps, 1 - 0.95**steps))
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.5)
    assert bias_corrections(sgd, steps)[0] == pytest.approx(1 - 0.5**steps)
    plain = bias_corrections(torch.optim.SGD(weights, lr=0.1), steps)
    assert all(0 < value <= 1 for value in plain)


@pytest.mark.parametrize("state_type", ["bf16", "8bit"])
def test_moments_in_fewer_bits_are_read_as_numbers(state_type: str) -> None:
    found = {}
    for chosen in ("fp32", state_type):
        weights = parameters(5000, 70_001)
        optimizer = NarrowAdamW([{"params": weights}], lr=1e-3, state_type=chosen)
        sample = Sample(weights, optimizer)
        for _ in range(3):
            optimizer.step()
        found[chosen] = sample.statistics().tolist()
    assert found[state_type] == pytest.approx(found["fp32"], rel=1e-2)
    assert found[state_type] != found["fp32"]


def test_gradients_that_do_not_outlive_the_backward_pass_are_seen_in_it() -> None:
    weights = parameters(5000, 300)
    sample, watched = (Sample(weights, torch.optim.SGD(weights)) for _ in range(2))
    expected, see = sample.gradient(), watched.watch()
    for weight in weights:
        see(weight)
        weight.grad = None
    assert torch.equal(watched.gradient(), expected)
    see(nn.Parameter(torch.ones(3)))  # not one of the sample
    assert torch.equal(watched.gradient(), expected)
