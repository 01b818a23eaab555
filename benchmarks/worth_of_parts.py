"""What three parts of prediction are worth: the residual correction, leaps of adapters in product space, the bandit.

python benchmarks/worth_of_parts.py --out result.json      # 12 seeds; about 16 minutes of one CPU core
python benchmarks/worth_of_parts.py --seeds 20 --only adapters --arms "as shipped" product

The same small runs are made with a part and without it, or with something simpler in its place. All arms of a task and
seed start from the same weights and see the same batches. A run ends when it has done a given amount of work, counted
in full steps (a forward pass is a third): audits, probes and steps that were taken back count. The figure is the loss
on fixed data at that point, with the part over without it, as a geometric mean over seeds with a 95 % interval of the
pairs; below 1 the part helps. The source is that of the commit below, the last one that has all three parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.trainer import HybridTrainer

COMMIT = "eededf9"
FORWARD = 1 / 3
"""Work of a forward pass, in full steps."""
LOOK = 10
"""Work between two looks at the loss on fixed data, which are not charged."""


# --- what stands in for the bandit -----------------------------------------------------------------------------------


class Simple:
    """The interface of the bandit, and its short form after harm."""

    def __init__(self, max_predict_steps: int, window: int) -> None:
        self.longest, self.window = max_predict_steps, window
        self.arms = (*(arm for arm in (10, 20, 40, 60, 80) if arm < max_predict_steps), max_predict_steps)
        self.allowed = float(max_predict_steps)
        self.table: dict[int, list[float]] = {arm: [0.0, 0.0] for arm in self.arms}

    def choose(self, context: Any, confidence: float, limit: int) -> int:
        most = min(limit, max(int(self.allowed), self.window), self.longest)
        if most <= 0:
            return 0
        return max(min(self.window, most), min(most, self.wanted(confidence, most)))

    def wanted(self, confidence: float, most: int) -> int:
        raise NotImplementedError

    def reward(self, horizon: int, context: Any, gain_steps: float, cost_steps: float) -> None:
        if math.isfinite(gain_steps) and cost_steps > 0:
            value = min(max(gain_steps / cost_steps, -20.0), 20.0)
            for entry in self.table.values():
                entry[:] = [0.96 * number for number in entry]
            nearest = min(self.arms, key=lambda arm: abs(math.log(arm / max(horizon, 1))))
            self.table[nearest][0] += value
            self.table[nearest][1] += 1.0
            self.allowed = min(float(self.longest), self.allowed * (2.0 if value > 0 else 1.25))

    def shorten(self) -> None:
        self.allowed = max(float(min(self.window, self.longest)), self.allowed / 2)

    def state_dict(self) -> dict[str, Any]:
        return {"allowed": self.allowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.allowed = float(state["allowed"])


class Longest(Simple):
    """Always as far as is allowed."""

    def wanted(self, confidence: float, most: int) -> int:
        return most


class Confident(Simple):
    """What the bandit does without history: the longest horizon times the square of the confidence."""

    def wanted(self, confidence: float, most: int) -> int:
        return math.floor(self.longest * min(max(confidence, 0.0), 1.0) ** 2)


class Table(Simple):
    """Mean reward of each horizon, with optimism where little is known; no context, no shape between horizons."""

    def wanted(self, confidence: float, most: int) -> int:
        known = sum(count for _, count in self.table.values())
        if known == 0:
            return math.floor(self.longest * min(max(confidence, 0.0), 1.0) ** 2)
        scale = sum(abs(total) for total, _ in self.table.values()) / known
        arms = [arm for arm in self.arms if arm <= most] or [most]
        value = {arm: self.table[arm][0] / (self.table[arm][1] + 0.2) for arm in arms}
        return max(arms, key=lambda arm: value[arm] + 0.6 * scale / math.sqrt(self.table[arm][1] + 0.2))


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    build: Callable[[int], tuple[nn.Module, Callable[[int], Any], Any]]
    """From a seed to a model with a `loss`, batches by number, and the data it is judged on."""
    settings: dict[str, Any]
    work: int
    """Full steps' worth."""


