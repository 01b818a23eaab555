"""Golden traces: small runs through every way of moving weights, as events without times and a checksum of the weights.

    python benchmarks/golden_traces.py                      # make the traces twice and say whether they are the same
    python benchmarks/golden_traces.py --against COMMIT     # compare with the traces of another commit

A change of the code's structure must leave them equal to the byte. Checksums differ between machines, so traces are not
kept in a file: the same script makes them from both commits, on one machine. It uses public names only. About a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import foretrain
from foretrain import Followed, Forecast, HybridTrainer, Predictor, Situation, load

Trace = list[str]
TIMES = {"seconds", "total_seconds", "tokens_per_second", "time", "path", "resident_peak", "eta"}
TIMES |= {"megabytes", "weights_megabytes", "prediction_megabytes"}  # these depend on the form of checkpoints
RENAMED = {"lookahead": "return_ahead"}
"""Settings by the name that they had, as the summary lists them: a new name is no other behaviour."""
SHORT = {
    "device": "cpu",
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 5,
    "hybrid.window_steps": 5,
    "hybrid.correct_steps": 3,
    "hybrid.max_predict_steps": 8,
    "hybrid.confidence_threshold": 0.0,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "sgd",
    "optimizer.weight_decay": 0.0,
    "optimizer.gradient_clip_norm": 0.0,
    "schedule.type": "constant",
    "memory.timeline": False,
    "log.interval": 10,
    "max_steps": 110,
}
"""All phases several times within a hundred steps."""
EXACT = {"optimizer.learning_rate": 0.05, "optimizer.momentum": 0.0}
NOISY = {"optimizer.learning_rate": 0.01, "optimizer.momentum": 0.5, "audit.time_budget": 1.0, "audit.steps": 6}
UNGUARDED = {"hybrid.search": False, "hybrid.divergence_threshold": 1e6, "guard.prediction_error": 1e6}
"""Harmful moves get through to their validation."""


# --- what is trained -------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic loss; the same batch in every step, so that the loss is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("curvature", torch.logspace(-2, 0, 20))

    def loss(self, batch: Tensor) -> Tensor:
        return 0.5 * (self.curvature * self.w.square()).sum() + 0 * batch.sum()


class Regression(nn.Module):
    """Linear regression on random batches, with dropout, so that random states count."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.dropout = nn.Dropout(0.1)
        self.fails_at = fails_at
        self.calls = 0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity")
        return (self.linear(self.dropout(batch[0]))[:, 0] - batch[1]).square().mean()


