"""Which settings have no effect on a module of somebody's own in `HybridTrainer`: the commands read them, who make
model and data, or language models of ours."""

from __future__ import annotations

from foretrain.config.listing import KNOWN
from foretrain.config.paths import value_of
from foretrain.config.schema import Config
from foretrain.config.writing import given

_SECTIONS = ("model.", "data.", "lora.")
OF_COMMANDS = frozenset(
    {
        *(name for name in KNOWN if name.startswith(_SECTIONS)),
        *("evaluation.batches", "evaluation.answers", "evaluation.final_answer", "hybrid.probe_examples"),
        *("memory.budget", "distributed.type", "distributed.shard", "distributed.replicate"),
        "distributed.timeout_seconds",
    }
)
"""`foretrain train` and `foretrain finetune` alone read them."""
OF_LANGUAGE_MODELS = frozenset({"engine.fused_loss", "engine.loss_rows", "precision.narrow_residual"})
"""Language models of ours alone go by them."""


def without_effect(config: Config) -> list[str]:
    """Return what was set and has no effect on a module of somebody's own."""
    usual = Config()
    names = sorted(given(config) & (OF_COMMANDS | OF_LANGUAGE_MODELS))
    return [name for name in names if value_of(config, name) != value_of(usual, name)]
