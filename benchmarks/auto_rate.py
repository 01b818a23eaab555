"""`optimizer.learning_rate = "auto"` against full runs at seven rates: the final loss, and what it costs in runs.

python benchmarks/auto_rate.py --tasks bytes-adamw bytes-muon digits diabetes --data ../shared/data --out result.json
python benchmarks/auto_rate.py --tasks lm30m-wiki-adamw --data FOLDER --device cuda --seeds 3 --out result.json

A FOLDER for a GPU holds `enwiki_train.bin` and `stories_train.bin`, GPT-2's tokens of two corpora (little-endian
uint16). Every run of a seed begins with the same weights and batches. Rates are chosen on held-out data, and the loss
that is reported is measured on a test set that no decision knows: at the end of the run, and (`best`) where the
held-out loss was lowest of --looks, as a run ends that keeps its best weights. The swept rates are a factor of two
apart around the default rate of the optimizer (or `--middle`); their warm-up is the usual one, or --warmup. With
--near N seeds after the Nth run at the best rate so far and its two neighbours alone, of which the best is chosen then.
What --out holds is not run again, so calls add up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from auto_rate_tasks import TASKS, RateTask, settings_of
from foretrain import HybridTrainer, environment
from foretrain.config import from_mapping, with_beta2, with_warmup
from foretrain.engine.batches import batches_in

RATES = 7
PATIENCE = 5
_DEFAULT = {"adamw": 2e-3, "muon": 6e-3}


def run(task: RateTask, options: argparse.Namespace, rate: float | str, seed: int) -> dict[str, Any]:
    """One whole run at a rate, or with `auto`."""
    torch.compiler.reset()  # it keeps a few versions per function and would then stop compiling
    steps = options.steps or int(task.settings["max_steps"])
    changes = {"optimizer.learning_rate": rate, "max_steps": steps}
    if options.warmup is not None and rate != "auto":
        changes["schedule.warmup_steps"] = round(options.warmup * steps)
    if options.copies and rate != "auto":
        changes |= {"forecast.copies": options.copies, "forecast.copy_steps": 0.01}
    config = from_mapping(settings_of(task, options.data, options.device, seed, changes))
    work = task.build(config)
    if task.text:
        config = with_warmup(with_beta2(config, work.model.shape.context))  # as `foretrain train` does
    trainer = HybridTrainer(work.model, loss_fn=work.loss_fn, config=config, probe=work.held_out)
    if trainer.race is not None and task.text:
        trainer.race.use(work.held_out, config.model.context or work.model.shape.context)
    batches, seconds = iter(work.loader), 0.0
    looks = []
    for place in range(options.looks):
        started = clock(options.device)
        for _ in range(place * steps // options.looks, (place + 1) * steps // options.looks):
            trainer.step(next(batches))
        seconds += clock(options.device) - started
        looks.append((trainer.evaluate(work.held_out), trainer.evaluate(work.test), trainer.global_step))
    lowest = min(looks, key=lambda look: _number(look[0]))
    return {
        "rate": rate,
        "seed": seed,
        "test": trainer.evaluate(work.test),
        "held_out": trainer.evaluate(work.held_out),
        "best": {"held_out": lowest[0], "test": lowest[1], "step": lowest[2]},
        "ends_early_at": ends_early(looks),
        "seconds": round(seconds, 3),
        "backward_passes": trainer.backward_passes,
        "steps": steps,
        "passes": round(steps / (batches_in(work.loader) or math.inf), 2),
        "found": None if trainer.race is None else trainer.race.summary(),
        "copies": [asdict(point) for point in trainer.copies.points],
    }


def ends_early(looks: list[tuple[float, float, int]]) -> int:
    """Return the step at which a run with evaluation.early_stopping_patience = PATIENCE would end."""
    best = 0
    for place, (held_out, _, step) in enumerate(looks):
        if held_out < looks[best][0]:
            best = place
        if place - best >= PATIENCE:
            return step
    return looks[-1][2]


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()  # other programs do not count
    torch.cuda.synchronize()
    return time.perf_counter()


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare `auto` with the best of the swept rates, chosen by held-out loss and reported on the test set: both at
    the end of the run, and both where their held-out loss was lowest."""
    swept = [one for one in runs if one["rate"] != "auto"]
    auto = [one for one in runs if one["rate"] == "auto"]
    if not swept or not auto:
        return None
    return {
        "auto_rates": [one["found"]["chosen"] for one in auto],
        "cost_in_runs": statistics.fmean(one["backward_passes"] / one["steps"] for one in auto),
        "best_rates": best_rates(swept),
        **_compared(swept, auto),
        "best_weights": _compared([one | one["best"] for one in swept], [one | one["best"] for one in auto]),
    }


