"""How OpenMP's threads wait, alone and beside busy programs: torch's default against what `foretrain` sets.

python benchmarks/busy_machine.py                         # about two and a half minutes; writes benchmarks/results
python benchmarks/busy_machine.py --busy 0                # on an otherwise idle machine: what it costs there
python benchmarks/busy_machine.py --spins 500 8000        # other counts beside the usual one

Each setting is a process of its own that trains the demo's model. They take turns of a second, first alone, then beside
`--busy` programs that only count, which are started here and ended here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain import environment
from foretrain.cli.doctor import usable_cores

CHOICES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
DEFAULT = "torch's default"
OURS = "foretrain's"


def work() -> None:
    """Train the demo's model for the seconds that each line of standard input says; print steps, seconds, CPU time."""
    import torch

    from foretrain.config import from_mapping
    from foretrain.recipes import train as run
    from foretrain.trainer import HybridTrainer

    config = from_mapping({"device": "cpu", "model.vocab_size": 512, "hybrid.mode": "off", "max_steps": 10**6})
    model = run.build_model(config)
    trainer = HybridTrainer(model, config=config)
    tokens = torch.randint(512, (config.batch_size, model.shape.context + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    trainer.step(batch)
    print(torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        steps, began, processor = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < float(line):
            trainer.step(batch)
            steps += 1
        print(steps, time.perf_counter() - began, time.process_time() - processor, flush=True)


class Worker:
    """One setting, in a process that waits for its turn."""

    def __init__(self, settings: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in CHOICES}
        command = [sys.executable, __file__, "--work"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env={**clean, **settings}, stdin=pipe, stdout=pipe, text=True)
        self.threads = int(self._answer()[0])

    def _answer(self) -> list[str]:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"a worker ended with {self.process.wait()}")
        return words

    def turn(self, seconds: float) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        steps, wall, processor = (float(word) for word in self._answer())
        return {"steps_per_second": steps / wall, "cpu_seconds_per_step": processor / steps}

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """As many programs that never rest."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(workers: dict[str, Worker], rounds: int, seconds: float) -> dict[str, Any]:
    """Turns in changing order, and each setting's speed as a ratio to the default's in the same round."""
    order = random.Random(1)  # noqa: S311 - no secret
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name in order.sample(list(workers), len(workers)):
            turns[name].append(workers[name].turn(seconds))
    speeds = {name: [turn["steps_per_second"] for turn in each] for name, each in turns.items()}
    ratios = {name: [a / b for a, b in zip(speeds[name], speeds[DEFAULT], strict=True)] for name in turns}
    return {
        name: {
            "steps_per_second": round(statistics.median(speeds[name]), 3),
            "best_steps_per_second": round(max(speeds[name]), 3),
            "cpu_ms_per_step": round(1000 * statistics.median(turn["cpu_seconds_per_step"] for turn in each), 1),
            "speed_ratio": round(statistics.median(ratios[name]), 3),
            "speeds": [round(speed, 3) for speed in speeds[name]],
        }
        for name, each in turns.items()
    }


def show(title: str, result: dict[str, Any]) -> None:
    print(f"{title}:")
    for name, row in result.items():
        print(
            f"  {name:<22} {row['steps_per_second']:8.2f} steps/s (best {row['best_steps_per_second']:.2f}), "
            f"{row['cpu_ms_per_step']:8.1f} ms of CPU a step, {row['speed_ratio']:.3f} x the default's speed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=usable_cores(), help="busy programs; default: one for each core")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--spins", type=int, nargs="*", default=[], help="further counts")
    parser.add_argument("--out", type=Path, help="default: a dated file in benchmarks/results")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    settings: dict[str, dict[str, str]] = {
        DEFAULT: {},
        OURS: {"GOMP_SPINCOUNT": str(environment.SPIN_COUNT)},
        "passive": {"OMP_WAIT_POLICY": "passive"},
        "one thread": {"OMP_NUM_THREADS": "1"},
        **{f"spin count {count}": {"GOMP_SPINCOUNT": str(count)} for count in options.spins},
    }
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load is {load:.1f} already: the first part is not that of an idle machine", file=sys.stderr)
    workers = {name: Worker(values) for name, values in settings.items()}
    report: dict[str, Any] = {
        "benchmark": "busy machine",
        "command": " ".join(["python", "benchmarks/busy_machine.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "threads": {name: worker.threads for name, worker in workers.items()},
        "settings": settings,
        "load_before": round(load, 2),
    }
    report["alone"] = measure(workers, options.rounds, options.seconds)
    show("alone", report["alone"])
    if options.busy:
        with busy_programs(options.busy):
            report["beside"] = {"programs": options.busy, **measure(workers, options.rounds, options.seconds)}
        show(f"beside {options.busy} busy programs", {name: report["beside"][name] for name in workers})
    for worker in workers.values():
        worker.end()
    day = datetime.now().astimezone().date().isoformat()
    out = options.out or Path(__file__).parent / "results" / f"{day}-busy-machine.json"
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
