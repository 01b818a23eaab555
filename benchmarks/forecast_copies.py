"""What an annealed copy is worth to the forecast of a run: small language models, forecast with and without copies.

python benchmarks/forecast_copies.py --data ../shared/data --out results.json    # eight runs, some minutes
python benchmarks/forecast_copies.py --runs results.json                         # the table of runs that were made
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import config as configuration
from foretrain import environment
from foretrain.data import tokens
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.recipes import train as recipe
from foretrain.trainer import HybridTrainer

STEPS, EVERY = 1000, 25
COPIES = {100: 15, 120: 30, 160: 50, 230: 10, 250: 15, 270: 30, 310: 50, 370: 100, 480: 15, 500: 30, 540: 50, 600: 100}
"""Where copies are made, and how long they are."""
SHAKESPEARE = "text/tinyshakespeare.txt"
RUNS = (
    ("muon", 6e-3, "wsd", 1, ""),
    ("adamw", 3e-3, "wsd", 1, ""),
    ("muon", 1.5e-2, "cosine", 2, ""),
    ("muon", 6e-3, "wsd", 2, SHAKESPEARE),
    ("adamw", 3e-3, "cosine", 2, SHAKESPEARE),
    ("muon", 2e-2, "wsd", 3, SHAKESPEARE),
    ("adamw", 1e-3, "wsd", 3, ""),
    ("adamw", 6e-3, "wsd", 4, SHAKESPEARE),
)
"""Optimizer, rate, schedule, seed and text (none: Python's own sources)."""


def make(optimizer: str, rate: float, schedule: str, seed: int, text: str, data: Path) -> dict[str, Any]:
    """Train one run with all copies."""
    values = {
        "optimizer.type": optimizer,
        "optimizer.learning_rate": rate,
        "schedule.type": schedule,
        "seed": seed,
        "data.path": str(data / text) if text else "",
        "max_steps": STEPS,
        "hybrid.mode": "off",
        "model.layers": 2,
        "model.width": 96,
        "model.heads": 2,
        "model.context": 64,
        "batch_size": 8,
        "evaluation.batches": 40,
        "device": "cpu",
    }
    config = configuration.from_mapping(values)
    corpus = tokens.prepare(config.data, lambda _: None)
    config = configuration.with_beta2(recipe.with_vocabulary(config, corpus), 64)
    model = recipe.build_model(config)
    held_out = recipe.build_held_out(config, corpus, model)
    trainer = HybridTrainer(model, config=config, probe=held_out)
    losses = []
    for step, batch in zip(range(STEPS), recipe.build_loader(config, corpus, 64, torch.device("cpu")), strict=False):
        if step in COPIES:
            trainer.anneal(COPIES[step])
        trainer.step(batch)
        if (step + 1) % EVERY == 0:
            losses.append([step + 1, trainer.evaluate(held_out)])
    copies = [dataclasses.astuple(point) for point in trainer.copies.points]
    return {"values": values | {"data.path": text}, "losses": losses, "final": losses[-1][1], "annealed": copies}


def plan_of(run: dict[str, Any]) -> RatePlan:
    """Return how the rate went, as a share of its peak."""
    config = configuration.from_mapping(run["values"])
    from foretrain.engine import schedule

    at = np.arange(0.0, STEPS + 1, 10.0)
    rate = schedule.build(config.schedule, 1.0, STEPS)
    return RatePlan(STEPS, at, np.array([rate(int(step)) for step in at]))


def row(runs: list[dict[str, Any]], share: float, lengths: tuple[int, ...]) -> dict[str, float]:
    """Forecast all runs when this share of them was seen, with copies of these lengths."""
    errors, held, widths = [], [], []
    for run in runs:
        steps, losses = np.array(run["losses"], dtype=np.float64).T
        seen = steps <= share * STEPS
        points = tuple(
            AnnealedPoint(*point)
            for point in run["annealed"]
            if point[1] in lengths and 0.15 * STEPS < point[0] <= share * STEPS
        )
        made = forecast(LossCurve(steps[seen], losses[seen], plan_of(run), points))
        if made is not None:
            errors.append(100 * (made.loss / run["final"] - 1))
            held.append(made.low <= run["final"] <= made.high)
            widths.append(100 * (made.high - made.low) / made.loss)
    return {
        "median_error": float(np.median(np.abs(errors))),
        "mean": float(np.mean(errors)),
        "held": float(np.mean(held)),
        "width": float(np.median(widths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, help="a result of this script whose runs are used again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.runs is not None:
        runs = json.loads(options.runs.read_text())["runs"]
    else:
        runs = [make(*one, options.data) for one in RUNS]
    table = []
    for share in (0.25, 0.5, 0.75):
        for name, lengths in (("no copy", ()), ("copies of 15 steps", (15,)), ("all copies", tuple(COPIES.values()))):
            found = row(runs, share, lengths)
            table.append({"seen": share, "copies": name} | found)
            print(
                f"{share:.0%} seen, {name:<18} median error {found['median_error']:.1f} %, "
                f"mean {found['mean']:+.1f} %, "
                f"interval held {found['held']:.0%}, {found['width']:.0f} % wide"
            )
    if options.out is not None:
        result = {
            "benchmark": "forecast_copies",
            "date": f"{datetime.now().astimezone():%Y-%m-%d}",
            "command": " ".join(["python", "benchmarks/forecast_copies.py", *sys.argv[1:]]),
            "environment": environment.describe("cpu"),
            "table": table,
            "runs": runs,
        }
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