def best_rates(swept: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return, by seed, the rate that was best for the whole run, and for copies of it that were annealed on the way (by
    the step at which they began): the lowest place of the parabola through the best and its neighbours, by held-out
    loss; `above` or `below` the rates that were tried where the best one is an edge."""
    found: dict[str, dict[str, str]] = {}
    for seed in sorted({one["seed"] for one in swept}):
        runs = sorted((one for one in swept if one["seed"] == seed), key=lambda one: one["rate"])
        rates = [one["rate"] for one in runs]
        moments = {"whole run": [one["held_out"] for one in runs]}
        for place, copy in enumerate(runs[0]["copies"]):
            moments[f"copy at step {copy['step']}"] = [one["copies"][place]["loss"] for one in runs]
        found[f"seed {seed}"] = {name: _lowest(rates, losses) for name, losses in moments.items()}
    return found


def _lowest(rates: list[float], losses: list[float]) -> str:
    best = min(range(len(rates)), key=lambda place: _number(losses[place]))
    if best in (0, len(rates) - 1):
        return f"{'below' if best == 0 else 'above'} {rates[best]:.2g}"
    left, lowest, right = (_number(losses[best + offset]) for offset in (-1, 0, 1))
    vertex = best + 0.5 * (left - right) / (left - 2 * lowest + right)
    return f"{rates[0] * (rates[1] / rates[0]) ** vertex:.2g}"


def _compared(swept: list[dict[str, Any]], auto: list[dict[str, Any]]) -> dict[str, Any]:
    rates = sorted({one["rate"] for one in swept})
    losses = {rate: [_number(one["held_out"]) for one in swept if one["rate"] == rate] for rate in rates}
    most = max(map(len, losses.values()))
    best = min((rate for rate in rates if len(losses[rate]) == most), key=lambda rate: statistics.fmean(losses[rate]))
    tests = {one["seed"]: one["test"] for one in swept if one["rate"] == best}
    pairs = [(one["test"], tests[one["seed"]]) for one in auto if one["seed"] in tests]
    return {
        "best_rate": best,
        "edge": best in (rates[0], rates[-1]),
        "best_test": statistics.fmean(theirs for _, theirs in pairs) if pairs else None,
        "auto_test": statistics.fmean(one["test"] for one in auto),
        "gap_percent": [100 * (mine / theirs - 1) for mine, theirs in pairs],
    }


def neighbours(rates: list[float], runs: list[dict[str, Any]], seeds: int) -> list[float]:
    """Return the best rate of the first seeds, and those next to it."""
    first = [one for one in runs if one["rate"] != "auto" and one["seed"] <= seeds]
    best = min(first, key=lambda one: _number(one["held_out"]))["rate"]
    return [rate for rate in rates if best / 2.1 < rate < best * 2.1]


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--middle", type=float, help="the middle of the swept rates")
    parser.add_argument("--copies", type=float, nargs="*", help="shares of a swept run at which a copy is annealed")
    parser.add_argument("--rates", type=int, default=RATES, help="swept rates; 0: auto only")
    parser.add_argument("--looks", type=int, default=40, help="evaluations of a run")
    parser.add_argument("--warmup", type=float, help="share of a swept run, instead of the usual one")
    parser.add_argument("--near", type=int, help="seeds that run at all rates; others run near the best one alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"tasks": {}}
    kept |= {
        "benchmark": "learning_rate = auto against seven rates",
        "command": " ".join(["python", "benchmarks/auto_rate.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
    }
    for name in options.tasks:
        task, found = TASKS[name], kept["tasks"].setdefault(name, {"runs": []})
        middle = options.middle or _DEFAULT[task.settings["optimizer.type"]]
        rates = [middle * 2.0**place for place in range(-(options.rates // 2), options.rates - options.rates // 2)]
        for seed in range(1, options.seeds + 1):
            if options.near is not None and seed > options.near:
                rates = neighbours(rates, found["runs"], options.near)
            for rate in ("auto", *rates):
                if any(one["rate"] == rate and one["seed"] == seed for one in found["runs"]):
                    continue
                found["runs"].append(one := run(task, options, rate, seed))
                rate_text = "auto" if rate == "auto" else f"{rate:.3g}"
                print(f"{name} {rate_text} seed {seed}: {one['test']:.4f}, {one['seconds']:.1f} s", flush=True)
                found["verdict"] = verdict(found["runs"])
                options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: found.get("verdict")}))


if __name__ == "__main__":
    main()
