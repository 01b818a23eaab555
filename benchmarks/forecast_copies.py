"""What an annealed copy is worth to the forecast of a run: small language models, forecast with and without copies.

python benchmarks/forecast_copies.py --data ../shared/data --out results.json    # eight runs, some minutes
python benchmarks/forecast_copies.py --data ../shared/data --others --out results.json              # of other texts
python benchmarks/forecast_copies.py --runs results.json ...                     # the table of runs that were made
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain import config as configuration
from foretrain import environment
from foretrain.data import tokens
from foretrain.forecast import transfer
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import AnnealedPoint, LossCurve, RatePlan
from foretrain.recipes import train as recipe
from foretrain.trainer import HybridTrainer

STEPS, EVERY = 1000, 25
COPIES = {100: 15, 120: 30, 160: 50, 230: 10, 250: 15, 270: 30, 310: 50, 370: 100, 480: 15, 500: 30, 540: 50, 600: 100}
"""Where copies are made, and how long they are."""
LATER = {200: 30, 235: 8, 250: 15, 270: 30, 480: 15, 500: 30, 600: 15}
COPIES_OF_OTHERS = {60: 15, 80: 8, 125: 15, 150: 8, 180: 15} | LATER
"""The same in runs of other texts."""
SHAKESPEARE = "text/tinyshakespeare.txt"
STORIES, ARTICLES = "text/tinystories_part1.txt.xz", "text/wikitext2_train.txt.xz"
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
OTHERS = (
    ("muon", 1e-2, "wsd", 31, STORIES),
    ("adamw", 2e-3, "wsd", 31, STORIES),
    ("muon", 6e-3, "cosine", 32, ARTICLES),
    ("adamw", 4e-3, "cosine", 32, STORIES),
    ("muon", 1.2e-2, "wsd", 33, ARTICLES),
    ("adamw", 2e-3, "wsd", 33, ARTICLES),
    ("muon", 1e-2, "cosine", 34, ""),
    ("adamw", 4e-3, "wsd", 34, ARTICLES),
)
"""Runs that had no say in any choice."""
LINE = (100, 125, 250)
"""Copies of 15 steps through which a line is drawn: runs have one of the first two, and the third."""
NAMES = (
    "no copy",
    "one copy, 15 steps at 25 %",
    "copies of 15 steps",
    "all copies",
    "all copies, also the earliest",
)
"""Rows of the table. Copies of 15 steps, and all: those from 15 % of the run on."""


def make(run: tuple[str, float, str, int, str], copies: dict[int, int], data: Path) -> dict[str, Any]:
    """Train one run with all copies."""
    optimizer, rate, schedule, seed, text = run
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
        if step in copies:
            trainer.anneal(copies[step])
        trainer.step(batch)
        if (step + 1) % EVERY == 0:
            losses.append([step + 1, trainer.evaluate(held_out)])
    made = [dataclasses.astuple(point) for point in trainer.copies.points]
    print(f"{run}: {losses[-1][1]:.4f}", flush=True)
    return {"values": values | {"data.path": text}, "losses": losses, "final": losses[-1][1], "annealed": made}


def make_all(data: Path, seed: int, others: bool) -> list[dict[str, Any]]:
    """Train eight runs. seed: what is added to that of each."""
    runs, copies = (OTHERS, COPIES_OF_OTHERS) if others else (RUNS, COPIES)
    return [make((*run[:3], run[3] + seed, run[4]), copies, data) for run in runs]


def plan_of(run: dict[str, Any]) -> RatePlan:
    """Return how the rate went, as a share of its peak."""
    config = configuration.from_mapping(run["values"])
    from foretrain.engine import schedule

    steps = config.max_steps
    at = np.arange(0.0, steps + 1, 10.0)
    rate = schedule.build(config.schedule, 1.0, steps)
    return RatePlan(steps, at, np.array([rate(int(step)) for step in at]))


def chosen(name: str, point: AnnealedPoint, steps: int) -> bool:
    """Whether a row of the table knows of a copy. steps: of the run."""
    late = point.step > 0.15 * steps
    short = point.steps == 15 * steps // STEPS
    return {
        "no copy": False,
        "one copy, 15 steps at 25 %": short and 4 * point.step == steps,
        "copies of 15 steps": short and late,
        "all copies": late,
        "all copies, also the earliest": True,
    }[name]


def error(run: dict[str, Any], share: float, name: str) -> tuple[float, bool, float]:
    """Forecast a run when this share of it was seen; error in percent, whether the interval held, and its width."""
    steps, losses = np.array(run["losses"], dtype=np.float64).T
    total = int(run["values"]["max_steps"])
    seen = steps <= share * total
    known = (AnnealedPoint(*point) for point in run["annealed"])
    points = tuple(one for one in known if one.step <= share * total and chosen(name, one, total))
    made = forecast(LossCurve(steps[seen], losses[seen], plan_of(run), points))
    if made is None:
        return float("nan"), False, float("nan")
    held = made.low <= run["final"] <= made.high
    return 100 * (made.loss / run["final"] - 1), held, 100 * (made.high - made.low) / made.loss


def name_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what runs that differ in their seed alone share."""
    values = run["values"]
    return tuple(values[name] for name in ("optimizer.type", "optimizer.learning_rate", "schedule.type", "data.path"))


