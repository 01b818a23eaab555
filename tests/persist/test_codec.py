"""The whole state: apart and together again, snapshots, and putting it back in place."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.worlds import Net
from torch import nn

from foretrain.errors import CheckpointError
from foretrain.persist.codec import Snapshot, put_together, random_state, restore_random_state, snapshot, take_apart
from foretrain.persist.model_state import checksum, restore_model, restore_optimizer
from foretrain.trainer import HybridTrainer

Make = Callable[..., Any]


def through_json(state: Any) -> Any:
    """Apart, the tree through JSON as on disk, and together again."""
    parts = take_apart(state)
    tree = json.loads(json.dumps(parts.tree, allow_nan=False))
    return put_together(Snapshot(parts.tensors, tree))


# --- apart and together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        (),
        {"a": {}},
        None,
        True,
        -7,
        2**100,
        0.1,
        -0.0,
        "text ü",
        {"b": 1, "a": 2},
        {1: "int", 2: {3: (4, [5, ()])}},
        {"1": "text", 1: "number"},
        {None: 1, True: 2, 2.5: 3},
        {"$tensor": "not a tensor", "$tuple": [1], "$float": "nan", "$entries": []},
        ({"a": (1,)}, [(2,), [3]]),
        [math.inf, -math.inf, {"x": math.inf}],
    ],
)
def test_plain_values_survive(value: Any) -> None:
    again = through_json(value)
    assert again == value
    assert repr(again) == repr(value)  # the types and the order too


def test_nan_survives() -> None:
    again = through_json({"a": [math.nan], math.inf: 1})
    assert math.isnan(again["a"][0])
    assert again[math.inf] == 1


def test_tensors_survive_as_they_are() -> None:
    tensors = [
        torch.arange(6).view(2, 3),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
    ]
    again = through_json({"a": tensors, 3: {"b": tensors[0]}})
    for one, other in zip(tensors, again["a"], strict=True):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
    assert torch.equal(again[3]["b"], tensors[0])


def test_names_that_look_alike_stay_apart() -> None:
    state = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        0: torch.tensor(3),
        "0": torch.tensor(4),
        "list": [torch.tensor(5)],
        "list.0": torch.tensor(6),
        "": torch.tensor(7),
    }
    again = through_json(state)
    assert [int(again[key]) for key in ("a.b", 0, "0", "list.0", "")] == [2, 3, 4, 6, 7]
    assert int(again["a"]["b"]) == 1
    assert int(again["list"][0]) == 5
    assert len(take_apart(state).tensors) == 7


def test_a_tensor_that_stands_twice_is_kept_twice() -> None:
    shared = torch.ones(3)
    again = through_json({"one": shared, "two": shared})
    assert torch.equal(again["one"], shared)
    assert torch.equal(again["two"], shared)


def test_taking_apart_copies_nothing_and_drops_the_graph() -> None:
    weight = nn.Parameter(torch.ones(3))
    (tensor,) = take_apart({"w": weight}).tensors.values()
    assert tensor.data_ptr() == weight.data_ptr()
    assert not tensor.requires_grad


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", np.float32(1), {(1, 2): 3}, lambda: None])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=f"not {'tuple' if isinstance(value, dict) else type(value).__name__}"):
        take_apart({"a": value})


def test_a_missing_tensor_is_an_error_that_names_it() -> None:
    parts = take_apart({"a": {"b": torch.ones(1)}})
    with pytest.raises((CheckpointError, ValueError), match=r"'a\.b' that is not there"):
        put_together(Snapshot({}, parts.tree))


# --- snapshots -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["adamw", "sgd", "muon"])
def trainer(request: pytest.FixtureRequest, make_model: Make, make_config: Make, make_batch: Make) -> HybridTrainer:
    settings = {"optimizer.type": request.param, "evaluation.ema_decay": 0.9, "precision.type": "fp16"}
    trainer = HybridTrainer(make_model(dropout=0.1), config=make_config(settings))
    for number in range(3):
        trainer.step(make_batch(seed=number))
    return trainer


def frozen(state: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in take_apart(state).tensors.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; what is not a number equals itself."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_snapshot_is_not_touched_by_later_steps(trainer: HybridTrainer, make_batch: Make) -> None:
    kept = snapshot(trainer.state_dict())
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    for number in range(3, 6):
        trainer.step(make_batch(seed=number))
    assert all(same(kept.tensors[name], before[name]) for name in before)
    changed = take_apart(trainer.state_dict()).tensors
    assert not torch.equal(changed["model.token_embedding.weight"], before["model.token_embedding.weight"])


def test_going_back_to_a_snapshot_is_exact_and_in_place(trainer: HybridTrainer, make_batch: Make) -> None:
    kept = snapshot(trainer.state_dict())
    places = {
        name: tensor.data_ptr()
        for name, tensor in take_apart(trainer.state_dict()).tensors.items()
        if name.startswith(("model", "optimizer", "average", "precision", "hybrid.policy.observer.trajectory"))
    }
    losses = [trainer.step(make_batch(seed=number)).loss for number in range(3, 6)]
    end = frozen(trainer.state_dict())
    for _ in range(2):  # a snapshot can be used again
        trainer.load_state_dict(put_together(kept))
        assert trainer.global_step == 3
        for name, place in places.items():
            assert take_apart(trainer.state_dict()).tensors[name].data_ptr() == place, name
        assert [trainer.step(make_batch(seed=number)).loss for number in range(3, 6)] == losses
        again = frozen(trainer.state_dict())
        assert again.keys() == end.keys()
        assert all(same(again[name], end[name]) for name in end)


def test_a_state_put_into_another_trainer_is_its_own(
    trainer: HybridTrainer, make_model: Make, make_batch: Make
) -> None:
    """Two trainers never share a tensor: a step of the one leaves the other alone."""
    other = HybridTrainer(make_model(dropout=0.1), config=trainer.config)
    other.load_state_dict(trainer.state_dict())
    before = frozen(trainer.state_dict())
    for number in range(3, 5):
        other.step(make_batch(seed=number))
    after = {name: tensor for name, tensor in frozen(trainer.state_dict()).items() if not name.startswith("random")}
    assert all(same(after[name], before[name]) for name in after)


def test_going_back_to_before_the_first_step(make_model: Make, make_config: Make, make_batch: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config({"schedule.type": "constant"}))
    kept = snapshot(trainer.state_dict())
    losses = [trainer.step(make_batch(seed=number)).loss for number in range(3)]
    trainer.load_state_dict(put_together(kept))
    assert [trainer.step(make_batch(seed=number)).loss for number in range(3)] == losses


# --- model ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(0))


def test_tied_weights_and_buffers_come_back_and_stay_tied() -> None:
    saved, model = Tied(), Tied()
    saved.count += 7
    place = model.embedding.weight.data_ptr()
    restore_model(model, through_json(saved.state_dict()), "here")
    assert torch.equal(model.head.weight, saved.embedding.weight)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.data_ptr() == place
    assert int(model.count) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("bias"), "bias is not in the checkpoint"),
        (lambda state: state.update(extra=torch.ones(1)), "extra is not in this model"),
        (
            lambda state: state.update(bias=torch.ones(3)),
            r"bias is \[3\] torch.float32 there, \[2\] torch.float32 here",
        ),
        (lambda state: state.update(bias=torch.ones(2, dtype=torch.float64)), "torch.float64 there"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_changes(change: Any, words: str) -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    saved = dict(nn.Linear(3, 2).state_dict())
    change(saved)
    with pytest.raises(CheckpointError, match=f"some/folder: it belongs to another model .*{words}"):
        restore_model(model, saved, "some/folder")
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


# --- optimizer -----------------------------------------------------------------------------------------------------


def test_an_optimizer_of_other_groups_is_refused() -> None:
    one, two = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    saved = torch.optim.AdamW(one.parameters()).state_dict()
    with pytest.raises(CheckpointError, match="use the same"):
        restore_optimizer(torch.optim.AdamW(two.parameters()), saved, "here")


def test_another_kind_of_optimizer_is_refused(make_model: Make, make_config: Make, make_batch: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config())
    trainer.step(make_batch())
    other = HybridTrainer(make_model(), config=make_config({"optimizer.type": "sgd"}))
    with pytest.raises(CheckpointError, match=r"\[optimizer\]"):
        other.load_state_dict(trainer.state_dict())


def test_a_tensor_rate_stays_the_same_tensor() -> None:
    params = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(0.1), capturable=True)
    params[0].grad = torch.ones(2)
    saved = snapshot(optimizer.state_dict())
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.5)
    restore_optimizer(optimizer, put_together(saved), "here")
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


# --- random states -------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float, float, float]:
    return (
        float(torch.rand(())),
        float(np.random.rand()),  # noqa: NPY002 - the global generator is what is tested
        float(np.random.normal()),  # noqa: NPY002
        random.random(),  # noqa: S311
        random.gauss(0, 1),
    )


def test_every_generator_comes_back() -> None:
    draw()  # so that half a pair of gaussian numbers is kept somewhere
    state = through_json(random_state())
    first = [draw() for _ in range(3)]
    assert len(set(first)) == 3
    restore_random_state(state)
    assert [draw() for _ in range(3)] == first


# --- frozen weights --------------------------------------------------------------------------------------------------


def test_frozen_weights_are_not_saved_but_known() -> None:
    trainer = HybridTrainer(Net(frozen=True))
    state = trainer.state_dict()
    assert not [name for name in state["model"] if name.startswith("middle")]
    assert {"first.weight", "last.bias"} <= set(state["model"])
    other = HybridTrainer(Net(frozen=True, seed=0))
    other.load_state_dict(state)


@pytest.mark.parametrize("change", ["another weight", "nothing frozen", "another order"])
def test_a_state_is_refused_beside_other_frozen_weights(change: str) -> None:
    state = HybridTrainer(Net(frozen=True)).state_dict()
    model = Net(frozen=change != "nothing frozen")
    with torch.no_grad():
        if change == "another weight":
            model.middle.bias[3] += 1e-6
        elif change == "another order":
            model.middle.weight.copy_(model.middle.weight.flip(0))
    with pytest.raises(CheckpointError, match="frozen"):
        HybridTrainer(model).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_sees_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    same = checksum({"a": tensor})
    assert same == checksum({"a": tensor.clone()})
    assert same != checksum({"b": tensor})
    assert same != checksum({"a": tensor.reshape(6, 4)})
    tensor[2, 1] += 1
    assert same != checksum({"a": tensor})
