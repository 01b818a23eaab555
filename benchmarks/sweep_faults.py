"""Sweeps whose workers, and whole sweeps, are killed at random: is anything lost?

    python benchmarks/sweep_faults.py --kills 12 --out result.json

One sweep of tiny runs is left alone. The same sweep is begun again, and every few seconds one of its two workers, or
the sweep itself with its workers, gets SIGKILL; a killed sweep is begun anew with the same command. When it is
complete, every loss of every trial must be, bit for bit, what it is in the sweep that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain import environment

SPACE = """
[base]
max_steps = {steps}
batch_size = 4
device = "cpu"
[base.model]
layers = 1
heads = 2
width = 16
context = 16
[base.evaluation]
batches = 2
[base.hybrid]
mode = "off"
[space]
"optimizer.learning_rate" = {{low = 1e-4, high = 1e-1, log = true}}
[sweep]
trials = {trials}
workers = 2
"""


def begin(space: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "foretrain", "sweep", str(space), "--out", str(out), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that a sweep has started."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in listed.read_text().split()] if listed.exists() else []


def kill(number: int) -> bool:
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def disturbed(space: Path, out: Path, kills: int, lot: random.Random) -> dict[str, int]:
    """Run a sweep to its end while it is killed so often."""
    done = {"workers": 0, "sweeps": 0}
    process = begin(space, out)
    while process.poll() is None or process.returncode < 0:
        if process.poll() is not None:
            process = begin(space, out)
        time.sleep(lot.uniform(0.5, 6.0))
        if sum(done.values()) >= kills:
            process.wait()
            continue
        own = workers_of(process)
        if lot.random() < 0.25:
            killed = kill(process.pid)
            process.wait()
            for number in own:  # as a machine that goes down takes all of them
                kill(number)
            done["sweeps"] += killed
        elif own:
            done["workers"] += kill(lot.choice(own))
    if process.returncode != 0:
        raise SystemExit(f"the sweep ended with exit code {process.returncode}")
    return done


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return how many losses of the trials are equal, and which are not."""
    same, different = 0, []
    for left, right in zip(one["trials"], other["trials"], strict=True):
        known = dict(map(tuple, left["losses"]))
        for step, loss in right["losses"]:
            if step in known:
                same += known[step] == loss
                different += [] if known[step] == loss else [[right["number"], step, known[step], loss]]
    return {"equal_losses": same, "different_losses": different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        space = Path(folder) / "space.toml"
        space.write_text(SPACE.format(steps=arguments.steps, trials=arguments.trials))
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        if begin(space, alone).wait() != 0:
            raise SystemExit("the sweep that is left alone failed")
        lot = random.Random(arguments.seed)  # noqa: S311
        done = disturbed(space, killed, arguments.kills, lot)
        summaries = [json.loads((path / "summary.json").read_text()) for path in (alone, killed)]
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(__file__).parent),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "kills": done,
        "complete": [summary["complete"] for summary in summaries],
        "failed_trials": [sum(one["state"] == "failed" for one in summary["trials"]) for summary in summaries],
        "best": [summary["best"]["final"] for summary in summaries],
        **compared(*summaries),
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
