"""Other names for settings, presets, and names kept for parts that are still to come. Data only, no logic.

A canonical name is the dotted path in the schema, such as `optimizer.learning_rate`.
"""

from __future__ import annotations

from typing import Any

SECTION_ALIASES: dict[str, str] = {
    "hybrid_trainer_config": "hybrid",
    "predictor_config": "predictor",
    "divergence_config": "guard",
    "learning_rate_schedule": "schedule",
    "dataset": "data",
}
"""A whole section under another name; its keys keep their names unless listed below."""

KEY_ALIASES: dict[str, tuple[str, ...]] = {
    "learning_rate.initial": ("optimizer.learning_rate",),
    "learning_rate.schedule": ("schedule.type",),
    "learning_rate.warmup_steps": ("schedule.warmup_steps",),
    "learning_rate.stable_steps": ("schedule.stable_steps",),
    "learning_rate.decay_steps": ("schedule.decay_steps",),
    "schedule.warmup_init": ("schedule.warmup_rate",),
    "schedule.warmup_target": ("optimizer.learning_rate",),
    "schedule.stable_rate": ("optimizer.learning_rate",),
    "schedule.decay_min": ("schedule.final_rate",),
    "schedule.base_lr": ("schedule.base_rate",),
    "schedule.max_lr": ("optimizer.learning_rate",),
    "guard.nan_check_enabled": ("guard.nan_check",),
    "data.num_examples": ("data.max_documents",),
    "model.hidden_dim": ("model.width",),
    "model.num_layers": ("model.layers",),
    "model.num_heads": ("model.heads",),
}
"""One key under another name."""

BARE_ALIASES: dict[str, str] = {
    # Keys that the methodology prints outside their section, or below the header of another one.
    "max_steps": "max_steps",
    "batch_size": "batch_size",
    "seed": "seed",
    "warmup_steps": "hybrid.warmup_steps",
    "full_steps": "hybrid.full_steps",
    "max_predict_steps": "hybrid.max_predict_steps",
    "confidence_threshold": "hybrid.confidence_threshold",
    "divergence_threshold": "hybrid.divergence_threshold",
    "correction_interval": "hybrid.correction_interval",
    "initial_lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "gradient_clip_norm": "optimizer.gradient_clip_norm",
    "dropout_rate": "model.dropout",
    "hidden_dim": "model.width",
    "num_layers": "model.layers",
    "normalization": "model.normalization",
    "weight_init": "model.initialization",
    "use_residual": "model.residual",
    "early_stopping_patience": "evaluation.early_stopping_patience",
    "use_mixed_precision": "precision.type",
    "loss_scale": "precision.loss_scale",
}
"""Bare keys, resolved wherever they stand, unless their section has a key of that name."""

VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "schedule.type": {"warmupstabledecay": "wsd", "warmup_stable_decay": "wsd", "warmuponly": "warmup"},
    "precision.type": {True: "fp16", False: "fp32"},
    "optimizer.type": {},
    "model.type": {},
    "model.normalization": {},
    "model.initialization": {},
    "schedule.mode": {},
    "schedule.decay": {},
}
"""Other spellings of values. Names listed here are also accepted in upper case."""

_HYBRID = (
    "mode warmup_steps full_steps max_predict_steps confidence_threshold divergence_threshold "
    "correction_interval monitor_interval"
)
_PREDICTOR = (
    "type beta gamma l2 forgetting hidden_dims deterministic_dim stochastic_dim num_categoricals "
    "ensemble_size bptt_steps"
)

RESERVED: dict[str, str] = {
    **{f"hybrid.{key}": "the predicted phases are not in this version yet" for key in _HYBRID.split()},
    **{f"predictor.{key}": "the predictors are not in this version yet" for key in _PREDICTOR.split()},
    "data.domain": "it only describes the data",
    "data.diversity_score": "it only describes the data",
}
"""Known names without a setting behind them (yet): they load, and a notice says that they change nothing and why."""

_PRESET_KEYS = (
    "hybrid.warmup_steps",
    "hybrid.full_steps",
    "hybrid.max_predict_steps",
    "hybrid.confidence_threshold",
    "hybrid.divergence_threshold",
    "optimizer.learning_rate",
)

PRESETS: dict[str, dict[str, Any]] = {
    "measured": {},
    "small": dict(zip(_PRESET_KEYS, (100, 20, 60, 0.85, 3.0, 1e-4), strict=True)),
    "medium": dict(zip(_PRESET_KEYS, (200, 30, 80, 0.87, 2.5, 5e-5), strict=True)),
    "large": dict(zip(_PRESET_KEYS, (500, 50, 100, 0.90, 2.0, 1e-5), strict=True)),
    "specialist": dict(zip(_PRESET_KEYS, (100, 15, 120, 0.82, 3.0, 1e-4), strict=True)),
    "generalist": dict(zip(_PRESET_KEYS, (500, 50, 80, 0.90, 2.5, 1e-4), strict=True)),
    "conservative": dict(zip(_PRESET_KEYS[:4], (200, 30, 25, 0.90), strict=True)),
    "balanced": dict(zip(_PRESET_KEYS[:4], (100, 20, 40, 0.85), strict=True)),
    "aggressive": dict(zip(_PRESET_KEYS[:4], (50, 15, 80, 0.75), strict=True)),
}
"""What each preset sets. `measured`, the default, is the schema's own defaults."""
