"""Fine-tuning with an adapter, plain against hybrid, at learning rates from much too low to tuned, and `auto`.

python benchmarks/finetune.py --base RUN --data banking77_train.jsonl --out result.json

BASE is a folder that `foretrain finetune` takes. For each seed and rate the arms run one after the other from the same
first weights on the same batches. "sooner" is the time of the plain run over the time at which the arm first has the
plain run's final held-out loss; probes, searches and steps taken back are in the arm's seconds, evaluations are not.
On a CPU these are the seconds that one thread of this process computed, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.config import changed, from_mapping, parse_override
from foretrain.data.loader import Loader
from foretrain.recipes.finetune import build_trainer, prepare
from foretrain.recipes.open_model import open_base

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"hybrid.mode": "off"},
    "hybrid": {},
    "product": {"hybrid.space": "product"},
}
BETWEEN = 10
"""Steps between two looks at the held-out loss."""


def run(options: argparse.Namespace, arm: str, rate: float | str, seed: int) -> dict[str, Any]:
    config = from_mapping(
        {
            "preset": "finetune",
            "device": options.device,
            "engine.compile": options.device == "cuda",  # its time is not measured, so "auto" must not weigh it
            "model.weights": options.base,
            "data.path": options.data,
            "data.max_length": options.length,
            "max_steps": options.steps,
            "batch_size": options.batch_size,
            "optimizer.learning_rate": rate,
            "seed": seed,
            "evaluation.answers": 0,
            **ARMS["hybrid" if arm == "auto" else arm],
            **dict(parse_override(text) for text in options.set),
        }
    )
    base = open_base(options.base)
    data = prepare(changed(config, {"hybrid.mode": "leap"}), base)  # what judges leaps is left out for every arm
    trainer = build_trainer(config, base.model, data)
    held_out = data.held_out.fixed_batches(config.batch_size, options.batches)
    batches = iter(Loader(data.train, config.batch_size, seed, pin_memory=trainer.device.type == "cuda"))
    seconds, look_at = 0.0, BETWEEN
    curve: list[tuple[int, float, float]] = []
    first = next(batches)
    trainer.engine.forward.forward_loss([trainer.engine.to_device(first)])  # what is compiled and loaded only once
    started = clock(trainer.device)
    while trainer.global_step < options.steps or trainer.judging:
        trainer.step(first if first is not None else next(batches))
        first = None
        if trainer.global_step >= look_at:
            look_at += BETWEEN
            seconds += clock(trainer.device) - started
            curve.append((trainer.global_step, seconds, float(trainer.engine.forward.forward_loss(held_out))))
            started = clock(trainer.device)
    seconds += clock(trainer.device) - started
    loss = float(trainer.engine.forward.forward_loss(held_out))
    moves = dict(trainer.policy.score.counts.moves) if trainer.policy is not None else {}
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "loss": loss,
        "seconds": seconds,
        "backward_passes": trainer.backward_passes,
        "probe_tokens": trainer.engine.progress.probe_tokens,
        "tokens": trainer.engine.progress.tokens,
        "moves": moves,
        "final_rate": config.optimizer.peak_rate if trainer.race is None else trainer.race.rate,
        "curve": [*curve, (trainer.global_step, seconds, loss)],
    }


def clock(device: torch.device) -> float:
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds_to(result: dict[str, Any], loss: float) -> float:
    """When the curve first is at `loss`, between two looks by a straight line; infinity if it never is."""
    before: tuple[float, float] | None = None
    for _, seconds, value in result["curve"]:
        if value <= loss:
            if before is None or before[1] <= value:
                return float(seconds)
            share = (before[1] - loss) / (before[1] - value)
            return float(before[0] + share * (seconds - before[0]))
        before = (seconds, value)
    return math.inf


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'rate':>8} {'arm':<8} {'loss':>16} {'seconds':>8} {'sooner':>22} {'kept':>6} {'refused':>8}"]
    for rate in dict.fromkeys(result["rate"] for result in results):
        for arm in dict.fromkeys(result["arm"] for result in results):
            mine = [result for result in results if result["rate"] == rate and result["arm"] == arm]
            if not mine:
                continue
            losses = [result["loss"] for result in mine]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            ratios = []
            for result in mine:
                same = [r for r in results if (r["rate"], r["seed"], r["arm"]) == (rate, result["seed"], "plain")]
                ratios += [plain["seconds"] / seconds_to(result, plain["loss"]) for plain in same]
            sooner = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""
            moves = [result["moves"] for result in mine if result["moves"]]
            kept = sum(m["kept"] + m["shrunk"] for m in moves)
            refused = sum(m["refused"] + m["rolled_back"] for m in moves)
            seconds = statistics.median(result["seconds"] for result in mine)
            lines.append(
                f"{rate!s:>8} {arm:<8} {statistics.mean(losses):>8.4f} ± {spread:.4f} {seconds:>8.1f} {sooner:>22} "
                f"{kept if moves else '':>6} {refused if moves else '':>8}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rates", nargs="+", default=["1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "auto"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batches", type=int, default=8, help="held-out batches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for every arm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    report = {
        "benchmark": "fine-tuning with an adapter",
        "command": " ".join(["python", "benchmarks/finetune.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "results": results,
    }
    for seed in range(1, options.seeds + 1):
        for text in options.rates:
            for arm in ["auto"] if text == "auto" else options.arms:
                result = run(options, arm, text if text == "auto" else float(text), seed)
                results.append(result)
                print(f"{text} {arm} seed {seed}: {result['loss']:.4f}, {result['seconds']:.1f} s", file=sys.stderr)
                if options.out:
                    options.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
