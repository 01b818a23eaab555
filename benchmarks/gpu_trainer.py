"""A small GPT on the GPU, for the checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrain.config import from_mapping
from foretrain.data.loader import Loader, TokenWindows
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

TOKENS = np.random.default_rng(1).zipf(1.3, 400_000).clip(max=999).astype(np.uint16)


def trainer(**settings: Any) -> tuple[HybridTrainer, Loader]:
    """A small GPT on the GPU."""
    values = {"device": "cuda", "max_steps": 40, "batch_size": 8, "model.width": 128, "model.context": 64}
    values |= {"model.vocab_size": 1000, "optimizer.type": "adamw", "optimizer.learning_rate": 1e-3}
    config = from_mapping({**values, **settings})
    made = HybridTrainer(run.build_model(config), config=config)
    return made, Loader(TokenWindows(TOKENS, 64, 1), config.batch_size, 1, pin_memory=True)


def losses(steps: int, **settings: Any) -> list[float]:
    made, loader = trainer(**settings)
    batches = iter(loader)
    return [made.step(next(batches)).loss for _ in range(steps)]