class Curve(nn.Module):
    """A small network that learns a curved surface."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.layers(batch[0])[:, 0] - batch[1]).square().mean()


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return x, torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1]) + 0.3 * x[:, 0]


def regression(size: int, seed: int) -> tuple[nn.Module, Callable[[int], Any], Any]:
    """All 512 points in every step, or `size` new ones."""
    whole = points(512, seed)
    return Curve(seed), (lambda n: whole if size == 0 else points(size, 1000 * seed + n + 7)), whole


def language(seed: int) -> tuple[nn.Module, Callable[[int], Any], Any]:
    """A tiny GPT on the bytes of a module of the standard library."""
    from foretrain.models.gpt2 import GPT2, GPT2Shape

    text = torch.tensor(list(Path(argparse.__file__).read_bytes()), dtype=torch.long)

    def rows(count: int, number: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 33, (count,), generator=torch.Generator().manual_seed(number))
        part = torch.stack([text[start : start + 33] for start in starts.tolist()])
        return part[:, :-1], part[:, 1:]

    model = GPT2(GPT2Shape(layers=2, heads=2, width=32, context=32, vocab_size=256), seed)
    return model, (lambda n: rows(8, 100_000 * (seed + 1) + n)), rows(64, 5)


SHORT = {
    "device": "cpu",
    "engine.compile": False,
    "precision.type": "fp32",
    "hybrid.warmup_steps": 60,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "adam",
    "optimizer.weight_decay": 0.0,
    "schedule.type": "constant",
    "health.interval": 0,
    "memory.timeline": False,
}
AUDITED = {"audit.time_budget": 1.0, "hybrid.confidence_threshold": 0.3}
"""Moves are tried often, whatever that costs, so that the part has many occasions to show what it can do."""
ROLLOUT = {"hybrid.mode": "rollout", "hybrid.correction_interval": 10, "hybrid.monitor_interval": 4}
TASKS: dict[str, Task] = {
    "regression, all points, rate 1e-3": Task(
        lambda seed: regression(0, seed), {**SHORT, "optimizer.learning_rate": 1e-3}, 1000
    ),
    "regression, all points, rate 1e-4": Task(
        lambda seed: regression(0, seed), {**SHORT, "optimizer.learning_rate": 1e-4}, 1000
    ),
    "regression, all points, rollout": Task(
        lambda seed: regression(0, seed), {**SHORT, **ROLLOUT, "optimizer.learning_rate": 1e-3}, 1000
    ),
    "regression, 32 points, audited": Task(
        lambda seed: regression(32, seed), {**SHORT, **AUDITED, "optimizer.learning_rate": 3e-4}, 1000
    ),
    "language, 8 rows, audited": Task(language, {**SHORT, **AUDITED, "optimizer.learning_rate": 5e-4}, 700),
    "adapters, rate 1e-4": Task(
        lambda seed: (nn.Identity(), lambda n: n, seed), {"optimizer.learning_rate": 1e-4}, 300
    ),
    "adapters, rate 1e-3": Task(
        lambda seed: (nn.Identity(), lambda n: n, seed), {"optimizer.learning_rate": 1e-3}, 300
    ),
}
ARMS: dict[str, tuple[dict[str, Any], type[Simple] | None]] = {
    "as shipped": ({}, None),
    "no correction": ({"correction.limit": 0.0}, None),
    "table": ({}, Table),
    "confidence": ({}, Confident),
    "longest": ({}, Longest),
    "product": ({"hybrid.space": "product"}, None),
}
COMPARED = (
    ("residual correction", "as shipped", "no correction"),
    ("bandit against a table", "as shipped", "table"),
    ("bandit against confidence^2", "as shipped", "confidence"),
    ("bandit against the longest", "as shipped", "longest"),
    ("product space", "product", "as shipped"),
)


class Work:
    """Counts calls of a loss, while it is on."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.done, self.on = loss, 0.0, True

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.done += self.on * (1.0 if torch.is_grad_enabled() else FORWARD)
        return self.loss(*arguments, **named)


