"""Long runs with everything switched on: does memory, the number of open files, the log or a step's time grow?

    python benchmarks/long_run.py                        # 20,000 steps of each arm: two minutes each on one core
    python benchmarks/long_run.py --jobs 3 --out long.json

Three arms, each a process of its own: `leap` and `rollout` train a minute GPT and try moves all the time, `exact` is a
network on a full batch, with quasi-Newton leaps. All evaluate, average their weights, save, keep the best, look at
their health, measure metrics, call callbacks, log every 10 steps, write for TensorBoard and for a console, and end
with a report. Every 500 steps: resident memory, Python objects, open files, threads, bytes of `metrics.jsonl` and of
everything else in the run folder, and CPU time per step.

The verdict is on what comes after the first quarter: memory by the median slope of all pairs of samples; files and
threads must be as many at the end as then; the log may grow, by a bounded number of bytes per step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer, environment
from foretrain.config import from_mapping
from foretrain.data.loader import Loader, TokenWindows
from foretrain.events import Event, Progress
from foretrain.hybrid.gate import Answer, Ask
from foretrain.recipes import train as run

MOST_MEMORY = 0.25
"""MB of resident memory per 1,000 steps."""
MOST_LOG = 400.0
"""Bytes of `metrics.jsonl` per step, with an entry every 10 steps and moves all the time."""
SLOWEST = 1.25
"""CPU time per step of the last quarter, as a multiple of the second one's; each as a multiple of a fixed piece of work
that is timed beside it, because other programs slow both down."""
TIMEOUT = 3600.0
"""Seconds that an arm may take."""

EVERYTHING: dict[str, Any] = {
    "device": "cpu",
    "batch_size": 4,
    "schedule.type": "constant",
    "evaluation.interval": 100,
    "evaluation.ema_decay": 0.99,
    "checkpoint.interval": 250,
    "health.interval": 50,
    "log.interval": 10,
    "log.trackers": ["tensorboard"],
    "guard.auto_tune": True,
    "hybrid.warmup_steps": 50,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": 5,
    "hybrid.max_predict_steps": 20,
    "hybrid.correct_steps": 3,
    "hybrid.confidence_threshold": 0.0,
    "audit.time_budget": 1.0,
    "audit.steps": 8,
}
GPT = {
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 3e-4,
    "model.layers": 1,
    "model.heads": 1,
    "model.width": 16,
    "model.context": 16,
    "model.vocab_size": 64,
    "predictor.beta": 0.5,
}
ARMS: dict[str, dict[str, Any]] = {
    "leap": {**GPT, "hybrid.mode": "leap"},
    "rollout": {**GPT, "hybrid.mode": "rollout"},
    "exact": {"optimizer.type": "adam", "optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.0},
}


@dataclass(frozen=True)
class Sample:
    """What the process and its run folder hold at a step."""

    step: int
    memory_mb: float
    objects: int
    files: int
    threads: int
    log_bytes: int
    other_bytes: int
    cpu_seconds: float
    """Of the process, without the looks themselves."""
    reference_ms: float
    """CPU time of a fixed piece of work."""


class Sampler:
    """Listens to a run, and looks every so many steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self.samples: list[Sample] = []
        self._spent = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress) and event.step >= self.every * (len(self.samples) + 1):
            began = time.process_time()
            self.samples.append(self.look(event.step, began - self._spent))
            self._spent += time.process_time() - began

    def look(self, step: int, cpu_seconds: float) -> Sample:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {path: path.lstat().st_size for path in self.folder.rglob("*") if path.is_file()}
        log = sizes.get(self.folder / "metrics.jsonl", 0)
        return Sample(
            step=step,
            memory_mb=int(status["VmRSS"].split()[0]) / 1024,
            objects=len(gc.get_objects()),
            files=len(list(Path("/proc/self/fd").iterdir())) - 1,  # without that of the look itself
            threads=int(status["Threads"]),
            log_bytes=log,
            other_bytes=sum(sizes.values()) - log,
            cpu_seconds=cpu_seconds,
            reference_ms=reference(),
        )


def reference() -> float:
    """Milliseconds of CPU time for small operations, as steps are made of."""
    tensor = torch.eye(16) * 0.5
    began = time.process_time()
    for _ in range(2000):
        tensor = torch.tanh(tensor @ tensor + tensor)
    return 1000 * (time.process_time() - began)


def force(trainer: HybridTrainer) -> None:
    """Whatever forecasts and moves were worth so far: the next move is tried as soon as it may be, every fourth as an
    audit."""
    assert trainer.policy is not None
    ask, number = trainer.policy.gate.ask, itertools.count(1)

    def yes(asked: Ask) -> Answer:
        answer = ask(asked)
        over = asked.horizon < 1 or asked.steps_left <= asked.needed_after
        return answer if answer.open or over else Answer(True, next(number) % 4 == 0, "forced")

    trainer.policy.gate.ask = yes  # type: ignore[method-assign]
    trainer.observer.quality.trusted = lambda windows: True  # type: ignore[method-assign]
    trainer.policy.confidence.estimate = lambda features: 0.9  # type: ignore[method-assign]