class Batches:
    """Batch k is a function of k alone."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch = batch
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield self.batch(self.position - 1)


def same_batch(position: int) -> Tensor:
    return torch.zeros(1)


def random_batch(position: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + position)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6) + 0.5 * torch.randn(8, generator=generator)


def not_finite(position: int) -> tuple[Tensor, Tensor]:
    inputs, targets = random_batch(position)
    return inputs, targets * (math.nan if 70 <= position < 76 else 1.0)


class Scripted(Predictor):
    """Repeats the last window and is trusted for it; only a move of 8 steps goes `factor` times as far, or back."""

    name = "scripted"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        asked = tuple(sorted({8, *horizons}))
        coefficients = np.zeros((len(asked), *situation.gram.shape[:2]))
        for index, horizon in enumerate(asked):
            coefficients[index, :, 1] = (self.factor if horizon == 8 else 1.0) * horizon / situation.window
        return Forecast(asked, coefficients, np.full(len(asked), situation.loss), np.zeros(len(asked)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        """Learns nothing."""

    def reset(self) -> None:
        """Has nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has nothing to remember."""


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """What a trace is made of."""

    lines: Trace = field(default_factory=list)

    def hear(self, event: Any) -> None:
        self.lines.append(f"{type(event).__name__} {json.dumps(plain(asdict(event)), sort_keys=True)}")

    def weigh(self, name: str, state: Mapping[str, Tensor]) -> None:
        digest = hashlib.sha256()
        for key in sorted(state):
            tensor = state[key].detach().cpu().contiguous()
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        self.lines.append(f"{name} {digest.hexdigest()}")


def plain(value: Any) -> Any:
    """JSON without times and paths; numbers as their exact digits."""
    if isinstance(value, Mapping):
        kept = {key: entry for key, entry in value.items() if key not in TIMES}
        return {RENAMED.get(str(key), str(key)): plain(entry) for key, entry in kept.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return re.sub(r"\b[\d.,]+ (s|MB|GB)\b", r"# \1", value)
    return value if isinstance(value, int | float | bool | None) else repr(value)


def configured(settings: Mapping[str, Any], preset: str = "measured") -> Any:
    return load(None, [f"{name}={json.dumps(value)}" for name, value in settings.items()], preset).config


@dataclass(frozen=True)
class Own:
    """A run through the Python API, and words that its trace must hold, or it would show nothing."""

    settings: dict[str, Any]
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    must: tuple[str, ...] = ()
    predictor: Callable[[], Predictor] | None = None
    stops: tuple[int, ...] = ()
    """Steps after which the run is stopped, and resumed by a new trainer."""

    def __call__(self, folder: Path) -> Kept:
        kept = Kept()
        for stop in (*self.stops, None):
            trainer = HybridTrainer(
                self.model(),
                config=configured({**SHORT, **self.settings}),
                predictor=self.predictor() if self.predictor else None,
            )

            def hear(event: Any, trainer: HybridTrainer = trainer, stop: int | None = stop) -> None:
                kept.hear(event)
                if stop is not None and type(event).__name__ == "PhaseChanged" and event.step >= stop:
                    trainer.stop()

            held_out = [self.batch(10_000 + number) for number in range(3)]
            options: dict[str, Any] = {"out": folder / "run", "resume": stop != (*self.stops, None)[0]}
            trainer.fit(Batches(self.batch), held_out, callbacks=[hear], progress=False, **options)
        kept.weigh("weights", trainer.model.state_dict())
        return kept


TEXT_SETTINGS = {
    "device": "cpu",
    "max_steps": 60,
    "batch_size": 4,
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 16,
    "evaluation.interval": 20,
    "evaluation.batches": 2,
    "log.interval": 10,
    "log.report": False,
    "memory.timeline": False,
    "data.prefetch": 0,
}


def text_run(folder: Path, **settings: Any) -> Kept:
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=3000)  # noqa: S311 - no secret
    (folder / "words.txt").write_text(" ".join(words), encoding="utf-8")
    values = {**TEXT_SETTINGS, "data.path": str(folder / "words.txt"), "data.cache": str(folder / "cache"), **settings}
    kept = Kept()
    foretrain.train(configured(values), folder / "run", progress=False, listeners=[kept.hear])
    kept.weigh("weights", load_file(folder / "run" / "model" / "model.safetensors"))
    return kept


def tuned(folder: Path, **settings: Any) -> Kept:
    """LoRA on a base of random weights, judged on held-out examples."""
    text_run(folder, **{"hybrid.mode": "off", "max_steps": 30, "model.context": 64})
    colors = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
    asked = [{"text": f"{n}: the {thing}?", "label": color} for n in range(60) for thing, color in colors.items()]
    (folder / "colors.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    values = {
        "device": "cpu",
        "model.weights": str(folder / "run" / "model"),
        "data.path": str(folder / "colors.jsonl"),
        "data.prefetch": 0,
        "max_steps": 60,
        "batch_size": 8,
        "optimizer.learning_rate": 1e-2,
        "evaluation.batches": 2,
        "evaluation.answers": 20,
        "engine.compile": False,
        "log.report": False,
        "memory.timeline": False,
        **settings,
    }
    kept = Kept()
    foretrain.finetune(configured(values, "finetune"), folder / "tuned", progress=False, listeners=[kept.hear])
    for file in sorted((folder / "tuned").glob("adapter*/*.safetensors")):
        kept.weigh(f"{file.parent.name}/{file.name}", load_file(file))
    return kept


LEAP, ROLLOUT = {"hybrid.mode": "leap"}, {"hybrid.mode": "rollout"}
RUNS: dict[str, Any] = {
    "off": Own({**NOISY, "hybrid.mode": "off", "evaluation.ema_decay": 0.9}, Regression, random_batch),
    "text, off, Muon": partial(text_run, **{"hybrid.mode": "off"}),
    "leap, exact, kept": Own({**EXACT, **LEAP}, Bowl, same_batch, ('"kept"',)),
    "leap, refused": Own({**EXACT, **LEAP}, Bowl, same_batch, ('"refused"',), lambda: Scripted(-1.0)),
    "leap, rolled back": Own(
        {**EXACT, **LEAP, **UNGUARDED}, Bowl, same_batch, ('"rolled back"',), lambda: Scripted(-2.0)
    ),
    "leap, audited, kept": Own({**NOISY, **LEAP}, Regression, random_batch, ('"kept"', '"audited": true')),
    "leap, audited, rolled back": Own(
        {**NOISY, **LEAP, **UNGUARDED},
        Regression,
        random_batch,
        ('"rolled back"', '"audited": true'),
        lambda: Scripted(-2.0),
    ),
    "rollout, kept": Own({**EXACT, **ROLLOUT}, Bowl, same_batch, ('"kept"',)),
    "rollout, audited": Own({**NOISY, **ROLLOUT}, Regression, random_batch, ('"kept"', '"audited": true')),
    "chain": Own({**EXACT, **LEAP, "hybrid.secant_pairs": 30}, Bowl, same_batch, ('"chained": true',)),
    "look-ahead, average": Own(
        {**EXACT, **LEAP, "predictor.beta": 0.5, "evaluation.ema_decay": 0.9, "optimizer.type": "adamw"},
        Bowl,
        same_batch,
        ('"kept"',),
    ),
    "out of memory, retried": Own(
        {**NOISY, **LEAP, "memory.on_out_of_memory": "retry"},
        partial(Regression, fails_at=67),
        random_batch,
        ("out_of_memory",),
    ),
    "fp16": Own(
        {**NOISY, **LEAP, "precision.type": "fp16", "precision.loss_scale": 1e9}, Regression, random_batch, ("Moved",)
    ),
    "emergency rollback": Own({**NOISY, **LEAP}, Regression, not_finite, ('"action": "roll_back"',)),
    "resumed inside moves": Own(
        {**NOISY, **LEAP}, Regression, random_batch, ("Resumed", '"audited": true'), stops=(40, 60, 80)
    ),
    "fine-tuning, held out": partial(tuned),
    "rate race": partial(tuned, **{"optimizer.learning_rate": "auto"}),
}


def traces(names: Sequence[str]) -> dict[str, Trace]:
    torch.set_num_threads(1)
    found: dict[str, Trace] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = [line.replace(folder, "") for line in RUNS[name](Path(folder)).lines]
        missing = [word for word in getattr(RUNS[name], "must", ()) if not any(word in line for line in found[name])]
        if missing:
            raise SystemExit(f"{name}: the run shows nothing of {', '.join(missing)}")
    return found


# --- comparison ------------------------------------------------------------------------------------------------------


def of_source(source: Path, names: Sequence[str]) -> dict[str, Trace]:
    """The traces that this script makes with the package under `source`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.json"
        chosen = [part for name in names for part in ("--only", name)]
        command = [sys.executable, str(Path(__file__).resolve()), "--write", str(file), *chosen]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, check=True)
        return dict(json.loads(file.read_text(encoding="utf-8")))


