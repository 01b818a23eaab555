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
    "memory.lookahead": ("memory.return_ahead",),
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
    # short forms
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "steps": "max_steps",
    "batch": "batch_size",
    "dropout": "model.dropout",
    "eps": "optimizer.epsilon",
    "clip": "optimizer.gradient_clip_norm",
    "optimizer": "optimizer.type",
    "scheduler": "schedule.type",
    "model": "model.type",
    "model.name": "model.type",
    "model.size": "model.type",
    "model.preset": "model.type",
    "dataset": "data.path",
    "data": "data.path",
    "precision": "precision.type",
    # nanoGPT
    "block_size": "model.context",
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "n_embd": "model.width",
    "max_iters": "max_steps",
    "time_limit": "max_time",
    "target_loss": "until_loss",
    "warmup_iters": "schedule.warmup_steps",
    "lr_decay_iters": "schedule.decay_steps",
    "min_lr": "schedule.final_rate",
    "grad_clip": "optimizer.gradient_clip_norm",
    "gradient_accumulation_steps": "accumulation_steps",
    "eval_interval": "evaluation.interval",
    "eval_iters": "evaluation.batches",
    "log_interval": "log.interval",
    "dtype": "precision.type",
    "init_from": "model.weights",
    # transformers and peft
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "warmup_ratio": "schedule.warmup_share",
    "lr_scheduler_type": "schedule.type",
    "optim": "optimizer.type",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "max_grad_norm": "optimizer.gradient_clip_norm",
    "bf16": "precision.type",
    "fp16": "precision.type",
    "mixed_precision": "precision.type",
    "torch_compile": "engine.compile",
    "gradient_checkpointing": "engine.activation_checkpointing",
    "eval_steps": "evaluation.interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.interval",
    "report_to": "log.trackers",
    "model_name_or_path": "model.weights",
    "max_seq_length": "model.context",
    "max_position_embeddings": "model.context",
    "n_positions": "model.context",
    "n_ctx": "model.context",
    "context_length": "model.context",
    "seq_len": "model.context",
    "hidden_size": "model.width",
    "d_model": "model.width",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_heads": "model.heads",
    "lora_r": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    # Lightning and Keras
    "max_epochs": "epochs",
    "accumulate_grad_batches": "accumulation_steps",
    "gradient_clip_val": "optimizer.gradient_clip_norm",
    "val_check_interval": "evaluation.interval",
    "validation_split": "data.held_out",
}
"""What people may write for a setting, in short or as other tools call it: not accepted, but understood, to say the
right name. With or without a section before it; one with a section is meant there only."""

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


def _preset(*values: float) -> dict[str, Any]:
    keys = (
        "hybrid.warmup_steps",
        "hybrid.full_steps",
        "hybrid.max_predict_steps",
        "hybrid.confidence_threshold",
        "hybrid.divergence_threshold",
        "optimizer.learning_rate",
    )
    # Their learning rates are AdamW's. A larger predictor forecasts no better than the linear one, and is dearer.
    fixed = {"predictor.type": "linear", "optimizer.type": "adamw"} if len(values) == len(keys) else {}
    return dict(zip(keys, values, strict=False)) | fixed


PRESETS: dict[str, dict[str, Any]] = {
    "measured": {},
    "small": _preset(100, 20, 60, 0.85, 3.0, 1e-4),
    "medium": _preset(200, 30, 80, 0.87, 2.5, 5e-5),
    "large": _preset(500, 50, 100, 0.90, 2.0, 1e-5),
    "specialist": _preset(100, 15, 120, 0.82, 3.0, 1e-4),
    "generalist": _preset(500, 50, 80, 0.90, 2.5, 1e-4),
    "conservative": _preset(200, 30, 25, 0.90),
    "balanced": _preset(100, 20, 40, 0.85),
    "aggressive": _preset(50, 15, 80, 0.75),
    "finetune": {
        "max_steps": 300,
        "optimizer.type": "adamw",
        "optimizer.learning_rate": 2e-3,
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.95,
        "hybrid.warmup_steps": 6,
        "hybrid.full_steps": 6,
        "hybrid.window_steps": 3,
        "hybrid.correct_steps": 2,
    },
}
"""What each preset sets. `measured`, the default, is the schema's own defaults."""

WITHOUT_SIZE = frozenset(name for name, values in PRESETS.items() if "predictor.type" in values)
"""Presets that are named after models or tasks, and set phases and rates only."""