class Network(nn.Module):
    """For the arm without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)[:, 0]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


def train(arm: str, steps: int, every: int, folder: Path) -> tuple[list[Sample], dict[str, Any]]:
    """The samples of a run in `folder`, and its summary."""
    config = from_mapping({**EVERYTHING, **ARMS[arm], "max_steps": steps})
    sampler = Sampler(folder, every)
    torch.manual_seed(0)
    if arm == "exact":
        model: nn.Module = Network()
        inputs = torch.randn(64, 4)
        loader: Any = [(inputs, torch.sin(3 * inputs).sum(1))]
        held_out: Any = loader
        metrics = {"error": lambda model, batch: (model(batch[0]) - batch[1]).abs().mean()}
    else:
        gpt = run.build_model(config)
        model = gpt
        tokens = np.random.default_rng(0).integers(0, 64, 40_000).cumsum() // 3 % 64
        windows, others = (
            TokenWindows(part.astype(np.uint16), gpt.shape.context, 0) for part in (tokens[:36_000], tokens[36_000:])
        )
        loader = Loader(windows, config.batch_size, 0)
        held_out = list(itertools.islice(Loader(others, config.batch_size, 0), 2))
        metrics = {"perplexity": lambda model, batch: model.loss(batch).exp()}
    trainer = HybridTrainer(model, config=config)
    force(trainer)
    summary = trainer.fit(loader, held_out, metrics=metrics, callbacks=[sampler], out=folder, progress=True)
    return sampler.samples, summary


def slope(samples: Sequence[Sample], name: str) -> float:
    """Median growth per 1,000 steps, over all pairs."""
    pairs = itertools.combinations(samples, 2)
    return statistics.median(
        1000 * (getattr(b, name) - getattr(a, name)) / (b.step - a.step) for a, b in pairs if b.step > a.step
    )


def judge(samples: Sequence[Sample]) -> dict[str, Any]:
    """What grew after the first quarter, and whether that is within its bounds."""
    after = [sample for sample in samples if sample.step >= samples[-1].step / 4]
    first, last = after[0], after[-1]
    paces = [
        (b.step, 1000 * (b.cpu_seconds - a.cpu_seconds) / (b.step - a.step) / (a.reference_ms + b.reference_ms) * 2)
        for a, b in itertools.pairwise(samples)
        if b.step > a.step
    ]
    end = samples[-1].step
    early = statistics.median(pace for step, pace in paces if end / 4 <= step < end / 2)
    late = statistics.median(pace for step, pace in paces if step >= 3 * end / 4)
    log = (last.log_bytes - first.log_bytes) / (last.step - first.step)
    grown = {
        "memory_mb_per_1000_steps": round(slope(after, "memory_mb"), 3),
        "objects_per_1000_steps": round(slope(after, "objects"), 1),
        "files": [first.files, last.files],
        "threads": [first.threads, last.threads],
        "log_bytes_per_step": round(log, 1),
        "other_kb_per_1000_steps": round(slope(after, "other_bytes") / 1024, 1),
        "step_in_references": [round(early, 4), round(late, 4)],
    }
    within = {
        "memory": grown["memory_mb_per_1000_steps"] <= MOST_MEMORY,
        "files": last.files <= first.files,
        "threads": last.threads <= first.threads,
        "log": log <= MOST_LOG,
        "time": late <= SLOWEST * early,
    }
    return {**grown, "within": within}


def table(arm: str, samples: Sequence[Sample]) -> str:
    rows = [f"{arm}: step   RSS MB   objects  files  threads  log kB  other kB  CPU ms/step"]
    shown = samples[:: max(1, len(samples) // 10)]
    for before, now in itertools.pairwise([None, *shown]):
        assert now is not None
        pace = (
            f"{1000 * (now.cpu_seconds - before.cpu_seconds) / (now.step - before.step):11.2f}" if before else " " * 11
        )
        rows.append(
            f"{now.step:>{len(arm) + 6}} {now.memory_mb:8.1f} {now.objects:9,} {now.files:6} {now.threads:8} "
            f"{now.log_bytes / 1024:7.0f} {now.other_bytes / 1024:9.0f}  {pace}"
        )
    return "\n".join(rows)


def in_a_process(arm: str, steps: int, every: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", arm, "--steps", str(steps), "--every", str(every)]
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=told, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if answer.returncode:
        raise SystemExit(f"{arm} failed:\n{answer.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def work(arm: str, steps: int, every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        samples, summary = train(arm, steps, every, Path(folder) / "run")
    told = {name: summary[name] for name in ("global_step", "moves", "backward_passes", "final_val_loss")}
    sys.stdout.write(json.dumps({"samples": [asdict(sample) for sample in samples], "summary": told}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="steps between two samples")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: a dated file in benchmarks/results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, options.every)
        return
    now = datetime.now().astimezone()
    out = options.out or Path(__file__).parent / "results" / f"{now.date().isoformat()}-long-run-cpu.json"
    report: dict[str, Any] = {
        "benchmark": "long run",
        "command": " ".join(["python", "benchmarks/long_run.py", *sys.argv[1:]]),
        "date": now.isoformat(timespec="seconds"),
        "environment": environment.describe("cpu"),
        "bounds": {"memory_mb_per_1000_steps": MOST_MEMORY, "log_bytes_per_step": MOST_LOG, "time": SLOWEST},
        "arms": {},
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda arm: in_a_process(arm, options.steps, options.every), options.arms)
        for arm, result in zip(options.arms, results, strict=True):
            samples = [Sample(**sample) for sample in result["samples"]]
            report["arms"][arm] = {**result, "verdict": judge(samples)}
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(table(arm, samples), flush=True)
    for arm, result in report["arms"].items():
        verdict = dict(result["verdict"])
        within = verdict.pop("within")
        failed = [name for name, good in within.items() if not good]
        print(f"{arm}: {'flat' if not failed else 'GROWS: ' + ', '.join(failed)}; moves {result['summary']['moves']}")
        print(f"  {json.dumps(verdict)}")
    print(f"bounds: {json.dumps(report['bounds'])}, no more files and threads than after a quarter; wrote {out}")
    sys.exit(any(not good for result in report["arms"].values() for good in result["verdict"]["within"].values()))


if __name__ == "__main__":
    main()
