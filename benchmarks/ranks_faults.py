"""Faults of a run of several processes under torchrun: what it says, and whether it ends with the bits of one that was
never disturbed.

python benchmarks/ranks_faults.py --out FILE       # all, two gloo ranks; some nine minutes
python benchmarks/ranks_faults.py --only kill hang # those whose names begin so
python benchmarks/ranks_faults.py --type fsdp2     # shards instead of replicas
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

FAULT = "FORETRAIN_FAULT"
"""Environment variable with `KIND RANK WHEN`: what a worker does to itself, in the first attempt only."""
NOTES = "FORETRAIN_FAULT_NOTES"
"""Environment variable with the file in which workers note when what happened to them: a fault that never came shows
nothing."""
SLOWER = 0.2
"""Seconds that the slow rank takes longer for a step: more than ten times what the others need."""
STEPS = 160
SETTINGS = {
    "max_steps": STEPS,
    "batch_size": 8,
    "device": "cpu",
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "model.dropout": 0.1,
    "data.tokenizer": "byte",
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 0,
    "schedule.type": "constant",
    "hybrid.mode": "leap",
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": 5,
    "hybrid.correct_steps": 5,
    "hybrid.max_predict_steps": 20,
    "audit.time_budget": 0.5,
    "evaluation.batches": 2,
    "evaluation.interval": 50,
    "checkpoint.interval": 20,
    "health.interval": 0,
    "log.report": False,
    "distributed.timeout_seconds": 60,
}


# --- a worker --------------------------------------------------------------------------------------------------------


def work(arguments: list[str]) -> None:
    """Run the command line of foretrain; in one rank something happens at a step, or in a phase."""
    if attempts() and os.environ["RANK"] == "0":
        note(f"attempt {attempts()} begins")
    from foretrain.cli.app import main
    from foretrain.engine.step import FullStep
    from foretrain.persist import shards
    from foretrain.persist.checkpoint import CheckpointStore
    from foretrain.trainer import HybridTrainer

    kind, who, when = (os.environ.get(FAULT) or "none 0 0").split()
    rank, first = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    plain_step, plain_loss, plain_put = HybridTrainer.step, FullStep.loss, CheckpointStore._put_in_place
    plain_share = shards.write_share
    here = (first or kind == "kill-often") and who in (rank, "all")

    def step(self: HybridTrainer, batch: Any) -> Any:
        reached = str(self.global_step) == when or (self.phase.value == when.lower() and self.global_step > 25)
        if here and kind == "slow":
            time.sleep(SLOWER)
        elif here and kind == "kill-often" and self.global_step >= 20 * attempts() + 5:
            os.kill(os.getpid(), signal.SIGKILL)
        elif here and reached and kind != "oom" and not kind.startswith("kill-"):
            note(f"{kind} of rank {rank} after step {self.global_step}, in {self.phase.value}")
            act(kind)
            self.policy.rest.steps += 10 if kind == "apart" else 0
        self.__dict__["_short"] = here and reached and kind == "oom"
        FullStep.loss = short if self.__dict__["_short"] else plain_loss  # type: ignore[method-assign]
        return plain_step(self, batch)

    def short(self: FullStep, batch: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def put_in_place(self: CheckpointStore, temporary: Path, final: Path) -> None:
        if here and kind == "kill-rename" and final.name.endswith(f"{int(when):08d}"):
            note(f"kill of rank {rank} while step {int(when)} is saved")
            act("kill")
        plain_put(self, temporary, final)

    def write_share(folder: Path, *given: Any) -> None:
        if here and kind == "kill-share" and folder.name.endswith(f"{int(when):08d}"):
            note(f"kill of rank {rank} while step {int(when)} is saved")
            act("kill")
        plain_share(folder, *given)

    HybridTrainer.step = step  # type: ignore[method-assign]
    shards.write_share = write_share
    CheckpointStore._put_in_place = put_in_place  # type: ignore[method-assign]
    main(arguments)


def note(words: str) -> None:
    """Write what happens, and when."""
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{time.time():.1f} {words}\n")


def attempts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def act(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(600)
    elif kind.startswith("signal-"):
        _, name, target = kind.split("-")
        os.kill(os.getpid() if target == "rank" else os.getppid(), getattr(signal, name))


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a run ended."""

    code: int
    seconds: float
    printed: str
    step: int = -1
    hash: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[float, str]] = field(default_factory=list)
    """When what happened to workers."""

    def weights(self, whole: Ended) -> str:
        return "same weights" if self.hash == whole.hash else f"other weights: {self.hash}"


