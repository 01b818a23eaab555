"""Full-batch and nearly noise-free training: seconds to a tuned loop's final loss, and the loss in equal seconds.

python benchmarks/low_noise.py --out result.json                       # all problems, three seeds (needs scikit-learn)
python benchmarks/low_noise.py --problems poisson operator --seeds 1
python benchmarks/low_noise.py --device cuda --problems burgers helmholtz --width 256 --points 8192 --steps 1000

The reference is Adam with a cosine schedule at the best of its learning rates; its final loss is the target, and its
seconds are the time T. Rates are swept with the first seed, the two best of them with every other. SOAP and Muon: four
rates, each with cosine schedules that take 0.3 T and T. The hybrid arms run at one rate (3e-3) everywhere, and at 1/10
and 1/100 of the tuned one. All arms of a problem and seed run one after the other in one process; everything is
charged: probes, refused leaps, audits. Where batches differ, the loss is judged on a fixed set every ten steps, outside
the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.trainer import HybridTrainer
from low_noise_problems import PROBLEMS, Problem, Settings
from soap import Soap

RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
OTHER_RATES = {"soap": (3e-3, 1e-2, 3e-2, 1e-1), "muon": (3e-3, 1e-2, 3e-2, 1e-1)}
SHARES = (0.3, 1.0)
SLACK = 1 + 1e-5
"""Runs that end at the floor of float32 must be able to meet the target again."""
SHORT = {"hybrid.warmup_steps": 20, "hybrid.full_steps": 10, "hybrid.max_predict_steps": 200}
COSINE = {"schedule.type": "cosine", "schedule.warmup_steps": 0}
REFERENCE = "adam, tuned cosine"


@dataclass
class Curve:
    """A run: when it had which loss."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    final: float = math.inf
    """At the weights it ended with."""

    def reach(self, target: float) -> int | None:
        return next((index for index, loss in enumerate(self.losses) if loss <= target), None)

    def within(self, seconds: float) -> float:
        """Lowest loss until then."""
        known = [loss for at, loss in zip(self.seconds, self.losses, strict=True) if at <= seconds]
        return min(known, default=math.inf)

    def outcome(self, target: float, **more: Any) -> dict[str, Any]:
        at = self.reach(target)
        found = {"seconds": None, "gradients": self.gradients[-1] if self.gradients else 0, "loss": self.final}
        if at is not None:
            found |= {"seconds": self.seconds[at], "gradients": self.gradients[at]}
        return {**found, "total_seconds": self.seconds[-1] if self.seconds else 0.0, **more}


