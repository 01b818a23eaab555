"""Optimizers from the configuration equal plain torch ones; the learning rate of any optimizer can be set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import OptimizerConfig
from foretrain.config.schema import FIRST_RATE
from foretrain.engine.optim import build as optim
from foretrain.engine.optim.muon import Muon
from foretrain.errors import ConfigError

Make = Callable[..., Any]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, make_batch: Make, steps: int = 6) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(*make_batch(seed=number)).backward()
        optimizer.step()


def split(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


REFERENCES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(split(model, 0.2), lr=3e-3, betas=(0.8, 0.9), eps=1e-6),
    "adam": lambda model: torch.optim.Adam(split(model, 0.2), lr=3e-3, betas=(0.8, 0.9), eps=1e-6),
    "sgd": lambda model: torch.optim.SGD(split(model, 0.2), lr=3e-3, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_built_optimizers_equal_plain_torch_ones(kind: str, make_model: Make, make_batch: Make) -> None:
    ours, theirs = make_model(), make_model()
    settings = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.2}
    train(ours, optim.build(ours, OptimizerConfig(type=kind, **settings)), make_batch)
    train(theirs, REFERENCES[kind](theirs), make_batch)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, True), (0.5, False), (0.5, True)])
def test_sgd_momentum(momentum: float, nesterov: bool, make_model: Make, make_batch: Make) -> None:
    ours, theirs = make_model(), make_model()
    config = OptimizerConfig(type="sgd", learning_rate=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0)
    train(ours, optim.build(ours, config), make_batch)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0)
    train(theirs, reference, make_batch)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_weight_decay_is_for_matrices_only(kind: str, make_model: Make) -> None:
    model = make_model()
    optimizer = optim.build(model, OptimizerConfig(type=kind, weight_decay=0.3))
    seen = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert seen == {id(p): 0.3 if p.ndim >= 2 else 0.0 for p in model.parameters()}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_every_built_optimizer_can_skip_on_the_device(kind: str, make_model: Make) -> None:
    assert optim.supports_device_skip(optim.build(make_model(), OptimizerConfig(type=kind)))


def test_other_optimizers_cannot(make_model: Make) -> None:
    assert not optim.supports_device_skip(torch.optim.RMSprop(make_model().parameters()))


def test_frozen_parameters_are_left_out(make_model: Make) -> None:
    model = make_model()
    model.token_embedding.weight.requires_grad_(False)
    optimizer = optim.build(model, OptimizerConfig())
    assert all(p is not model.token_embedding.weight for group in optimizer.param_groups for p in group["params"])


def test_a_model_of_vectors_only_has_one_group() -> None:
    assert len(optim.build(nn.LayerNorm(4), OptimizerConfig()).param_groups) == 1


# --- Muon's groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rate", "rest"),
    [
        ({}, 6e-3, 6e-3),
        ({"rest_rate_factor": 0.25}, 6e-3, 1.5e-3),
        ({"rest_rate_factor": 0.25, "learning_rate": 0.02}, 0.02, 5e-3),
        ({"rest_rate_factor": 0.25, "rest_learning_rate": 1e-3}, 6e-3, 1e-3),
        ({"rest_rate_factor": 2.0, "learning_rate": "auto"}, FIRST_RATE, 2 * FIRST_RATE),
    ],
)
def test_the_rest_of_muon_has_its_own_rate_or_a_multiple(settings: Any, rate: float, rest: float) -> None:
    optimizer = optim.build(nn.Linear(3, 3), OptimizerConfig(type="muon", **settings))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, rest])
    control = optim.RateControl(optimizer)
    control.set(3 * rate)  # as a schedule or a race does
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3 * rate, 3 * rest])


def names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw(make_model: Make) -> None:
    model = make_model()
    optimizer = optim.build(model, OptimizerConfig(type="muon", learning_rate=0.02, rest_learning_rate=3e-3))
    assert isinstance(optimizer, Muon)
    hidden, others, vectors = names_by_group(model, optimizer)
    assert hidden == {name for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name}
    assert others == {"token_embedding.weight", "position_embedding.weight"}
    assert len(hidden) + len(others) + len(vectors) == len(list(model.parameters()))
    assert [(group["algorithm"], group["lr"]) for group in optimizer.param_groups] == [
        ("muon", 0.02),
        ("adamw", 3e-3),
        ("adamw", 3e-3),
    ]


def test_muon_leaves_convolutions_and_tied_output_layers_to_adamw() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.convolution = nn.Conv1d(4, 4, 3)
            self.hidden = nn.Linear(4, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    hidden, others, _ = names_by_group(model, optim.build(model, OptimizerConfig(type="muon")))
    assert hidden == {"hidden.weight"}
    assert others == {"embedding.weight", "convolution.weight"}


# --- the learning rate ---------------------------------------------------------------------------------------------


def test_groups_keep_their_proportion() -> None:
    one, two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.4}])
    control = optim.RateControl(optimizer)
    assert control.peak == 0.1
    for rate in (0.1, 0.05, 0.0, 0.02):
        control.set(rate)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, 4 * rate])
    assert control.peak == 0.1


def test_a_tensor_rate_is_filled_in_place_and_not_shared() -> None:
    rate = torch.tensor(0.1)
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2))]}]
    optimizer = torch.optim.AdamW(groups, lr=rate, capturable=True)
    control = optim.RateControl(optimizer)
    tensors = [group["lr"] for group in optimizer.param_groups]
    control.set(0.025)
    assert [group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True)] == [
        True,
        True,
    ]
    assert [float(tensor) for tensor in tensors] == pytest.approx([0.025, 0.025])
    assert tensors[0].data_ptr() != tensors[1].data_ptr()
    assert float(rate) == pytest.approx(0.1)


def test_after_the_state_was_replaced_the_rate_is_set_anew() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    control = optim.RateControl(optimizer)
    control.set(0.05)
    optimizer.param_groups[0]["lr"] = 9.0
    control.forget()
    control.set(0.05)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


# --- states of other libraries ---------------------------------------------------------------------------------------


class Quantized(torch.Tensor):
    """Stands for a tensor that holds its numbers in other tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None


