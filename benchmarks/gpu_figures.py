"""All that still has to be measured on one GPU, in the order of its worth, as much as fits into a time.

python benchmarks/gpu_figures.py --prepare ../shared/data FOLDER                 # token files that the jobs read, once
python benchmarks/gpu_figures.py --list                                          # jobs, their minutes, what they show
python benchmarks/gpu_figures.py --data FOLDER --out FOLDER --minutes 9          # as many as fit, in order
python benchmarks/gpu_figures.py --data FOLDER --out FOLDER --only ranks auto-30m

A job that has come to its end is not run again, so calls add up; what each printed is NAME.log, and its results are
files of --out. After every job `figures.tar.gz` there holds all of it, for a machine that may be taken away.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BUNDLE = "figures.tar.gz"
KNOWN = str(HERE / "results" / "2026-11-19-stack-lm{}-cuda.json")
"""Runs of tuning that are not made again."""


@dataclass(frozen=True)
class Job:
    """One command. `{data}` and `{out}` in it are folders. minutes: what it takes on an H200, by reckoning."""

    name: str
    minutes: float
    shows: str
    command: str


JOBS = (
    Job(
        "tune-30m",
        3,
        "the warm-up of both at 30M, beside what is known of their settings",
        f"stack.py tune lm30m --data {{data}} --out {{out}}/stack --minutes 5 --known {KNOWN.format('30m')}",
    ),
    Job(
        "seeds-30m",
        4,
        "Muon over AdamW at 30M, three seeds: the aim is 2x",
        f"stack.py seeds lm30m --data {{data}} --out {{out}}/stack --minutes 5 --known {KNOWN.format('30m')}",
    ),
    Job(
        "auto-30m",
        10,
        "learning_rate = auto against seven rates at 30M: two corpora, both optimizers, three seeds",
        "auto_rate.py --tasks lm30m-wiki-adamw lm30m-wiki-muon lm30m-stories-adamw lm30m-stories-muon --steps 1000 "
        "--looks 10 --near 1 --seeds 3 --data {data} --device cuda --out {out}/auto-rate-cuda.json",
    ),
    Job(
        "auto-124m",
        12,
        "the same at 124M, one corpus, one seed",
        "auto_rate.py --tasks lm124m-wiki-adamw lm124m-wiki-muon --steps 1000 --looks 10 --data {data} --device cuda "
        "--out {out}/auto-rate-cuda-124m.json",
    ),
    Job(
        "profile",
        1.5,
        "where the milliseconds of a step at 124M go: the aim is 600,000 tokens per second",
        "profile_step.py --rounds 4 --out {out}/profile-step-cuda.json",
    ),
    Job(
        "parts-30m",
        4,
        "additions to Muon at 30M that pay on a CPU, timed: rows, and half the batch at first",
        'stack_parts.py lm30m --data {data} --device cuda --seeds 3 --parts plain "NorMuon\'s rows" '
        "'half the batch at first' --out {out}/stack-parts-cuda.json",
    ),
    Job(
        "throughput",
        3,
        "tokens per second at 124M: the aim is 600,000",
        "throughput.py --device cuda --data {data}/enwiki_train.bin --out {out}",
    ),
    Job(
        "idle",
        2,
        "what watching costs at 124M and in a tiny model: the aim is 1 %",
        "idle_overhead.py --device cuda --out {out}/idle-overhead-cuda.json",
    ),
    Job(
        "growth-20",
        2,
        "growth at 20 tokens per parameter, whose runs of 18 November were kept as printed lines only",
        "campaign.py bytes-20-muon --data {data} --out {out}/campaign --grid {out}/grid.json --minutes 2",
    ),
    Job(
        "checks",
        3,
        "what only a GPU can show: kernels, graphs, resume, precision",
        "gpu_checks.py --out {out}/gpu-checks.json",
    ),
    Job(
        "tune-124m",
        2,
        "the warm-up of both at 124M, beside what is known of their settings",
        f"stack.py tune lm124m --data {{data}} --out {{out}}/stack --minutes 7 --known {KNOWN.format('124m')}",
    ),
    Job(
        "seeds-124m",
        6,
        "the whole stack over AdamW at 124M, three seeds: the aim is 2x",
        f"stack.py seeds lm124m --data {{data}} --out {{out}}/stack --minutes 6 --known {KNOWN.format('124m')}",
    ),
    Job(
        "ranks",
        3,
        "FSDP2 at world 1 over NCCL, 124M: the aim is 0.97x of one process in its eager form, and 1 % when idle",
        "ranks_speed.py --device cuda --model small --rounds 6 --out {out}/ranks-speed-cuda.json",
    ),
)
GRID = {
    "bytes-20-muon": [
        {"arm": arm, "seed": seed, "settings": {"hybrid.mode": "off"} | settings}
        for seed in (1, 2, 3)
        for arm, settings in (("plain", {}), ("grown at 50 %", {"growth.layers": 6}))
    ]
}


def prepare(source: Path, folder: Path) -> None:
    """Write tokens of Wikipedia and of novels, and bytes of Wikipedia, as little-endian uint16: some 46 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, target, most in (("enwiki", "enwiki_train.bin", 10_000_000), ("eltec", "stories_train.bin", 6_000_000)):
        tokens = lzma.decompress((source / "tokens" / f"{name}_train.gpt2.u16.xz").read_bytes())
        (folder / target).write_bytes(tokens[: 2 * most])
    text = lzma.decompress((source / "text" / "wikitext2_train.txt.xz").read_bytes())[:8_000_000]
    np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / "enwiki_bytes.bin")
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 2**20:.0f} MB")