def of_commit(commit: str, names: Sequence[str]) -> dict[str, Trace]:
    git = ["git", "-C", str(Path(__file__).resolve().parents[1]), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], check=True)
        try:
            return of_source(tree / "src", names)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def difference(before: Trace, now: Trace) -> str:
    """Nothing where they are equal; else the first line that differs."""
    if before == now:
        return ""
    for number, (old, new) in enumerate(zip(before, now, strict=False), 1):
        if old != new:
            at = next(i for i, (a, b) in enumerate(zip(old + " ", new + " ", strict=False)) if a != b)
            was, now_is = (text[max(0, at - 90) : at + 60] for text in (old, new))
            return f"line {number}:\n    was {was}\n    is  {now_is}"
    return f"{len(before)} lines were, {len(now)} lines are"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the traces of this commit")
    parser.add_argument("--only", action="append", choices=RUNS, help="this run only; may be repeated")
    parser.add_argument("--write", type=Path, help="write the traces of this source to a file, compare nothing")
    options = parser.parse_args()
    names = options.only or list(RUNS)
    now = traces(names)
    if options.write:
        options.write.write_text(json.dumps(now, indent=1), encoding="utf-8")
        return
    source = Path(foretrain.__file__).resolve().parents[1]
    before = of_commit(options.against, names) if options.against else of_source(source, names)
    differing = 0
    for name in names:
        text = difference(before[name], now[name])
        differing += bool(text)
        print(f"{name:28} {len(now[name]):4} lines   {'DIFFERS, ' + text if text else 'equal'}")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
