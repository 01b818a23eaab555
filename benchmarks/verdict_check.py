"""Does `foretrain bench compare` tell the truth on this machine? Real processes, interleaved A B B A.

python benchmarks/verdict_check.py --out result.json                     # 10 to 20 minutes
python benchmarks/verdict_check.py --again result.json --out result.json  # the same numbers, judged anew

- 100 comparisons of the same code with itself, five processes a side: none may be called regressed, 5 at the most.
- Planted slowdowns of 5 % (up to 20 processes a side) and 1 %: a hot path that does so much more of the same work.
- Planted 30 % with five processes a side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

UNITS = 100
SAMPLES, CALLS = 20, 40


def worker(units: int) -> None:
    """One process of 0.4 s: samples in seconds of a hot path of `units` equal pieces of work.

    One call takes 0.3 ms, less than a busy machine's slice of time; a sample is the median of 40 calls.
    """
    import numpy as np

    numbers = np.random.default_rng(0).random(400)

    def hot_path() -> None:
        for _ in range(units):
            np.sort(numbers)

    def seconds() -> float:
        start = time.perf_counter()
        hot_path()
        return time.perf_counter() - start

    for _ in range(20):
        hot_path()
    print(json.dumps([statistics.median(seconds() for _ in range(CALLS)) for _ in range(SAMPLES)]))


def measure(units: int) -> list[float]:
    command = [sys.executable, __file__, "--worker", str(units)]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    samples: list[float] = json.loads(answer.stdout)
    return samples


def interleaved(slowdown: float, processes: int) -> tuple[list[list[float]], list[list[float]]]:
    a: list[list[float]] = []
    b: list[list[float]] = []
    sides = ((a, UNITS), (b, round(UNITS * (1 + slowdown))))
    for turn in range(processes):
        for side, units in sides if turn % 2 == 0 else reversed(sides):
            side.append(measure(units))
    return a, b


def compare(a: list[list[float]], b: list[list[float]]) -> dict[str, Any]:
    """Through the command line, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "a.json", Path(folder) / "b.json"]
        for file, side in zip(files, (a, b), strict=True):
            file.write_text(json.dumps({"hot path": side}))
        command = [sys.executable, "-m", "foretrain.cli.app", "bench", "compare", *map(str, files), "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict: dict[str, Any] = json.loads(answer.stdout)["hot path"]
    assert answer.returncode == (1 if verdict["verdict"] == "regressed" else 0), answer
    return verdict


def trial(slowdown: float, looks: tuple[int, ...], stored: dict[str, Any] | None) -> dict[str, Any]:
    if stored is None:
        a, b = (rounded(side) for side in interleaved(slowdown, looks[-1]))
        stored = {"load": round(os.getloadavg()[0], 2), "a": a, "b": b}
    return {**stored, "verdicts": {str(n): compare(stored["a"][:n], stored["b"][:n]) for n in looks}}


def rounded(side: list[list[float]]) -> list[list[float]]:
    return [[float(f"{sample:.5g}") for sample in samples] for samples in side]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--same", type=int, default=100, help="A/A comparisons")
    parser.add_argument("--planted", type=int, default=8, help="trials of each planted slowdown")
    parser.add_argument("--again", type=Path, help="judge the numbers of this result anew")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    from foretrain import environment
    from foretrain_bench.timing import this_version

    experiments = (
        ("same code", 0.0, options.same, (5,)),
        ("5 % slower", 0.05, options.planted, (5, 10, 20)),
        ("1 % slower", 0.01, options.planted, (5, 10, 20)),
        ("30 % slower", 0.30, options.planted, (5,)),
    )
    earlier = json.loads(options.again.read_text()) if options.again else None
    started, results = time.monotonic(), {}
    print(f"{'':12} {'processes':>9}  verdicts")
    for name, slowdown, trials, looks in experiments:
        stored = earlier["results"][name]["trials"] if earlier else [None] * trials
        found = [trial(slowdown, looks, one) for one in stored]
        table = {n: Counter(one["verdicts"][str(n)]["verdict"] for one in found) for n in looks}
        for n, counts in table.items():
            words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
            print(f"{name:12} {n:>9}  {words}", flush=True)
        counted = {str(n): dict(counts) for n, counts in table.items()}
        results[name] = {"slowdown": slowdown, "verdicts_by_processes": counted, "trials": found}
    report = earlier or {
        "benchmark": "verdict check",
        "command": " ".join(["python", "benchmarks/verdict_check.py", *_options(options)]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(this_version().source),
        "environment": environment.describe("cpu"),
        "seconds": round(time.monotonic() - started),
        "unit": "seconds per sample, a list of samples per process",
    }
    report["results"] = results
    if earlier:
        report["judged_anew"] = datetime.now().astimezone().isoformat(timespec="seconds")
    if options.out:
        options.out.write_text(json.dumps(report) + "\n")


def _options(options: argparse.Namespace) -> list[str]:
    return ["--same", str(options.same), "--planted", str(options.planted)]


if __name__ == "__main__":
    main()
