"""A state with another kind of value somewhere is refused before any of it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import CheckpointError
from foretrain.persist.form import check_form

OWN: dict[str, Any] = {
    "count": 0,
    "share": 0.5,
    "on": False,
    "name": "x",
    "best": None,
    "mean": torch.zeros(3),
    "rate": torch.tensor(1.0),
    "rows": [],
    "pair": [0, "a"],
    "within": {"count": 0},
    "optimizer": {"count": 0},
}


@pytest.mark.parametrize(
    "change",
    [
        *({}, {"count": 5.5}, {"count": True}, {"on": 1}, {"best": 2.5}, {"mean": None}, {"mean": torch.zeros(9)}),
        *(
            {"rate": 0.5},
            {"share": torch.tensor(0.5)},
            {"rows": [1, 2.5, None]},
            {"rows": [[1], [2, 3]]},
            {"pair": [7]},
        ),
        *({"pair": [7]}, {"new": "x"}, {"within": {}}, {"optimizer": {"count": "x"}}, {"pair": (1, "b", 3)}),
    ],
    ids=str,
)
def test_what_fits(change: dict[str, Any]) -> None:
    check_form(OWN, OWN | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "5"}, "count is a text, not a number"),
        ({"count": 10**30}, "count is a number of"),
        ({"best": 10**400}, "best is a number of"),
        ({"name": 5}, "name is a number, not a text"),
        ({"mean": [1.0]}, "mean is a list, not a tensor"),
        ({"mean": torch.zeros(3, 3)}, "mean has 2 dimensions, not 1"),
        ({"rows": {}}, "rows is a mapping, not a list"),
        ({"rows": [1, "a"]}, "rows holds values of several kinds"),
        ({"pair": [0, 1]}, r"pair\.1 is a number, not a text"),
        ({"within": {"count": []}}, r"within\.count is a list, not a number"),
    ],
    ids=str,
)
def test_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        check_form(OWN, OWN | change)


@pytest.fixture(scope="module")
def trained() -> HybridTrainer:
    settings = {"device": "cpu", "max_steps": 40, "hybrid.warmup_steps": 2, "hybrid.window_steps": 2}
    trainer = HybridTrainer(
        torch.nn.Linear(3, 1), loss_fn=lambda model, batch: model(batch).square().mean(), config=from_mapping(settings)
    )
    for number in range(10):
        trainer.step(torch.full((4, 3), float(number)))
    return trainer


def changed(state: Any, path: str, value: Any) -> Any:
    key, _, rest = path.partition(".")
    return {**state, key: changed(state[key], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("progress.global_step", [1]),
        ("hybrid.policy.bandit.targets", ["x"]),
        ("hybrid.policy.observer.encoder.mean", [0.0] * 63),
        ("hybrid.policy.guard.losses.count", "many"),
        ("hybrid.policy.snapshots", []),
        ("rescue.settings", 5),
    ],
)
def test_a_trainer_refuses_it_in_words(path: str, value: Any, trained: HybridTrainer) -> None:
    state = trained.state_dict()
    trained.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"^here: it does not hold the state of such a trainer \(ValueError: "):
        trained.load_state_dict(changed(state, path, value), "here")


@pytest.mark.parametrize("value", [None, torch.zeros(7), 5])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_an_optimizer_with_half_a_state(name: str, value: Any, trained: HybridTrainer) -> None:
    state = trained.state_dict()
    kept = {number: dict(values) for number, values in state["optimizer"]["state"].items()}
    next(values for values in kept.values() if name in values)[name] = value
    with pytest.raises(CheckpointError, match="the state of its optimizer is not complete"):
        trained.load_state_dict(changed(state, "optimizer.state", kept), "here")