class Watch:
    """A clock that stops while the loss is judged."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self.problem, self.settings = problem, settings
        self.curve, self.steps = Curve(), 0
        self.away = 0.0
        self.started = self.now()

    def now(self) -> float:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started - self.away

    def note(self, loss: float, model: torch.nn.Module, gradients: int) -> None:
        """loss: of the step; it was read, so that the device is done with it."""
        at, self.steps = self.elapsed, self.steps + 1
        if not self.problem.exact:
            if self.steps % 10:
                return
            before = self.now()
            loss = self.problem.judge(model)
            self.away += self.now() - before
        self.curve.seconds.append(at)
        self.curve.losses.append(loss)
        self.curve.gradients.append(gradients)

    def end(self, model: torch.nn.Module) -> Curve:
        self.curve.final = self.problem.judge(model)
        return self.curve


@dataclass(frozen=True)
class Bench:
    problem: Problem
    settings: Settings
    seed: int
    steps: int

    def train(self, changes: dict[str, Any], steps: int = 0, seconds: float = 600.0, target: float = -1.0) -> Curve:
        """By foretrain: plain or hybrid. Ends after so many steps or seconds, or at the target."""
        steps = steps or self.steps
        kind = changes.get("optimizer.type", "adam")
        values = {
            "max_steps": steps,
            "device": self.settings.device,
            "seed": self.seed,
            "precision.type": "fp32",
            "engine.compile": False,  # it cannot take derivatives of derivatives
            "optimizer.type": "adam",
            "optimizer.weight_decay": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.gradient_clip_norm": 0.0,
            "optimizer.muon_scale": "original",
            "schedule.type": "constant",
            **changes,
        }
        torch.manual_seed(self.seed)
        model = self.problem.build()
        optimizer = None
        if kind == "soap":
            values["optimizer.type"] = "adam"
            optimizer = Soap(model.parameters(), lr=values["optimizer.learning_rate"])
        trainer = HybridTrainer(model, optimizer, self.problem.loss, from_mapping(values))
        watch = Watch(self.problem, self.settings)
        position = 0
        while (trainer.global_step < steps or trainer.judging) and watch.elapsed < seconds:
            loss = trainer.step(self.problem.batch(position)).loss
            position += 1
            watch.note(loss, model, trainer.backward_passes)
            if watch.curve.losses and watch.curve.losses[-1] <= target:
                break
        return watch.end(model)

    def lbfgs(self, history: int, seconds: float, target: float = -1.0) -> Curve:
        """Where batches differ, a new one every 20 iterations."""
        torch.manual_seed(self.seed)
        model = self.problem.build()
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            max_iter=20,
            max_eval=25,
            history_size=history,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        watch, position, count = Watch(self.problem, self.settings), 0, 0

        def closure() -> Tensor:
            nonlocal count
            optimizer.zero_grad()
            loss = self.problem.loss(model, batch)
            loss.backward()
            count += 1
            watch.note(float(loss.detach()), model, count)
            return loss

        while watch.elapsed < seconds and count < 4 * self.steps:
            batch, before = self.problem.batch(position), count
            position += 1
            optimizer.step(closure)
            stuck = count - before <= 2 and self.problem.exact
            if stuck or (watch.curve.losses and watch.curve.losses[-1] <= target):
                break
        return watch.end(model)

    def cosine(self, kind: str, rate: float, steps: int = 0, seconds: float = 600.0) -> Curve:
        changes = {**COSINE, "hybrid.mode": "off", "optimizer.type": kind, "optimizer.learning_rate": rate}
        return self.train(changes, steps, seconds)


Tuned = dict[str, list[Any]]
"""What the first seed found best, by optimizer."""


def reference(bench: Bench, tuned: Tuned) -> tuple[Curve, float]:
    curves = {rate: bench.cosine("adam", rate) for rate in tuned.get("adam", RATES)}
    order = sorted(curves, key=lambda rate: (not math.isfinite(curves[rate].final), curves[rate].final))
    tuned.setdefault("adam", order[:2])
    return curves[order[0]], order[0]


def other_first_order(bench: Bench, kind: str, tuned: Tuned, target: float, seconds: float) -> dict[str, Any]:
    """SOAP or Muon, rates and lengths of the schedule: the fastest to the target, and the lowest in equal seconds."""
    per_step = bench.cosine(kind, 1e-2, steps=40).seconds[-1] / 40
    tries = tuned.get(kind, list(itertools.product(OTHER_RATES[kind], SHARES)))
    curves = {
        (rate, share): bench.cosine(kind, rate, max(20, int(share * seconds / per_step)), 1.3 * seconds)
        for rate, share in tries
    }
    outcomes = {
        key: curve.outcome(target, learning_rate=key[0], schedule_share=key[1]) for key, curve in curves.items()
    }
    whole = [key for key in outcomes if key[1] == 1.0]
    lowest = min(whole, key=lambda key: outcomes[key]["loss"] if math.isfinite(outcomes[key]["loss"]) else math.inf)
    fastest = min(outcomes, key=lambda key: (outcomes[key]["seconds"] or math.inf, outcomes[key]["loss"]))
    tuned.setdefault(kind, list(dict.fromkeys([fastest, lowest])))
    return {**outcomes[fastest], "equal_seconds_loss": outcomes[lowest]["loss"]}


def measure(name: str, seed: int, settings: Settings, steps: int, tuned: Tuned) -> dict[str, Any]:
    bench = Bench(PROBLEMS[name](settings), settings, seed, steps)
    plain, rate = reference(bench, tuned)
    target = plain.final * SLACK
    arms = {REFERENCE: plain.outcome(target, learning_rate=rate, equal_seconds_loss=plain.final)}
    total = plain.seconds[-1]
    for kind in OTHER_RATES:
        arms[f"{kind}, tuned cosine"] = other_first_order(bench, kind, tuned, target, total)
    hybrid = {"optimizer.learning_rate": 3e-3}
    more = 3 * steps  # it is seconds that end them
    if not bench.problem.exact:  # noise has to be averaged away by the end: the reference's own schedule
        hybrid, more = {**COSINE, "optimizer.learning_rate": rate}, steps
    limit = total if bench.problem.exact else 2 * total
    for arm, changes in (("hybrid", hybrid), ("hybrid, short phases", {**hybrid, **SHORT})):
        curve = bench.train(changes, more, limit)
        arms[arm] = curve.outcome(target, equal_seconds_loss=curve.final)
    for history in (10, 100):
        curve = bench.lbfgs(history, total)
        arms[f"l-bfgs {history}"] = curve.outcome(target, equal_seconds_loss=curve.within(total))
    low = {}
    for part in (10, 100):
        slow = {"optimizer.learning_rate": rate / part}
        alone = bench.train({**slow, "hybrid.mode": "off"}, seconds=2 * total)
        own = max(alone.final, alone.losses[-1]) * SLACK
        ours = bench.train(slow, more, limit, min(own, target))
        low[f"1/{part}"] = {
            "plain": alone.outcome(own),
            "plain to the tuned target": alone.outcome(target),
            "hybrid": ours.outcome(own),
            "hybrid to the tuned target": ours.outcome(target),
        }
    return {
        "problem": name,
        "seed": seed,
        "target": target,
        "equal_seconds": total,
        "arms": arms,
        "below the tuned rate": low,
    }


def ratio(reference: dict[str, Any], outcome: dict[str, Any]) -> float | None:
    """Seconds of the reference / seconds of the other; None where the target was missed."""
    mine, plain = outcome["seconds"], reference["seconds"]
    return plain / mine if mine and plain else None


def columns(ratios: list[float | None]) -> str:
    known = [value for value in ratios if value]
    figures = f"{statistics.median(known):>8.1f}x{min(known):>7.1f}x" if known else f"{'-':>9}{'-':>8}"
    return f"{figures}{len(known):>5}/{len(ratios)}"


def show(name: str, rows: list[dict[str, Any]]) -> None:
    for arm in rows[0]["arms"]:
        outcomes = [row["arms"][arm] for row in rows]
        ratios = [ratio(row["arms"][REFERENCE], outcome) for row, outcome in zip(rows, outcomes, strict=True)]
        gradients = statistics.median(outcome["gradients"] for outcome in outcomes)
        loss = statistics.median(outcome["equal_seconds_loss"] for outcome in outcomes)
        print(f"{name:<24}{arm:<30}{columns(ratios)}{gradients:>10.0f}{loss:>14.3g}")
    for part in rows[0]["below the tuned rate"]:
        low = [row["below the tuned rate"][part] for row in rows]
        own = [ratio(arms["plain"], arms["hybrid"]) for arms in low]
        tuned = [
            ratio(row["arms"][REFERENCE], arms["hybrid to the tuned target"])
            for row, arms in zip(rows, low, strict=True)
        ]
        print(f"{name:<24}{f'hybrid at {part}, to plain there':<30}{columns(own)}")
        print(f"{name:<24}{f'hybrid at {part}, to the target':<30}{columns(tuned)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(options.device, options.width, options.points)
    first = Bench(PROBLEMS["operator"](settings), settings, 0, 50)
    first.lbfgs(10, 0.2)  # what is loaded, compiled and allocated only once
    first.cosine("adam", 1e-3)
    results = []
    report = {
        "benchmark": "low noise",
        "command": " ".join(["python", "benchmarks/low_noise.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": {**asdict(settings), "steps": options.steps},
        "environment": environment.describe(options.device),
        "results": results,
    }
    print(f"{'problem':<24}{'arm':<30}{'median':>9}{'lowest':>8}{'reached':>7}{'gradients':>10}{'loss, equal s':>14}")
    for name in options.problems:
        tuned: Tuned = {}
        rows = [measure(name, seed, settings, options.steps, tuned) for seed in range(1, options.seeds + 1)]
        results += rows
        show(name, rows)
        sys.stdout.flush()
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
