"""Do runs end where they were asked to? Ten runs with `until_loss`, ten with `max_time`, on two tasks.

python benchmarks/targets.py                       # some fifteen minutes on two cores; writes benchmarks/results
python benchmarks/targets.py --only until_loss     # or max_time
python benchmarks/targets.py --seconds 60          # longer runs by the clock

The tasks: a small GPT on a text (`--data`), through `recipes.train`, and a classifier of the user's own, through `fit`.
Of the runs by the clock, five are slowed down in the middle by programs that only count, started and ended here, and
one by a model that does all its work twice meanwhile. With `until_loss` plain runs follow whose lengths were
chosen beforehand: the shortest of them that ends at the target says how early it could have been met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.config import from_mapping
from foretrain.errors import ForetrainError
from foretrain.events import Event, Planned, Progress
from foretrain.recipes import train as recipe
from foretrain.trainer import HybridTrainer

GPT = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 64,
    "model.context": 64,
    "batch_size": 8,
    "evaluation.batches": 16,
    "device": "cpu",
    "hybrid.mode": "off",
    "log.report": False,
}
CLASSIFIER = {"batch_size": 64, "device": "cpu", "hybrid.mode": "off", "optimizer.type": "adamw"}
LOSSES = {"gpt": (2.45, 2.35, 2.25, 2.15, 2.05), "classifier": (0.68, 0.66, 0.64, 0.62, 0.6)}
"""Targets, chosen from one plain run of each task so that a few hundred steps reach the first."""
LIMIT = 4000
LENGTHS = (0.75, 0.9, 1.05)
"""Plain runs, as factors of the steps that the run with the target took."""


class Classifier(nn.Module):
    """A network that can be made to do its work several times over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
        self.times = 1

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(self.times - 1):
            self.layers(inputs).sum().backward()
            self.zero_grad()
        output: Tensor = self.layers(inputs)
        return output


class Batches:
    """Batches of a fixed random network's classes, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        drawn = torch.Generator().manual_seed(7)
        self.teacher = [torch.randn(32, 64, generator=drawn) / 5, torch.randn(64, 10, generator=drawn)]

    def labelled(self, rows: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(rows, 32, generator=drawn)
        return inputs, (torch.tanh(inputs @ self.teacher[0]) @ self.teacher[1]).argmax(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        drawn = torch.Generator().manual_seed(self.seed)
        while True:
            yield self.labelled(64, drawn)


@contextmanager
def counting(programs: int) -> Iterator[None]:
    """Programs that only count, beside what is done inside the block."""
    begun = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for one in begun:
            one.kill()
            one.wait()


class Slower:
    """A listener that slows the run down while its progress is between two shares of its time."""

    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self.first, self.last = kind, 0.4 * seconds, 0.8 * seconds
        self.began = time.monotonic()
        self.model: Any = None
        self.stack = ExitStack()
        self.slow = False

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Progress):
            return
        wanted = self.first <= time.monotonic() - self.began < self.last and self.kind != "none"
        if wanted == self.slow:
            return
        self.slow = wanted
        if self.kind == "work twice" and isinstance(self.model, Classifier):
            self.model.times = 2 if wanted else 1
        elif wanted:
            self.stack.enter_context(counting(2 * (os.cpu_count() or 1)))
        else:
            self.stack.close()


def run(task: str, seed: int, settings: dict[str, Any], data: Path, listeners: list[Callable[[Event], None]]) -> Any:
    """One run in a folder of its own; its summary."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if task == "gpt":
            config = from_mapping({**GPT, "data.path": str(data), "seed": seed, **settings})
            return recipe.train(config, out, progress=False, listeners=listeners)
        torch.manual_seed(seed)
        model = Classifier()
        for listener in listeners:
            if isinstance(listener, Slower):
                listener.model = model
        trainer = HybridTrainer(
            model, None, nn.CrossEntropyLoss(), from_mapping({**CLASSIFIER, "seed": seed, **settings})
        )
        batches = Batches(seed)
        held_out = [batches.labelled(1000, torch.Generator().manual_seed(1000 + n)) for n in range(4)]
        return trainer.fit(batches, held_out, out=out, progress=False, callbacks=listeners)


