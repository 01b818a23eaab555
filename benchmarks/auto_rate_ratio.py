"""Whether `optimizer.learning_rate = "auto"` should find the ratio of Muon's two rates, too: what another ratio is
worth in whole runs, and whether short trials as `auto` makes them can tell which one is best.

python benchmarks/auto_rate_ratio.py --seeds 2 --data ../shared/data --out result.json       # one CPU core, 15 minutes
python benchmarks/auto_rate_ratio.py --seeds 1 --beta2 0.95 --matrix 0.5 2 --ratios 0.25 0.5 1 2 --out result.json
python benchmarks/auto_rate_ratio.py --seeds 2 --own 0.5 --out result.json
python benchmarks/auto_rate_ratio.py --seeds 1 --tasks wider-muon --ratios 0.25 0.5 1 2 --out result.json

The rate of the matrices is what `auto` finds where both rates are the same (`--matrix`: a multiple of it); that of the
rest (embeddings, vectors) is `--ratios` times as high. `optimizer.beta2` is what a module of one's own has, and what
`foretrain train` has in runs of so few tokens per step. All runs of a seed begin with the same weights and batches. A
trial is that of `auto`: the first 5.5 % of the run, then 1 % in which the rate falls to 0, and held-out data judges it;
it has the matrix rate of trials, which the correction for the length has not touched. Copies of a whole run, brought to
a rate of 0 later on, tell whether longer trials would be better. `--own`: `auto` itself keeps the ratio while it looks
for the matrix rate, and the whole run has that rate. The loss of a whole run is that of a test set. What
--out holds is not run again, so calls add up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from auto_rate_tasks import BYTES, TASKS, RateTask, Work, _text, settings_of
from foretrain import HybridTrainer, environment
from foretrain.config import from_mapping
from foretrain.hybrid.rate_plan import RacePlan, found_rate, plan_of

WIDER = {"optimizer.type": "muon", "model.layers": 4, "model.width": 128, "model.context": 64, "batch_size": 16}
MUON_TASKS = {
    **{name: TASKS[name] for name in ("bytes-muon", "bytes-wiki-muon", "other-muon")},
    "wider-muon": RateTask(BYTES | WIDER | {"max_steps": 800}, _text, "text/tinyshakespeare.txt"),
}
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
COPIES = (0.055, 0.11, 0.22)
"""Shares of a whole run at which a copy of it is brought to a rate of 0."""
EXPONENT = 0.08
"""Correction for the length of the run that `auto` has for language models and Muon."""
BATCHES = 64
"""Of the test set, so that differences of 0.2 % can be seen."""
JUDGES = 8
"""Every eighth held-out batch judges a trial: as many as in the other benchmarks of `auto`."""
BETAS = (0.95, 0.999)

Runs = list[dict[str, Any]]


# --- runs -------------------------------------------------------------------------------------------------------------


def trainer_of(
    task: RateTask, options: argparse.Namespace, seed: int, changes: dict[str, Any]
) -> tuple[Work, HybridTrainer]:
    """Return what a run needs, and its trainer, which is judged by as many batches as `auto` has."""
    settings = settings_of(task, options.data, "cpu", seed, {"evaluation.batches": BATCHES} | changes)
    config = from_mapping(settings)
    work = task.build(config)
    judges = work.held_out[::JUDGES]
    trainer = HybridTrainer(work.model, loss_fn=work.loss_fn, config=config, probe=judges)
    if trainer.race is not None:
        trainer.race.use(judges, config.model.context or work.model.shape.context)
    return work, trainer


def found_by_auto(
    task: RateTask, options: argparse.Namespace, beta2: float, seed: int, ratio: float = 1.0
) -> dict[str, Any]:
    """Run until `auto` has found a rate with this ratio, and return what it says."""
    changes = {
        "optimizer.learning_rate": "auto",
        "optimizer.beta2": beta2,
        "optimizer.rest_rate_factor": ratio,
    }
    work, trainer = trainer_of(task, options, seed, changes)
    batches = iter(work.loader)
    assert trainer.race is not None
    while trainer.race.open:
        trainer.step(next(batches))
    return trainer.race.summary()


def pair(task: RateTask, options: argparse.Namespace, key: dict[str, Any], rate: float) -> dict[str, Any]:
    """Run a trial and a whole run with the same ratio. rate: of the matrices in the whole run."""
    seed = key["seed"]
    steps = int(task.settings["max_steps"])
    plan = plan_of(steps, adapters=False)
    own = {
        "optimizer.rest_rate_factor": key["ratio"],
        "optimizer.beta2": key["beta2"],
        "schedule.warmup_steps": plan.warmup,
    }
    trial = own | {
        "optimizer.learning_rate": rate * (steps / plan.length) ** EXPONENT,
        "max_steps": plan.length,
        "schedule.decay_steps": plan.anneal,
    }
    whole = own | {
        "optimizer.learning_rate": rate,
        "forecast.copies": list(COPIES),
        "forecast.copy_steps": plan.anneal / steps,
    }
    return {
        **key,
        "matrix_rate": rate,
        "trial": ended(task, options, seed, trial)["judges"],
        **ended(task, options, seed, whole),
    }


def ended(task: RateTask, options: argparse.Namespace, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Run to the end and return the losses there, and those of copies."""
    work, trainer = trainer_of(task, options, seed, changes)
    batches = iter(work.loader)
    for _ in range(trainer.engine.config.max_steps):
        trainer.step(next(batches))
    return {
        "test": trainer.evaluate(work.test),
        "held_out": trainer.evaluate(work.held_out),
        "judges": trainer.evaluate(work.held_out[::JUDGES]),
        "copies": [point.loss for point in trainer.copies.points],
    }


