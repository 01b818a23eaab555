"""What users hand in: as people write it, or refused in one sentence."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain import Config, ConfigError, HybridTrainer, InputError, Muon, supervised
from foretrain.config import from_mapping
from foretrain.engine import own

OFF = {"hybrid.mode": "off", "device": "cpu", "health.interval": 0}
CPU = Config(device="cpu")


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


# --- losses ----------------------------------------------------------------------------------------------------------


def by_target(logits: Tensor, y_true: Tensor) -> Tensor:
    return F.cross_entropy(logits, y_true)


CRITERIA: dict[str, Callable[..., Tensor]] = {
    "object": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "partial": functools.partial(F.cross_entropy, reduction="mean"),
    "own function": by_target,
    "lambda": lambda output, labels: F.cross_entropy(output, labels) * 1.0,
    "supervised": supervised(F.cross_entropy),
    "of model and batch": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "of model and y": lambda model, y: F.cross_entropy(model(y[0]), y[1]),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_loss_may_be_a_criterion_or_a_function_of_model_and_batch(name: str) -> None:
    trainer = HybridTrainer(net(), None, CRITERIA[name], from_mapping(OFF))
    expected = F.cross_entropy(net()(batch()[0]), batch()[1]).item()
    assert trainer.step(batch()).loss == pytest.approx(expected)


def test_a_criterion_goes_where_the_model_is() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])).to(torch.double)
    loss = own.as_loss(criterion, torch.device("meta"))
    assert criterion.weight is not None
    assert criterion.weight.device.type == "meta"
    assert not own.is_criterion(loss)


@pytest.mark.parametrize(
    ("given", "described"),
    [
        (torch.zeros(4, 3), r"a tensor of shape \[4, 3\]"),
        ({"x": torch.zeros(4, 3), "y": torch.zeros(4)}, "a dict of x, y"),
        ((torch.zeros(4, 3), torch.zeros(4), torch.zeros(4)), "a tuple of 3"),
    ],
)
def test_a_criterion_needs_pairs(given: Any, described: str) -> None:
    trainer = HybridTrainer(net(), None, nn.CrossEntropyLoss(), from_mapping(OFF))
    with pytest.raises(InputError, match=rf"needs batches of \(inputs, targets\), not {described}; write a function"):
        trainer.step(given)


def test_a_criterion_that_is_not_recognised_says_how_to_write_it() -> None:
    trainer = HybridTrainer(net(), None, lambda one, other: (one - other).square().mean(), from_mapping(OFF))
    with pytest.raises(InputError, match=r"TypeError: .*called with \(model, batch\).*write supervised\("):
        trainer.step(batch())


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn is the class MSELoss; give an object of it: MSELoss\(\)"):
        HybridTrainer(net(), None, nn.MSELoss, CPU)
    with pytest.raises(ConfigError, match=r"loss_fn = 'mse' cannot be called; give a function of \(model, batch\)"):
        HybridTrainer(net(), None, "mse", CPU)  # type: ignore[arg-type]


def test_a_loss_of_one_element_is_a_loss_and_one_of_more_is_not() -> None:
    trainer = HybridTrainer(net(), None, lambda model, batch: model(batch[0]).mean().reshape(1), from_mapping(OFF))
    assert trainer.step(batch()).loss == pytest.approx(net()(batch()[0]).mean().item())
    assert trainer.evaluate([batch()]) < 1e9
    many = HybridTrainer(net(), None, nn.CrossEntropyLoss(reduction="none"), from_mapping(OFF))
    with pytest.raises(InputError, match=r"gave a tensor of shape \[8\], and one number is needed: give its mean"):
        many.step(batch())
    none = HybridTrainer(net(), None, lambda model, batch: None, from_mapping(OFF))
    with pytest.raises(InputError, match="gave of type NoneType"):
        none.step(batch())


# --- batches ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("form", ["tuple", "list", "named tuple", "read-only"])
def test_numpy_batches_train_as_tensors_do(form: str) -> None:
    x, y = batch()
    arrays = x.double().numpy(), y.numpy().astype(np.int32)
    if form == "read-only":
        arrays[0].flags.writeable = False
    given: Any = {"list": list(arrays), "named tuple": Pair(*arrays)}.get(form, arrays)
    one, other = (HybridTrainer(net(), None, nn.CrossEntropyLoss(), from_mapping(OFF)) for _ in range(2))
    assert one.step(given).loss == other.step((x, y)).loss
    assert torch.equal(one.model.weight, other.model.weight)  # type: ignore[arg-type]
    assert one.engine.progress.tokens == 8
    assert one.evaluate([given]) == other.evaluate([(x, y)])


def test_numpy_batches_may_be_dicts_and_hold_other_things() -> None:
    made = own.as_tensors(
        {"x": np.ones(2), "n": np.uint32([1]), "b": np.uint8([3]), "s": np.array(["a"])}, torch.double
    )
    assert [made[name].dtype for name in ("x", "n", "b")] == [torch.double, torch.int64, torch.uint8]
    assert isinstance(made["s"], np.ndarray)
    same = {"x": torch.ones(1), "text": "a"}
    assert own.as_tensors(same, torch.float) is same


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_an_optimizer_may_be_a_class() -> None:
    trainer = HybridTrainer(net(), torch.optim.Adam, nn.CrossEntropyLoss(), from_mapping(OFF))
    assert isinstance(trainer.optimizer, torch.optim.Adam)
    assert trainer.step(batch()).learning_rate == 1e-3  # its own default, and no schedule
    settings = {**OFF, "optimizer.learning_rate": 0.05, "optimizer.weight_decay": 0.3}
    group = HybridTrainer(net(), torch.optim.SGD, nn.CrossEntropyLoss(), from_mapping(settings)).optimizer.param_groups
    assert (group[0]["lr"], group[0]["weight_decay"]) == (0.05, 0.3)


def test_an_optimizer_may_be_a_function_of_what_is_trained() -> None:
    model = net()
    model.bias.requires_grad_(False)
    trainer = HybridTrainer(model, functools.partial(torch.optim.SGD, lr=0.2), nn.CrossEntropyLoss(), from_mapping(OFF))
    assert trainer.optimizer.param_groups[0]["params"] == [model.weight]
    assert trainer.step(batch()).learning_rate == 0.2


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("SGD", torch.optim.SGD), ("muon", Muon)])
def test_an_optimizer_may_be_a_name(name: str, kind: type) -> None:
    trainer = HybridTrainer(net(), name, nn.CrossEntropyLoss(), from_mapping({**OFF, "optimizer.beta2": 0.9}))
    assert type(trainer.optimizer) is kind
    assert (trainer.config.optimizer.type, trainer.config.optimizer.beta2) == (name.lower(), 0.9)


@pytest.mark.parametrize(
    ("optimizer", "settings", "text"),
    [
        ("adamv", {}, "optimizer = 'adamv': the names are 'adamw', 'adam', 'sgd', 'muon'; did you mean 'adam"),
        ("lion", {}, "give an object or a class of torch.optim for others"),
        ("sgd", {"optimizer.type": "adam"}, "optimizer = 'sgd' and optimizer.type = 'adam': keep one of them"),
        (3, {}, "optimizer is of type int; give an object or a class of torch.optim"),
        (lambda params: params, {}, "optimizer is a list of 2; give an object"),
        (torch.optim.Adam, {"optimizer.learning_rate": "auto"}, "'auto' is for optimizers named in the Config"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HybridTrainer(net(), optimizer, nn.CrossEntropyLoss(), from_mapping({**OFF, **settings}))


def test_closures_are_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"LBFGS computes the loss several times per step, by a closure.*Adam"):
        HybridTrainer(model, torch.optim.LBFGS(model.parameters()), nn.CrossEntropyLoss(), CPU)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the SGD holds none of the parameters of Linear, so nothing would"):
        HybridTrainer(net(), torch.optim.SGD(net().parameters(), lr=0.1), nn.CrossEntropyLoss(), CPU)


def test_parameters_that_no_optimizer_holds_are_named() -> None:
    model = net()
    with pytest.warns(UserWarning, match="1 of 2 parameters that require gradients are not in the SGD.* bias among"):
        HybridTrainer(model, torch.optim.SGD([model.weight], lr=0.1), nn.CrossEntropyLoss(), CPU)


def test_settings_without_effect_are_named() -> None:
    model, settings = net(), {**OFF, "optimizer.learning_rate": 0.1, "optimizer.beta1": 0.9}
    with pytest.warns(UserWarning, match=r"^optimizer\.learning_rate of the Config: no effect on an optimizer that is"):
        HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), from_mapping(settings))


# --- models ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight of LazyLinear has no shape yet.*call the model once on a batch"):
        HybridTrainer(nn.LazyLinear(2), None, nn.MSELoss(), CPU)
    with pytest.raises(ConfigError, match="Linear cannot be trained: all its parameters are frozen"):
        HybridTrainer(net().requires_grad_(False), None, nn.MSELoss(), CPU)
    with pytest.raises(ConfigError, match="ReLU cannot be trained: it has no parameters"):
        HybridTrainer(nn.ReLU(), None, nn.MSELoss(), CPU)
    with pytest.raises(ConfigError, match=r"model is of type function; give a torch\.nn\.Module"):
        HybridTrainer(batch, None, nn.MSELoss(), CPU)  # type: ignore[arg-type]


def test_a_frozen_batch_normalisation_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    trainer = HybridTrainer(model, None, nn.CrossEntropyLoss(), from_mapping(OFF))
    for _ in range(3):
        trainer.step(batch())
    trainer.evaluate([batch()])
    assert torch.equal(model[1].running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert [module.training for module in model] == [True, False, True]


def test_a_model_that_only_evaluates_is_set_to_train() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)).eval()
    HybridTrainer(model, None, nn.CrossEntropyLoss(), from_mapping(OFF))
    assert all(module.training for module in model.modules())


# --- processes -------------------------------------------------------------------------------------------------------


def test_prediction_in_processes_that_have_not_met_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 processes, and they have not met: call .*init_process_group"):
        HybridTrainer(net(), None, nn.CrossEntropyLoss(), CPU)
    HybridTrainer(net(), None, nn.CrossEntropyLoss(), from_mapping(OFF)).step(batch())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match=r"one of 3 processes, and .* is neither in DistributedDataParallel"):
        HybridTrainer(net(), None, nn.CrossEntropyLoss(), CPU)
