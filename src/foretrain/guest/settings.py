"""Which settings of the configuration a guest goes by. All others are the host's."""

from __future__ import annotations

from foretrain.config import Config, given
from foretrain.config.paths import value_of, with_settings
from foretrain.errors import ConfigError

_SECTIONS = ("hybrid.", "guard.", "health.", "log.", "predictor.", "precision.")
_SINGLE = frozenset(
    {
        *("max_steps", "preset", "seed", "evaluation.interval", "forecast.enabled", "forecast.level"),
        *("checkpoint.directions", "memory.basis"),
    }
)
_NOT_OF_SECTIONS = frozenset(
    {
        *("hybrid.correct_steps", "hybrid.correction_interval", "hybrid.monitor_interval", "hybrid.secant_pairs"),
        *("hybrid.secant_memory_mb", "hybrid.linear_rows", "hybrid.linear_memory_mb", "hybrid.probe_examples"),
        *("predictor.beta", "predictor.stride", "predictor.gamma"),
        *("guard.nan_check", "guard.max_skipped_steps", "guard.max_rollbacks", "guard.auto_tune"),
        *("guard.prediction_error", "precision.tf32", "precision.loss_scale", "precision.growth_interval"),
        "precision.narrow_residual",
    }
)
"""They are about steps that foretrain makes, or takes back."""


def settings_for_guest(config: Config, device: str, leaps: bool) -> Config:
    """Return the configuration of a guest; ConfigError names what would have no effect. leaps: there is a probe."""
    usual = Config()
    unused = [
        name for name in sorted(given(config)) if not _counts(name) and value_of(config, name) != value_of(usual, name)
    ]
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} of the Config: no effect in a loop that is not foretrain's; leave it out, "
            "or train with HybridTrainer"
        )
    if config.hybrid.mode == "rollout":
        raise ConfigError(
            "hybrid.mode = 'rollout' of the Config needs steps of foretrain's own; in another loop it is "
            "'leap' or 'off'"
        )
    own = {
        "device": device,
        "distributed.basis": "replicated",  # each rank saves what it holds beside the host's checkpoint
        "engine.compile": False,
        "engine.cuda_graph": False,
        "hybrid.correct_steps": 0,
        "hybrid.mode": config.hybrid.mode if leaps else "off",
    }
    if config.precision.type == "auto":
        own["precision.type"] = "fp32"  # the host's loss function has its own formats
    return with_settings(config, own)


def _counts(name: str) -> bool:
    return name in _SINGLE or (name.startswith(_SECTIONS) and name not in _NOT_OF_SECTIONS)
