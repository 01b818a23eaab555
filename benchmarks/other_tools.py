"""A user's choice instead: DeepXDE and PINA on published examples of their own, relative L2 error against seconds.

pip install deepxde pina-mathlab                              # they are no part of foretrain; keep its torch
python benchmarks/other_tools.py --out result.json            # all problems, three seeds
python benchmarks/other_tools.py --problems burgers --seeds 1 --share 1

Each tool runs its example as published (network, points, optimizers and their settings), but DeepXDE only 0.3 of its
published iterations unless --share says otherwise. The seconds of that run are T. Where the example has no L-BFGS, a
second arm lets it follow on Adam. foretrain has the same points, the same first weights and the same loss, Adam at 1e-3
and default settings, and T seconds. All arms of a problem and seed run one after the other in one process on one core.
Errors are judged on a fixed grid outside the clock, at the weights as they are just then. Generous to the tools: what
they test, print and save is outside the clock or off. DeepXDE's L-BFGS is called for 50 iterations at a time, not
1,000, so that there is something to judge; it keeps its history in between.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import foretrain
from foretrain import Config, HybridTrainer, environment
from other_tools_problems import PROBLEMS, Errors, MissingTool, Posed, Problem, deepxde, quiet

RATE = 1e-3
OWN = "foretrain"
NAMES = {"deepxde": "DeepXDE", "pina": "PINA"}
ITERATIONS_AT_A_TIME = 50
APART = 1.04
"""Factor between the seconds of one judgement and the next."""

Run = dict[str, Any]


class Watch:
    """A clock that stops while errors are judged."""

    def __init__(self, errors: Errors, clock: str, limit: float = math.inf) -> None:
        self.errors, self.limit = errors, limit
        self.clocks = {"cpu": time.process_time, "wall": time.perf_counter}
        self.clock = self.clocks[clock]
        self.curve: dict[str, list[float]] = {"seconds": []}
        self.away = dict.fromkeys(self.clocks, 0.0)
        self.due = 0.0
        self.started = {name: read() for name, read in self.clocks.items()}
        self.name = clock

    def total(self, name: str) -> float:
        return self.clocks[name]() - self.started[name] - self.away[name]

    @property
    def elapsed(self) -> float:
        return self.total(self.name)

    @property
    def over(self) -> bool:
        return self.elapsed >= self.limit

    @contextmanager
    def aside(self) -> Iterator[None]:
        before = {name: read() for name, read in self.clocks.items()}
        yield
        for name, read in self.clocks.items():
            self.away[name] += read() - before[name]

    def look(self) -> None:
        """After every step."""
        if self.elapsed >= self.due:
            self._judge()

    def _judge(self) -> None:
        at = self.elapsed
        self.due = APART * at + 0.01
        with self.aside():
            self.curve["seconds"].append(round(at, 4))
            for name, error in self.errors().items():
                self.curve.setdefault(name, []).append(float(f"{error:.5g}"))

    def end(self, **more: Any) -> Run:
        totals = {f"{name}_seconds": round(self.total(name), 3) for name in self.clocks}
        self._judge()
        last = {name: values[-1] for name, values in self.curve.items()}
        return {**more, **totals, "end": last, "curve": self.curve}


# --- arms ------------------------------------------------------------------------------------------------------------


def by_deepxde(posed: Posed, adam: int, lbfgs: int, clock: str, limit: float = math.inf) -> Run:
    dde, model = deepxde(), posed.tool
    options = dde.optimizers.config.LBFGS_options
    dde.optimizers.set_LBFGS_options(maxiter=max(lbfgs, 1))
    options["iter_per_step"], options["fun_per_step"] = ITERATIONS_AT_A_TIME, ITERATIONS_AT_A_TIME * 5 // 4
    watch, test = Watch(posed.tool_errors, clock, limit), model._test

    class Look(dde.callbacks.Callback):
        def on_batch_end(self) -> None:
            watch.look()
            model.stop_training = model.stop_training or watch.over

    def test_aside(verbose: int = 1) -> None:
        with watch.aside():
            test(verbose=verbose)

    model._test = test_aside
    unknown = {} if posed.unknown is None else {"external_trainable_variables": posed.unknown}
    with quiet():
        model.compile("adam", lr=1e-3, **unknown)
        model.train(iterations=adam, callbacks=[Look()], verbose=0)
        first, by_adam = watch.elapsed, model.train_state.step
        if lbfgs and not watch.over:
            model.compile("L-BFGS", **unknown)
            model.train(callbacks=[Look()], verbose=0)
    steps = {"adam": by_adam, "l-bfgs": model.train_state.step - by_adam}
    return watch.end(iterations=steps, seconds_of_adam=round(first, 3), loss=float(sum(model.train_state.loss_train)))


def by_pina(posed: Posed, adam: int, lbfgs: int, clock: str, limit: float = math.inf) -> Run:
    from lightning.pytorch.callbacks import Callback
    from pina.callback import SwitchOptimizer
    from pina.optim import TorchOptimizer

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            watch.look()
            trainer.should_stop = trainer.should_stop or watch.over

    callbacks: list[Any] = [Look()]
    if lbfgs:
        then = TorchOptimizer(torch.optim.LBFGS, line_search_fn="strong_wolfe")
        callbacks.append(SwitchOptimizer(then, epoch_switch=adam))
    trainer = posed.tool(adam + lbfgs, callbacks)
    watch = Watch(posed.tool_errors, clock, limit)
    trainer.train()
    epochs = trainer.current_epoch
    loss = float(trainer.callback_metrics["train_loss"])
    return watch.end(iterations={"adam": min(adam, epochs), "l-bfgs": 20 * max(0, epochs - adam)}, loss=loss)


def by_foretrain(posed: Posed, clock: str, limit: float) -> Run:
    batch, model = posed.batch(), posed.model
    watch = Watch(posed.errors, clock, limit)
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    trainer = HybridTrainer(model, adam, residuals=posed.residuals, config=Config(max_steps=10_000_000))
    loss = math.nan
    while not watch.over:
        loss = trainer.step(batch).loss
        watch.look()
    with watch.aside():
        told = trainer.summary()
        leaps = trainer.hybrid.policy.kinds[0].leaps  # the linearised ones
        seen = {
            "leaps": leaps.made,
            "rows": leaps.rows,
            "all_rows": leaps.prices.outputs,
            "damping": leaps.damping.value,
        }
        seen["price"] = round(leaps.price(leaps.rows), 2)
    steps = {"steps": told["steps"], "moves": told["moves"], "backward_passes": told["backward_passes"]}
    return watch.end(**steps, linearised=seen, loss=float(loss))


BY_TOOL: dict[str, Callable[..., Run]] = {"deepxde": by_deepxde, "pina": by_pina}


# --- measuring and showing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    name: str
    problem: Problem
    share: float
    clock: str

    def measure(self, seed: int) -> Run:
        problem, tool = self.problem, NAMES[self.problem.tool]
        run, before = BY_TOOL[problem.tool], os.getloadavg()[0]
        published = run(
            problem.pose(seed), round(self.share * problem.adam), round(self.share * problem.lbfgs), self.clock
        )
        seconds = published[f"{self.clock}_seconds"]
        arms = {tool: published}
        if problem.switch:
            switch = round(self.share * problem.switch)
            arms[f"{tool}, then L-BFGS"] = run(problem.pose(seed), switch, 1_000_000, self.clock, seconds)
        arms[OWN] = by_foretrain(problem.pose(seed), self.clock, seconds)
        row = {"problem": self.name, "seed": seed, "seconds": seconds, "share": self.share}
        return {**row, "load": [round(before, 2), round(os.getloadavg()[0], 2)], "arms": arms}


def at(run: Run, seconds: float, kind: str = "l2") -> float:
    """The error then: of the last judgement before."""
    known = [e for t, e in zip(run["curve"]["seconds"], run["curve"][kind], strict=True) if t <= seconds]
    return known[-1] if known else math.nan


def reached(run: Run, error: float) -> float | None:
    """Seconds to this error."""
    return next((t for t, e in zip(run["curve"]["seconds"], run["curve"]["l2"], strict=True) if e <= error), None)


def show(name: str, rows: list[Run]) -> None:
    tool = next(iter(rows[0]["arms"]))
    for arm in rows[0]["arms"]:
        runs = [row["arms"][arm] for row in rows]
        pairs = list(zip(runs, rows, strict=True))
        tenth, third = (statistics.median(at(run, row["seconds"] / part) for run, row in pairs) for part in (10, 3))
        last = [run["end"]["l2"] for run in runs]
        times = [reached(run, row["arms"][tool]["end"]["l2"]) for run, row in pairs]
        known = [one for one in times if one is not None]
        when = f"{statistics.median(known):>9.2f}" if known else f"{'-':>9}"
        ends = f"{statistics.median(last):>10.2e}  {min(last):.1e} to {max(last):.1e}"
        more = ""
        if "coefficient" in runs[0]["end"]:
            more = f"   coefficient {statistics.median(run['end']['coefficient'] for run in runs):.1e} off"
        seconds = statistics.median(row["seconds"] for row in rows)
        print(
            f"{name:<32}{arm:<22}{seconds:>7.1f}{tenth:>10.2e}{third:>10.2e}{ends}"
            f"{when}{len(known):>4}/{len(rows)}{more}"
        )


def written(report: Run) -> str:
    """JSON with a line for each list of numbers."""
    whole = json.dumps(report, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), whole) + "\n"


def warm_up(tools: set[str], clock: str) -> None:
    """What is loaded and allocated only once."""
    for name in sorted(tools):
        problem = next(problem for problem in PROBLEMS.values() if problem.tool == name)
        BY_TOOL[name](problem.pose(0), 20, 60, clock, 3.0)
        by_foretrain(problem.pose(0), clock, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, help="part of the published iterations that is run")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: where other programs run, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: PROBLEMS[name] for name in options.problems}
    try:
        warm_up({problem.tool for problem in chosen.values()}, options.clock)
    except MissingTool as error:
        sys.exit(str(error))
    results: list[Run] = []
    versions = {name: environment.version(name) for name in ("deepxde", "pina-mathlab", "lightning", "scipy")}
    report = {
        "benchmark": "other tools",
        "command": " ".join(["python", "benchmarks/other_tools.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(foretrain.__file__).parents[1]),
        "clock": options.clock,
        "learning_rate": RATE,
        "environment": environment.describe("cpu") | versions,
        "results": results,
    }
    heads = f"{'T':>7}{'T/10':>10}{'T/3':>10}{'T':>10}  {'lowest, highest':<18}{'s to tool':>9}{'reached':>8}"
    print(f"{'problem':<32}{'arm':<22}{heads}")
    for name, problem in chosen.items():
        bench = Bench(name, problem, options.share or problem.share, options.clock)
        rows: list[Run] = []
        for seed in range(1, options.seeds + 1):
            rows.append(bench.measure(seed))
            results.append(rows[-1])
            if options.out:
                options.out.write_text(written(report), encoding="utf-8")
        show(name, rows)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
