"""What a step costs beside a loop of one's own: `trainer.step`, `fit`, and `fit` with prediction off, on small models.

python benchmarks/own_loop.py        # a minute on one core

Processor time, so that other programs count little; rounds in turns, medians. Each round begins with new weights and
makes as many steps of AdamW on the same batches, on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer, environment

Batches = list[tuple[Tensor, Tensor]]
WARM = 50
"""Steps before the clock starts."""


def network(width: int) -> nn.Module:
    """Return a small classifier."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batches(steps: int) -> Batches:
    """Return noisy data: nothing is to be predicted."""
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps, 64, 16, generator=draw)
    targets = torch.randint(4, (steps, 64), generator=draw)
    return list(zip(inputs, targets, strict=True))


def plain(width: int, data: Batches) -> float:
    """A loop as people write it."""
    model, loss_fn = network(width), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = 0.0
    for number, (inputs, targets) in enumerate(data):
        if number == WARM:
            began = time.process_time()
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return time.process_time() - began


def trainer_of(width: int, steps: int, mode: str = "leap") -> HybridTrainer:
    """Return foretrain around the same model, optimizer and loss."""
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(max_steps=steps, hybrid={"mode": mode})
    return HybridTrainer(model, optimizer, nn.CrossEntropyLoss(), config=config)


def stepped(width: int, data: Batches) -> float:
    """The same loop with `trainer.step`."""
    trainer, began = trainer_of(width, len(data)), 0.0
    for number, batch in enumerate(data):
        if number == WARM:
            began = time.process_time()
        trainer.step(batch)
    return time.process_time() - began


def fitted(width: int, data: Batches, mode: str = "leap") -> float:
    """`fit`, without a folder and a console."""
    trainer, began = trainer_of(width, len(data), mode), [0.0]

    def counted() -> Any:
        for number, batch in enumerate(data):
            if number == WARM:
                began[0] = time.process_time()
            yield batch

    trainer.fit(Once(counted), progress=False)
    return time.process_time() - began[0]


class Once:
    """A loader that is read once."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __iter__(self) -> Any:
        return self._read()


ARMS: dict[str, Callable[[int, Batches], float]] = {
    "a loop of one's own": plain,
    "trainer.step": stepped,
    "fit": fitted,
    "fit, hybrid.mode = off": lambda width, data: fitted(width, data, "off"),
}


def main() -> None:
    """Measure all arms in turns, print a table, write every number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = batches(options.steps), []
    for width in (32, 512):
        seconds: dict[str, list[float]] = {name: [] for name in ARMS}
        for _ in range(options.rounds):
            for name, arm in ARMS.items():
                seconds[name].append(arm(width, data))
        steps = options.steps - WARM
        own = statistics.median(seconds["a loop of one's own"])
        for name, took in seconds.items():
            median = statistics.median(took)
            row = {"width": width, "arm": name, "ms_per_step": round(1000 * median / steps, 4)}
            row |= {"more_ms": round(1000 * (median - own) / steps, 4), "seconds": [round(one, 4) for one in took]}
            rows.append(row)
            print(f"{width:4} {name:24} {row['ms_per_step']:.3f} ms per step, {row['more_ms']:+.3f}", flush=True)
    found = {"steps": options.steps, "rounds": options.rounds, "rows": rows}
    found["environment"] = environment.describe("cpu")
    here = Path(__file__).parent / "results"
    out = options.out or here / f"{datetime.now().astimezone():%Y-%m-%d}-own-loop-cpu.json"
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
