"""Some of the thousand faults, drawn, carried out and judged by `benchmarks/thousand_faults.py` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "thousand_faults.py"
CONFIGURATIONS = ("adamw, plain", "exact leap, refused")
FAULTS = (
    *("kill -9 at a file event", "signal", "full disk", "not finite"),
    *("damaged checkpoint", "two processes in one folder", "moved folder", "folder of another version"),
)


def faults(folder: Path, items: int) -> subprocess.CompletedProcess[str]:
    arguments = ["--out", str(folder), "--jobs", "2", "--configurations", *CONFIGURATIONS, "--faults", *FAULTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *arguments, "--items", str(items)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_drawn_faults_end_as_promised_and_an_end_that_differs_is_seen(tmp_path: Path) -> None:
    done = faults(tmp_path, len(FAULTS))  # each is the first one once
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(FAULTS)} items, {len(FAULTS)} same bits, 0 as promised, 0 failures" in done.stdout
    rows = read_rows(tmp_path)
    assert {name for row in rows for name in row["faults"]} == set(FAULTS)
    assert {row["setup"] for row in rows} == set(CONFIGURATIONS)

    for path in (tmp_path / "references").glob("*.json"):
        kept = json.loads(path.read_text())
        kept["reference"]["digest"]["optimizer.safetensors"] = "of another run"
        path.write_text(json.dumps(kept))
    again = faults(tmp_path, len(FAULTS) + 1)
    assert again.returncode == 1
    assert f"{len(FAULTS)} items are done, 1 are left" in again.stdout
    (row,) = (row for row in read_rows(tmp_path) if row["item"] == len(FAULTS))
    assert row["verdict"] == "DIFFERS"
    assert row["text"].startswith("optimizer.safetensors of step ")
