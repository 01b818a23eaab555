"""The configurations that `thousand_faults.py` disturbs, and what their runs read."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults_own as own

FILE = "run.toml"

TINY: dict[str, Any] = {
    "max_steps": 36,
    "batch_size": 4,
    "device": "cpu",
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 16,
    "model.context": 16,
    "data.path": "words.txt",
    "data.cache": "cache",
    "evaluation.batches": 2,
    "evaluation.interval": 9,
    "checkpoint.interval": 6,
    "log.interval": 3,
    "health.interval": 12,
}
EAGER: dict[str, Any] = {
    "hybrid.warmup_steps": 8,
    "hybrid.full_steps": 3,
    "hybrid.window_steps": 3,
    "hybrid.correct_steps": 2,
    "hybrid.max_predict_steps": 4,
    "hybrid.confidence_threshold": 0.0,
    "audit.time_budget": 1.0,
    "audit.steps": 3,
    "optimizer.type": "adamw",
    "schedule.type": "constant",
    "max_steps": 48,
}
"""Moves are tried whatever they cost."""
TUNED: dict[str, Any] = {
    "preset": "finetune",
    "max_steps": 24,
    "batch_size": 8,
    "device": "cpu",
    "model.weights": "base",
    "data.path": "examples.jsonl",
    "evaluation.batches": 2,
    "evaluation.interval": 8,
    "evaluation.answers": 4,
    "checkpoint.interval": 5,
    "log.interval": 3,
    "lora.rank": 2,
    "optimizer.learning_rate": 1e-2,
}
BACKWARD = {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0, "optimizer.type": "adamw"}
PINNED = {"memory.offload": True, "memory.snapshots": "pinned", "memory.basis": "pinned"}
MUON = {"optimizer.type": "muon", "optimizer.learning_rate": 1e-3}
PATIENT = {
    "evaluation.interval": 2,
    "evaluation.early_stopping_patience": 2,
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 0.3,
}
UNSTABLE = {
    "guard.auto_tune": True,
    "health.interval": 4,
    "optimizer.type": "sgd",
    "optimizer.learning_rate": 3.0,
    "optimizer.gradient_clip_norm": 0.0,
}
WIDE = {"model.width": 64, "optimizer.state_type": "8bit"}


@dataclass(frozen=True)
class Setup:
    """One configuration. command: of foretrain, or "fit" for a program of one's own, which `parts` makes."""

    name: str
    command: str
    settings: dict[str, Any]
    parts: Callable[..., own.Parts] | None = None
    factor: float | None = None
    """Of the scripted predictor; None: one of foretrain's own."""
    verdicts: frozenset[str] = frozenset()
    """Moves that must have been made for a table with this row to say anything; "any": whatever came of it."""

    @property
    def steps(self) -> int:
        if self.command != "fit":
            return int(self.settings["max_steps"])
        base = own.CHAINED if self.parts in (own.full_batch, own.by_heart) else own.SHORT
        return int((base | self.settings)["max_steps"])


def _train(name: str, *changes: dict[str, Any], verdicts: Sequence[str] = ()) -> Setup:
    settings = TINY.copy()
    for change in changes:
        settings |= change
    return Setup(name, "train", settings, verdicts=frozenset(verdicts))


def _fit(name: str, parts: Callable[..., own.Parts], factor: float | None, verdicts: str, **settings: Any) -> Setup:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return Setup(name, "fit", changes, parts, factor, frozenset(verdicts.split(", ")) - {""})


def _tune(name: str, **settings: Any) -> Setup:
    return Setup(name, "finetune", TUNED | {key.replace("__", "."): value for key, value in settings.items()})


