"""Sweeps whose workers, and whole sweeps, are killed at random: is anything lost?

    python benchmarks/sweep_faults.py --kills 12 --out result.json
    python benchmarks/sweep_faults.py --machines 2 --storage postgresql://user@host/database --out result.json

One sweep of tiny runs is left alone. The same sweep is begun again, and every few seconds one of its two workers, or
the sweep itself with its workers, gets SIGKILL; a killed sweep is begun anew with the same command. When it is
complete, every loss of every trial must be, bit for bit, what it is in the sweep that was left alone.

--storage names a database that is empty: then as many sweeps as --machines says, each with a folder of its own, share
the trials there, and any of them may be killed. --restart is a command that starts the database's server anew, such as
"pg_ctl restart -D DATA -m immediate": it is run after every third kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import foretrain
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
workers = {workers}
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


def disturbed(space: Path, outs: list[Path], kills: int, lot: random.Random, restart: str) -> dict[str, int]:
    """Run sweeps, one per machine, to their end while they are killed so often."""
    done = {"workers": 0, "sweeps": 0}
    restarts = 0
    processes = [begin(space, out) for out in outs]
    while any(process.poll() is None or process.returncode < 0 for process in processes):
        for place, process in enumerate(processes):
            if process.poll() is not None and process.returncode < 0:
                processes[place] = begin(space, outs[place])
        time.sleep(lot.uniform(0.5, 6.0))
        if sum(done.values()) >= kills:
            for process in processes:
                process.wait()
            continue
        process = lot.choice(processes)
        own = workers_of(process)
        if lot.random() < 0.25:
            killed = process.poll() is None and kill(process.pid)
            process.wait()
            for number in own:  # as a machine that goes down takes all of them
                kill(number)
            done["sweeps"] += killed
        elif own:
            done["workers"] += kill(lot.choice(own))
        if restart and sum(done.values()) // 3 > restarts:
            restarts += 1
            subprocess.run(restart, shell=True, check=True, stdout=subprocess.DEVNULL)  # noqa: S602 - who asks names it
    for process in processes:
        if process.returncode != 0:
            raise SystemExit(f"a sweep ended with exit code {process.returncode}")
    return done | {"servers": restarts}


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


def most_told(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary that knows most losses: a machine reads those of its own runs only."""
    return max(summaries, key=lambda summary: sum(len(trial["losses"]) for trial in summary["trials"]))


def without_password(text: str) -> str:
    """Return a storage's address as others may read it."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machines", type=int, default=1, help="sweeps with a folder of their own on one storage")
    parser.add_argument("--storage", default="", help="address of an empty database; empty: a file in the folder")
    parser.add_argument("--restart", default="", help="command that starts the database's server anew")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        space, shared, alone = (Path(folder) / name for name in ("space.toml", "shared.toml", "alone"))
        machines = [Path(folder) / f"machine-{number}" for number in range(arguments.machines)]
        text = SPACE.format(steps=arguments.steps, trials=arguments.trials, workers=1 if arguments.storage else 2)
        space.write_text(text)
        shared.write_text(text + f'storage = "{arguments.storage}"\n')
        if begin(space, alone).wait() != 0:
            raise SystemExit("the sweep that is left alone failed")
        lot = random.Random(arguments.seed)  # noqa: S311
        done = disturbed(shared, machines, arguments.kills, lot, arguments.restart)
        summaries = [json.loads((path / "summary.json").read_text()) for path in (alone, *machines)]
        of_machines = [len(list((machine / "runs").glob("trial-*"))) for machine in machines]
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(foretrain.__file__).parents[1]),
        "arguments": {name: without_password(str(value)) for name, value in vars(arguments).items()},
        "kills": done,
        "complete": [summary["complete"] for summary in summaries],
        "failed_trials": [sum(one["state"] == "failed" for one in summary["trials"]) for summary in summaries],
        "best": [summary["best"]["final"] for summary in summaries],
        "trials_of_machines": of_machines,
        **compared(summaries[0], most_told(summaries[1:])),
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
