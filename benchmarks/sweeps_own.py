"""Own sweeps with a learning rate that falls: every trial runs to its end once, with annealed copies at every rung.

    python benchmarks/sweeps_own.py --out tables.jsonl

writes one line per run: what it set, its held-out losses, its annealed copies and its last loss. `sweeps.py` plays
policies back on these tables. A run that is in the file already is not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from foretrain import config as configuration
from foretrain.errors import DivergenceError
from foretrain.events import Annealed, Evaluated, Event
from foretrain.recipes.train import train
from foretrain.sweep.pieces import trial_config
from foretrain.sweep.sampling import values_of
from foretrain.sweep.space import Space, parse_space

SPACE = """
[base]
max_steps = {steps}
batch_size = 12
[base.model]
layers = 2
heads = 4
width = 48
context = 48
[base.optimizer]
type = "adamw"
[base.hybrid]
mode = "off"
[base.schedule]
type = "{schedule}"
[base.evaluation]
batches = 20
[base.health]
interval = 0
[base.forecast]
copy_steps = {copy}
[space]
"optimizer.learning_rate" = {{low = 5e-4, high = 5e-2, log = true}}
"optimizer.weight_decay" = {{low = 0.01, high = 1.0, log = true}}
"optimizer.beta2" = [0.9, 0.95, 0.99, 0.999]
[sweep]
trials = {trials}
seed = {seed}
"""


def space_of(schedule: str, copy: float, steps: int, trials: int, seed: int = 1) -> Space:
    text = SPACE.format(schedule=schedule, copy=copy, steps=steps, trials=trials, seed=seed)
    return parse_space(text, "the space", Path())


def measure(space: Space, number: int) -> dict[str, Any]:
    """Run one trial to its end, without a pause."""
    values = values_of(space, number, [])
    config = trial_config(space, values)
    losses: list[tuple[int, float]] = []
    copies: list[tuple[int, int, float, float]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Evaluated):
            losses.append((event.step, event.loss))
        elif isinstance(event, Annealed):
            copies.append((event.step, event.steps, event.loss, event.before))

    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            final = train(config, Path(folder) / "run", progress=False, listeners=[listen])["final_val_loss"]
        except DivergenceError:
            final = None
    return {
        "values": values,
        "final": final,
        "losses": losses,
        "annealed": copies,
        "cpu_seconds": round(time.process_time() - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=["wsd", "cosine"])
    parser.add_argument("--copies", type=float, nargs="+", default=[0.02])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(one["schedule"], one["copy"], one["number"], one["steps"], one["seed"]) for one in known}
    for copy in arguments.copies:
        for number in range(arguments.trials):
            for schedule in arguments.schedules:
                key = {"schedule": schedule, "copy": copy, "number": number, "steps": arguments.steps}
                key["seed"] = arguments.seed
                if tuple(key.values()) in done:
                    continue
                space = space_of(schedule, copy, arguments.steps, arguments.trials, arguments.seed)
                result = key | measure(space, number)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{schedule} {number} copies {copy}: {result['final']} in {result['cpu_seconds']} s", flush=True)


if __name__ == "__main__":
    configuration.from_mapping({})  # fails early where the package is not installed
    main()
