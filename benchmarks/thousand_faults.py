"""A thousand faults: each item draws a configuration and one to three faults, runs to the end with resumes, and
compares the end bit for bit with the undisturbed run, or the words with what is promised.

    python benchmarks/thousand_faults.py --items 1000 --seed 0 --jobs 15 --out FOLDER   # minutes on 16 cores
    python benchmarks/thousand_faults.py --only 123 --out FOLDER   # one item again, with all it said

The same command goes on where it was stopped: `results.jsonl` in FOLDER grows by a line per item. Everything that is
drawn follows from the seed and the number of the item. All runs are real processes, forked from one that has torch
loaded already. The exit code is 1 if any promise was not kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: runs are side by side
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["COLUMNS"] = "300"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import gc
import json
import random
import resource
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer does

import faults_files
import faults_process
import foretrain.cli.app
import foretrain.recipes.train
from faults_ends import Reference, identity, reference
from faults_kinds import KINDS, Kind
from faults_runs import Order
from faults_setups import Setup, setups, write_base, write_inputs
from faults_work import FAILURES, Failure, Work, forget
from foretrain import environment

assert faults_files
assert faults_process
assert foretrain.cli.app
assert foretrain.recipes.train


def draw_item(
    number: int, seed: int, found: dict[str, Setup], chosen: Sequence[str] = ()
) -> tuple[Setup, list[Kind], random.Random]:
    """What item `number` is: the first fault goes round, so that there are as many of each as its weight says
    (of chosen ones: as many of each).

    found, chosen: the configurations and faults to draw from; none chosen: all of them."""
    draw = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
    kinds = [KINDS[name] for name in chosen or KINDS]
    kinds = [one for one in kinds if any(one.fits(setup) for setup in found.values())]
    ring = [one for one in kinds for _ in range(1 if chosen else one.weight)]
    random.Random(seed).shuffle(ring)  # noqa: S311
    first = ring[number % len(ring)]
    setup = draw.choice([one for one in found.values() if first.fits(one)])
    others = [one for one in kinds if one.fits(setup) and one is not first and (one.place != 2 or first.place != 2)]
    more = draw.choices([0, 1, 2], [5, 3, 2])[0]
    drawn = [first, *draw.sample(others, min(more, len(others)))]
    ends = [one for one in drawn if one.place == 2][:1]
    begins = [one for one in drawn if one.place == 0][:1]
    return setup, [*begins, *(one for one in drawn if one.place == 1), *ends], draw


class Campaign:
    """All items of one seed, in one folder."""

    def __init__(self, out: Path, seed: int, names: Sequence[str] = (), faults: Sequence[str] = ()) -> None:
        """names, faults: the configurations and faults to draw from; none: all of them."""
        self.out, self.seed, self.faults = out, seed, faults
        out.mkdir(parents=True, exist_ok=True)
        self.results = out / "results.jsonl"
        self.identity = identity()
        self.base = out / "base"
        if not self.base.is_dir():
            write_base(self.base)
        everything = setups()
        self.setups = {name: everything[name] for name in names or everything}
        self.references: dict[str, Reference] = {}

    def rows(self) -> dict[int, dict[str, Any]]:
        """Items that are done, of this seed and this code."""
        if not self.results.is_file():
            return {}
        lines = self.results.read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["item"]: row for row in found if (row["seed"], row["identity"]) == (self.seed, self.identity)}

    def make_references(self, names: Sequence[str], jobs: int) -> None:
        folder = self.out / "references"
        folder.mkdir(exist_ok=True)
        share_out(range(len(names)), jobs, lambda n: reference(self.setups[names[n]], folder, self.base, self.identity))
        for name in names:
            self.references[name] = reference(self.setups[name], folder, self.base, self.identity)

    def carry_out(self, number: int, keep: bool = False) -> dict[str, Any]:
        """One item, and what came of it."""
        setup, kinds, draw = draw_item(number, self.seed, self.setups, self.faults)
        folder, began = self.out / "items" / f"{number:06d}", time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        work = Work(setup, self.references[setup.name], folder, self.base, draw)
        verdict, text = "", ""
        try:
            for one in kinds:
                one.happen(work)
            work.finish()
            verdict = "same bits" if work.bits else "as promised"
        except Failure as failure:
            verdict, text = failure.verdict, str(failure)
            work.happened = [one.name for one in kinds]
        except Exception:  # noqa: BLE001 - one item that cannot be judged ends no other
            verdict, text = "NOT JUDGED", traceback.format_exc()
            work.happened = [one.name for one in kinds]
        if verdict not in FAILURES and not keep:
            forget(folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "item": number,
            "seed": self.seed,
            "identity": self.identity,
            "setup": setup.name,
            "drawn": [one.name for one in kinds],
            "faults": work.happened,
            "verdict": verdict,
            "text": text,
            "words": work.words,
            "history": work.history,
            "processes": work.processes,
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
            "seconds": round(time.monotonic() - began, 2),
        }

    def keep(self, number: int) -> None:
        """Carry an item out and write its line, at once and whole."""
        line = json.dumps(self.carry_out(number)) + "\n"
        descriptor = os.open(self.results, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def share_out(numbers: Sequence[int], jobs: int, work: Any) -> None:
    """Each number to the first worker that is free; a worker that fails ends the whole."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(struct.pack("I", number) for number in numbers[:8000]))
    os.close(writer)
    workers = []
    for _ in range(max(1, min(jobs, len(numbers)))):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                while part := os.read(reader, 4):
                    work(struct.unpack("I", part)[0])
                code = 0
            except Exception as error:  # noqa: BLE001 - told by the parent, too
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        workers.append(pid)
    os.close(reader)
    if any(os.waitpid(pid, 0)[1] for pid in workers):
        raise SystemExit("a worker failed; what is done is kept")


