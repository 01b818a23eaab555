"""Full-batch training, where leaps can be judged on the exact loss: seconds and gradients to a tuned loop's final loss.

python benchmarks/low_noise.py                       # all problems, three seeds (needs scikit-learn)
python benchmarks/low_noise.py --problems poisson diabetes_mlp --seeds 2

The reference is Adam with a cosine schedule at the best of five learning rates; its final loss is the target of all
others. The hybrid arms use one learning rate (3e-3) everywhere, not a tuned one. All arms of a problem and seed run one
after the other in one process, on one thread; everything is charged, probes and refused leaps included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.trainer import HybridTrainer

STEPS = 2000
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SLACK = 1 + 1e-5
"""Runs that end at the floor of float32 must be able to meet the target again."""
HYBRID = {"hybrid.warmup_steps": 20, "hybrid.full_steps": 10, "hybrid.max_predict_steps": 200}


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer] if index == len(sizes) - 2 else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


# --- physics-informed networks: an equation instead of data ----------------------------------------------------------


def derivative(values: Tensor, points: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return found


def poisson() -> Problem:
    """-u'' = f on [0, 1], u = sin(pi x) + 0.3 sin(4 pi x)."""
    x = torch.linspace(0, 1, 128).view(-1, 1)
    force = math.pi**2 * torch.sin(math.pi * x) + 0.3 * 16 * math.pi**2 * torch.sin(4 * math.pi * x)

    def loss(model: nn.Module) -> Tensor:
        points = x.clone().requires_grad_()
        u = model(points)
        residual = -derivative(derivative(u, points), points) - force
        return residual.square().mean() / 100 + u[[0, -1]].square().mean()

    return Problem(lambda: mlp(1, 32, 32, 1), loss)


def cubic() -> Problem:
    """-u'' + u^3 = f on [0, 1], u = 2 sin(2 pi x)."""
    x = torch.linspace(0, 1, 128).view(-1, 1)
    exact = 2 * torch.sin(2 * math.pi * x)
    force = 4 * math.pi**2 * exact + exact**3

    def loss(model: nn.Module) -> Tensor:
        points = x.clone().requires_grad_()
        u = model(points)
        residual = -derivative(derivative(u, points), points) + u**3 - force
        return residual.square().mean() / 100 + u[[0, -1]].square().mean()

    return Problem(lambda: mlp(1, 32, 32, 32, 1), loss)


def burgers() -> Problem:
    """u_t + u u_x = 0.05 u_xx, u(x, 0) = -sin(pi x), u(-1, t) = u(1, t) = 0."""
    generator = torch.Generator().manual_seed(99)
    inside = torch.rand(512, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    start, side = torch.linspace(-1, 1, 64), torch.linspace(0, 1, 32)
    edge = torch.cat(
        [torch.stack([start, 0 * start], 1), torch.stack([0 * side + 1, side], 1), torch.stack([0 * side - 1, side], 1)]
    )
    wanted = torch.cat([-torch.sin(math.pi * start), 0 * side, 0 * side]).view(-1, 1)

    def loss(model: nn.Module) -> Tensor:
        points = inside.clone().requires_grad_()
        u = model(points)
        slopes = derivative(u, points)
        bend = derivative(slopes[:, 0], points)[:, :1]
        residual = slopes[:, 1:] + u * slopes[:, :1] - 0.05 * bend
        return residual.square().mean() + (model(edge) - wanted).square().mean()

    return Problem(lambda: mlp(2, 32, 32, 32, 1), loss)


# --- real tables, all rows in every step -----------------------------------------------------------------------------


def table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    x = torch.tensor(data.data, dtype=torch.float64)
    return ((x - x.mean(0)) / (x.std(0) + 1e-8)).float(), torch.tensor(data.target)


def diabetes_mlp() -> Problem:
    x, y = table("diabetes")
    y = ((y - y.mean()) / y.std()).float().view(-1, 1)
    return Problem(lambda: mlp(10, 32, 32, 1), lambda model: F.mse_loss(model(x), y))


def diabetes_least_squares() -> Problem:
    """Products of all features: condition number of some thousands."""
    x, y = table("diabetes")
    rows, columns = torch.triu_indices(10, 10)
    x = torch.cat([x, x[:, rows] * x[:, columns]], 1)
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).float().view(-1, 1)
    return Problem(lambda: mlp(x.shape[1], 1), lambda model: F.mse_loss(model(x), y))


def cancer_logistic() -> Problem:
    x, y = table("breast_cancer")
    y = y.float().view(-1, 1)

    def loss(model: nn.Module) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.binary_cross_entropy_with_logits(model(x), y) + 5e-5 * penalty

    return Problem(lambda: mlp(30, 1), loss)


PROBLEMS = {
    problem.__name__: problem
    for problem in (poisson, cubic, burgers, diabetes_mlp, diabetes_least_squares, cancer_logistic)
}


# --- arms ------------------------------------------------------------------------------------------------------------


class Reached(Exception):
    """The target loss was seen."""


@dataclass
class Outcome:
    seconds: float | None
    """To the target; None if it was not reached."""
    gradients: int
    loss: float


def foretrain(problem: Problem, seed: int, target: float, seconds: float, settings: dict[str, Any]) -> Outcome:
    values = {
        "max_steps": STEPS,
        "device": "cpu",
        "seed": seed,
        "optimizer.type": "adam",
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.999,
        "optimizer.gradient_clip_norm": 0.0,
        "schedule.type": "constant",
        **settings,
    }
    torch.manual_seed(seed)
    model = problem.build()
    trainer = HybridTrainer(model, None, lambda model, _: problem.loss(model), from_mapping(values))
    batch, best, started = torch.zeros(1), math.inf, time.perf_counter()
    while (trainer.global_step < STEPS or trainer.judging) and time.perf_counter() - started < seconds:
        best = min(best, trainer.step(batch).loss)
        if best <= target:
            return Outcome(time.perf_counter() - started, trainer.backward_passes, best)
    if trainer.pilot is None:
        best = float(problem.loss(model).detach())  # a plain loop ends where its schedule ends
    return Outcome(None, trainer.backward_passes, best)


def lbfgs(problem: Problem, seed: int, target: float, seconds: float, history: int) -> Outcome:
    torch.manual_seed(seed)
    model = problem.build()
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=20,
        max_eval=25,
        history_size=history,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    seen = {"best": math.inf, "count": 0}
    started = time.perf_counter()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        seen["best"], seen["count"] = min(seen["best"], float(loss.detach())), seen["count"] + 1
        if seen["best"] <= target:
            raise Reached
        return loss

    try:
        while time.perf_counter() - started < seconds and seen["count"] < 3 * STEPS:
            optimizer.step(closure)
    except Reached:
        return Outcome(time.perf_counter() - started, int(seen["count"]), seen["best"])
    return Outcome(None, int(seen["count"]), seen["best"])


def measure(name: str, seed: int) -> dict[str, Any]:
    problem = PROBLEMS[name]()
    cosine = {"hybrid.mode": "off", "schedule.type": "cosine", "schedule.warmup_steps": 0}
    sweep = {}
    for rate in RATES:
        sweep[rate] = foretrain(problem, seed, -1.0, 600, {**cosine, "optimizer.learning_rate": rate}).loss
    rate = min(sweep, key=lambda key: sweep[key])
    target = sweep[rate] * SLACK
    plain = foretrain(problem, seed, target, 600, {**cosine, "optimizer.learning_rate": rate})
    limit = max(2.0, 2 * (plain.seconds or 10.0))
    hybrid = {"optimizer.learning_rate": 3e-3}
    arms = {
        "adam, tuned cosine": plain,
        "hybrid": foretrain(problem, seed, target, limit, {**hybrid, **HYBRID}),
        "hybrid, default phases": foretrain(problem, seed, target, limit, hybrid),
        "hybrid, forecast leaps only": foretrain(
            problem, seed, target, limit, {**hybrid, **HYBRID, "hybrid.secant_pairs": 0}
        ),
        "hybrid, learning rate 3e-4": foretrain(
            problem, seed, target, limit, {**HYBRID, "optimizer.learning_rate": 3e-4}
        ),
        "l-bfgs 10": lbfgs(problem, seed, target, limit, 10),
        "l-bfgs 100": lbfgs(problem, seed, target, limit, 100),
    }
    return {
        "problem": name,
        "seed": seed,
        "learning_rate": rate,
        "sweep": {str(key): value for key, value in sweep.items()},
        "target": target,
        "arms": {arm: vars(outcome) for arm, outcome in arms.items()},
    }


def speedups(results: list[dict[str, Any]], arm: str) -> list[float | None]:
    """Seconds of the tuned loop / seconds of the arm, per run; None where the target was missed."""
    found = []
    for result in results:
        mine, plain = result["arms"][arm]["seconds"], result["arms"]["adam, tuned cosine"]["seconds"]
        found.append(plain / mine if mine and plain else None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lbfgs(PROBLEMS["poisson"](), 0, 0.0, 0.2, 10)  # its import alone takes a second
    results = []
    for name in options.problems:
        for seed in range(1, options.seeds + 1):
            results.append(measure(name, seed))
            ratios = {arm: speedups(results[-1:], arm)[0] for arm in results[-1]["arms"]}
            words = ", ".join(f"{arm} {ratio:.1f}x" if ratio else f"{arm} missed" for arm, ratio in ratios.items())
            print(f"{name} seed {seed}: {words}", file=sys.stderr, flush=True)
    report = {
        "benchmark": "low noise",
        "command": " ".join(["python", "benchmarks/low_noise.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'problem':<24}{'arm':<30}{'speed-up, median':>17}{'lowest':>8}{'reached':>9}{'gradients':>11}")
    for name in options.problems:
        rows = [result for result in results if result["problem"] == name]
        for arm in rows[0]["arms"]:
            ratios = speedups(rows, arm)
            known = [ratio for ratio in ratios if ratio]
            gradients = statistics.median(row["arms"][arm]["gradients"] for row in rows)
            figures = f"{statistics.median(known):>16.1f}x{min(known):>7.1f}x" if known else f"{'-':>17}{'-':>8}"
            print(f"{name:<24}{arm:<30}{figures}{len(known):>6}/{len(ratios)}{gradients:>11.0f}")


if __name__ == "__main__":
    main()
