"""What a configuration names reaches a language model that was made before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretrain import HybridTrainer
from foretrain.config import from_mapping


def test_what_the_configuration_does_not_name_stays_as_the_model_was_made(make_model: Callable[..., Any]) -> None:
    made = {"activation_checkpointing": 0.5, "fused_loss": True, "loss_rows": 7, "narrow_residual": False}
    kept = HybridTrainer(make_model(options=made), config=from_mapping({"device": "cpu"})).model
    assert {name: getattr(kept, name) for name in made} == made
    named = {"engine.activation_checkpointing": False, "engine.fused_loss": False, "engine.loss_rows": "auto"}
    named |= {"precision.narrow_residual": True, "device": "cpu"}
    changed = HybridTrainer(make_model(options=made), config=from_mapping(named)).model
    assert [getattr(changed, name) for name in made] == [False, False, None, True]
    named["engine.loss_rows"] = 5
    assert HybridTrainer(make_model(options=made), config=from_mapping(named)).model.loss_rows == 5