class Bench:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        text = folder / "text.txt"
        draw = random.Random(1)  # noqa: S311 - words to learn, no secrets
        words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
        text.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(500)))
        self.settings = {**SETTINGS, "data.path": str(text), "data.cache": str(folder / "cache")}
        self.settings["distributed.type"] = kind
        self._without: Ended | None = None

    def run(self, out: str, ranks: int = 2, fault: str = "", restarts: int = 0, **changes: Any) -> Ended:
        """One call of torchrun, which goes on with what is there."""
        settings = self.settings | {name.replace("__", "."): value for name, value in changes.items()}
        told = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        launcher += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]  # as the page says
        command = [sys.executable, *launcher, __file__, "work", "train", "--out", str(self.folder / out), "--resume"]
        notes = self.folder / f"{out}.notes"
        notes.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", FAULT: fault, NOTES: str(notes)}
        began = time.monotonic()
        done = subprocess.run(
            [*command, *told], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        ended = Ended(done.returncode, round(time.monotonic() - began, 1), done.stderr)
        with (self.folder / f"{out}.log").open("a") as log:
            log.write(done.stderr)
        told_by_workers = notes.read_text().splitlines() if notes.is_file() else []
        ended.notes = [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in told_by_workers]
        summary = self.folder / out / "summary.json"
        ended.summary = json.loads(summary.read_text()) if summary.is_file() else {}
        self.look(ended, out)
        return ended

    def without_dropout(self) -> Ended:
        """The run that those are compared with whose random numbers come otherwise."""
        if self._without is None:
            self._without = self.run("undisturbed without dropout", model__dropout=0)
        return self._without

    def look(self, ended: Ended, out: str) -> None:
        """Note which step was saved last, and the hash of its weights."""
        from foretrain.persist import checkpoint
        from foretrain.persist.checkpoint import CheckpointStore

        newest = next(CheckpointStore(self.folder / out / "checkpoints").steps(), None)
        if newest is None:
            return
        digest, weights = hashlib.sha256(), checkpoint.read(newest[1])["model"]
        for name in sorted(weights):
            digest.update(weights[name].contiguous().numpy().tobytes())
        ended.step, ended.hash = newest[0], digest.hexdigest()[:16]


@dataclass
class Row:
    """One line of the table."""

    name: str
    well: bool
    seen: str
    seconds: float


def said(ended: Ended, pattern: str) -> str:
    """The first line of what was printed that fits; empty where there is none."""
    return next((line for line in ended.printed.splitlines() if re.search(pattern, line)), "")


def check_kill(bench: Bench, whole: Ended, name: str, fault: str) -> Row:
    ended = bench.run(name, fault=fault, restarts=3)
    happened = [words for _, words in ended.notes if words.startswith("kill of rank")]
    wanted = name.removeprefix("kill in ") if name.startswith("kill in ") else "is saved"
    hit = len(happened) == 1 and happened[0].endswith(wanted) and "failed (exitcode: -9)" in ended.printed
    resumed = said(ended, "resumed from").split(" (")[0] or "began again at step 0"
    well = hit and ended.code == 0 and ended.hash == whole.hash
    return Row(name, well, f"{', '.join(happened)}; {resumed}; {ended.weights(whole)}", ended.seconds)


def check_all(bench: Bench, whole: Ended) -> Row:
    first = bench.run("kill-all", fault="kill all 75")
    again = bench.run("kill-all")
    well = len(first.notes) == 2 and first.code != 0 and again.code == 0 and again.hash == whole.hash
    seen = f"exit {first.code}, then {said(again, 'resumed from').split(' (')[0]}; {again.weights(whole)}"
    return Row("kill all, same command again", well, seen, first.seconds + again.seconds)


def check_slow(bench: Bench, whole: Ended) -> Row:
    ended = bench.run("slow", fault="slow 1 0")
    well = ended.hash == whole.hash and ended.code == 0 and ended.seconds > STEPS * SLOWER
    return Row("slow rank", well, f"{SLOWER} s more per step; {ended.weights(whole)}", ended.seconds)


def check_hang(bench: Bench, whole: Ended, number: int) -> Row:
    """After a hang of one rank both end, soon after the time that was set, and the next attempt goes on."""
    name = f"hang {number}"
    ended = bench.run(name, fault="hang 1 75", restarts=1, distributed__timeout_seconds=8)
    line = said(ended, "hangs or is gone")
    took = ended.notes[1][0] - ended.notes[0][0] if len(ended.notes) == 2 else float("nan")
    well = "rank 1 hangs or is gone, last seen after step 75" in line and ended.hash == whole.hash and took < 20
    seen = f"{line[:55]}; the next attempt began {took:.0f} s after the hang; {ended.weights(whole)}"
    return Row(name, well, seen, ended.seconds)


def check_other_number(bench: Bench, one: int, other: int) -> Row:
    """Dropout draws other numbers on another number of ranks, so there is none here."""
    name, whole = f"{one} ranks, then {other}", bench.without_dropout()
    first = bench.run(name, ranks=one, fault="signal-SIGTERM-rank 0 75", model__dropout=0)
    again = bench.run(name, ranks=other, model__dropout=0)
    loss, wanted = again.summary.get("final_val_loss", 9.9), whole.summary["final_val_loss"]
    alike = all(again.summary.get(same) == whole.summary.get(same) for same in ("moves", "global_step", "tokens"))
    told = said(again, "goes on in") != "" or said(again, "saved by") != ""
    well = 75 <= first.step < STEPS and again.code == 0 and abs(loss - wanted) < 1e-4 and alike and told
    seen = f"exit {first.code} at step {first.step}; loss {loss:.6f} against {wanted:.6f}, moves equal: {alike}"
    return Row(name, well, seen, first.seconds + again.seconds)


def check_signal(bench: Bench, whole: Ended, name: str, target: str) -> Row:
    label = f"{name} to {'rank 1' if target == 'rank' else 'the launcher'}"
    first = bench.run(label, fault=f"signal-{name}-{target} 1 75")
    codes = sorted(set(re.findall(r"exitcode +: (-?\d+)", first.printed)))
    again = bench.run(label)
    stopped = said(first, "stopped after step").split(";")[0]
    expected = [str(128 + getattr(signal, name))] if target == "rank" else []  # torchrun does not print them then
    saved = stopped.endswith(f"stopped after step {first.step}") and 75 <= first.step < STEPS
    well = saved and codes == expected and first.code != 0 and again.code == 0 and again.hash == whole.hash
    seen = f"{stopped}; exit of ranks {codes or 'not told'}, of torchrun {first.code}; {again.weights(whole)}"
    return Row(label, well, seen, first.seconds + again.seconds)


def check_apart(bench: Bench, whole: Ended) -> Row:
    """One rank decides otherwise: it rests longer than the others."""
    first = bench.run("apart", fault="apart 1 75")
    found = re.search(r"ranks disagree on (.+) after step (\d+)", first.printed)
    again = bench.run("apart")
    what, step = (found[1], int(found[2])) if found else ("nothing", 0)
    well = "state.rest_steps" in what and step <= 75 + SETTINGS["hybrid.window_steps"] and first.step < STEPS
    well = well and first.code != 0 and again.code == 0 and again.hash == whole.hash
    seen = f"stopped after step {step}, as ranks disagree on {what}; {again.weights(whole)}"
    return Row("a rank decides otherwise", well, seen, first.seconds + again.seconds)


def check_two_runs(bench: Bench, whole: Ended) -> Row:
    """A second run, of two ranks as well, in the folder of one that goes on meanwhile."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(bench.run, "shared", fault="slow 1 0")
        while not running.done() and not list((bench.folder / "shared").glob("checkpoints/step-*")):
            time.sleep(0.1)
        second = bench.run("shared")
        during, first = not running.done(), running.result()
    told = [line for line in second.printed.splitlines() if "another run is writing there" in line]
    well = during and len(told) == 1 and second.code != 0 and first.code == 0 and first.hash == whole.hash
    words = told[0].split("shared': ")[-1] if told else "not refused"
    return Row("two runs in one folder", well, f"the second: {words}; the first: {first.weights(whole)}", first.seconds)


def check_memory(bench: Bench) -> Row:
    """Parts of a batch draw other numbers for dropout than the whole, so there is none here."""
    whole = bench.without_dropout()
    ended = bench.run("out of memory", fault="oom 1 75", restarts=1, model__dropout=0)
    line = said(ended, "out of memory in")
    begins = said(ended, "memory ran out in an earlier attempt")
    near = abs(ended.summary.get("final_val_loss", 9.9) - whole.summary["final_val_loss"]) < 1e-4
    well = "rank 1" in line and bool(begins) and ended.code == 0 and near
    return Row("out of memory on one rank", well, f"{line[:60]}...; {begins}", ended.seconds)


def check_restarts(bench: Bench, whole: Ended, times: int) -> Row:
    """Kill a rank in every attempt, 20 steps further each time, until the run is over; then begin anew."""
    lost, restarts, seconds, equal = 0, 0, 0.0, True
    for number in range(-(-times // 7)):
        ended = bench.run(f"often {number}", fault="kill-often 1 0", restarts=12)
        restarts += len(re.findall("failed \\(exitcode: -9\\)", ended.printed))
        lost += max(0, ended.printed.count("resumed from") - 7)
        seconds += ended.seconds
        equal = equal and ended.hash == whole.hash and ended.code == 0
    well = equal and lost == 0 and restarts >= times
    return Row("restarts", well, f"{restarts} restarts, {lost} attempts lost, same weights: {equal}", seconds)


def checks(bench: Bench, whole: Ended) -> dict[str, Callable[[], Row]]:
    kills = {
        "kill in warmup": "kill 1 10",
        "kill in full": "kill 1 FULL",
        "kill in predict": "kill 1 PREDICT",
        "kill in correct": "kill 1 CORRECT",
        "kill while saving, rank 0": "kill-rename 0 60",
        "kill while saving, rank 1": "kill-share 1 60",
    }
    made: dict[str, Callable[[], Row]] = {
        name: lambda name=name, fault=fault: check_kill(bench, whole, name, fault)  # type: ignore[misc]
        for name, fault in kills.items()
    }
    made["kill all"] = lambda: check_all(bench, whole)
    made["slow"] = lambda: check_slow(bench, whole)
    for number in range(1, 6):
        made[f"hang {number}"] = lambda number=number: check_hang(bench, whole, number)  # type: ignore[misc]
    made["ranks 2 1"] = lambda: check_other_number(bench, 2, 1)
    made["ranks 1 2"] = lambda: check_other_number(bench, 1, 2)
    for name in ("SIGTERM", "SIGUSR1"):
        made[f"signal {name} rank"] = lambda name=name: check_signal(bench, whole, name, "rank")  # type: ignore[misc]
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        made[f"signal {name} launcher"] = lambda name=name: check_signal(bench, whole, name, "launcher")  # type: ignore[misc]
    made["apart"] = lambda: check_apart(bench, whole)
    made["two runs"] = lambda: check_two_runs(bench, whole)
    made["memory"] = lambda: check_memory(bench)
    made["often"] = lambda: check_restarts(bench, whole, 20)
    return made


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks begin so")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the results; with --only these replace earlier ones of it"
    )
    parser.add_argument("--folder", type=Path, help="empty folder in which runs and what they printed stay")
    chosen = parser.parse_args()
    from foretrain import environment

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(chosen.folder or Path(temporary), chosen.type)
        whole = bench.run("undisturbed")
        print(f"undisturbed: exit {whole.code}, step {whole.step}, hash {whole.hash}, {whole.seconds} s", flush=True)
        if whole.code:
            sys.exit(whole.printed[-9000:])
        known = checks(bench, whole)
        if unknown := [one for one in chosen.only if not any(name.startswith(one) for name in known)]:
            sys.exit(f"--only {' '.join(unknown)}: no check is called so; there are {', '.join(known)}")
        for name, check in known.items():
            if not chosen.only or name.startswith(tuple(chosen.only)):
                rows.append(check())
                row = rows[-1]
                row.seen = row.seen.replace(f"{bench.folder}/", "")
                print(f"{'ok  ' if row.well else 'FAIL'} {row.name:<30} {row.seconds:6.1f} s  {row.seen}", flush=True)
    if chosen.out is not None:
        facts = {**environment.describe(), "date": f"{datetime.now().astimezone():%Y-%m-%d}", "type": chosen.type}
        before = json.loads(chosen.out.read_text())["checks"] if chosen.only and chosen.out.is_file() else []
        made = {row["name"]: row for row in [*before, *map(asdict, rows)]}
        document = {"environment": facts, "undisturbed": whole.hash, "checks": list(made.values())}
        chosen.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(not all(row.well for row in rows))


if __name__ == "__main__":
    main()
