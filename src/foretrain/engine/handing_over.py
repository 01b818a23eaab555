"""Settings that a language model of ours carries out itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from foretrain.config import Config, given
from foretrain.config.paths import value_of
from foretrain.engine.described import unwrapped

_SWITCHES = (
    "engine.activation_checkpointing",
    "engine.fused_loss",
    "engine.loss_rows",
    "precision.narrow_residual",
)
"""Each is an attribute of the model with the same name."""


def hand_over(model: nn.Module, config: Config) -> None:
    """Tell a language model of ours what the configuration names. What it does not name stays as the model was made."""
    model = unwrapped(model)
    if not hasattr(model, "activation_checkpointing"):
        return
    for setting in _SWITCHES:
        name = setting.rpartition(".")[2]
        if setting in given(config) and hasattr(model, name):
            value: Any = value_of(config, setting)
            setattr(model, name, None if name == "loss_rows" and value == "auto" else value)
