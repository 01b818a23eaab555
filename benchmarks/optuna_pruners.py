"""foretrain's pruner beside Optuna's own: 20 trials, three seeds, the same trials for all of them.

python benchmarks/optuna_pruners.py --out FILE       # seconds to a minute on a CPU

Every trial is trained to its end once, and its held-out losses are played back to each pruner: so all see the same
trials, and what they would have saved is counted in steps. Two tasks: a constant rate, and one that falls to 0, of
which the pruner is told. Bars of foretrain's pruner: the best trial is that without pruning, for at most the steps of
Optuna's MedianPruner.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import torch

from foretrain import environment
from foretrain.integrations.optuna import ForecastPruner

STEPS, TRIALS, SEEDS, EVERY = 200, 20, (1, 2, 3), 4


def falling(step: int) -> float:
    return 1 - step / STEPS


def constant(step: int) -> float:
    return 1.0


RATES: dict[str, Callable[[int], float]] = {"constant rate": constant, "rate falls to 0": falling}


def pruners(rates: Callable[[int], float], seed: int) -> dict[str, optuna.pruners.BasePruner]:
    return {
        "none": optuna.pruners.NopPruner(),
        "median": optuna.pruners.MedianPruner(),
        "hyperband": optuna.pruners.HyperbandPruner(min_resource=EVERY, max_resource=STEPS),
        "successive halving": optuna.pruners.SuccessiveHalvingPruner(),
        "foretrain": ForecastPruner(STEPS, rates=rates),
    }


def suggest(trial: optuna.Trial) -> tuple[float, int, float]:
    rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
    width = trial.suggest_categorical("width", [8, 32, 128])
    return rate, int(width), trial.suggest_float("decay", 1e-4, 1.0, log=True)


def losses_of(rate: float, width: int, decay: float, rates: Callable[[int], float]) -> list[float]:
    """Held-out losses of a whole trial: a small network on noisy data, in batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    x = torch.randn(2048, 8)
    y = x.sin().sum(1, keepdim=True) + 0.3 * torch.randn(2048, 1)
    found = []
    for step in range(1, STEPS + 1):
        rows = torch.randint(1536, (64,))
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            with torch.no_grad():
                found.append(float(torch.nn.functional.mse_loss(model(x[1536:]), y[1536:])))
    return found


def sweep(seed: int, rates: Callable[[int], float], known: dict[int, list[float]]) -> dict[str, dict[str, Any]]:
    """Best value and steps of each pruner. known: losses by number of the trial."""
    found = {}
    for name, pruner in pruners(rates, seed).items():
        sampler = optuna.samplers.RandomSampler(seed=seed)
        study = optuna.create_study(study_name=str(seed), sampler=sampler, pruner=pruner)  # hyperband draws by the name
        steps = 0
        for _ in range(TRIALS):
            trial = study.ask()
            own = suggest(trial)
            if trial.number not in known:
                known[trial.number] = losses_of(*own, rates)
            for place, loss in enumerate(known[trial.number], 1):
                steps += EVERY
                trial.report(loss, place * EVERY)
                if trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    break
            else:
                study.tell(trial, known[trial.number][-1])
        found[name] = {"best_trial": study.best_trial.number, "best": study.best_value, "steps": steps}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    chosen = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for task, rates in RATES.items():
        for seed in SEEDS:
            found = sweep(seed, rates, {})
            for name, row in found.items():
                row["same_best"] = row["best_trial"] == found["none"]["best_trial"]
                rows.append({"task": task, "seed": seed, "pruner": name, **row})
                share = row["steps"] / (TRIALS * STEPS)
                best = f"{row['best']:.4f}, {'the same' if row['same_best'] else 'another'} trial"
                print(f"{task:16} seed {seed} {name:18} {share:5.0%} of the steps, best {best}")
    if chosen.out is not None:
        facts = {**environment.describe(), "date": f"{datetime.now().astimezone():%Y-%m-%d}"}
        chosen.out.write_text(json.dumps({"environment": facts, "trials": TRIALS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
