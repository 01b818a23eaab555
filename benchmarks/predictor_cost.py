"""What a predictor costs on the host: forecasts at single horizons and at five at once, and learning from a window.

python benchmarks/predictor_cost.py                      # all predictors, 52 groups, one thread
python benchmarks/predictor_cost.py --json cost.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain.config.schema import PredictorConfig
from foretrain.motion.predictors.base import Followed, Predictor, Situation
from foretrain.motion.predictors.registry import NAMES, build
from foretrain.motion.records import HORIZONS_IN_WINDOWS

WINDOW = 10
SINGLE = (1, 5, 10, 15, 25, 50, 75)
SEVERAL = (10, 15, 20, 40, 80)


class Motion:
    """A drifting, noisy run of `groups` groups: what a trainer would report at the end of each window."""

    def __init__(self, groups: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.groups = groups
        self.window = 0
        self.past: list[Situation] = []

    def next(self) -> tuple[Situation, list[Followed]]:
        mix = self.random.normal(size=(self.groups, 4, 40)) + 0.5
        gram = mix @ mix.transpose(0, 2, 1) / 40
        loss = 3.0 * 0.99**self.window + 0.01 * float(self.random.normal())
        self.window += 1
        now = Situation(self.random.normal(size=64), gram, WINDOW, loss, self.window * WINDOW)
        followed = []
        for horizon in HORIZONS_IN_WINDOWS:
            begin = self.window - 1 - horizon
            if begin >= 0 and (horizon == 1 or begin % 8 == 0):
                before = self.past[begin]
                dots = 0.3 * horizon * before.gram[:, 1] + 0.1 * self.random.normal(size=(self.groups, 4))
                square = np.full(self.groups, 0.5 * horizon * horizon + horizon)
                followed.append(Followed(before, horizon * WINDOW, dots, square, loss))
        self.past.append(now)
        return now, followed


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median over many single calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def cost(predictor: Predictor, groups: int, repeats: int) -> dict[str, float]:
    """Milliseconds. `observe` is the mean, because learning is spread unevenly over windows."""
    motion = Motion(groups)
    for _ in range(40):
        now, followed = motion.next()
        predictor.observe(now, followed)
    trust = getattr(predictor, "trust", None)
    if trust is not None:  # the corrections count in the forecast's cost even if they were of no use on this motion
        predictor._shares = np.ones(len(HORIZONS_IN_WINDOWS))  # type: ignore[attr-defined]
    result = {
        f"forecast {h}": milliseconds(lambda h=h: predictor.forecast(now, [h]), repeats)  # type: ignore[misc]
        for h in SINGLE
    }
    result["forecast 5 at once"] = milliseconds(lambda: predictor.forecast(now, SEVERAL), repeats)
    other = replace(now, step=now.step + 1)
    result["same, new situation"] = milliseconds(lambda: predictor.forecast(other, SEVERAL), repeats)
    times, processor = [], []
    for _ in range(max(repeats // 2, 48)):
        now, followed = motion.next()
        start, start_processor = time.perf_counter(), time.thread_time()
        predictor.observe(now, followed)
        times.append(time.perf_counter() - start)
        processor.append(time.thread_time() - start_processor)
    result["observe, mean"] = statistics.fmean(times) * 1e3
    result["observe, median"] = statistics.median(times) * 1e3
    result["observe, processor"] = statistics.fmean(processor) * 1e3  # the mean, without what others took away
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=52)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--predictors", nargs="*", default=list(NAMES))
    parser.add_argument("--json", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = {}
    for name in arguments.predictors:
        table[name] = cost(build(PredictorConfig(type=name), seed=0), arguments.groups, arguments.repeats)
    rows = list(next(iter(table.values())))
    print(f"{arguments.groups} groups, {arguments.threads} thread(s), torch {torch.__version__}; milliseconds")
    print(f"{'':22}" + "".join(f"{name:>10}" for name in table))
    for row in rows:
        print(f"{row:22}" + "".join(f"{table[name][row]:10.3f}" for name in table))
    if arguments.json:
        machine = {"processor": platform.processor(), "python": platform.python_version(), "torch": torch.__version__}
        settings = {"groups": arguments.groups, "repeats": arguments.repeats, "threads": arguments.threads}
        arguments.json.write_text(json.dumps({**machine, **settings, "milliseconds": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