def setups() -> dict[str, Setup]:
    """All of them, as far as this machine has what they need."""
    unguarded = {name.replace(".", "__"): value for name, value in own.UNGUARDED.items()}
    found = [
        _train("adamw, plain", {"optimizer.type": "adamw", "hybrid.mode": "off"}),
        _train("muon, idle", {"model.dropout": 0.1}),
        _train("adam, cosine", {"optimizer.type": "adam", "schedule.type": "cosine", "data.prefetch": 0}),
        _train("sgd, cyclic", {"optimizer.type": "sgd", "schedule.type": "cyclic", "schedule.cycle_length": 8}),
        _train("average", {"evaluation.ema_decay": 0.9, "model.dropout": 0.1, "optimizer.type": "adamw"}),
        _train("accumulation", {"accumulation_steps": 2, "model.dropout": 0.1}),
        _train("look-ahead", {"predictor.beta": 0.5, "hybrid.warmup_steps": 5, "optimizer.type": "adamw"}),
        _train("fp16", {"precision.type": "fp16", "optimizer.type": "adamw", "precision.growth_interval": 7}),
        _train("bf16", {"precision.type": "bf16", "optimizer.type": "adamw"}),
        _train("8-bit moments", WIDE, {"optimizer.type": "adamw"}),
        _train("bf16 moments, muon", WIDE, {"optimizer.state_type": "bf16"}),
        _train("updates in backward", BACKWARD),
        _train("recomputed", {"engine.activation_checkpointing": True, "engine.fused_loss": True, "model.layers": 2}),
        _train("saved every step", {"checkpoint.interval": 1, "checkpoint.keep": 3, "optimizer.type": "adamw"}),
        _train("characters", {"data.tokenizer": "char", "data.prefetch": 2, "schedule.decay": "cosine"}),
        _train("early stopping", PATIENT),
        _train("tuned by itself", UNSTABLE),
        _train("leap", EAGER, {"max_steps": 80}, verdicts=["any"]),
        _train("leap, muon, averaged", EAGER, MUON, {"evaluation.ema_decay": 0.8}, verdicts=["any"]),
        _train("leap, offload", EAGER, PINNED, verdicts=["any"]),
        _train("leap, updates in backward", EAGER, BACKWARD),
        _train("leap, fp16", EAGER, {"precision.type": "fp16"}),
        _train("leap, 8-bit, accumulation", EAGER, WIDE, {"accumulation_steps": 2}),
        _train("leap, mlp", EAGER, {"predictor.type": "mlp", "predictor.hidden_dims": [8]}),
        _train("leap, momentum", EAGER, {"predictor.type": "momentum"}),
        _train(
            "leap, rssm",
            EAGER,
            {"predictor.type": "rssm", "predictor.deterministic_dim": 8, "predictor.stochastic_dim": 2},
        ),
        _train("rollout", EAGER, {"hybrid.mode": "rollout"}, verdicts=["any"]),
        _train("rollout, offload", EAGER, PINNED, {"hybrid.mode": "rollout", "memory.return_ahead": 2}),
        _tune("adapter"),
        _tune("adapter, auto", optimizer__learning_rate="auto", schedule__warmup_steps=6),
        _tune("adapter, auto, averaged", optimizer__learning_rate="auto", evaluation__ema_decay=0.8, lora__dropout=0.1),
        _tune(
            "adapter, leap", hybrid__space="product", **{key.replace(".", "__"): value for key, value in EAGER.items()}
        ),
        _fit("chain", own.full_batch, None, "kept"),
        _fit("chain, taken back", own.by_heart, None, "kept"),
        _fit("exact leap", own.bowl, None, "kept"),
        _fit("exact leap, refused", own.bowl, -1.0, "refused"),
        _fit("exact leap, rolled back", own.bowl, -2.0, "rolled back", **unguarded),
        _fit("exact rollout", own.bowl, None, "kept", hybrid__mode="rollout"),
        _fit("exact rollout, undone", own.bowl, -30.0, "refused", hybrid__mode="rollout"),
        _fit("noisy leap", own.regression, None, "kept"),
        _fit("noisy leap, rolled back", own.regression, -2.0, "rolled back", **unguarded),
        _fit("noisy rollout", own.regression, None, "kept", hybrid__mode="rollout"),
        _fit("own optimizer and scheduler", own.own_parts, None, ""),
        _fit("augmented samples", own.augmented, None, ""),
    ]
    if importlib.util.find_spec("tensorboardX"):
        found.append(_train("tracker", {"log.trackers": ["tensorboard"], "optimizer.type": "adamw"}))
    return {setup.name: setup for setup in found}


def write_inputs(setup: Setup, folder: Path, base: Path) -> None:
    """Everything that the run reads."""
    draw = random.Random(0)  # noqa: S311 - no secret
    text = " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"], k=700))
    lines = [f"{name} = {json.dumps(value)}" for name, value in setup.settings.items()]
    folder.mkdir(parents=True, exist_ok=True)
    if setup.command == "fit":
        return
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if setup.command == "train":
        (folder / "words.txt").write_text(text, encoding="utf-8")
        return
    colors = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
    records = [{"text": f"{n}: the {thing}?", "label": color} for n in range(20) for thing, color in colors.items()]
    (folder / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    shutil.copytree(base, folder / "base", dirs_exist_ok=True)


def write_base(folder: Path) -> Path:
    """A model to fine-tune: random weights, with embeddings large enough to say something."""
    import torch

    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.models import huggingface
    from foretrain.models.gpt2 import GPT2, GPT2Shape

    model = GPT2(GPT2Shape(layers=1, heads=2, width=16, context=32, vocab_size=257), 3)
    with torch.no_grad():
        model.token_embedding.weight.mul_(15)
    return huggingface.save(model, folder, ByteTokenizer())
