"""The whole stack against AdamW that is tuned as hard: time to equal loss, in two parts that add up.

python benchmarks/stack.py tune lm124m --data FOLDER --out FOLDER --minutes 9     # each side, setting by setting
python benchmarks/stack.py seeds lm124m --data FOLDER --out FOLDER --minutes 9    # the best of each side, three seeds
python benchmarks/stack.py table lm124m --data FOLDER --out FOLDER                # what is there so far
python benchmarks/stack.py seeds lm30m --known EARLIER.json ...                   # runs of tuning of an earlier result
python benchmarks/stack.py tune tiny --data FOLDER --out FOLDER --device cpu      # to try the script

AdamW and Muon are tuned by the same procedure with as many runs each, on held-out data, with seed 1: from the default
settings on, one setting after the other gets the values of `TUNED`, of which the best stays; a learning rate goes on
beyond the edge. AdamW's runs are longer (`LENGTHS`), nearer to where it is compared. Runs of tuning have a folder of
their own and are not timed, so that several models can be tuned at once.

Then each seed runs, in turns, AdamW, the arms of `ARMS`, and the best Muon again with prediction as it is by default.
The figure is the time that AdamW needs for an arm's final loss on the test set over the arm's time: by that seed's run,
and by the slope over log(steps) between two lengths, the second of which seed 1 has alone. What --out holds is not run
again. FOLDER of --data is that of `campaign.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from campaign import BYTES, LANGUAGE, LARGE, SMALL
from foretrain import environment
from foretrain.config import from_mapping
from foretrain.measure.analysis import Curve
from foretrain.measure.compare import ComparisonRunner
from foretrain.measure.plan import Options
from foretrain.measure.runs import Spec, carry_out, check_pairing
from foretrain.measure.stats import paired_interval
from foretrain.measure.tasks import TextTask

Settings = dict[str, Any]
MODELS: dict[str, Settings] = {
    "lm30m": LANGUAGE | SMALL | {"max_steps": 1200, "schedule.warmup_steps": 100, "optimizer.learning_rate": 2e-3},
    "lm124m": LANGUAGE | LARGE | {"max_steps": 350, "schedule.warmup_steps": 50, "batch_size": 16},
    "tiny": LANGUAGE
    | BYTES
    | {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "batch_size": 8, "max_steps": 60}
    | {"schedule.warmup_steps": 10, "evaluation.batches": 2},
}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "lm30m": {"adamw": (1e-3, 2e-3, 4e-3), "muon": (3e-3, 6e-3, 12e-3)},
    "lm124m": {"adamw": (0.5e-3, 1e-3, 2e-3), "muon": (2e-3, 4e-3, 8e-3)},
    "tiny": {"adamw": (2e-3, 4e-3, 8e-3), "muon": (5e-3, 1e-2, 2e-2)},
}
TUNED: dict[str, dict[str, list[tuple[str, tuple[Any, ...]]]]] = {
    "lm30m": {
        "adamw": [
            *(("optimizer.beta2", (0.95, 0.98)), ("decay share", (0.6,))),
            *(("optimizer.weight_decay", (0.3,)), ("warm-up share", (0.16, 0.3))),
        ],
        "muon": [
            *(("optimizer.row_beta2", (0.95,)), ("optimizer.momentum", (0.85, 0.95))),
            *(("decay share", (0.6,)), ("warm-up share", (0.03, 0.16))),
        ],
    },
    "lm124m": {
        "adamw": [("optimizer.beta2", (0.95, 0.98)), ("decay share", (0.6,)), ("warm-up share", (0.3,))],
        "muon": [
            *(("optimizer.row_beta2", (0.95,)), ("optimizer.momentum", (0.95,))),
            *(("decay share", (0.6,)), ("warm-up share", (0.05,))),
        ],
    },
}
TUNED["tiny"] = TUNED["lm30m"]
"""Tried beside the default of each setting. "decay share", "warm-up share": of the run, in which the learning rate
falls or rises."""
_SHARES = {"decay share": "schedule.decay_steps", "warm-up share": "schedule.warmup_steps"}
LENGTHS: dict[str, tuple[float, float]] = {"lm30m": (1.8, 2.4), "lm124m": (1.8, 2.2), "tiny": (1.5, 1.2)}
"""Of AdamW's runs, as factors on `max_steps`; it is tuned at the first."""
GROWTH = {"growth.layers": 6, "growth.at": 0.5}
ARMS: dict[str, dict[str, Settings]] = {
    "lm30m": {"Muon": {}},
    "lm124m": {"Muon": {}, "Muon and growth": GROWTH},
    "tiny": {"Muon": {}, "Muon and growth": GROWTH | {"growth.layers": 1}},
}
"""On top of the best settings of Muon. Growth stands where it is known to pay (docs/growth.md)."""
WATCHED = "Muon, prediction as by default"
SEEDS = (1, 2, 3)


