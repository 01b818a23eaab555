"""Crash matrix: kill `foretrain train` at every file event of a run, resume it, compare the final model bit for bit.

    python benchmarks/crash_matrix.py                     # all of it, about 20 minutes on two cores
    python benchmarks/crash_matrix.py --modes before      # one way of dying only

The kills, the resumes and the verdicts are those of `ckpt-chaos` (https://github.com/rkb32/ckpt-chaos). Two set-ups:
one keeps every checkpoint, so that work lost on a resume is always seen; one keeps two, so that deletions are hit too.

  before    killed before the file event, as by SIGKILL
  torn      killed with the file written half
  term      SIGTERM at the file event, SIGKILL if the run is still there after some seconds
  unsynced  killed, and whatever was not yet synced to the disk is lost, by the disk of power_cut.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MODES = ("before", "torn", "term", "unsynced")
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK", "CONTROL_FAIL")
FAIL_ON = ",".join(VERDICTS[1:])
COMMAND = ("foretrain", "train", "tiny.toml", "--out", "{out}", "--resume")
FORETRAIN = (sys.executable, str(Path(__file__).resolve().with_name("power_cut.py")))
"""Is started for the first word of it."""
SETUPS = {"every checkpoint kept": 100, "two checkpoints kept": 2}
STEPS = 10
CONFIG = """\
max_steps = {steps}
batch_size = 4
[model]
layers = 1
heads = 2
width = 16
context = 16
dropout = 0.1
[data]
path = "words.txt"
cache = "cache"
[evaluation]
interval = 4
batches = 2
ema_decay = 0.9
[checkpoint]
interval = 3
keep = {keep}
[log]
interval = 2
"""


@dataclass(frozen=True)
class Row:
    """One kill, and what the resumed run made of it."""

    event: str
    mode: str
    verdict: str
    newest_complete_step: int
    resumed_from_step: int | None
    died: bool
    as_planned: bool
    """Whether the run that was killed had come to the same file event as the fault-free one."""


def write_inputs(folder: Path, keep: int, steps: int = STEPS) -> None:
    """`tiny.toml` and the text it trains on: dropout, an average of the weights, evaluations, a save every 3 steps."""
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"], k=2000)  # noqa: S311
    (folder / "words.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "tiny.toml").write_text(CONFIG.format(keep=keep, steps=steps), encoding="utf-8")


def chaos_options(modes: Sequence[str], jobs: int, most: int = 100_000) -> list[str]:
    """Options of `ckpt-chaos run`. A checkpoint counts as complete by the names of its files alone, because the time
    in its state differs in length from run to run; the rename makes this the stricter rule. most: kills in all."""
    return [
        *("--modes", ",".join(modes), "--jobs", str(jobs), "--max-points", str(most), "--timeout", "1800"),
        *("--checkpoint-glob", "{out}/checkpoints/step-*", "--ckpt-ignore-size"),
        *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/model/model.safetensors"),
        *("--fail-on", FAIL_ON),
    ]


def run_matrix(
    folder: Path, command: Sequence[str], modes: Sequence[str], jobs: int, most: int = 100_000
) -> tuple[list[Row], str]:
    """Run `command` in `folder` through ckpt-chaos; every row, and what it printed."""
    work = folder / "work"
    arguments = ["run", *chaos_options(modes, jobs, most), "--work", str(work), "--", *command]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    if not work.is_dir() or done.returncode not in (0, 1):
        raise RuntimeError(f"ckpt-chaos gave up (exit code {done.returncode}):\n{printed}")
    return read_rows(work), printed


def read_rows(work: Path) -> list[Row]:
    from ckpt_chaos.runner import rejudge

    records = [json.loads(path.read_text(encoding="utf-8")) for path in work.glob("pt_*/result.json")]
    rows = []
    for record, judged in zip(sorted(records, key=lambda entry: entry["order"]), rejudge(work), strict=True):
        number, mode = record.get("point", (0, "control"))
        event = f"{number} {' '.join(record['event'])}" if number else "no kill"
        outcome = judged.outcome
        rows.append(
            Row(
                event,
                mode,
                judged.verdict,
                outcome.newest_complete_step,
                outcome.resumed_from_step,
                died=judged.crashed,
                as_planned=not judged.drift,
            )
        )
    return rows


def counts(rows: Sequence[Row], mode: str) -> dict[str, int]:
    """Verdicts of one mode, plus the kills that did not fall where they were planned."""
    chosen = [row for row in rows if row.mode == mode]
    by_verdict = Counter(row.verdict for row in chosen)
    missed = sum(not row.as_planned or (mode in ("before", "torn", "unsynced") and not row.died) for row in chosen)
    return {"points": len(chosen), **{verdict: by_verdict[verdict] for verdict in VERDICTS}, "missed": missed}


def table(matrices: dict[str, list[Row]]) -> str:
    """Markdown."""
    columns = ["points", *VERDICTS, "missed"]
    lines = ["| set-up | mode | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for name, rows in matrices.items():
        for mode in ("control", *MODES):
            numbers = counts(rows, mode)
            if numbers["points"]:
                lines.append(f"| {name} | {mode} | " + " | ".join(str(numbers[column]) for column in columns) + " |")
    return "\n".join(lines)


def is_clean(rows: Sequence[Row]) -> bool:
    modes = {row.mode for row in rows}
    return all(counts(rows, mode)["PASS"] == counts(rows, mode)["points"] for mode in modes) and not any(
        counts(rows, mode)["missed"] for mode in modes
    )


def report(matrices: dict[str, list[Row]], modes: Sequence[str], jobs: int) -> dict[str, Any]:
    from foretrain import environment

    options = [f"'{text}'" if set(text) & set("{}*(\\ ") else text for text in chaos_options(modes, jobs)]
    return {
        "benchmark": "crash matrix",
        "command": f"ckpt-chaos run {' '.join(options)} -- {' '.join(COMMAND)}",
        "configuration": CONFIG.format(keep="KEEP", steps=STEPS),
        "keep": SETUPS,
        "environment": environment.describe("cpu") | {"ckpt-chaos": environment.version("ckpt-chaos")},
        "clean": all(is_clean(rows) for rows in matrices.values()),
        "counts": {name: {mode: counts(rows, mode) for mode in ("control", *modes)} for name, rows in matrices.items()},
        "rows": {name: [asdict(row) for row in rows] for name, rows in matrices.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help=f"ways of dying, of {', '.join(MODES)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: 2)")
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="folder for the dated JSON file")
    options = parser.parse_args()
    modes = [mode.strip() for mode in options.modes.split(",")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the runs are side by side
    os.environ["COLUMNS"] = "300"
    command = (*FORETRAIN, *COMMAND[1:])
    matrices: dict[str, list[Row]] = {}
    for name, keep in SETUPS.items():
        with tempfile.TemporaryDirectory(prefix="crash-matrix-") as temporary:
            print(f"{name}: killing {' '.join(COMMAND)} ...", flush=True)
            write_inputs(Path(temporary), keep)
            matrices[name], printed = run_matrix(Path(temporary), command, modes, options.jobs)
            if not is_clean(matrices[name]):
                print(printed)
    content = report(matrices, modes, options.jobs)
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results / f"{datetime.now().astimezone():%Y-%m-%d}-crash-matrix.json"
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(matrices))
    print(f"{'clean' if content['clean'] else 'NOT CLEAN'}; every row is in {target.name}")
    return 0 if content["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
