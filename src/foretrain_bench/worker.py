"""Times a few benchmarks in a process of its own and prints the samples as one line of JSON.

Run by its path (`python -P worker.py '{...}'`), with the version of foretrain to be timed on PYTHONPATH. So it imports
nothing of foretrain itself.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "foretrain-bench "
"""Begins the line with the result; everything else on standard output is the benchmarked code's own."""
SHORTEST = 0.001
"""Seconds of one timing: long enough that the clock does not count, and shorter than the slice of time for which a busy
machine takes the processor away. So most timings are undisturbed, and their median is."""
WARM_UP = 0.1
BUDGET = 0.5
"""Seconds of all timings of one benchmark, as far as the limits below allow."""
FEWEST_TIMINGS, MOST_TIMINGS = 5, 500
MOST_LOOPS = 100_000
"""Calls of one timing; nothing in Python is that quick."""
SAMPLES = 25
"""More timings than this are kept as the medians of so many stretches of time."""


def time_calls(
    call: Callable[[], object], loops: int, synchronise: Callable[[], None], clock: Callable[[], float]
) -> float:
    """Return the seconds of `loops` calls, until the device has done them all."""
    synchronise()
    start = clock()
    for _ in range(loops):
        call()
    synchronise()
    return clock() - start


def measure(
    call: Callable[[], object],
    synchronise: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], int]:
    """Return samples in seconds per call, and how many calls a timing has. Warm-up and calibration are not among
    them."""
    spent = time_calls(call, 1, synchronise, clock)
    warm = 1
    while spent < WARM_UP or warm < 3:
        spent += time_calls(call, 1, synchronise, clock)
        warm += 1
    loops, taken = 1, 0.0
    while True:
        taken = time_calls(call, loops, synchronise, clock)
        if taken >= SHORTEST or loops >= MOST_LOOPS:
            break
        wanted = round(1.2 * loops * SHORTEST / max(taken, 1e-9))
        loops = min(MOST_LOOPS, max(loops + 1, min(10 * loops, wanted)))
    count = max(FEWEST_TIMINGS, min(MOST_TIMINGS, round(BUDGET / max(taken, 1e-9))))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return stretches([time_calls(call, loops, synchronise, clock) / loops for _ in range(count)]), loops
    finally:
        if collecting:
            gc.enable()


def stretches(timings: list[float]) -> list[float]:
    """Return at most SAMPLES medians of neighbours."""
    count = min(SAMPLES, len(timings))
    bounds = [len(timings) * number // count for number in range(count + 1)]
    return [statistics.median(timings[low:high]) for low, high in itertools.pairwise(bounds)]


def load_average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def clock_rate() -> float | None:
    """Return the mean clock of the processor in MHz, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        rates = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return round(sum(rates) / len(rates), 1) if rates else None


def _hot_paths() -> Any:
    """Load this folder's benchmarks, whichever foretrain is imported."""
    path = Path(__file__).with_name("hotpaths.py")
    spec = importlib.util.spec_from_file_location("foretrain_hot_paths", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _synchronise(device: str) -> Callable[[], None]:
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def time_benchmark(benchmark: Any, device: str) -> dict[str, Any]:
    """Return what is recorded of one benchmark in one process."""
    before = load_average()
    try:
        samples, loops = measure(benchmark.setup(device), _synchronise(device))
    except Exception as error:  # noqa: BLE001 - another version may lack anything; the others go on
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "samples": [float(f"{sample / benchmark.per_call:.6g}") for sample in samples],
        "loops": loops,
        "load": [before, load_average()],
        "clock_mhz": clock_rate(),
    }


def main(argument: str) -> None:
    order = json.loads(argument)
    import torch

    torch.set_num_threads(order["threads"])
    benchmarks = _hot_paths().BENCHMARKS
    timed = {name: time_benchmark(benchmarks[name], order["device"]) for name in order["names"]}
    sys.stdout.write(f"\n{MARK}{json.dumps({'benchmarks': timed, 'environment': _environment(order['device'])})}\n")


def _environment(device: str) -> dict[str, Any]:
    """Describe the environment of this process: another version may run in another Python."""
    try:
        from foretrain import environment
    except ImportError:
        return {}
    return environment.describe(device)


if __name__ == "__main__":
    main(sys.argv[1])