class Library(torch.optim.SGD):
    """Keeps its momentum in such tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for values in self.state.values():
            values["momentum_buffer"] = values["momentum_buffer"].as_subclass(Quantized)


@pytest.mark.parametrize("mode", ["leap", "off"])
def test_a_state_that_cannot_be_copied_is_refused_in_words(
    mode: str, make_config: Make, make_model: Make, make_batch: Make, tmp_path: Path
) -> None:
    model = make_model()
    settings = {"hybrid.mode": mode, "hybrid.warmup_steps": 20, "max_steps": 60, "checkpoint.interval": 15}
    trainer = HybridTrainer(model, Library(model.parameters(), lr=0.01, momentum=0.9), config=make_config(settings))
    with pytest.raises(ConfigError, match=r"Library keeps momentum_buffer in Quantized, .*state_type = '8bit'"):
        trainer.fit([make_batch(seed=number) for number in range(70)], out=tmp_path / "run", progress=False)
    assert trainer.global_step > 0


def test_a_state_of_objects_is_refused_in_words(make_config: Make, make_model: Make, make_batch: Make) -> None:
    class Objects(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["history"] = range(3)

    model = make_model()
    trainer = HybridTrainer(model, Objects(model.parameters(), lr=0.01), config=make_config({"hybrid.mode": "off"}))
    trainer.step(make_batch())
    with pytest.raises(
        ConfigError, match="Objects keeps history in range, which snapshots and checkpoints cannot copy"
    ):
        trainer.state_dict()


@pytest.mark.parametrize(("kind", "decay"), [("adamw", 0.1), ("muon", 0.1), ("adam", 0.0), ("sgd", 0.0)])
def test_weights_decay_unasked_only_where_that_is_decoupled_from_the_gradient(kind: str, decay: float) -> None:
    groups = optim.build(nn.Linear(3, 3), OptimizerConfig(type=kind)).param_groups
    assert max(group["weight_decay"] for group in groups) == decay
    groups = optim.build(nn.Linear(3, 3), OptimizerConfig(type=kind, weight_decay=0.3)).param_groups
    assert max(group["weight_decay"] for group in groups) == 0.3