def with_a_finished_run(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Forecast each run from each other one of the same optimizer, text and schedule: of another seed, or rate."""
    rows = []
    for share in (0.25, 0.5, 0.75):
        errors: dict[str, list[float]] = {"another seed": [], "another rate": []}
        for run, other in itertools.product(runs, others):
            mine, theirs = name_of(run), name_of(other)
            if run is other or (mine[0], *mine[2:]) != (theirs[0], *theirs[2:]):
                continue
            steps, losses = np.array(run["losses"], dtype=np.float64).T
            seen = steps <= share * STEPS
            finished = LossCurve(*np.array(other["losses"], dtype=np.float64).T, plan_of(other), kind="one")
            curve = LossCurve(steps[seen], losses[seen], plan_of(run), kind="one")
            made = forecast(curve, [finished])
            if made is not None:
                kind = "another seed" if mine == theirs else "another rate"
                errors[kind].append(100 * abs(made.loss / run["final"] - 1))
        for kind, found in ((kind, found) for kind, found in errors.items() if found):
            middle, far = (round(float(np.percentile(found, place)), 2) for place in (50, 90))
            rows.append({"seen": share, "finished": kind, "pairs": len(found), "median_error": middle, "p90": far})
            print(f"{share:.0%} seen, a finished run of {kind}: {middle:.2f} % ({far:.1f}), {len(found)} pairs")
    return rows


def by_two_copies(runs: list[dict[str, Any]]) -> float:
    """Forecast each run by a straight line through the losses of its copies at about 10 and at 25 %, against the
    logarithm of steps; return the median error in percent."""
    errors = []
    for run in runs:
        first, second = ((at + steps, loss) for at, steps, loss, _ in run["annealed"] if steps == 15 and at in LINE)
        slope = (second[1] - first[1]) / np.log(second[0] / first[0])
        errors.append(abs(second[1] + slope * np.log(STEPS / second[0]) - run["final"]) / run["final"])
    return round(100 * float(np.median(errors)), 2)


def alike(runs: list[dict[str, Any]], pairs: int = 10) -> list[dict[str, Any]]:
    """Return the pairs of runs of different settings with one schedule whose losses from 5 to 25 % of the run differ
    least: how far these lie apart, how far their copies at 25 % fell, and how far their ends lie apart, in percent."""
    rows = []
    for one, other in itertools.combinations(runs, 2):
        mine, theirs = name_of(one), name_of(other)
        if mine == theirs or mine[2] != theirs[2]:
            continue
        first, second = (
            np.log([loss for at, loss in run["losses"] if 0.05 * STEPS <= at <= 0.25 * STEPS]) for run in (one, other)
        )
        falls = [
            round(100 * (1 - loss / before), 1)
            for run in (one, other)
            for at, steps, loss, before in run["annealed"]
            if (at, steps) == (250, 15)
        ]
        apart = 100 * float(np.sqrt(np.mean((first - second) ** 2)))
        ends = 100 * abs(float(np.log(one["final"] / other["final"])))
        told = {"losses_apart": round(apart, 2), "copies_fell": falls, "ends_apart": round(ends, 1)}
        rows.append({"one": " ".join(map(str, mine)), "other": " ".join(map(str, theirs))} | told)
    return sorted(rows, key=lambda row: row["losses_apart"])[:pairs]


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Forecast all runs with and without copies; count runs that copies made worse by 0.05 points at least."""
    rows: list[dict[str, Any]] = []
    for share in (0.25, 0.5, 0.75):
        without = np.abs([error(run, share, "no copy")[0] for run in runs])
        for name in NAMES:
            errors, held, widths = np.array([error(run, share, name) for run in runs]).T
            found = {
                "seen": share,
                "copies": name,
                "median_error": round(float(np.median(np.abs(errors))), 2),
                "root_mean_square": round(float(np.sqrt(np.mean(errors**2))), 2),
                "mean": round(float(np.mean(errors)), 2),
                "worse_than_without": int(np.sum(np.abs(errors) > without + 0.05)),
                "held": float(np.mean(held)),
                "width": round(float(np.median(widths)), 1),
                "errors": [round(float(one), 2) for one in errors],
            }
            rows.append(found)
            print(
                f"{share:.0%} seen, {name:<30} median error {found['median_error']:.1f} %, "
                f"root mean square {found['root_mean_square']:.1f} %, mean {found['mean']:+.1f} %, "
                f"worse in {found['worse_than_without']} of {len(runs)}, "
                f"interval held {found['held']:.0%}, {found['width']:.0f} % wide"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", help="results of this script whose runs are used again")
    parser.add_argument("--seed", type=int, default=0, help="is added to the seed of each run")
    parser.add_argument("--others", action="store_true", help="eight runs of other texts, rates and seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.runs:
        sets = {file.stem: json.loads(file.read_text()) for file in options.runs}
    else:
        sets = {"these": {"runs": make_all(options.data, options.seed, options.others)}}
    tables = {}
    for name, found in sets.items():
        print(name)
        tables[name] = table(found["runs"])
    everything = [run for found in sets.values() for run in found["runs"]]
    beside: dict[str, Any] = {}
    now = transfer._SCATTER
    for weighed, scatter in (("scatter does not count", 0.0), ("now", now)):
        transfer._SCATTER = scatter
        print(f"a finished run beside it, {weighed}")
        told = {name: with_a_finished_run(found["runs"], everything) for name, found in sets.items() if options.runs}
        beside[weighed] = told
    lines = {name: by_two_copies(found["runs"]) for name, found in sets.items() if options.runs}
    print("a line through two copies:", lines)
    pairs = alike(everything) if options.runs else []
    for pair in pairs:
        print(json.dumps(pair))
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)  # noqa: S607
    if options.out is not None:
        result = {
            "benchmark": "forecast_copies",
            "date": f"{datetime.now().astimezone():%Y-%m-%d}",
            "command": " ".join(["python", "benchmarks/forecast_copies.py", *sys.argv[1:]]),
            "environment": environment.describe("cpu"),
            "tables": tables,
            "commit": commit.stdout.strip(),
            "with one finished run of any file beside it": beside,
            "runs that look alike until 25 %": pairs,
            "median error at 25 % of a line through two copies": lines,
        }
        options.out.write_text(json.dumps(result if options.runs else result | sets["these"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
