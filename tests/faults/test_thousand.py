"""A dozen of the thousand faults, drawn, carried out and judged by `benchmarks/thousand_faults.py` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "thousand_faults.py"
CONFIGURATIONS = ("leap", "exact leap, refused")
FAULTS = (
    *("kill -9 at a file event", "kill -9 inside a step", "signal", "full disk", "read-only folder", "not finite"),
    *("damaged checkpoint", "two processes in one folder", "moved folder", "folder of another version"),
)
ITEMS = 16
"""Each of these faults at least once."""


def faults(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--out", str(folder), "--jobs", "2", "--configurations", *CONFIGURATIONS, "--faults", *FAULTS, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment)


def test_drawn_faults_end_as_promised_and_an_end_that_differs_is_seen(tmp_path: Path) -> None:
    done = faults(tmp_path, "--items", str(ITEMS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ITEMS} items, {ITEMS} same bits, 0 as promised, 0 failures" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row["faults"]} == set(FAULTS)
    assert {row["setup"] for row in rows} == set(CONFIGURATIONS)

    again = faults(tmp_path, "--items", str(ITEMS))  # what is done is not done again
    assert f"{ITEMS} items are done, 0 are left" in again.stdout

    for path in (tmp_path / "references").glob("*.json"):
        kept = json.loads(path.read_text())
        kept["reference"]["digest"]["optimizer.safetensors"] = "of another run"
        path.write_text(json.dumps(kept))
    number = next(row["item"] for row in rows if "not finite" not in row["faults"])
    done = faults(tmp_path, "--only", str(number))
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)
    assert row["verdict"] == "DIFFERS"
    assert row["text"].startswith("optimizer.safetensors of step ")
