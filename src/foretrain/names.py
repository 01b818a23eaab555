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

NICKNAMES: dict[str, str] = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "steps": "max_steps",
    "batch": "batch_size",
    "dropout": "model.dropout",
}
"""What people may write for a setting: not accepted, but understood, to say the right name."""

VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "schedule.type": {"warmupstabledecay": "wsd", "warmup_stable_decay": "wsd", "warmuponly": "warmup"},
    "precision.type": {True: "fp16", False: "fp32"},
    "optimizer.type": {},
    "model.type": {},
    "model.normalization": {},
    "model.initialization": {},
    "schedule.mode": {},
    "hybrid.mode": {},
    "predictor.type": {},
    "schedule.decay": {},
}
"""Other spellings of values. Names listed here are also accepted in upper case."""

RESERVED: dict[str, str] = {
    "data.domain": "it only describes the data",
    "data.diversity_score": "it only describes the data",
}
"""Known names without a setting behind them (yet): they load, and a notice says that they change nothing and why."""

_LINEAR = {"predictor.type": "linear"}
_RSSM_KEYS = ("type", "deterministic_dim", "stochastic_dim", "num_categoricals", "ensemble_size")
_RSSM, _RSSM_LARGE = (
    {f"predictor.{key}": value for key, value in zip(_RSSM_KEYS, ("rssm", *sizes), strict=True)}
    for sizes in ((256, 32, 32, 3), (512, 64, 32, 5))
)


def _preset(predictor: dict[str, Any], *values: float) -> dict[str, Any]:
    keys = (
        "hybrid.warmup_steps",
        "hybrid.full_steps",
        "hybrid.max_predict_steps",
        "hybrid.confidence_threshold",
        "hybrid.divergence_threshold",
        "optimizer.learning_rate",
    )
    adamw = {"optimizer.type": "adamw"} if len(values) == len(keys) else {}  # their learning rates are AdamW's
    return dict(zip(keys, values, strict=False)) | predictor | adamw


PRESETS: dict[str, dict[str, Any]] = {
    "measured": {},
    "small": _preset(_LINEAR, 100, 20, 60, 0.85, 3.0, 1e-4),
    "medium": _preset(_RSSM, 200, 30, 80, 0.87, 2.5, 5e-5),
    "large": _preset(_RSSM_LARGE, 500, 50, 100, 0.90, 2.0, 1e-5),
    "specialist": _preset(_LINEAR, 100, 15, 120, 0.82, 3.0, 1e-4),
    "generalist": _preset(_RSSM, 500, 50, 80, 0.90, 2.5, 1e-4),
    "conservative": _preset({}, 200, 30, 25, 0.90),
    "balanced": _preset({}, 100, 20, 40, 0.85),
    "aggressive": _preset({}, 50, 15, 80, 0.75),
    "finetune": {
        "max_steps": 300,
        "optimizer.type": "adamw",
        "optimizer.learning_rate": 2e-3,
        "optimizer.weight_decay": 0.0,
        "hybrid.warmup_steps": 6,
        "hybrid.full_steps": 6,
        "hybrid.window_steps": 3,
        "hybrid.correct_steps": 2,
    },
}
"""What each preset sets. `measured`, the default, is the schema's own defaults."""
