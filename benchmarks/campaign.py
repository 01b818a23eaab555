"""The campaign behind docs/results.md: language models and images on one GPU, plain against look-ahead and leaps.

python benchmarks/campaign.py lm30m-adamw --data FOLDER --out FOLDER --ladder      # three seeds, all arms
python benchmarks/campaign.py lm124m-muon --data FOLDER --out FOLDER --grid grid.json   # single runs

FOLDER of --data holds `enwiki_train.bin` (GPT-2 tokens of English Wikipedia, little-endian uint16) for the language
models, `enwiki_bytes.bin` (the same text, a byte as a token) for those of bytes, and `fashion_mnist.npz` (`images`
uint8 [60000, 28, 28], `labels`) for the images. What --out holds is not run again, so calls add up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain import Loader
from foretrain.config import Config, from_mapping
from foretrain.measure.compare import ComparisonRunner
from foretrain.measure.ladder import rungs
from foretrain.measure.plan import Arm, Options
from foretrain.measure.runs import Spec, carry_out
from foretrain.measure.tasks import Job, ModelShelf, Task, TextTask
from foretrain.models import gpt2
from foretrain.show.comparison import ComparisonConsole, print_comparison

LANGUAGE: dict[str, Any] = {
    "data.tokenizer": "gpt2",
    "data.held_out": 0.04,
    "model.vocab_size": 50257,
    "evaluation.batches": 12,
    "optimizer.learning_rate": 2e-3,
    "log.interval": 25,
}
SMALL: dict[str, Any] = {
    "model.layers": 6,
    "model.width": 384,
    "model.heads": 6,
    "model.context": 256,
    "batch_size": 64,
    "max_steps": 600,
    "schedule.warmup_steps": 120,
}
LARGE: dict[str, Any] = {
    "model.type": "gpt2-small",
    "model.context": 1024,
    "batch_size": 32,
    "max_steps": 400,
    "schedule.warmup_steps": 80,
    "optimizer.learning_rate": 1e-3,
}
BYTES: dict[str, Any] = {
    "data.tokenizer": "byte",
    "model.vocab_size": 256,
    "model.layers": 12,
    "model.context": 256,
    "batch_size": 64,
    "optimizer.learning_rate": 6e-3,
}
"""Nearly all arithmetic of these models is in their blocks. Their lengths are so many tokens per parameter."""
DEEP: dict[str, dict[str, Any]] = {
    "bytes-2": {"model.width": 256, "model.heads": 4, "max_steps": 1160, "schedule.warmup_steps": 100},
    "bytes-5": {"model.width": 192, "model.heads": 3, "max_steps": 1640, "schedule.warmup_steps": 100},
    "bytes-20": {"model.width": 128, "model.heads": 2, "max_steps": 2900, "schedule.warmup_steps": 100},
}
IMAGES: dict[str, Any] = {
    "batch_size": 256,
    "max_steps": 1500,
    "optimizer.learning_rate": 2e-3,
    "log.interval": 25,
    "schedule.warmup_steps": 150,
}
SETTINGS: dict[str, dict[str, Any]] = {
    f"{name}-{optimizer}": settings | {"optimizer.type": optimizer}
    for name, settings in (
        ("lm30m", LANGUAGE | SMALL),
        ("lm124m", LANGUAGE | LARGE),
        *((name, LANGUAGE | BYTES | size) for name, size in DEEP.items()),
        ("images", IMAGES),
    )
    for optimizer in ("adamw", "muon")
}
AHEAD: dict[str, Any] = {"predictor.beta": 0.3}
TRIED: dict[str, Any] = {"audit.time_budget": 0.1}
"""The default tries no leap in so short a run; here it must."""
ARMS = (
    Arm("look-ahead", "gradients at the predicted point", AHEAD | {"hybrid.mode": "off"}),
    Arm("leaps, linear", "leaps that are tried whatever they cost", TRIED, rates_of="plain"),
    Arm("look-ahead and leaps", "both", AHEAD | TRIED, rates_of="plain"),
    *(
        Arm(f"leaps, {name}", "another predictor", TRIED | {"predictor.type": name}, rates_of="plain", once=True)
        for name in ("momentum", "mlp", "rssm")
    ),
)


class Convolutions(nn.Module):
    """Six convolutions with group norm, about 0.6 million parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for inputs, outputs, stride in (
                (1, 32, 1),
                (32, 64, 2),
                (64, 64, 1),
                (64, 128, 2),
                (128, 128, 1),
                (128, 256, 2),
            ):
                layers += [
                    nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                    nn.GroupNorm(8, outputs),
                    nn.ReLU(),
                ]
            self.body = nn.Sequential(*layers)
            self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


