"""`growth.layers = "auto"`: when a run grows, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretrain import Config, HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.growing import (
    LIMIT,
    RULES,
    SHARE,
    Sizes,
    explained,
    planned_growth,
    step_cost,
    trained_sizes,
    with_growth,
)
from foretrain.engine.moments import Moments
from foretrain.events import Event, Notice
from foretrain.models import lora
from foretrain.models.gpt2 import GPT2, GPT2Shape

DEEP = Sizes(12, 700_000, 1_000_000)


def config_of(**changes: Any) -> Config:
    given = {"growth.layers": "auto", "max_steps": 1000, "batch_size": 8, "device": "cpu", "hybrid.mode": "off"}
    return from_mapping(given | {name.replace("__", "."): value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("blocks", "share", "tokens", "planned"),
    [
        (12, SHARE, LIMIT, (6, 0.5)),
        (12, 0.9, 0.1, (6, 0.5)),
        (5, 0.9, 0.1, (2, 0.5)),
        (2, 0.9, 0.1, (1, 0.5)),
        (12, SHARE - 0.01, 0.1, None),
        (12, 0.9, LIMIT + 0.1, None),
        (1, 0.9, 0.1, None),
    ],
)
def test_it_grows_only_where_that_was_seen_to_pay(
    blocks: int, share: float, tokens: float, planned: tuple[int, float] | None
) -> None:
    assert planned_growth(blocks, share, tokens) == planned
    assert explained(blocks, share, tokens).startswith("off, because" if planned is None else f"{planned[0]} of ")


def test_the_decision_is_explained() -> None:
    assert explained(12, 0.69, 3.0) == (
        "6 of 12 blocks until 50% of the run, because 69% of a step lies in the blocks and the run has only 3 tokens "
        "per parameter"
    )
    assert "only 35% of a step lies in the blocks, and it was seen to pay from 60% on" in explained(6, 0.35, 3.0)
    assert "has 40 tokens per parameter, and it was seen to pay up to 5 only" in explained(12, 0.69, 40.0)
    assert explained(1, 0.9, 1.0) == "off, because the model has one block"


def test_every_rule_of_the_table_can_be_carried_out() -> None:
    for rule in RULES:
        assert 0 < rule.begin < 1
        assert Moments((rule.at,), 1000).fits()


def test_what_a_step_costs() -> None:
    assert step_cost(12, 12, 0.7) == 1.0
    assert step_cost(6, 12, 0.7) == pytest.approx(0.65)
    assert step_cost(3, 12, 0.4) == pytest.approx(0.7)


def test_auto_is_written_down_as_numbers() -> None:
    config, text = with_growth(config_of(growth__at=0.7), DEEP, 128)
    assert (config.growth.layers, config.growth.at) == (6, 0.5)
    assert text.startswith("6 of 12 blocks until 50% of the run, because 70% of a step")
    assert with_growth(config, DEEP, 128) == (config, ""), "it is decided once"
    config, text = with_growth(config_of(), DEEP, 4096)
    assert (config.growth.layers, config.growth.stages) == (0, [])
    assert text.startswith("off, because the run has 32.8 tokens per parameter")


@pytest.mark.parametrize(
    ("changes", "sizes", "length", "why"),
    [
        ({"model__weights": "some/run"}, DEEP, 128, "the run starts from weights that have learned"),
        ({}, None, 128, "is no list of blocks that are all trained"),
        ({}, DEEP, None, "it is not known how many tokens a step has"),
        ({"max_steps": 9}, DEEP, 128, "a run of 9 steps is too short to judge it"),
    ],
)
def test_auto_is_off_where_growth_cannot_be(
    changes: dict[str, Any], sizes: Sizes | None, length: int | None, why: str
) -> None:
    config, text = with_growth(config_of(**changes), sizes, length)
    assert config.growth.layers == 0
    assert text.startswith("off, because")
    assert why in text


def test_a_number_is_left_alone() -> None:
    for layers in (0, 3, (2, 4)):
        at = (0.2, 0.4) if isinstance(layers, tuple) else 0.5
        config = config_of(growth__layers=layers, growth__at=at)
        assert with_growth(config, DEEP, 128) == (config, "")


def test_the_sizes_of_a_model_whose_blocks_are_frozen_are_not_given() -> None:
    model = GPT2(GPT2Shape(2, 2, 16, 16, 32))
    sizes = trained_sizes(model, "blocks")
    assert sizes is not None
    assert (sizes.blocks, sizes.parameters) == (2, sum(p.numel() for p in model.parameters()))
    assert trained_sizes(model, "layers") is None
    assert trained_sizes(model, "final_norm") is None
    lora.attach(model, lora.LoraSettings(rank=2), seed=0)
    assert trained_sizes(model, "blocks") is None


@pytest.mark.parametrize(
    ("frozen", "why"), [(False, "it is not known how many tokens a step has"), (True, "no list of blocks that are all")]
)
def test_a_trainer_of_any_module_says_once_that_auto_is_off(frozen: bool, why: str) -> None:
    model = GPT2(GPT2Shape(2, 2, 16, 16, 32))
    model.blocks[0].requires_grad_(not frozen)
    trainer = HybridTrainer(model, config=config_of())
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    for _ in range(2):
        trainer.step((tokens, tokens))
    assert trainer.growth is None
    assert trainer.config.growth.layers == 0
    (told,) = [event.message for event in events if isinstance(event, Notice)]
    assert told.startswith("growth: off, because")
    assert why in told
