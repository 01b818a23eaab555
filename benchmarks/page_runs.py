"""The runs that `page_check.py` opens: the demo, 20,000 steps, one that goes wrong, one of many moves, 100,000 steps.

python benchmarks/page_runs.py FOLDER [NAME ...]

All of them are real trainings; on one busy CPU core they take about 2, 4, 0.2, 1.5 and 6 minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from foretrain import HybridTrainer, Loader, MappedSamples
from foretrain.config import load

_MINUTE = "model.layers=1 model.width=8 model.heads=1 model.context=16 optimizer.type=adamw schedule.type=constant"
_EAGER = "audit.time_budget=1 audit.steps=5 hybrid.confidence_threshold=0 hybrid.full_steps=5 hybrid.correct_steps=2"
SETTINGS = {
    "demo": "audit.time_budget=0.03",
    "long": "max_steps=20000 batch_size=8 model.layers=2 model.width=32 model.heads=2 model.context=32 "
    "audit.time_budget=0.1",
    "troubled": "max_steps=2000 optimizer.gradient_clip_norm=0 audit.time_budget=1 audit.steps=5 device=cpu "
    "hybrid.confidence_threshold=0",
    "busy": f"max_steps=20000 schedule.type=constant hybrid.warmup_steps=20 hybrid.window_steps=3 device=cpu {_EAGER} "
    "hybrid.max_predict_steps=10 hybrid.secant_pairs=0 optimizer.weight_decay=0",
    "huge": f"max_steps=100000 batch_size=2 evaluation.batches=4 checkpoint.interval=5000 {_MINUTE} {_EAGER}",
}


def train(name: str, folder: Path) -> None:
    if name in ("demo", "long", "huge"):
        subprocess.run(command(name, folder), check=True)
    elif name == "troubled":
        model = _network(48, 48)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        _fit(name, folder, model, optimizer, Troubled(), batch_size=32, count=4096)
    else:  # a full batch: nothing is noise, so that moves are tried all the time
        model = _network(8)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        _fit(name, folder, model, optimizer, _error, batch_size=256, count=256)


def command(name: str, folder: Path) -> list[str]:
    """The command line that trains it."""
    settings = [part for setting in SETTINGS[name].split() for part in ("--set", setting)]
    return [sys.executable, "-m", "foretrain.cli.app", "train", "--out", str(folder), "--quiet", *settings]


Batch = tuple[Tensor, Tensor]


def _error(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


class Troubled:
    """A loss that is not finite for a while, three times, and whose gradient explodes for a while."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = _error(model, batch)
        if not torch.is_grad_enabled():
            return loss
        self.steps += 1
        if 400 <= self.steps < 407 or self.steps in (150, 1200, 1201):
            return loss * torch.nan
        return loss * 1e4 if 800 <= self.steps < 812 else loss


def _network(*widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for before, width in zip((8, *widths), widths, strict=False):
        layers += [nn.Linear(before, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def _fit(
    name: str,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Tensor],
    batch_size: int,
    count: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count + 256, 8, generator=generator)
    targets = torch.sin(3 * inputs).prod(dim=1) + inputs[:, 0] + torch.randn(count + 256, generator=generator)
    loader = Loader(MappedSamples(TensorDataset(inputs[256:], targets[256:])), batch_size, seed=1)
    trainer = HybridTrainer(model, optimizer, loss, load(None, SETTINGS[name].split()).config)
    trainer.fit(loader, [(inputs[:256], targets[:256])], out=folder, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETTINGS))
    given = parser.parse_args()
    for name in given.names or SETTINGS:
        train(name, given.folder / name)


if __name__ == "__main__":
    main()