class Stack:
    """One model's runs, of which none is made twice."""

    def __init__(self, options: argparse.Namespace) -> None:
        values = MODELS[options.model] | {"device": options.device, "hybrid.mode": "off", "evaluation.interval": 0}
        text = "enwiki_bytes.bin" if options.model == "tiny" else "enwiki_train.bin"
        values |= {"data.path": str(options.data / text), "data.cache": str(options.data)}
        values |= {"optimizer.row_beta2": 0.0}  # tried as the other settings are
        self.base = from_mapping(values)
        self.task = TextTask(self.base)
        plan = Options(arms=(), controls=False)
        off = self.base.model_copy(update={"predictor": self.base.predictor.model_copy(update={"beta": 0.3})})
        folder = options.out / options.model
        self.timed = ComparisonRunner(self.task, off, plan, folder)
        self.tuning = ComparisonRunner(self.task, off, plan, folder / "tuning")
        self.lengths, self.rates = LENGTHS[options.model], RATES[options.model]
        self.tuned, self.arms = TUNED[options.model], ARMS[options.model]
        self.until = time.monotonic() + 60 * options.minutes
        self.warmed: set[str] = set()
        self.found: list[dict[str, Any]] = []
        self.only_read = options.part == "table"
        earlier = json.loads(options.known.read_text(encoding="utf-8"))["runs"] if options.known else []
        self.earlier = {_key(one): one for one in earlier if one["arm"].startswith("tuning")}

    def spec(self, arm: str, seed: int, settings: Settings, length: float) -> Spec:
        settings = {"predictor.beta": 0.0} | settings
        for name, steps in _SHARES.items():
            if (share := settings.pop(name, None)) is not None:
                settings[steps] = round(share * self.base.max_steps)
        return Spec(arm, seed, 1.0, round(length * self.base.max_steps), settings)

    def run(
        self, arm: str, seed: int, settings: Settings, length: float = 1.0, timed: bool = True
    ) -> dict[str, Any] | None:
        """Return the result of a run; None where there is none, and no time for it."""
        spec, store = self.spec(arm, seed, settings, length), self.timed if timed else self.tuning
        result = store.find(spec) or self.earlier.get(_key(vars(spec)))
        if result is None and not self.only_read and time.monotonic() < self.until:
            result = carry_out(self.task, spec, store.base, self.warmed)
            check_pairing([*(one for one in self.found if one["loss"] is not None and "account" in one), result])
            store.keep(spec, result)
            print(_line(spec, result), flush=True)
        if result is not None and result not in self.found:
            self.found.append(result)
        return result

    # --- tuning ------------------------------------------------------------------------------------------------------

    def tune(self, side: str) -> tuple[Settings, bool]:
        """Return the best settings of a side, and whether all of them were tried."""
        length = self.lengths[0] if side == "adamw" else 1.0
        losses: dict[str, float] = {}

        def loss(settings: Settings) -> float | None:
            key = json.dumps(settings, sort_keys=True)
            if key not in losses:
                result = self.run(f"tuning {side}", SEEDS[0], dict(settings), length, timed=False)
                if result is None:
                    return None
                losses[key] = float("inf") if result["held_out_loss"] is None else result["held_out_loss"]
            return losses[key]

        best, complete = _best_rate({"optimizer.type": side}, self.rates[side], loss)
        for name, values in self.tuned[side]:
            if not complete:
                break
            tried = [best, *(best | {name: value} for value in values)]
            known = [found for found in map(loss, tried) if found is not None]
            complete = len(known) == len(tried)
            best = tried[known.index(min(known))] if known else best
        return best, complete

    # --- seeds -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Run the best of both sides with all seeds, as far as the time goes, and return a row per arm."""
        (adamw, tuned), (muon, also) = self.tune("adamw"), self.tune("muon")
        if not (tuned and also):
            print("not everything is tuned yet: give `tune` more minutes")
        arms = {name: muon | settings for name, settings in self.arms.items()}
        results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in (*arms, WATCHED, "adamw")}
        for seed in SEEDS:
            for name in ("adamw", *arms, WATCHED):
                settings = adamw if name == "adamw" else muon | arms.get(name, {"hybrid.mode": "leap"})
                result = self.run(name, seed, dict(settings), self.lengths[0] if name == "adamw" else 1.0)
                if result is not None and result["loss"] is not None:
                    results[name][seed] = result
        other = self.run("adamw", SEEDS[0], dict(adamw), self.lengths[1])
        if other is None or SEEDS[0] not in results["adamw"]:
            return []
        shape = [(one["steps"], one["loss"]) for one in (results["adamw"][SEEDS[0]], other)]
        rows = [self.row(name, results[name], results["adamw"], shape) for name in arms]
        rows = [row | {"settings": arms[row["arm"]], "adamw": adamw} for row in rows]
        return [*rows, self.watched(results[WATCHED], results["Muon"])]

    def row(
        self,
        name: str,
        results: dict[int, dict[str, Any]],
        adamw: dict[int, dict[str, Any]],
        shape: list[tuple[int, float]],
    ) -> dict[str, Any]:
        """Return how much sooner than AdamW an arm is at its final loss, seed by seed. shape: AdamW's losses by steps,
        of one seed; those of another one are as far apart."""
        ratios, outside = [], 0
        for seed in sorted(set(results) & set(adamw)):
            result, plain = results[seed], adamw[seed]
            apart = plain["loss"] - shape[0][1]
            steps, inside = Curve([(steps, loss + apart) for steps, loss in shape]).steps(result["loss"])
            ratios.append(steps * plain["seconds"] / plain["steps"] / result["seconds"])
            outside += not inside
        return {"arm": name, "sooner": ratios, "outside": outside, "in words": _in_words(ratios, outside)}

    def watched(self, results: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Return what prediction as it is by default costs: the time of the plain run over that of the same one."""
        seeds = sorted(set(results) & set(plain))
        ratios = [plain[seed]["seconds"] / results[seed]["seconds"] for seed in seeds]
        apart = [results[seed]["loss"] - plain[seed]["loss"] for seed in seeds]
        words = (
            f"{statistics.fmean(ratios):.3f}x the speed of plain, loss apart {max(map(abs, apart)):.1g}"
            if seeds
            else ""
        )
        return {"arm": WATCHED, "speed": ratios, "losses apart": apart, "in words": words or "no seed is complete"}


def _key(run: dict[str, Any]) -> str:
    return json.dumps([run[name] for name in ("arm", "seed", "max_steps", "settings")], sort_keys=True)


def _best_rate(
    start: Settings, rates: tuple[float, ...], loss: Callable[[Settings], float | None]
) -> tuple[Settings, bool]:
    """Return the best learning rate, beyond the edge where that is best, and whether all of them were tried."""
    rates, tried = tuple(sorted(rates)), [*sorted(rates)]
    while True:
        settings = {rate: start | {"optimizer.learning_rate": rate} for rate in tried}
        losses = {rate: loss(settings[rate]) for rate in tried}
        known = {rate: value for rate, value in losses.items() if value is not None}
        if len(known) < len(tried):
            return settings[min(known, key=lambda rate: known[rate])] if known else start, False
        best = min(known, key=lambda rate: known[rate])
        ratio = rates[1] / rates[0]
        if best not in (min(tried), max(tried)) or len(tried) > len(rates) + 1:
            return settings[best], True
        tried.append(best * ratio if best == max(tried) else best / ratio)


def _in_words(ratios: list[float], outside: int) -> str:
    """Say how much sooner than AdamW, with the interval of so many seeds."""
    if not ratios:
        return "no seed is complete"
    found = paired_interval([math.log(ratio) for ratio in ratios])
    ends = [math.exp(end) for end in (found.low, found.high) if end is not None]
    interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
    beyond = f", {outside} beyond AdamW's lengths" if outside else ""
    return f"{math.exp(found.mean):.3f}x{interval} sooner than AdamW, n = {found.n}{beyond}"


def _line(spec: Spec, result: dict[str, Any]) -> str:
    told = ", ".join(f"{name.split('.')[-1]} {value}" for name, value in spec.settings.items() if name[-5:] != ".beta")
    loss = "failed" if result["loss"] is None else f"{result['loss']:.4f}, held out {result['held_out_loss']:.4f}"
    return f"{spec.arm}: {told}; {spec.max_steps} steps, seed {spec.seed}: {loss}, {result.get('seconds', 0):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["tune", "seeds", "table"])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--known", type=Path, help="a result whose runs of tuning are not made again")
    options = parser.parse_args()
    stack = Stack(options)
    if options.part == "tune":
        for side in ("muon", "adamw"):
            best, complete = stack.tune(side)
            print(f"{side}: best {best}{'' if complete else ', not complete'}")
        return
    rows = stack.rows()
    for row in rows:
        print(f"{row['arm']}: {row['in words']}")
    result = {
        "benchmark": "the whole stack against AdamW tuned as hard",
        "command": " ".join(["python", "benchmarks/stack.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(__file__).parents[1] / "src"),
        "environment": environment.describe(options.device),
        "rows": rows,
        "runs": [
            {key: value for key, value in one.items() if key not in ("account", "training", "phases")}
            for one in stack.found
        ],
    }
    path = options.out / f"stack-{options.model}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