# --- what follows -----------------------------------------------------------------------------------------------------


def lowest(losses: dict[float, float]) -> float:
    """Return the ratio at the lowest place by the rule by which `auto` finds a rate."""
    plan = RacePlan(steps=1, anneal=0, factor=2.0, budget=0, reach=9, exponent=0.0, refined=True)
    tried = {round(math.log2(ratio)): loss for ratio, loss in losses.items()}
    return round(found_rate(plan, 1.0, tried, 1).rate, 3)


def chosen(losses: dict[float, float]) -> float:
    """Return the ratio with the lowest loss. One that is no number has lost."""
    return min(losses, key=lambda ratio: losses[ratio] if math.isfinite(losses[ratio]) else math.inf)


def verdict(runs: Runs) -> dict[str, Any]:
    """Compare what trials choose with what whole runs want; all runs have the same seed and the same matrix rate."""
    by = {one["ratio"]: one for one in runs}
    if 1.0 not in by:
        return {}
    gain = {ratio: 100 * (one["test"] / by[1.0]["test"] - 1) for ratio, one in sorted(by.items())}
    wanted = {ratio: one["held_out"] for ratio, one in by.items()}
    moments = {"trial": {ratio: one["trial"] for ratio, one in by.items()}}
    for place, share in enumerate(COPIES):
        moments[f"copy at {share:g}"] = {ratio: one["copies"][place] for ratio, one in by.items()}
    picks = {
        name: {"ratio": chosen(losses), "parabola": lowest(losses), "gain_percent": round(gain[chosen(losses)], 3)}
        for name, losses in {"whole run": wanted, **moments}.items()
    }
    near = {ratio: loss for ratio, loss in moments["trial"].items() if 0.5 <= ratio <= 2}
    picks["trial of three"] = {"ratio": chosen(near), "gain_percent": round(gain[chosen(near)], 3)}
    return {"test_percent": {f"{ratio:g}": round(percent, 3) for ratio, percent in gain.items()}, **picks}


def verdicts(runs: Runs) -> dict[str, Any]:
    """Return a verdict of every `beta2`, matrix rate and seed."""
    kinds = sorted({kind_of(one) for one in runs})
    return {
        f"beta2 {beta2:g}, {multiple:g} times the matrix rate, seed {seed}": verdict(
            [one for one in runs if kind_of(one) == (beta2, multiple, seed)]
        )
        for beta2, multiple, seed in kinds
    }


def of_own(found: dict[str, Any]) -> dict[str, float]:
    """Return by how many percent the test loss changes where `auto` keeps another ratio while it looks for a rate."""
    equal: dict[float, dict[int, float]] = {one["beta2"]: {} for one in found["runs"]}
    for one in found["runs"]:
        if (one["multiple"], one["ratio"]) == (1.0, 1.0):
            equal[one["beta2"]][one["seed"]] = one["test"]
    return {
        f"beta2 {one['beta2']:g}, ratio {one['ratio']:g}, seed {one['seed']}": round(
            100 * (one["test"] / equal[one["beta2"]][one["seed"]] - 1), 3
        )
        for one in found["own"]
        if one["seed"] in equal.get(one["beta2"], {})
    }


