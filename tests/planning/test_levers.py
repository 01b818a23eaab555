"""Which combinations of settings a plan may choose from."""

from __future__ import annotations

import pytest

from foretrain.config import from_mapping
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning.estimate import PlanTarget
from foretrain.planning.levers import LEVERS, choices

CONFIG = from_mapping({"batch_size": 4, "max_steps": 10_000, "optimizer.type": "adamw"})
TARGET = PlanTarget(GPT2Shape(2, 2, 64, 2048, 256), True, "bf16", 2048)


TOGETHER = {
    "engine.loss_rows": {"engine.fused_loss"},
    "engine.update_in_backward": {"optimizer.gradient_clip_norm"},
    "memory.return_ahead": {"memory.offload"},
}
"""What has to be free as well."""
ALONE = [name for name in LEVERS if name not in ("hybrid.mode", "optimizer.gradient_clip_norm")]
"""These two are chosen elsewhere, or with another one."""


@pytest.mark.parametrize("name", ALONE)
def test_what_was_named_stays_as_it_is(name: str) -> None:
    named = frozenset(LEVERS) - {name} - TOGETHER.get(name, set())
    chosen = {setting for choice in choices(CONFIG, named, TARGET) for setting in choice.settings}
    assert name in chosen
    assert not chosen & named


def test_all_of_them_named_leaves_the_configuration_alone() -> None:
    (choice,) = choices(CONFIG, frozenset(LEVERS), TARGET)
    assert (choice.settings, choice.cost) == ({}, 0)


def test_the_fastest_comes_first() -> None:
    costs = [choice.cost for choice in choices(CONFIG, frozenset(), TARGET)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert len(costs) > 100