def carry_out(job: Job, data: Path, out: Path, seconds: float) -> str:
    """Run a job with its output in its log, and return how it ended."""
    command = [sys.executable, *shlex.split(job.command.format(data=data, out=out))]
    command[1] = str(HERE / command[1])
    source = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with (out / f"{job.name}.log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
                env=os.environ | {"PYTHONPATH": source},
            ).returncode
        except subprocess.TimeoutExpired:
            return "its time was over"
    if code == 0:
        (out / f"{job.name}.done").touch()
    return "done" if code == 0 else f"failed with {code}"


def bundle(out: Path) -> None:
    """Put everything into one file, beside what was there before until it is complete."""
    unfinished = out / f"{BUNDLE}.part"
    with tarfile.open(unfinished, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name not in (BUNDLE, unfinished.name):
                archive.add(path, arcname=path.name)
    unfinished.replace(out / BUNDLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--prepare", nargs=2, type=Path, metavar=("SOURCE", "FOLDER"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], metavar="JOB")
    options = parser.parse_args()
    if options.prepare:
        prepare(*options.prepare)
        return
    if options.list or options.data is None or options.out is None:
        for job in JOBS:
            print(f"{job.name:<12} {job.minutes:>3.0f} min  {job.shows}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "grid.json").write_text(json.dumps(GRID), encoding="utf-8")
    end = time.monotonic() + 60 * options.minutes
    for job in JOBS:
        if (options.only and job.name not in options.only) or (options.out / f"{job.name}.done").exists():
            continue
        left = end - time.monotonic()
        if left < 30 * job.minutes and not options.only:  # half of what it needs would be wasted
            print(f"{job.name:<12} left out: {left / 60:.1f} minutes are left, it takes {job.minutes:.0f}")
            continue
        started = time.monotonic()
        ended = carry_out(job, options.data, options.out, max(1.0, left))
        print(f"{job.name:<12} {(time.monotonic() - started) / 60:4.1f} min  {ended}", flush=True)
        for line in (options.out / f"{job.name}.log").read_text(encoding="utf-8").splitlines()[-8:]:
            print(f"    {line}", flush=True)
        bundle(options.out)


if __name__ == "__main__":
    main()
