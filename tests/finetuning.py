"""A base model and examples, small enough for tests of fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from foretrain import config as configuration
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.models import huggingface
from foretrain.models.gpt2 import GPT2, GPT2Shape

SHAPE = GPT2Shape(layers=2, heads=2, width=32, context=64, vocab_size=257)
COLORS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


@torch.no_grad()
def make_base(seed: int) -> GPT2:
    """Random weights; embeddings as large as trained ones, for what is frozen must be able to say something."""
    model = GPT2(SHAPE, seed)
    model.token_embedding.weight.mul_(15)
    return model


def write_base(folder: Path) -> Path:
    return huggingface.save(make_base(3), folder, ByteTokenizer())


def write_colors(path: Path) -> Path:
    """Many ways to ask four questions."""
    records = [
        {"text": f"{number}: the {thing}?", "label": color} for number in range(60) for thing, color in COLORS.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def config_for(base: Path, data: Path, **changes: Any) -> configuration.Config:
    values = {
        "preset": "finetune",
        "device": "cpu",
        "model.weights": str(base),
        "data.path": str(data),
        "data.prefetch": 0,
        "max_steps": 40,
        "batch_size": 8,
        "optimizer.learning_rate": 1e-2,
        "evaluation.batches": 2,
        "evaluation.answers": 20,
        "checkpoint.interval": 0,
        "engine.compile": False,
    }
    return configuration.from_mapping(values | {name.replace("__", "."): value for name, value in changes.items()})