def adapters(seed: int, settings: dict[str, Any], folder: Path) -> tuple[HybridTrainer, Callable[[int], Any], Any]:
    """LoRA on a small GPT that can spell, taught to answer questions; leaps are judged on examples left out."""
    from foretrain.data.loader import Loader
    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.models import huggingface
    from foretrain.models.gpt2 import GPT2, GPT2Shape
    from foretrain.recipes.finetune import build_trainer, prepare
    from foretrain.recipes.open_model import open_base

    base = folder / f"base-{seed}"
    if not base.exists():
        model = GPT2(GPT2Shape(layers=2, heads=2, width=32, context=64, vocab_size=257), seed)
        with torch.no_grad():  # embeddings as large as trained ones: what is frozen must be able to say something
            model.token_embedding.weight.mul_(15)
        huggingface.save(model, base, ByteTokenizer())
        colors = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
        asked = [{"text": f"{n}: the {thing}?", "label": color} for n in range(60) for thing, color in colors.items()]
        (folder / "colors.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    values = {
        "preset": "finetune",
        "device": "cpu",
        "model.weights": str(base),
        "data.path": str(folder / "colors.jsonl"),
        "data.prefetch": 0,
        "max_steps": 3 * TASKS["adapters, rate 1e-4"].work,
        "schedule.type": "constant",
        "batch_size": 8,
        "evaluation.answers": 0,
        "engine.compile": False,
        "seed": seed,
        **settings,
    }
    config = from_mapping(values)
    opened = open_base(str(base))
    data = prepare(config, opened)
    trainer = build_trainer(config, opened.model, data)
    batches = iter(Loader(data.train, config.batch_size, seed))
    return trainer, lambda _: next(batches), data.held_out.fixed_batches(config.batch_size, 4)


