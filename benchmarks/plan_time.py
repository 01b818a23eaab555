"""`foretrain plan --time`, checked by training: does the model that it names end lowest in the time it was given?

python benchmarks/plan_time.py --data wiki.txt --seconds 60          # CPU; some ten minutes where nothing else runs

The plan names a model and a batch for this machine. It is trained, and so are models around it: half and twice its
depth and width, half and twice its batch, and the default one. Each makes as many steps as fit into the same time by
its own speed, which is the median of rounds in turns over all models, so that a machine that is busy for a while
slows all of them alike. Each finds its own learning rate (`auto`), charged alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain import environment
from foretrain.config import Config
from foretrain.models.gpt2 import GPT2Shape, shape_from_config
from foretrain.planning import scaling
from foretrain.planning.parameters import parameters_of
from foretrain.planning.scaling import Candidate, LossLaw, Speed, law_by, operations
from foretrain.planning.speed import operations_per_second
from foretrain.recipes.train import train

ROUNDS = 3
"""In which every model's speed is measured."""
LENGTH = 128


def settings(options: argparse.Namespace, shape: GPT2Shape, rows: int, steps: int, seed: int) -> Config:
    """Return the run of one model."""
    return configuration.from_mapping(
        {
            "seed": seed,
            "device": options.device,
            "data.path": str(options.data),
            "data.tokenizer": "byte",
            "model.layers": shape.layers,
            "model.heads": shape.heads,
            "model.width": shape.width,
            "model.context": LENGTH,
            "batch_size": rows,
            "max_steps": steps,
            "optimizer.learning_rate": "auto",
            "evaluation.batches": max(1, 16 * 16 // rows),
            "evaluation.interval": steps,
            "checkpoint.interval": steps,
        }
    )


def around(chosen: GPT2Shape) -> list[GPT2Shape]:
    """Return the model itself, and those of half and twice its depth and width."""
    depths = [replace(chosen, layers=layers) for layers in (chosen.layers // 2, 2 * chosen.layers)]
    widths = [
        replace(chosen, width=width, heads=max(1, width // 64)) for width in (chosen.width // 2, 2 * chosen.width)
    ]
    found = [chosen, *depths, *widths]
    return [shape for shape in found if shape.layers and shape.width >= 32]


def speeds(options: argparse.Namespace, tried: list[tuple[GPT2Shape, int]]) -> list[float]:
    """Return each model's operations per second: medians over rounds in turns."""
    found: list[list[float]] = [[] for _ in tried]
    for _ in range(ROUNDS):
        for number, (shape, rows) in enumerate(tried):
            speed = operations_per_second(settings(options, shape, rows, 1000, 0), shape, options.look)
            assert speed is not None
            found[number].append(speed)
    return [statistics.median(one) for one in found]


def planned(options: argparse.Namespace, asked: GPT2Shape) -> Candidate:
    """Return what `foretrain plan --time` would say: two measured sizes, as it does."""
    rows, measured = 16, []
    for shape in (asked, replace(asked, layers=1, width=64, heads=1)):
        speed = operations_per_second(settings(options, shape, rows, 1000, 0), shape, options.look)
        assert speed is not None
        measured.append((operations(shape, LENGTH), speed))
    law = law_by([], asked.vocab_size)
    found = scaling.best(asked, LENGTH, options.seconds, Speed(tuple(sorted(measured))), law)
    assert found is not None
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plan, measure speeds, train; return all of it."""
    base = settings(options, GPT2Shape(vocab_size=257, context=LENGTH, width=128, layers=4, heads=4), 16, 100, 0)
    asked = shape_from_config(base.model.model_copy(update={"vocab_size": 257}))
    choice = planned(options, asked)
    shape = replace(asked, layers=choice.layers, width=choice.width, heads=choice.heads)
    tried = [("planned", shape, choice.batch_size)]
    tried += [(f"{s.layers} x {s.width}", s, choice.batch_size) for s in around(shape)[1:]]
    tried += [
        ("half the batch", shape, max(1, choice.batch_size // 2)),
        ("twice the batch", shape, 2 * choice.batch_size),
    ]
    tried += [("default", asked, 16)]
    found = speeds(options, [(one, rows) for _, one, rows in tried])
    law, rows_of_table = LossLaw(), []
    for (name, one, rows), speed in zip(tried, found, strict=True):
        here = Speed(((operations(one, LENGTH), speed),))
        expected = scaling.candidate(one, LENGTH, options.seconds, here, law, rows)
        losses = []
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                summary = train(
                    settings(options, one, rows, expected.steps, seed),
                    Path(folder) / "run",
                    progress=False,
                    table=False,
                )
            losses.append(summary["final_val_loss"])
        row = {
            "name": name,
            "layers": one.layers,
            "width": one.width,
            "batch": rows,
            "parameters": parameters_of(one).elements,
            "steps": expected.steps,
            "expected": round(expected.loss, 4),
            "losses": [round(loss, 4) for loss in losses],
        }
        rows_of_table.append(row)
        print(json.dumps(row), flush=True)
    return {"seconds": options.seconds, "rows": rows_of_table, "environment": environment.describe(options.device)}


def main() -> None:
    """Read the options, measure, and write every number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="the time that the plan is made for")
    parser.add_argument("--look", type=float, default=1.0, help="seconds in which a speed is measured, per round")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options)
    means = {row["name"]: statistics.fmean(row["losses"]) for row in found["rows"]}
    best = min(means, key=lambda name: means[name])
    found["regret"] = means["planned"] / means[best] - 1.0
    print(f"lowest: {best}, {means[best]:.4f}; planned: {means['planned']:.4f}, {found['regret']:+.1%}")
    here = Path(__file__).parent / "results"
    out = options.out or here / f"{datetime.now().astimezone():%Y-%m-%d}-plan-time-{options.device}.json"
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
