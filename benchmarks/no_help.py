"""Where linearised leaps do not help: what trying them costs in time and loss, and what the run says about it.

python benchmarks/no_help.py --out result.json           # all problems, three seeds
python benchmarks/no_help.py --problems million --seeds 1

Two plain arms: `off` predicts nothing (hybrid.mode = "off"), `no rows` does everything but linearised leaps
(hybrid.linear_rows = 0). Against them the default settings. All arms of a problem and seed begin with the same weights,
see the same batches and end after the same number of steps. They take turns in one process, a thirtieth of the run
each, in an order that rotates; the time is that of the processor. The loss is that of all data, measured after every
turn outside the clock: at the end, and, as "equal seconds", when an arm had taken as long as the plain one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.events import Event, Moved, Notice
from foretrain.trainer import HybridTrainer
from low_noise_problems import Problem, mlp

ARMS: dict[str, dict[str, Any]] = {"off": {"hybrid.mode": "off"}, "no rows": {"hybrid.linear_rows": 0}, "default": {}}
PLAIN = ("off", "no rows")
TURNS = 30
WHAT = ("seconds", "loss", "loss in equal seconds")
LIMIT = 1.01
"""A run within 1 % of the plain one takes no more than this times as long, and ends no higher than this times it."""

Row = dict[str, Any]
"""What was found with one problem and seed."""


@dataclass(frozen=True)
class Case:
    make: Callable[[], Problem]
    steps: int


# --- problems --------------------------------------------------------------------------------------------------------


def table(rows: int, features: int, seed: int = 99) -> tuple[Tensor, Tensor]:
    """Inputs, and a smooth function of them with values about 1."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=draw)
    mix = torch.randn(features, 6, generator=draw) / math.sqrt(features)
    return inputs, torch.sin(2 * inputs @ mix).sum(1, keepdim=True) / 2


def million() -> Problem:
    """A million weights on 256 rows, all of them in every step: rows of the Jacobian are dear."""
    batch = table(256, 8)
    return Problem(lambda: mlp(8, 1000, 1000, 1), lambda _: batch, criterion=nn.MSELoss())


def noisy() -> Problem:
    """Eight rows in every step, targets with as much noise as signal."""
    inputs, wanted = table(4096, 8)
    given = wanted + torch.randn(wanted.shape, generator=torch.Generator().manual_seed(98))

    def batch(position: int) -> tuple[Tensor, Tensor]:
        some = torch.randint(len(inputs), (8,), generator=torch.Generator().manual_seed(position))
        return inputs[some], given[some]

    return Problem(lambda: mlp(8, 64, 64, 1), batch, criterion=nn.MSELoss(), whole=(inputs, wanted))


def integral() -> Problem:
    """u(x) + the integral of exp(-|x - y|) u(y)^3 over [0, 1] = f(x): each of 512 rows depends on all points."""
    x = torch.linspace(0, 1, 512).view(-1, 1)
    kernel = torch.exp(-(x - x.T).abs()) / len(x)
    exact = torch.sin(2 * math.pi * x) + 0.5 * torch.cos(5 * math.pi * x)
    wanted = exact + kernel @ exact**3

    def residuals(model: nn.Module, points: Tensor) -> Tensor:
        u = model(points)
        return u + kernel @ u**3 - wanted

    return Problem(lambda: mlp(1, 32, 32, 1), lambda _: x, residuals)


def norms() -> Problem:
    """Batch norm: rows depend on each other, and the model changes its statistics in every pass. Targets have noise,
    and the network is too small to learn it by heart."""
    inputs, wanted = table(1024, 8)
    batch = (inputs, wanted + torch.randn(wanted.shape, generator=torch.Generator().manual_seed(98)))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), mlp(24, 24, 1))

    return Problem(build, lambda _: batch, criterion=nn.MSELoss())


def classes() -> Problem:
    """Cross-entropy of 100 classes: a hundred rows of the Jacobian for each sample. A third of the labels is wrong,
    and the network is too small to learn them by heart."""
    inputs, _ = table(4096, 16)
    draw = torch.Generator().manual_seed(97)
    right = torch.cdist(inputs, torch.randn(100, 16, generator=draw)).argmin(1)
    wrong = torch.randint(100, right.shape, generator=draw)
    targets = torch.where(torch.rand(right.shape, generator=draw) < 1 / 3, wrong, right)
    return Problem(lambda: mlp(16, 24, 100), lambda _: (inputs, targets), criterion=nn.CrossEntropyLoss())


