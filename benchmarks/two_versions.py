"""Two versions of foretrain side by side: time per step, interleaved, as a ratio. Is a redesign any slower?

    python benchmarks/two_versions.py --before COMMIT --device cpu       # tiny GPT; about two minutes
    python benchmarks/two_versions.py --before COMMIT --device cuda      # and GPT-2 124M; about five minutes
    python benchmarks/two_versions.py --source FOLDER ...                # the other version's `src`, without git

Each version runs in a process of its own and makes some steps when it is told to, so that both meet the same moments of
the machine. Arms: the plain loop (`hybrid.mode = "off"`), and one that watches weights and predicts nothing. At the end
the weights of both versions are compared, bit for bit where operations are deterministic.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"model.type": "gpt2-tiny", "model.vocab_size": 256, "batch_size": 16},
    "124M": {"model.type": "gpt2-small", "model.vocab_size": 50257, "batch_size": 32},
}
ARMS: dict[str, dict[str, Any]] = {
    "off": {"hybrid.mode": "off"},
    "watching": {"hybrid.mode": "leap", "hybrid.warmup_steps": 90_000, "audit.time_budget": 0.005},
}
STEPS = {"tiny": 60, "124M": 20}


# --- one version -----------------------------------------------------------------------------------------------------


def work(device: str) -> None:
    """Make steps as the lines of the input say: a model, an arm and a number of steps. Answers with seconds."""
    import torch

    from foretrain import HybridTrainer, load
    from foretrain.models import gpt2

    trainers: dict[tuple[str, str], tuple[Any, Any]] = {}
    for line in sys.stdin:
        name, arm, steps = line.split()
        if (name, arm) not in trainers:
            settings = {**MODELS[name], **ARMS[arm], "device": device, "max_steps": 100_000}
            settings |= {"memory.timeline": False, "health.interval": 0}
            config = load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()]).config
            torch.manual_seed(0)
            trainer = HybridTrainer(gpt2.build(config.model, config.seed), config=config)
            shape = (config.batch_size, trainer.model.shape.context + 1)
            numbers = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))
            batch = (numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())
            trainers[name, arm] = trainer, tuple(part.to(trainer.device) for part in batch)
        trainer, batch = trainers[name, arm]
        if int(steps) == 0:
            digest = hashlib.sha256()
            for parameter in trainer.model.parameters():
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
            print(json.dumps(digest.hexdigest()), flush=True)
            continue
        wait(device)
        began = time.perf_counter()
        for _ in range(int(steps)):
            trainer.step(batch)
        wait(device)
        print(json.dumps(time.perf_counter() - began), flush=True)


def wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


class Version:
    """A process that holds one version."""

    def __init__(self, source: Path, device: str) -> None:
        packages = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *packages])}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", "--device", device]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, name: str, arm: str, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {arm} {steps}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a version ended early; its error is above")
        return json.loads(line)


# --- both ------------------------------------------------------------------------------------------------------------


def compare(before: Path, now: Path, device: str, names: list[str], rounds: int) -> list[dict[str, Any]]:
    versions = {"before": Version(before, device), "now": Version(now, device)}
    rows = []
    for name in names:
        for arm in ARMS:
            for version in versions.values():  # both compile at the same time
                version.ask(name, arm, 12)
            for version in versions.values():
                version.answer()
            seconds: dict[str, list[float]] = {"before": [], "now": []}
            for turn in range(rounds):
                for which in ("before", "now") if turn % 2 else ("now", "before"):
                    versions[which].ask(name, arm, STEPS[name])
                    seconds[which].append(versions[which].answer())
            for version in versions.values():
                version.ask(name, arm, 0)
            same = len({version.answer() for version in versions.values()}) == 1
            ratios = [a / b for a, b in zip(seconds["now"], seconds["before"], strict=True)]
            milliseconds = {which: 1e3 * statistics.median(times) / STEPS[name] for which, times in seconds.items()}
            row = {"model": name, "arm": arm, "ms_per_step": milliseconds, "ratio": statistics.median(ratios)}
            rows.append(row | {"ratios": ratios, "same_weights": same})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for version in versions.values():
        version.process.stdin.close()  # type: ignore[union-attr]
        version.process.wait()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["model   arm        before ms   now ms   now/before (median, range)     same weights"]
    for row in rows:
        ms, ratios = row["ms_per_step"], row["ratios"]
        spread = f"{row['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        same = "yes" if row["same_weights"] else "no"
        lines.append(f"{row['model']:7} {row['arm']:10} {ms['before']:9.3f} {ms['now']:8.3f}   {spread:30} {same}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", default="HEAD~1")
    parser.add_argument("--source", type=Path, help="folder `src` of the other version, instead of a commit")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the raw figures here")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.device)
        return
    names = ["tiny"] if options.device == "cpu" else list(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        tree, git = Path(folder) / "tree", ["git", "-C", str(ROOT), "worktree"]
        if options.source is None:
            subprocess.run([*git, "add", "--detach", "--quiet", str(tree), options.before], check=True)
        try:
            rows = compare(options.source or tree / "src", ROOT / "src", options.device, names, options.rounds)
        finally:
            if options.source is None:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    if options.out:
        written = {"date": datetime.now().date().isoformat(), "before": options.before, "device": options.device}  # noqa: DTZ005
        options.out.write_text(json.dumps(written | {"rows": rows}, indent=1), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
