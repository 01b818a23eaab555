"""Full-batch and nearly noise-free training: seconds to a tuned loop's final loss, and the loss in equal seconds.

python benchmarks/low_noise.py --out result.json             # all problems and arms, three seeds (needs scikit-learn)
python benchmarks/low_noise.py --problems poisson operator --seeds 1
python benchmarks/low_noise.py --problems burgers --arms broyden hybrid
python benchmarks/low_noise.py --device cuda --problems burgers helmholtz --width 256 --points 8192 --steps 1000

The reference is Adam with a cosine schedule at the best of its learning rates; its final loss is the target, and its
seconds are the time T. Its peers are tuned as well: SOAP, Muon, L-BFGS with a history of 10 and of 100, and dense
quasi-Newton methods in fp64 (BFGS, self-scaled BFGS and Broyden), eight settings or more each. Settings are swept with
the first seed, the two best of them are run with every other. The hybrid arm has the default settings and one rate
(3e-3, constant) everywhere; "hybrid fp64" is the same with a model and data in fp64, as the dense
quasi-Newton methods have them, "chains" the same without linearised leaps. All arms of a problem and seed run
one after the other in one process, with the same code for the loss; everything is charged: probes, refused leaps,
audits. Where batches differ, the loss is judged on a fixed set every ten steps, that of the hybrid arms after every
step, outside the clock. Of peers the lowest loss within T counts, of hybrid arms that at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from low_noise_arms import PEERS, SLACK, Bench, Curve, Setting, Tuned, peer, reference
from low_noise_new import PROBLEMS
from low_noise_problems import Settings

REFERENCE = "adam, tuned cosine"
HYBRID: Setting = {"optimizer.learning_rate": 3e-3}
CHAINS: Setting = {**HYBRID, "hybrid.linear_rows": 0}
OWN = ("hybrid", "hybrid fp64", "chains", "low rates")
USUAL = (*PEERS, "hybrid", "hybrid fp64", "chains")

Row = dict[str, Any]
"""What was found with one problem and seed."""


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(name: str, bench: Bench, chosen: list[str], tuned: Tuned) -> Row:
    plain, rate = reference(bench, tuned)
    target, total = plain.final * SLACK, plain.seconds[-1]
    arms = {REFERENCE: plain.outcome(target, learning_rate=rate, equal_seconds_loss=plain.final)}
    for one in PEERS:
        if one in chosen:
            arms[one] = peer(bench, one, tuned, target, total)
    row: Row = {"problem": name, "seed": bench.seed, "target": target, "equal_seconds": total, "arms": arms}
    if "hybrid" in chosen:
        curve = bench.hybrid(HYBRID, total)
        arms["hybrid"] = ours(curve, target, total)
        row["hybrid and the best peer"] = against_peers(row, curve)
    if "hybrid fp64" in chosen:
        arms["hybrid fp64"] = ours(replace(bench, problem=bench.problem.doubled()).hybrid(HYBRID, total), target, total)
    if "chains" in chosen:
        arms["chains"] = ours(bench.hybrid(CHAINS, total), target, total)
    if "low rates" in chosen:
        row["below the tuned rate"] = low_rates(bench, rate, target, total)
    return row


def ours(curve: Curve, target: float, seconds: float) -> dict[str, Any]:
    return curve.outcome(target, equal_seconds_loss=curve.final, lowest=curve.within(seconds))


def against_peers(row: Row, curve: Curve) -> dict[str, Any]:
    """curve: of the hybrid arm."""
    arms = row["arms"]
    known = [arm for arm in arms if arm == REFERENCE or arm in PEERS]
    reached = [arm for arm in known if arms[arm]["seconds"] is not None]
    fastest = min(reached, key=lambda arm: arms[arm]["seconds"])
    lowest = min(known, key=lambda arm: arms[arm]["equal_seconds_loss"])
    loss = arms[lowest]["equal_seconds_loss"]
    at = curve.reach(loss * SLACK)
    return {
        "fastest": fastest,
        "times_sooner": ratio(arms[fastest], arms["hybrid"]),
        "lowest": lowest,
        "peer_loss": loss,
        "hybrid_loss": arms["hybrid"]["equal_seconds_loss"],
        "seconds_to_peer_loss": None if at is None else curve.seconds[at],
    }


def low_rates(bench: Bench, rate: float, target: float, total: float) -> dict[str, Any]:
    """Hybrid and plain runs at a constant rate far below the tuned one."""
    found = {}
    for part in (10, 100):
        slow = {"optimizer.learning_rate": rate / part}
        alone = bench.train({**slow, "hybrid.mode": "off"}, bench.steps, 2 * total)
        own = max(alone.losses[-2:]) * SLACK
        hybrid = bench.hybrid(slow, total, min(own, target))
        found[f"1/{part}"] = {
            "plain": alone.outcome(own),
            "plain to the tuned target": alone.outcome(target),
            "hybrid": hybrid.outcome(own),
            "hybrid to the tuned target": hybrid.outcome(target),
        }
    return found


# --- showing ---------------------------------------------------------------------------------------------------------


def ratio(reference: dict[str, Any], outcome: dict[str, Any]) -> float | None:
    """Seconds of the reference / seconds of the other; None where the target was missed."""
    mine, plain = outcome["seconds"], reference["seconds"]
    return plain / mine if mine and plain else None


def columns(ratios: list[float | None]) -> str:
    known = [value for value in ratios if value]
    figures = f"{statistics.median(known):>8.1f}x{min(known):>7.1f}x" if known else f"{'-':>9}{'-':>8}"
    return f"{figures}{len(known):>5}/{len(ratios)}"


def show(name: str, rows: list[Row]) -> None:
    for arm in rows[0]["arms"]:
        outcomes = [row["arms"][arm] for row in rows]
        ratios = [ratio(row["arms"][REFERENCE], outcome) for row, outcome in zip(rows, outcomes, strict=True)]
        gradients = statistics.median(outcome["gradients"] for outcome in outcomes)
        loss = statistics.median(outcome["equal_seconds_loss"] for outcome in outcomes)
        print(f"{name:<24}{arm:<30}{columns(ratios)}{gradients:>10.0f}{loss:>14.3g}")
    if "hybrid and the best peer" in rows[0]:
        show_against_peers(name, rows)
    for part in rows[0].get("below the tuned rate", ()):
        low = [row["below the tuned rate"][part] for row in rows]
        own = [ratio(arms["plain"], arms["hybrid"]) for arms in low]
        tuned = [
            ratio(row["arms"][REFERENCE], arms["hybrid to the tuned target"])
            for row, arms in zip(rows, low, strict=True)
        ]
        print(f"{name:<24}{f'hybrid at {part}, to plain there':<30}{columns(own)}")
        print(f"{name:<24}{f'hybrid at {part}, to the target':<30}{columns(tuned)}")


def show_against_peers(name: str, rows: list[Row]) -> None:
    """Seed by seed: to the target, to the lowest loss of any peer within T, and the two losses after T."""
    best = [row["hybrid and the best peer"] for row in rows]
    sooner = columns([one["times_sooner"] for one in best])
    print(f"{name:<24}{'hybrid : fastest peer':<30}{sooner}   ({', '.join(one['fastest'] for one in best)})")
    again = [
        row["equal_seconds"] / one["seconds_to_peer_loss"] if one["seconds_to_peer_loss"] else None
        for row, one in zip(rows, best, strict=True)
    ]
    print(f"{name:<24}{'T : hybrid to lowest peer':<30}{columns(again)}   ({', '.join(one['lowest'] for one in best)})")
    losses = ", ".join(f"{one['hybrid_loss']:.3g} / {one['peer_loss']:.3g}" for one in best)
    print(f"{name:<24}{'loss: hybrid / lowest peer':<30}   {losses}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--arms", nargs="+", choices=(*PEERS, *OWN), default=list(USUAL), help="beside tuned Adam")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: where other programs run, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.clock == "cpu" and options.device == "cuda":
        parser.error("--clock cpu does not see what a GPU does")
    torch.set_num_threads(1)
    settings = Settings(options.device, options.width, options.points, options.clock)
    warm_up(settings)
    results: list[Row] = []
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
        rows: list[Row] = []
        for seed in range(1, options.seeds + 1):
            bench = Bench(PROBLEMS[name](settings), settings, seed, options.steps)
            rows.append(measure(name, bench, options.arms, tuned))
            results.append(rows[-1])
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        show(name, rows)
        sys.stdout.flush()


def warm_up(settings: Settings) -> None:
    """What is loaded, compiled and allocated only once."""
    first = Bench(PROBLEMS["poisson"](settings), settings, 0, 50)
    first.cosine("adam", 1e-3, 50)
    first.lbfgs(10, 0.2)
    first.broyden(0.2, "ssbroyden", True, "wolfe")
    for changes in (HYBRID, CHAINS):
        first.hybrid(changes, 1.0)


if __name__ == "__main__":
    main()
