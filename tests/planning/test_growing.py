"""`growth.layers = "auto"` of a GPT-2 that is not built yet."""

from __future__ import annotations

import pytest

from foretrain.config import from_mapping
from foretrain.engine.growing import trained_sizes
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.planning.growing import sizes_of_shape, with_planned_growth


@pytest.mark.parametrize(
    ("shape", "share"), [(GPT2Shape(12, 12, 768), 0.69), (GPT2Shape(6, 6, 384, context=256), 0.35)]
)
def test_the_share_of_the_blocks(shape: GPT2Shape, share: float) -> None:
    assert sizes_of_shape(shape).block_share == pytest.approx(share, abs=0.01)


def test_a_shape_has_the_sizes_of_its_model() -> None:
    shape = GPT2Shape(3, 2, 16, 16, 300)
    assert sizes_of_shape(shape) == trained_sizes(GPT2(shape), "blocks")


def test_while_only_epochs_are_known_nothing_is_decided() -> None:
    config = from_mapping({"growth.layers": "auto", "epochs": 2})
    same, text = with_planned_growth(config, GPT2Shape(12, 12, 768))
    assert same == config
    assert text.startswith("decided when the run begins")
    plain = from_mapping({"epochs": 2})
    assert with_planned_growth(plain, GPT2Shape(12, 12, 768)) == (plain, "")
