"""nanoGPT's CPU recipe on tiny Shakespeare, through the command line's own code path. Published there: 1.88,
measured on 20 random batches; here on all of the held-out text.

python benchmarks/shakespeare.py --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from foretrain import load, train

RECIPE = Path(__file__).parent.parent / "examples" / "shakespeare_char.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("tinyshakespeare.txt"), help="the text, 1,115,394 characters")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting")
    parser.add_argument("--out", type=Path, help="folder for a dated JSON file")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        sys.exit(
            f"{arguments.data} is not there: fetch tinyshakespeare.txt (1,115,394 characters) and name it with --data"
        )
    runs = []
    for seed in arguments.seeds:
        settings = [f"data.path={arguments.data}", f"seed={seed}", f"device={arguments.device}", *arguments.set]
        with tempfile.TemporaryDirectory() as folder:
            summary = train(load(RECIPE, settings).config, f"{folder}/run", say=print)
        summary["config"]["data"]["path"] = arguments.data.name
        runs.append(summary)
    print(f"\n{'seed':>6} {'val loss':>9} {'train loss':>11} {'seconds':>8} {'tokens/s':>9}")
    for seed, run in zip(arguments.seeds, runs, strict=True):
        numbers = f"{run['final_val_loss']:9.4f} {run['final_train_loss']:11.4f} {run['seconds']:8.1f}"
        print(f"{seed:6d} {numbers} {run['tokens_per_second']:9,.0f}")
    if arguments.out:
        seeds = " ".join(map(str, arguments.seeds))
        date = f"{datetime.now().astimezone():%Y-%m-%d}"
        changes = "".join(f" --set {change}" for change in arguments.set)
        command = f"python benchmarks/shakespeare.py --data {arguments.data.name} --seeds {seeds}{changes}"
        path = arguments.out / f"{date}-shakespeare.json"
        path.write_text(
            json.dumps({"command": command, "date": date, "published": 1.88, "runs": runs}, indent=1) + "\n"
        )
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