CASES = {
    "million": Case(million, 500),
    "noisy": Case(noisy, 16_000),
    "integral": Case(integral, 10_000),
    "norms": Case(norms, 10_000),
    "classes": Case(classes, 3000),
}


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """One trainer, what it said, and how long it trained."""

    trainer: HybridTrainer
    problem: Problem
    seconds: float = 0.0
    position: int = 0
    said: list[str] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and loss after every turn."""

    def hear(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.said.append(event.message)
        if isinstance(event, Moved):
            self.moves[f"{'chain' if event.chained else 'leap'} {event.verdict}"] += 1

    def train(self, until: int) -> None:
        started = time.process_time()
        while self.trainer.global_step < until or (until == self.trainer.config.max_steps and self.trainer.judging):
            self.trainer.step(self.problem.batch(self.position))
            self.position += 1
        self.seconds += time.process_time() - started
        self.curve.append((round(self.seconds, 3), self.problem.judge(self.trainer.model)))

    def outcome(self) -> dict[str, Any]:
        summary = self.trainer.summary()
        return {
            "seconds": round(self.seconds, 3),
            "loss": self.curve[-1][1],
            "curve": self.curve,
            "moves": dict(self.moves),
            "said": self.said,
            "worth": (summary["audit"] or {}).get("sentence"),
            "result": (summary["exact"] or {}).get("sentence"),
        }


def arm(problem: Problem, seed: int, steps: int, changes: dict[str, Any]) -> Arm:
    values = {
        "max_steps": steps,
        "device": "cpu",
        "seed": seed,
        "precision.type": "fp32",
        "engine.compile": False,
        "optimizer.type": "adam",
        "optimizer.learning_rate": 1e-3,
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.999,
        "optimizer.gradient_clip_norm": 0.0,
        "schedule.type": "cosine",  # else losses at the end jump about
        "schedule.warmup_steps": 0,
        **changes,
    }
    torch.manual_seed(seed)
    made = Arm(HybridTrainer(problem.build(), config=from_mapping(values), **problem.handed_in), problem)
    made.trainer.bus.subscribe(made.hear)
    return made


def measure(name: str, seed: int, steps: int) -> Row:
    problem = CASES[name].make()
    arms = {kind: arm(problem, seed, steps, changes) for kind, changes in ARMS.items()}
    order = list(arms.values())
    for turn in range(1, TURNS + 1):
        for one in order:
            one.train(steps * turn // TURNS)
        order = [*order[1:], order[0]]
    found = {kind: one.outcome() for kind, one in arms.items()}
    return {"problem": name, "seed": seed, "steps": steps, "arms": found, "ratios": ratios(found)}


def ratios(arms: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Time and loss of the default settings, as multiples of those of the plain arms; the loss also when both had taken
    as long as the faster of them took."""
    found, mine = {}, arms["default"]
    for name in PLAIN:
        plain = arms[name]
        seconds = min(mine["seconds"], plain["seconds"])
        found[name] = {
            "seconds": mine["seconds"] / plain["seconds"],
            "loss": mine["loss"] / plain["loss"],
            "loss in equal seconds": at(mine["curve"], seconds) / at(plain["curve"], seconds),
        }
    return found


def at(curve: list[tuple[float, float]], seconds: float) -> float:
    """The loss after so many seconds, between two turns on a line in its logarithm."""
    (first, loss), *others = curve
    for later, lower in others:
        if later >= seconds:
            share = max(0.0, (seconds - first) / (later - first))
            return float(loss ** (1 - share) * lower**share)
        first, loss = later, lower
    return loss


# --- showing ---------------------------------------------------------------------------------------------------------


def show(name: str, rows: list[Row]) -> None:
    for plain in PLAIN:
        known = {what: [row["ratios"][plain][what] for row in rows] for what in WHAT}
        figures = "".join(f"{statistics.median(found):>9.3f}{max(found):>9.3f}" for found in known.values())
        seconds = statistics.median(row["arms"][plain]["seconds"] for row in rows)
        print(f"{name:<12}{plain:<10}{seconds:>8.1f} s{figures}   {'yes' if within(rows, plain) else 'no'}")
    first = rows[0]["arms"]["default"]
    print(f"{'':<12}moves: {first['moves'] or 'none'}")
    for text in (*first["said"], first["worth"], first["result"]):
        if text:
            print(f"{'':<12}says: {text}")


def within(rows: list[Row], plain: str) -> bool:
    """Time and loss are within 1 % of those of the plain arm, or below, in the median."""
    return all(statistics.median(row["ratios"][plain][what] for row in rows) <= LIMIT for what in ("seconds", "loss"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each problem")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.problems:
        measure(name, 0, 60)  # what is loaded and allocated only once
    results: list[Row] = []
    report = {
        "benchmark": "no help",
        "command": " ".join(["python", "benchmarks/no_help.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "results": results,
    }
    columns = "".join(f"{what:>9}{'most':>9}" for what in ("time", "loss", "equal s"))
    print(f"{'problem':<12}{'against':<10}{'takes':>10}{columns}   within 1 %")
    for name in options.problems:
        rows = []
        for seed in range(1, options.seeds + 1):
            rows.append(measure(name, seed, max(100, round(options.share * CASES[name].steps))))
            results.append(rows[-1])
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        show(name, rows)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
