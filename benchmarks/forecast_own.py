"""Twelve own runs in one folder, one after the other, and what each said of its end; then the examples of
docs/forecast.md: `foretrain forecast` of the third run, and of a public run's log that was cut off.

The runs are of a small GPT on Python's own source code and differ in their seed alone: the first has nothing beside
it, the last eleven finished runs.

python benchmarks/forecast_own.py --data ../shared/data --out benchmarks/results/FILE.json    # some three minutes
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import config as configuration
from foretrain import environment
from foretrain.recipes.train import train

RUNS = 12
SETTINGS = {
    "max_steps": 400,
    "batch_size": 8,
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 2,
    "model.context": 64,
    "evaluation.interval": 40,
    "hybrid.mode": "off",
    "device": "cpu",
}
CUT = 9584
"""Step at which the public run is cut off."""


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Train one run; return what it said of its end."""
    config = configuration.from_mapping(SETTINGS | {"seed": seed})
    told = train(config, folder / f"seed-{seed}", progress=False)["loss_forecast"]
    return {
        "seed": seed,
        "final": told["curve"]["losses"][-1],
        "finished_runs_beside_it": told["own_finished_runs"],
        "siblings": told["siblings"],
        "calibrated": told["calibrated"],
        "checks": told["checks"],
        "made": told["made"],
    }


def command(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return what `foretrain forecast` says, called as a user calls it."""
    words = (sys.executable, "-m", "foretrain", "forecast", *words, "--json")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return list(found)


def public_log(data: Path, run: str, file: Path, until: float) -> None:
    """Write one of the multi-power law's curves as a log."""
    with (data / "curves" / "multipowerlaw" / "curves.csv").open() as source, file.open("w") as target:
        rows = sorted(
            (int(row["step"]), row["loss"], row["lr"]) for row in csv.DictReader(source) if row["run_id"] == run
        )
        writer = csv.writer(target)
        writer.writerow(("step", "val_loss", "lr"))
        writer.writerows(row for row in rows if row[0] <= until)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how good forecasts were: of the first run, and of those that had others beside them."""
    later = [one["checks"] for one in runs[1:]]
    checks = [check for found in later for check in found]
    errors: dict[str, list[float]] = {}
    for check in checks:
        errors.setdefault(f"step {check['step']}", []).append(abs(check["error_percent"]))
    return {
        "first_run_errors_percent": [round(check["error_percent"], 2) for check in runs[0]["checks"]],
        "first_run_held": [check["held"] for check in runs[0]["checks"]],
        "later_runs_median_error_percent": {step: round(statistics.median(found), 2) for step, found in errors.items()},
        "later_runs_held": sum(check["held"] for check in checks),
        "later_runs_intervals": len(checks),
        "first_calibrated": next((place for place, one in enumerate(runs, 1) if one["calibrated"]), None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = options.data.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs: list[dict[str, Any]] = []
        for seed in range(1, RUNS + 1):
            runs.append(run(seed, folder / "runs"))
            print(json.dumps({key: runs[-1][key] for key in ("seed", "final", "calibrated", "checks")}), flush=True)
        afterwards = command(folder, "runs/seed-3")
        public_log(data, "mpl_100M_cosine_24000", folder / "prefix.csv", CUT)
        public_log(data, "mpl_25M_cosine_24000", folder / "smaller.csv", float("inf"))
        words = ("prefix.csv", "--total-steps", "24000", "--schedule", "cosine")
        public = {
            "alone": command(folder, *words),
            "with a sibling": command(folder, *words, "--sibling", "smaller.csv"),
        }
    result = {
        "benchmark": "forecasts of twelve own runs, and the examples of docs/forecast.md",
        "date": f"{datetime.now().astimezone():%Y-%m-%d}",
        "command": " ".join(["python", "benchmarks/forecast_own.py", *sys.argv[1:]]),
        "environment": environment.describe("cpu"),
        "settings": SETTINGS,
        "summary": summary(runs),
        "seed-3 afterwards": afterwards,
        "a public run, cut off": public,
        "runs": runs,
    }
    print(json.dumps(result["summary"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