def by_clock(data: Path, seconds: float) -> list[dict[str, Any]]:
    """Ten runs with `max_time`: the whole call is timed, with what follows the last step."""
    rows = []
    for number in range(10):
        task, kind = (
            ("gpt", "classifier")[number % 2],
            ("none", "none", "programs", "work twice", "programs")[number // 2],
        )
        kind = "programs" if kind == "work twice" and task == "gpt" else kind
        asked, rates = seconds * (1 + number % 3 / 4), []
        slower = Slower(kind, asked)
        note = lambda event, rates=rates: rates.append(event.learning_rate) if isinstance(event, Progress) else None  # noqa: E731
        began = time.monotonic()
        try:
            summary = run(task, number + 1, {"max_time": asked}, data, [slower, note])
        finally:
            slower.stack.close()
        took = time.monotonic() - began
        row = {"task": task, "slowed": kind, "asked": asked, "took": round(took, 3), "steps": summary["global_step"]}
        row |= {"loss": summary["final_val_loss"], "last_rate_of_peak": rates[-1] / max(rates)}
        row["off_percent"] = round(100 * (took / asked - 1), 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def by_loss(data: Path, plain: bool) -> list[dict[str, Any]]:
    """Ten runs with `until_loss`, and plain runs of other lengths."""
    rows = []
    for number in range(10):
        task, target = ("gpt", "classifier")[number % 2], LOSSES[("gpt", "classifier")[number % 2]][number // 2]
        seed, plans = number + 1, []
        note = lambda event, plans=plans: plans.append([event.step, event.what]) if isinstance(event, Planned) else None  # noqa: E731
        summary = run(task, seed, {"until_loss": target, "max_steps": LIMIT}, data, [note])
        row = {"task": task, "asked": target, "loss": summary["final_val_loss"], "steps": summary["global_step"]}
        row |= {
            "backward_passes": summary["backward_passes"],
            "plans": plans,
            "off_percent": round(100 * (summary["final_val_loss"] / target - 1), 2),
        }
        if plain:
            ends = {
                round(factor * row["steps"]): run(task, seed, {"max_steps": round(factor * row["steps"])}, data, [])[
                    "final_val_loss"
                ]
                for factor in LENGTHS
            }
            row["plain_runs"] = ends
            row["shortest_plain"] = min((steps for steps, loss in ends.items() if loss <= target), default=None)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", choices=("until_loss", "max_time"))
    parser.add_argument("--seconds", type=float, default=24.0, help="of the shortest run by the clock")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain runs out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.data / "text" / "tinyshakespeare.txt"
    if not text.is_file():
        raise SystemExit(f"{text} is not there; name the folder with --data")
    result: dict[str, Any] = {"command": "benchmarks/targets.py", "torch": torch.__version__}
    result |= {"python": platform.python_version(), "cores": os.cpu_count()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    result["commit"] = commit.stdout.strip()
    if options.only != "max_time":
        result["until_loss"] = by_loss(text, not options.no_plain)
    if options.only != "until_loss":
        result["max_time"] = by_clock(text, options.seconds)
    for kind in ("until_loss", "max_time"):
        if kind in result:
            within = sum(abs(row["off_percent"]) <= 2 for row in result[kind])
            print(f"{kind}: {within} of {len(result[kind])} runs end within 2 % of what was asked")
    today = datetime.now().astimezone()
    path = options.out or Path(__file__).parent / "results" / f"{today:%Y-%m-%d}-targets-cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    try:
        main()
    except ForetrainError as error:
        raise SystemExit(f"error: {error}") from None
