"""How fast this machine trains a model: a few real steps on random tokens, for a second or two."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from foretrain.config import Config, changed
from foretrain.config.kinds import MOST
from foretrain.config.schema import FIRST_RATE
from foretrain.engine.compiling import SAVED_SHARE
from foretrain.errors import OutOfMemory
from foretrain.models import gpt2
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning.scaling import operations
from foretrain.trainer import HybridTrainer

_WARM = 2
"""Steps that are not timed: they make room."""


def operations_per_second(
    config: Config, shape: GPT2Shape, seconds: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Return the operations per second of real training steps; None where a batch does not fit into memory.

    Steps are not compiled. On a CUDA GPU, where a run of any length would be, the gain that was measured for it is
    reckoned in.
    """
    config = config.model_copy(update={"epochs": None, "max_time": None, "until_loss": None})
    if config.optimizer.learning_rate == "auto":  # any rate takes as long
        config = changed(config, {"optimizer.learning_rate": FIRST_RATE})
    size = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "context": shape.context}
    plain = {"hybrid.mode": "off", "engine.compile": False, "max_steps": MOST, "schedule.type": "constant"}
    idle = {"growth.layers": 0, "health.interval": 0, "guard.auto_tune": False, "forecast.copies": []}
    plain |= {"model.vocab_size": shape.vocab_size}
    config = changed(config, {**{f"model.{name}": value for name, value in size.items()}, **plain, **idle})
    try:
        model = gpt2.build(config.model, config.seed)
        trainer = HybridTrainer(model, config=config)
        tokens = torch.randint(shape.vocab_size, (config.batch_size, shape.context + 1))
        batch = tokens[:, :-1], tokens[:, 1:]
        for _ in range(_WARM):
            trainer.step(batch)
        trainer.engine.wait()
        began, steps = clock(), 0
        while steps == 0 or clock() - began < seconds:
            trainer.step(batch)
            trainer.engine.wait()
            steps += 1
    except OutOfMemory:
        return None
    took = (clock() - began) * (1.0 - SAVED_SHARE if trainer.device.type == "cuda" else 1.0)
    return steps * config.batch_size * shape.context * operations(shape, shape.context) / took
