"""The look-ahead formula, step by step, and when it is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.step import StepOutput
from foretrain.hybrid.moves.lookahead import LookAhead

STEPS = 60
OUTPUT = StepOutput(*torch.zeros(3).unbind())
WARMUP = 20
BASE: dict[str, Any] = {
    "max_steps": STEPS,
    "device": "cpu",
    "hybrid.mode": "off",
    "hybrid.warmup_steps": WARMUP,
    "optimizer.type": "sgd",
    "optimizer.learning_rate": 0.05,
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.gradient_clip_norm": 0.0,
    "schedule.type": "constant",
    "predictor.stride": 1,
}


class Bowl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 12))
        self.b = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("curvature", torch.logspace(-1, 0.5, 12))

    def loss(self, batch: Tensor) -> Tensor:
        shifted = self.w - batch
        return 0.5 * (self.curvature * shifted.square()).sum() + 0.25 * self.b.square().sum() * (1 + batch.mean())


def batch(step: int) -> Tensor:
    return 0.1 * torch.randn(12, generator=torch.Generator().manual_seed(step))


def trained(steps: int = STEPS, **settings: Any) -> tuple[HybridTrainer, list[list[Tensor]]]:
    config = from_mapping({**BASE, **{name.replace("__", "."): value for name, value in settings.items()}})
    trainer = HybridTrainer(Bowl(), config=config)
    history = []
    for step in range(steps):
        trainer.step(batch(step))
        history.append([p.detach().clone() for p in trainer.model.parameters()])
    return trainer, history


def reference(beta: float, gamma: float, shares: list[float], stride: int, rate: float = 0.05) -> list[list[Tensor]]:
    """Every k steps w' = w + beta m;  w+ = k steps from w';  m+ = g m + (1 - g)(w+ - w), g = gamma^k, in double."""
    model = Bowl().double()
    g = gamma**stride
    means = [torch.zeros_like(p) for p in model.parameters()]
    history = []
    for step, share in enumerate(shares):
        if step % stride == 0:
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for weight, mean in zip(model.parameters(), means, strict=True):
                    weight += share * beta * mean
        gradients = torch.autograd.grad(model.loss(batch(step).double()), list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= rate * gradient
            if step % stride == stride - 1:
                means = [
                    g * mean + (1 - g) * (weight - old)
                    for mean, weight, old in zip(means, model.parameters(), before, strict=True)
                ]
        history.append([p.detach().clone() for p in model.parameters()])
    return history


def share(step: int) -> float:
    return 1.0 if WARMUP <= step < STEPS * 2 / 3 else 0.0


@pytest.mark.parametrize(
    ("beta", "gamma", "stride"), [(0.5, 0.9, 1), (0.9, 0.5, 1), (0.3, 0.99, 1), (0.5, 0.99, 10), (0.7, 0.9, 7)]
)
def test_every_step_follows_the_formula(beta: float, gamma: float, stride: int) -> None:
    _, found = trained(predictor__beta=beta, predictor__gamma=gamma, predictor__stride=stride)
    expected = reference(beta, gamma, [share(step) for step in range(STEPS)], stride)
    for step, (mine, slow) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(mine, slow, strict=True):
            assert torch.allclose(one.double(), other, atol=2e-6), step


def test_it_is_off_before_the_warm_up_ends_and_on_after_it() -> None:
    _, plain = trained(WARMUP + 1)
    _, ahead = trained(WARMUP + 1, predictor__beta=0.9)
    for step in range(WARMUP):
        assert all(torch.equal(a, b) for a, b in zip(plain[step], ahead[step], strict=True)), step
    assert not torch.equal(plain[WARMUP][0], ahead[WARMUP][0])


def test_it_is_off_in_the_last_third() -> None:
    """From there on the run goes as a plain one would from the same weights."""
    first = STEPS * 2 // 3
    ahead, history = trained(predictor__beta=0.9)
    plain, _ = trained(0)
    with torch.no_grad():
        for weight, value in zip(plain.model.parameters(), history[first - 1], strict=True):
            weight.copy_(value)
    for step in range(first, STEPS):
        plain.step(batch(step))
    for one, other in zip(plain.model.parameters(), ahead.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_is_as_strong_as_the_learning_rate_is_high() -> None:
    settings = {
        "schedule__type": "cosine",
        "schedule__warmup_steps": 0,
        "predictor__beta": 0.8,
        "predictor__gamma": 0.9,
    }
    trainer, _ = trained(30, **settings)
    assert trainer.look_ahead is not None
    before = [p.detach().clone() for p in trainer.model.parameters()]
    strength = trainer.engine.schedule(30) / 0.05
    assert 0.3 < strength < 0.7
    seen: list[Tensor] = []
    inner = trainer.engine.full_step.loss
    trainer.engine.full_step.loss = lambda data: (seen.append(trainer.model.w.detach().clone()), inner(data))[1]
    mean = trainer.look_ahead.m[0].clone()
    trainer.step(batch(30))
    assert torch.allclose(seen[0], before[0] + 0.8 * strength * mean, atol=1e-7)


def test_without_it_the_weights_are_bit_identical() -> None:
    off, _ = trained(predictor__beta=0.0)
    assert off.look_ahead is None
    plain, _ = trained()
    measuring = HybridTrainer(Bowl(), config=from_mapping(BASE))
    measuring.look_ahead = LookAhead(list(measuring.model.parameters()), beta=0.0, gamma=0.9)
    for step in range(STEPS):
        measuring.step(batch(step))
    for one, two, three in zip(*(t.model.parameters() for t in (off, plain, measuring)), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_share_of_zero_leaves_every_bit() -> None:
    weights = [torch.tensor([0.1, -0.0, float("inf"), 1e-40])]
    ahead = LookAhead(weights, beta=0.5, gamma=0.9, share=lambda: 0.0)
    ahead.m = [torch.ones(4)]
    before = weights[0].clone()
    ahead.before_step()
    assert torch.equal(weights[0].view(torch.int32), before.view(torch.int32))


def test_it_pays_where_the_motion_goes_on() -> None:
    """A narrow valley: looking ahead is momentum by another name."""
    config = {"optimizer__learning_rate": 0.01, "max_steps": 300}
    plain, _ = trained(300, **config)
    ahead, _ = trained(300, **config, predictor__beta=0.9, predictor__gamma=0.9)
    with torch.no_grad():
        assert float(ahead.model.loss(torch.zeros(12))) < float(plain.model.loss(torch.zeros(12)))


@pytest.mark.parametrize("stride", [1, 10])
def test_state_continues_bit_for_bit(stride: int) -> None:
    """Also in the middle of a stride."""
    settings = {"predictor__beta": 0.7, "predictor__gamma": 0.9, "predictor__stride": stride}
    whole, history = trained(**settings)
    first, _ = trained(35, **settings)
    assert first.look_ahead is not None
    assert first.look_ahead.steps == 35 % stride
    second = HybridTrainer(Bowl(), config=first.config)
    second.load_state_dict(first.state_dict())
    for step in range(35, STEPS):
        second.step(batch(step))
        for one, other in zip(second.model.parameters(), history[step], strict=True):
            assert torch.equal(one, other), step
    assert whole.look_ahead is not None
    assert second.look_ahead is not None
    assert all(torch.equal(a, b) for a, b in zip(whole.look_ahead.m, second.look_ahead.m, strict=True))


def test_steps_in_which_something_else_moved_the_weights_teach_nothing() -> None:
    weights = [torch.zeros(3)]
    ahead = LookAhead(weights, beta=0.5, gamma=0.9, stride=3)
    ahead.before_step()
    weights[0] += 1.0
    ahead.after_step(OUTPUT)
    weights[0] += 100.0  # a leap
    ahead.restart()
    for _ in range(3):
        ahead.before_step()
        weights[0] += 1.0
        ahead.after_step(OUTPUT)
    assert torch.allclose(ahead.m[0], torch.full((3,), 3 * (1 - 0.9**3)))


def test_a_step_that_is_not_done_takes_the_look_ahead_back() -> None:
    weights = torch.arange(6.0)
    ahead = LookAhead([weights], beta=0.5, gamma=0.9)
    ahead.m[0].fill_(0.1)
    before = weights.clone()
    ahead.before_step()
    assert not torch.equal(weights, before)
    ahead.take_back()
    assert torch.equal(weights, before)
    ahead.before_step()
    ahead.after_step(OUTPUT)
    done = weights.clone()
    ahead.take_back()  # a step that is done stays
    assert torch.equal(weights, done)