class Pictures:
    """All images in memory."""

    deterministic = True

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Any, epoch: int) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


class ImageTask:
    """Fashion-MNIST: 50,000 to train on, 5,000 to choose by, 5,000 for the result."""

    title = "Fashion-MNIST, six convolutions"
    fingerprint = "fashion-mnist"

    def __init__(self, folder: Path) -> None:
        data = np.load(folder / "fashion_mnist.npz")
        images = torch.from_numpy(data["images"]).float().div_(255).sub_(0.2860).div_(0.3530).unsqueeze(1)
        self.images, self.labels = images, torch.from_numpy(data["labels"]).long()
        self._shelf = ModelShelf()

    def job(self, config: Config) -> Job:
        model = self._shelf.with_weights_of(config, lambda config: Convolutions(config.seed))
        batches = [
            (self.images[start : start + 500], self.labels[start : start + 500]) for start in range(50_000, 60_000, 500)
        ]
        loader = Loader(Pictures(self.images[:50_000], self.labels[:50_000]), config.batch_size, config.seed)
        return Job(model, loader, batches[0::2], batches[1::2], classify)


def explore(comparison: ComparisonRunner, grid: list[dict[str, Any]], minutes: float) -> None:
    """Single runs; each entry: arm, settings, and optionally seed, rate_factor, max_steps, control."""
    started, warmed = time.monotonic(), set[str]()
    for entry in grid:
        spec = Spec(**({"seed": 1, "rate_factor": 1.0, "max_steps": comparison.base.max_steps} | entry))
        result = comparison.find(spec)
        if result is None and time.monotonic() - started < 60 * minutes:
            result = carry_out(comparison.task, spec, comparison.base, warmed)
            comparison.keep(spec, result)
        if result is not None:
            print(row(spec, result), flush=True)


def row(spec: Spec, result: dict[str, Any]) -> str:
    if result["loss"] is None:
        return f"{spec.arm:<28} seed {spec.seed} {spec.max_steps:>5} steps  failed: {result['failed']}"
    return (
        f"{spec.arm:<28} seed {spec.seed} {spec.max_steps:>5} steps  loss {result['loss']:.4f} "
        f"held-out {result['held_out_loss']:.4f}  {result['seconds']:7.2f} s  "
        f"{1e3 * result['seconds'] / result['backward_passes']:7.2f} ms/pass  {result['backward_passes']:>5} passes  "
        f"kept {result['kept']} refused {result['refused']} rolled back {result['rolled_back']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=SETTINGS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="key=value")
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.7, 1.0, 1.4])
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--arms", nargs="*", help="only these, beside plain and hybrid")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    values = SETTINGS[options.task] | {"device": options.device, "evaluation.interval": 0}
    values |= {key: json.loads(value) for key, value in (text.split("=", 1) for text in options.set)}
    if not options.task.startswith("images"):
        text = "enwiki_bytes.bin" if options.task.startswith("bytes") else "enwiki_train.bin"
        values |= {"data.path": str(options.data / text), "data.cache": str(options.data)}
        values["evaluation.interval"] = values["max_steps"] // 3
    base = from_mapping(values)
    task: Task = ImageTask(options.data) if options.task.startswith("images") else TextTask(base)
    blocks = 0 if options.task.startswith("images") else gpt2.shape_from_config(base.model).layers
    plan = Options(
        options.seeds,
        tuple(options.rates),
        tuple(options.budgets),
        tuple(arm for arm in ARMS if options.arms is None or arm.name in options.arms)
        + (rungs(base, blocks) if options.ladder else ()),
        not options.no_controls,
    )
    comparison = ComparisonRunner(task, base, plan, options.out / options.task)
    if options.grid:
        explore(comparison, json.loads(options.grid.read_text())[options.task], options.minutes)
        return
    console = ComparisonConsole()
    comparison.run(console, options.minutes)
    console.close()
    result = comparison.result(" ".join(["python", "benchmarks/campaign.py", *sys.argv[1:]]))
    print_comparison(result, str(comparison.write(result)))


if __name__ == "__main__":
    main()
