"""Seconds to the first step of `foretrain train` with `engine.compile = true`: with no compiled code yet, and with what
an earlier run left.

python benchmarks/compile_cache.py --out benchmarks/results/DATE-compile-cache-cpu.json

Every run is a process of its own, on Python's own source; cold ones begin with an empty cache folder. Eager runs are
measured beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain import environment

SETTINGS: dict[str, Any] = {
    "model.type": "gpt2-tiny",
    "batch_size": 4,
    "max_steps": 3,
    "hybrid.mode": "off",
    "evaluation.batches": 1,
    "data.max_documents": 50,
    "log.report": False,
    "device": "cpu",
}
RUN = """
import json, sys, time
begun = time.time()
from foretrain.config import from_mapping
from foretrain.events import Notice
from foretrain.recipes.train import train
from foretrain.trainer import HybridTrainer

steps, ends, said, plain = [], [], [], HybridTrainer.step

def step(trainer, batch):
    start = time.time()
    result = plain(trainer, batch)
    result.loss
    ends.append(time.time())
    steps.append(ends[-1] - start)
    return result

HybridTrainer.step = step
listen = lambda event: said.append(event.message) if isinstance(event, Notice) else None
train(from_mapping(json.loads(sys.argv[1])), sys.argv[2], progress=False, listeners=[listen])
told = [text.partition(";")[0].partition(" in /")[0] for text in said if text.startswith("compiled in")]
print(json.dumps({"first_step": steps[0], "third_step": steps[2], "to_first_step": ends[0] - begun, "told": told}))
"""


def run(cache: Path, folder: Path, compiled: bool) -> dict[str, Any]:
    settings = SETTINGS | {"engine.compile": compiled, "data.cache": str(folder / "tokens")}
    given = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings), str(out)],
        env=given | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": [], "eager": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder / "unused", folder, compiled=False)  # reads the text
        for number in range(chosen.rounds):
            cache = folder / f"cache-{number}"
            for kind, compiled in (("cold", True), ("warm", True), ("eager", False)):
                found[kind].append(run(cache, folder, compiled))
                sys.stdout.write(f"{kind}: {found[kind][-1]}\n")
    result = {
        "date": datetime.now().astimezone().date().isoformat(),
        "command": "python benchmarks/compile_cache.py",
        "environment": environment.describe("cpu"),
        "load_average": os.getloadavg()[0],
        "settings": SETTINGS,
        "runs": found,
    }
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