def run(name: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    from foretrain.hybrid import policy

    changes, stand_in = ARMS[arm]
    task = TASKS[name]
    real = policy.HorizonBandit
    policy.HorizonBandit = stand_in or real  # type: ignore[assignment,misc]
    try:
        if name.startswith("adapters"):
            trainer, batch, fixed = adapters(seed, {**task.settings, **changes}, folder)
            work = Work(trainer.engine.full_step.loss)
            trainer.engine.full_step.loss = work  # type: ignore[method-assign]
            judge: Callable[[], float] = lambda: float(trainer.engine.forward.forward_loss(fixed))  # noqa: E731
        else:
            model, batch, judged = task.build(seed)
            work = Work(model.loss)
            config = from_mapping({**task.settings, "max_steps": 3 * task.work, "seed": seed, **changes})
            trainer = HybridTrainer(model, None, lambda _, data: work(data), config)
            judge = lambda: float(model.loss(judged).detach())  # noqa: E731
    finally:
        policy.HorizonBandit = real  # type: ignore[misc]
    known: list[tuple[float, float]] = []
    number = 0
    while not known or known[-1][0] < task.work:
        trainer.step(batch(number))
        number += 1
        if not trainer.judging and work.done >= (known[-1][0] + LOOK if known else 0):
            work.on = False
            with torch.no_grad():
                known.append((work.done, judge()))
            work.on = True
    assert trainer.policy is not None
    moves = trainer.policy.score.counts.moves
    found = np.array(known)
    return {
        "task": name,
        "arm": arm,
        "seed": seed,
        "loss": float(np.exp(np.interp(task.work, found[:, 0], np.log(found[:, 1])))),
        "kept": moves["kept"] + moves["shrunk"],
        "tried": trainer.policy.score.counts.tried,
        "predicted_steps": trainer.policy.score.counts.predicted_steps,
        "corrections": trainer.summary()["corrections"],
    }


# --- results ---------------------------------------------------------------------------------------------------------


def paired(results: Sequence[dict[str, Any]], task: str, one: str, other: str) -> dict[str, Any] | None:
    """Ratio of the losses of two arms, seed by seed."""
    by = {(r["arm"], r["seed"]): r for r in results if r["task"] == task}
    seeds = sorted(seed for arm, seed in by if arm == one and (other, seed) in by)
    if len(seeds) < 2:
        return None
    logs = np.array([math.log(by[one, seed]["loss"] / by[other, seed]["loss"]) for seed in seeds])
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    mean = float(logs.mean())
    counts = {side: sum(by[side, seed]["kept"] for seed in seeds) for side in (one, other)}
    tried = {side: sum(by[side, seed]["tried"] for seed in seeds) for side in (one, other)}
    ratios = [r for seed in seeds if (r := by[one, seed]["corrections"]["error_ratio"]) is not None]
    return {
        "task": task,
        "seeds": len(seeds),
        "ratio": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "same_bits": int((logs == 0).sum()),
        "kept": [counts[one], counts[other]],
        "tried": [tried[one], tried[other]],
        "corrections_applied": sum(by[one, seed]["corrections"]["applied"] for seed in seeds),
        "forecast_error_with_correction": float(np.median(ratios)) if ratios else None,
    }


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over tasks: the mean of their means, each with its own uncertainty."""
    logs = np.array([math.log(row["ratio"]) for row in rows])
    errors = [math.log(row["high"] / row["ratio"]) / stats.t.ppf(0.975, row["seeds"] - 1) for row in rows]
    half = 1.96 * math.sqrt(sum(error**2 for error in errors)) / len(rows)
    mean = float(logs.mean())
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def tables(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name, one, other in COMPARED:
        found[name] = [row for task in TASKS if (row := paired(results, task, one, other)) is not None]
    return found


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in found.items():
        print(f"\n{name}: loss with / without, at equal work")
        for row in rows:
            interval = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            kept = " against ".join(f"{k}/{t}" for k, t in zip(row["kept"], row["tried"], strict=True))
            more = ""
            if name == "residual correction":
                error = row["forecast_error_with_correction"]
                more = f"; applied {row['corrections_applied']}x, error of forecasts x {error or math.nan:.3f}"
            print(f"  {row['task']:36} {interval:24} same bits {row['same_bits']}/{row['seeds']}; kept {kept}{more}")
        if rows:
            whole = together(rows)
            print(f"  {'all tasks':36} {whole['ratio']:.3f} [{whole['low']:.3f}, {whole['high']:.3f}]")


def work_through(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for name in TASKS:
                if options.only and options.only not in name:
                    continue
                arms = [arm for arm in options.arms if arm != "product" or name.startswith("adapters")]
                results += [run(name, arm, seed, Path(folder)) for arm in arms]
            print(f"seed {seed}: {time.process_time():.0f} s of CPU so far", file=sys.stderr, flush=True)
            options.rows.write_text(json.dumps(results), encoding="utf-8")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--only", help="tasks whose name holds this")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, help="also write all figures here")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # for the process that has the old source
    options = parser.parse_args()
    if options.rows:
        work_through(options)
        return
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    with tempfile.TemporaryDirectory() as folder:
        tree, rows = Path(folder) / "tree", Path(folder) / "rows.json"
        subprocess.run([*git, "worktree", "add", "--detach", "--quiet", str(tree), COMMIT], check=True)
        try:
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rows", str(rows)]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree / "src")}, check=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
        results = json.loads(rows.read_text(encoding="utf-8"))
    found = tables(results)
    show(found)
    if options.out:
        report = {
            "benchmark": "worth of parts",
            "command": " ".join(["python", "benchmarks/worth_of_parts.py", *sys.argv[1:]]),
            "commit": COMMIT,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment.describe("cpu"),
            "compared": found,
            "together": {name: together(rows) for name, rows in found.items() if rows},
            "runs": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
