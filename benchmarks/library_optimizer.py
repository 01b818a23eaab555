"""8-bit moments of bitsandbytes beside our own and fp32: loss, bytes of state, and whether a resumed run is the same.

pip install bitsandbytes && python benchmarks/library_optimizer.py

A small GPT on Python's own source, 300 hybrid steps each; then the run goes on from a checkpoint of step 200.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.data.loader import Loader, TokenWindows
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import take_apart
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

STEPS, SAVED = 300, 200
SETTINGS: dict[str, Any] = {
    "model.type": "gpt2-tiny",
    "model.vocab_size": 256,
    "batch_size": 8,
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 1e-3,
    "schedule.type": "constant",
    "max_steps": STEPS,
    "hybrid.warmup_steps": 50,
    "audit.time_budget": 0.2,
    "optimizer.gradient_clip_norm": 1.0,  # asked for, so that an optimizer of a library gets it too
}


def bitsandbytes(model: nn.Module) -> Optimizer:
    import bitsandbytes

    made: Optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    return made


ARMS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Optimizer] | None]] = {
    "fp32": ({}, None),
    "8bit": ({"optimizer.state_type": "8bit"}, None),
    "bitsandbytes": ({}, bitsandbytes),
}


def trainer_for(name: str, device: str) -> HybridTrainer:
    settings, make = ARMS[name]
    config = from_mapping({**SETTINGS, **settings, "device": device})
    model = run.build_model(config)
    return HybridTrainer(model, None if make is None else make(model), config=config)


def source() -> Any:
    """Bytes of the standard library's modules."""
    folder = Path(json.__file__).parent.parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:150])
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def train(trainer: HybridTrainer, loader: Loader, store: CheckpointStore | None = None) -> Path | None:
    saved = None
    for batch in loader:
        if trainer.global_step >= STEPS and not trainer.judging:
            break
        trainer.step(batch)
        if store is not None and saved is None and trainer.global_step >= SAVED and not trainer.judging:
            saved = store.save(trainer.global_step, trainer.state_dict())
    return saved


def measure(name: str, device: str, windows: TokenWindows, held_out: list[Any]) -> dict[str, Any]:
    trainer = trainer_for(name, device)
    loader = Loader(windows, SETTINGS["batch_size"], 1)
    with tempfile.TemporaryDirectory() as folder:
        saved = train(trainer, loader, CheckpointStore(Path(folder)))
        assert saved is not None
        resumed = trainer_for(name, device)
        resumed.load_state_dict(checkpoint.read(saved))
    again = Loader(windows, SETTINGS["batch_size"], 1)
    again.seek(resumed.position)
    train(resumed, again)
    tensors = take_apart(trainer.optimizer.state_dict()["state"]).tensors.values()
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    return {
        "held_out_loss": round(trainer.evaluate(held_out), 4),
        "bytes_per_weight": round(
            sum(t.nbytes for t in tensors) / sum(p.numel() for p in trainer.model.parameters()), 3
        ),
        "moves": dict(trainer.summary()["moves"]),
        "resumed_run_is_the_same": all(torch.equal(one, other) for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokens = source()
    windows = TokenWindows(tokens[:-100_000], 128, 1)
    others = Loader(TokenWindows(tokens[-100_000:], 128, 1), 32, 1)
    held_out = [batch for batch, _ in zip(others, range(4), strict=False)]
    results: dict[str, Any] = {}
    for name in ARMS:
        results[name] = measure(name, options.device, windows, held_out)
        print(f"{name:<14} {results[name]}", flush=True)
    if options.out:
        report = {
            "benchmark": "optimizers of a library",
            "command": " ".join(["python", "benchmarks/library_optimizer.py", *sys.argv[1:]]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment.describe(options.device),
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
