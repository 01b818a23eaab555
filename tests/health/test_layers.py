"""The look: norms per layer are those of a plain computation, however the step is executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worlds import QUICK, Net, Regression
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.engine import Engine
from foretrain.health.layers import SAMPLED, LayerMeter, LayerNorms

LAYERS = ["first", "middle", "last"]


def engine(model: nn.Module, **changes: Any) -> Engine:
    settings = {**QUICK, "optimizer.gradient_clip_norm": 0.0}
    return Engine(model, None, None, from_mapping(settings | {k.replace("__", "."): v for k, v in changes.items()}))


def look_at(one: Engine, batch: Any) -> tuple[LayerMeter, LayerNorms]:
    look = LayerMeter(one.model, one.full_step.parameters)
    look.begin()
    look.end(7, one.full(batch))
    measured = look.take()
    assert measured is not None
    assert look.take() is None
    return look, measured


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).norm())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer__gradient_clip_norm": 0.01},
        {"accumulation_steps": 4},
        {"engine__update_in_backward": True},
        {"optimizer__type": "muon"},
        {"optimizer__type": "sgd"},
    ],
)
def test_norms_are_those_of_a_plain_computation(changes: dict[str, Any]) -> None:
    batch = Regression()(0)
    plain = Net()
    plain.loss(batch).backward()
    one = engine(Net(), **changes)
    before = [p.detach().clone() for p in one.model.parameters()]
    look, measured = look_at(one, batch)
    assert look.names == LAYERS
    assert measured.step == 7
    for place, layer in enumerate(LAYERS):
        module, trained = getattr(plain, layer), list(getattr(one.model, layer).parameters())
        assert measured.gradient[place] == pytest.approx(norm(p.grad for p in module.parameters()), rel=1e-5)
        assert measured.weight[place] == pytest.approx(norm(module.parameters()), rel=1e-5)
        moved = [now - then for now, then in zip(trained, before[2 * place : 2 * place + 2], strict=True)]
        assert measured.update[place] == pytest.approx(norm(moved), rel=1e-3)
    assert measured.gradient_to_weight == pytest.approx(measured.gradient / measured.weight)


def test_the_update_of_a_large_parameter_is_estimated() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 100, bias=False)
    assert model.weight.numel() > 4 * SAMPLED
    look = LayerMeter(model, list(model.parameters()))
    one = engine(Net())
    look.begin()
    with torch.no_grad():
        moved = torch.randn_like(model.weight)
        model.weight += moved
    output = one.full(Regression()(0))
    look.end(0, type(output)(output.loss, output.gradient_norm, output.skipped, torch.ones(1)))
    measured = look.take()
    assert measured is not None
    assert measured.update[0] == pytest.approx(float(moved.norm()), rel=0.05)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_layer_without_a_gradient_has_no_norm(in_backward: bool) -> None:
    class Half(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return (self.first(batch[0]).sum(1) - batch[1]).square().mean()

    _, measured = look_at(engine(Half(), engine__update_in_backward=in_backward), Regression()(0))
    assert [bool(value != value) for value in measured.gradient] == [False, True, True]


def test_a_weight_that_is_still_zero_has_no_ratio() -> None:
    model = Net()
    nn.init.zeros_(model.middle.weight)
    nn.init.zeros_(model.middle.bias)
    _, measured = look_at(engine(model), Regression()(0))
    assert [bool(value != value) for value in measured.update_to_weight] == [False, True, False]


def test_the_gradient_norm_of_all_is_that_of_the_parts() -> None:
    output = engine(Net()).full(Regression()(0))
    assert output.gradient_norms is not None
    assert float(output.gradient_norms.norm()) == pytest.approx(float(output.gradient_norm))


def test_parameters_of_several_formats() -> None:
    class Mixed(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs)).to(torch.bfloat16)
            return self.last(torch.tanh(self.middle(hidden)).float())[:, 0]

    model = Mixed()
    model.middle.to(torch.bfloat16)
    _, measured = look_at(engine(model, optimizer__type="sgd"), Regression()(0))
    assert (measured.gradient > 0).all()


def test_a_look_that_is_not_taken_can_be_saved() -> None:
    one = engine(Net())
    look = LayerMeter(one.model, one.full_step.parameters)
    assert look.wait() is None
    look.begin()
    look.end(3, one.full(Regression()(0)))
    other = LayerMeter(one.model, one.full_step.parameters)
    other.put_back(look.wait())
    mine, theirs = look.take(), other.take()
    assert mine is not None
    assert theirs is not None
    assert mine.step == theirs.step
    assert (mine.gradient == theirs.gradient).all()


def test_a_frozen_model_is_not_looked_at() -> None:
    model = Net()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    trainer = HybridTrainer(model, config=from_mapping({**QUICK, "hybrid.mode": "off"}))
    trainer.step(Regression()(0))
    assert list(trainer.summary()["health"]["layers"]) == ["last"]