def warm_up(out: Path) -> None:
    """Import and remember once what a run needs on its way, for all forks."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This process.*is multi-threaded, use of fork", DeprecationWarning)
    setup = setups()["leap"]
    folder = out / "warm-up"
    write_inputs(setup, folder, folder)
    here, outputs = Path.cwd(), (sys.stdout, sys.stderr)
    os.chdir(folder)
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            Order(setup, folder, how="overwrite", settings={"max_steps": 2}).carry_out()
        except SystemExit:
            pass
        finally:
            sys.stdout, sys.stderr = outputs
            os.chdir(here)
    gc.collect()
    gc.freeze()  # no collection touches, and so copies, what all forks share


# --- tables ----------------------------------------------------------------------------------------------------------


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    verdicts = Counter(row["verdict"] for row in rows)
    return {
        "items": len(rows),
        "same bits": verdicts["same bits"],
        "as promised": verdicts["as promised"],
        "failures": sum(verdicts[name] for name in FAILURES),
    }


def table(title: str, groups: dict[str, list[dict[str, Any]]], notes: dict[str, str]) -> str:
    """Markdown."""
    columns = ("items", "same bits", "as promised", "failures")
    lines = [f"| {title} | " + " | ".join(columns) + " | |", "|---|" + "---:|" * len(columns) + "---|"]
    for name, rows in groups.items():
        found = counts(rows)
        lines.append(f"| {name} | " + " | ".join(str(found[column]) for column in columns) + f" | {notes[name]} |")
    return "\n".join(lines)


def tables(rows: Sequence[dict[str, Any]], references: dict[str, Reference]) -> str:
    faults = {name: [row for row in rows if name in row["faults"]] for name in KINDS}
    configurations = {name: [row for row in rows if row["setup"] == name] for name in references}
    promises = {name: one.promise for name, one in KINDS.items()}
    moves = {
        name: ", ".join(
            [
                *(f"{count} {verdict}" for verdict, count in sorted(one.moves.items())),
                *([f"{one.recovered} recovered"] if one.recovered else []),
            ]
        )
        for name, one in references.items()
    }
    return "\n\n".join(
        [
            table("fault", {name: found for name, found in faults.items() if found}, promises),
            table("configuration", {name: found for name, found in configurations.items() if found}, moves),
        ]
    )


def report(rows: Sequence[dict[str, Any]], campaign: Campaign) -> dict[str, Any]:
    faults = {name: [row for row in rows if name in row["faults"]] for name in KINDS}
    return {
        "benchmark": "a thousand faults",
        "command": " ".join(["python", "benchmarks/thousand_faults.py", *sys.argv[1:]]),
        "seed": campaign.seed,
        "environment": environment.describe("cpu"),
        "all": counts(rows) | {"processes": sum(row["processes"] for row in rows)},
        "faults": {name: counts(found) | {"promise": KINDS[name].promise} for name, found in faults.items() if found},
        "configurations": {
            name: counts([row for row in rows if row["setup"] == name])
            | {"moves": one.moves, "recovered": one.recovered, "end": one.reason}
            for name, one in campaign.references.items()
        },
        "rows": [
            {key: row[key] for key in ("item", "setup", "faults", "verdict", "text", "words", "processes")}
            for row in rows
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="items at the same time (default: 2)")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--only", type=int, nargs="+", help="these items alone; their folders stay")
    parser.add_argument("--configurations", nargs="*", default=(), metavar="NAME", help="draw from these alone")
    parser.add_argument("--faults", nargs="*", default=(), metavar="NAME", help="draw from these alone")
    parser.add_argument("--results", type=Path, help="folder for the dated JSON file (default: none is written)")
    options = parser.parse_args()
    campaign = Campaign(options.out.resolve(), options.seed, options.configurations, options.faults)
    warm_up(campaign.out)
    numbers = list(options.only if options.only is not None else range(options.items))
    needed = {draw_item(number, options.seed, campaign.setups, campaign.faults)[0].name for number in numbers}
    campaign.make_references([name for name in campaign.setups if name in needed], options.jobs)
    if options.only is not None:
        rows = [campaign.carry_out(number, keep=True) for number in numbers]
        print(json.dumps(rows, indent=1))
        return int(any(row["verdict"] in FAILURES for row in rows))
    left = [number for number in numbers if number not in campaign.rows()]
    print(f"{len(numbers) - len(left)} items are done, {len(left)} are left", flush=True)
    share_out(left, options.jobs, campaign.keep)
    rows = [row for number, row in sorted(campaign.rows().items()) if number in set(numbers)]
    print(tables(rows, campaign.references))
    for row in rows:
        if row["verdict"] in FAILURES:
            print(f"\n{row['item']}: {row['setup']}; {', '.join(row['faults'])}: {row['verdict']}: {row['text']}")
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        target = options.results / f"{datetime.now().astimezone():%Y-%m-%d}-thousand-faults.json"
        target.write_text(json.dumps(report(rows, campaign), indent=1) + "\n", encoding="utf-8")
    found = counts(rows)
    print(f"\n{', '.join(f'{value} {name}' for name, value in found.items())}")
    return int(found["failures"] > 0 or found["items"] < len(numbers))


if __name__ == "__main__":
    sys.exit(main())
