"""Which setting keeps leaps off where the loss is exact: said once, with what to set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain import Bus, HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Notice
from foretrain.hybrid.moves.obstacles import KeptOff, Obstacle, told

ROWS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
START = "the loss is exact here, since every step sees all the data: quasi-Newton leaps could be tried, but "


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def noise(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch + 0.01 * torch.randn_like(batch))


def distances(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)[:, 0]
    return found - batch.sum(1)


def hints(
    settings: dict[str, Any] | None = None,
    optimizer: Any = None,
    shares: float = 1.0,
    loss: Any = squares,
    residuals: Any = None,
) -> list[str]:
    """residuals: instead of the loss."""
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    config = {"device": "cpu", "max_steps": 200, "schedule.type": "constant"}
    made = optimizer(model.parameters()) if optimizer is not None else None
    if made is None:
        config |= {"optimizer.type": "adam", "optimizer.weight_decay": 0.0, "optimizer.learning_rate": 1e-3}
    trainer = HybridTrainer(
        model,
        made,
        None if residuals else loss,
        from_mapping(config | (settings or {})),
        residuals=residuals,
        bus=bus,
    )
    for position in range(60):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(position))[: int(64 * abs(shares))]
        trainer.step(ROWS if shares == 1 else ROWS[order])
    return [event.message for event in events if isinstance(event, Notice) and event.level == "info"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer.weight_decay": 0.1}, "optimizer.weight_decay = 0.1 keeps them off; optimizer.weight_decay = 0"),
        ({"hybrid.secant_pairs": 4}, "hybrid.secant_pairs = 4 keeps them off; hybrid.secant_pairs = 100"),
        (
            {"hybrid.secant_memory_mb": 0.0001},
            "hybrid.secant_memory_mb = 0.0001 keeps them off; hybrid.secant_memory_mb = 1 or more",
        ),
        ({"hybrid.mode": "rollout"}, 'hybrid.mode = "rollout" keeps them off; hybrid.mode = "leap"'),
        ({"hybrid.search": False}, 'hybrid.search = false keeps them off; hybrid.search = "auto"'),
        ({"precision.type": "fp16"}, 'precision.type = "fp16" keeps them off; precision.type = "fp32"'),
        (
            {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0},
            "engine.update_in_backward = true keeps them off; engine.update_in_backward = false",
        ),
    ],
)
def test_a_setting_that_keeps_leaps_off_is_named_once(settings: dict[str, Any], said: str) -> None:
    assert hints(settings) == [f"{START}{said} allows them"]


def test_several_of_them_are_named_together() -> None:
    (text,) = hints({"optimizer.weight_decay": 0.1, "hybrid.search": False})
    assert "hybrid.search = false and optimizer.weight_decay = 0.1 keep them off" in text
    assert text.endswith('hybrid.search = "auto" and optimizer.weight_decay = 0 allow them')


def test_an_optimizer_of_ones_own_is_named_as_it_was_made() -> None:
    (text,) = hints(optimizer=torch.optim.AdamW)
    assert "weight_decay=0.01 of torch.optim.AdamW keeps them off; torch.optim.AdamW(..., weight_decay=0)" in text


def test_shuffled_rows_are_the_same_data() -> None:
    assert len(hints({"optimizer.weight_decay": 0.1}, shares=-1.0)) == 1


def test_other_rows_are_not() -> None:
    assert hints({"optimizer.weight_decay": 0.1}, shares=0.9) == []


def test_a_loss_with_random_numbers_is_not_exact() -> None:
    (text,) = hints(loss=noise)
    assert text.startswith("every step sees the same data, but not the same loss")


def test_what_keeps_both_kinds_of_leaps_off_is_said_once() -> None:
    (text,) = hints(optimizer=torch.optim.AdamW, residuals=distances)
    assert text.startswith(START.replace("quasi-Newton", "quasi-Newton and linearised"))
    assert "weight_decay=0.01 of torch.optim.AdamW keeps them off" in text


def test_what_keeps_one_kind_off_is_said_once_while_the_other_is_tried() -> None:
    (text,) = hints({"hybrid.linear_memory_mb": 0.0001}, residuals=distances)
    assert "hybrid.linear_memory_mb = 0.0001 keeps them off; hybrid.linear_memory_mb = 1 or more allows them" in text
    assert "quasi-Newton" not in text


def test_each_kind_names_what_keeps_it_alone_off() -> None:
    decay, memory = Obstacle("decay", "none"), Obstacle("memory", "more")
    first, second = told([KeptOff("one", (decay, memory)), "", KeptOff("other", (decay,), exact=False), None])
    assert "one leaps could be tried, but decay and memory keep them off" in first
    assert second.startswith("batches hardly differ here: other leaps could be tried, but decay keeps them off")


def test_where_leaps_are_tried_nothing_is_said() -> None:
    assert hints() == []