def table(tasks: dict[str, Any]) -> list[str]:
    """Return rows of a table: by task, `beta2` and matrix rate, the change of the test loss against equal rates in
    percent, mean of seeds, and which ratio whole runs and trials find best, by seed."""
    rows = []
    for name, found in tasks.items():
        by: dict[tuple[float, float], list[dict[str, Any]]] = {}
        for beta2, multiple, seed in sorted({kind_of(one) for one in found["runs"]}):
            kind = f"beta2 {beta2:g}, {multiple:g} times the matrix rate, seed {seed}"
            by.setdefault((beta2, multiple), []).append(found["verdicts"][kind])
        for (beta2, multiple), seeds in by.items():
            cells = [_mean(seeds, f"{ratio:g}") for ratio in RATIOS if ratio != 1]
            cells += [", ".join(f"{one[choice]['ratio']:g}" for one in seeds) for choice in ("whole run", "trial")]
            rows.append(f"| {' | '.join([name, f'{beta2:g}', f'{multiple:g}', *cells])} |")
    return rows


def _mean(seeds: list[dict[str, Any]], ratio: str) -> str:
    percents = [one["test_percent"][ratio] for one in seeds if ratio in one["test_percent"]]
    return f"{statistics.fmean(percents):+.2f} %" if percents else ""


def kind_of(one: dict[str, Any]) -> tuple[float, float, int]:
    return one["beta2"], one["multiple"], one["seed"]


def mean_gains(tasks: dict[str, Any], beta2: float, name: str) -> dict[str, float]:
    """Return what choosing by one kind of loss changes in the test loss, in percent, by task, mean of seeds, at the
    matrix rate that `auto` found."""
    gains = {}
    for task, found in tasks.items():
        start = f"beta2 {beta2:g}, 1 times"
        own = [one for key, one in found["verdicts"].items() if key.startswith(start) and name in one]
        if own:
            gains[task] = round(statistics.fmean(one[name]["gain_percent"] for one in own), 3)
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(MUON_TASKS), default=list(MUON_TASKS)[:3])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--matrix", type=float, nargs="+", default=[1.0], help="times the matrix rate of `auto`")
    parser.add_argument("--beta2", type=float, nargs="+", default=list(BETAS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=float, nargs="*", default=[], help="ratios that `auto` itself keeps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"tasks": {}}
    kept |= {
        "benchmark": "the ratio of Muon's two rates: whole runs and short trials",
        "command": " ".join(["python", "benchmarks/auto_rate_ratio.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(__file__).parents[1] / "src"),
        "environment": environment.describe("cpu"),
    }
    for beta2, seed, name in product(options.beta2, range(1, options.seeds + 1), options.tasks):
        task, found = MUON_TASKS[name], kept["tasks"].setdefault(name, {"auto": {}, "runs": []})
        auto = f"beta2 {beta2:g}, seed {seed}"
        if auto not in found["auto"]:
            found["auto"][auto] = found_by_auto(task, options, beta2, seed)
        for multiple, ratio in product(options.matrix, options.ratios):
            key = {"beta2": beta2, "multiple": multiple, "seed": seed, "ratio": ratio}
            if any(key.items() <= one.items() for one in found["runs"]):
                continue
            found["runs"].append(one := pair(task, options, key, multiple * found["auto"][auto]["chosen"]))
            print(f"{name} {key}: trial {one['trial']:.4f}, test {one['test']:.4f}", flush=True)
            found["verdicts"] = verdicts(found["runs"])
            options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        for ratio in options.own:
            key = {"beta2": beta2, "seed": seed, "ratio": ratio}
            runs = found.setdefault("own", [])
            if any(key.items() <= one.items() for one in runs):
                continue
            rate = found_by_auto(task, options, beta2, seed, ratio)["chosen"]
            runs.append(one := pair(task, options, key, rate))
            print(f"{name} {key} at its own rate {rate:.4f}: test {one['test']:.4f}", flush=True)
            found["own_percent"] = of_own(found)
            options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kept["mean_gain_percent"] = {
        f"beta2 {beta2:g}, by {choice}": mean_gains(kept["tasks"], beta2, choice)
        for beta2 in BETAS
        for choice in ("whole run", "trial", "trial of three")
    }
    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(kept["tasks"])))
    print(json.dumps(kept["mean_gain_percent"]))


if __name__ == "__main__":
    main()
