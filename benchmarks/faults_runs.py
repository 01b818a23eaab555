"""The runs that `thousand_faults.py` disturbs: their settings, their processes, and what their ends are compared by."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import faults_own as own
from faults_inject import FileEvents, Injection, Operations

from foretrain.engine.checkpoint import CheckpointStore
from foretrain.errors import ForetrainError

OUT = "runs/mine"
FILE = "run.toml"
SECONDS = 300
"""No process takes longer, however busy the machine is: what does hangs."""

# --- settings --------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "max_steps": 36,
    "batch_size": 4,
    "device": "cpu",
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 16,
    "model.context": 16,
    "data.path": "words.txt",
    "data.cache": "cache",
    "evaluation.batches": 2,
    "evaluation.interval": 9,
    "checkpoint.interval": 6,
    "log.interval": 3,
    "health.interval": 12,
}
EAGER: dict[str, Any] = {
    "hybrid.warmup_steps": 8,
    "hybrid.full_steps": 3,
    "hybrid.window_steps": 3,
    "hybrid.correct_steps": 2,
    "hybrid.max_predict_steps": 4,
    "hybrid.confidence_threshold": 0.0,
    "audit.time_budget": 1.0,
    "audit.steps": 3,
    "optimizer.type": "adamw",
    "schedule.type": "constant",
    "max_steps": 48,
}
"""Moves are tried whatever they cost."""
TUNED: dict[str, Any] = {
    "preset": "finetune",
    "max_steps": 24,
    "batch_size": 8,
    "device": "cpu",
    "model.weights": "base",
    "data.path": "examples.jsonl",
    "evaluation.batches": 2,
    "evaluation.interval": 8,
    "evaluation.answers": 4,
    "checkpoint.interval": 5,
    "log.interval": 3,
    "lora.rank": 2,
    "optimizer.learning_rate": 1e-2,
}
BACKWARD = {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0, "optimizer.type": "adamw"}
PINNED = {"memory.offload": True, "memory.snapshots": "pinned", "memory.basis": "pinned"}
WIDE = {"model.width": 64, "optimizer.state_type": "8bit"}


@dataclass(frozen=True)
class Setup:
    """One configuration. command: of foretrain, or "fit" for a program of one's own, which `parts` makes."""

    name: str
    command: str
    settings: dict[str, Any]
    parts: Callable[..., own.Parts] | None = None
    factor: float | None = None
    """Of the scripted predictor; None: one of foretrain's own."""
    verdicts: frozenset[str] = frozenset()
    """Moves that must have been made for a table with this row to say anything."""

    @property
    def steps(self) -> int:
        base = own.CHAINED if self.parts in (own.full_batch, own.by_heart) else own.SHORT
        return int((self.settings if self.command != "fit" else {"max_steps": base["max_steps"]} | self.settings)["max_steps"])


def _train(name: str, *changes: dict[str, Any], verdicts: Sequence[str] = ()) -> Setup:
    settings = TINY.copy()
    for change in changes:
        settings |= change
    return Setup(name, "train", settings, verdicts=frozenset(verdicts))


def _fit(name: str, parts: Callable[..., own.Parts], factor: float | None, verdicts: str, **settings: Any) -> Setup:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return Setup(name, "fit", changes, parts, factor, frozenset(verdicts.split(", ")) - {""})


def _tune(name: str, **settings: Any) -> Setup:
    return Setup(name, "finetune", TUNED | {key.replace("__", "."): value for key, value in settings.items()})


def setups() -> dict[str, Setup]:
    """All of them, as far as this machine has what they need."""
    unguarded = {name.replace(".", "__"): value for name, value in own.UNGUARDED.items()}
    found = [
        _train("adamw, plain", {"optimizer.type": "adamw", "hybrid.mode": "off"}),
        _train("muon, idle", {"model.dropout": 0.1}),
        _train("adam, cosine", {"optimizer.type": "adam", "schedule.type": "cosine", "data.prefetch": 0}),
        _train("sgd, cyclic", {"optimizer.type": "sgd", "schedule.type": "cyclic", "schedule.cycle_length": 8}),
        _train("average", {"evaluation.ema_decay": 0.9, "model.dropout": 0.1, "optimizer.type": "adamw"}),
        _train("accumulation", {"accumulation_steps": 2, "model.dropout": 0.1}),
        _train("look-ahead", {"predictor.beta": 0.5, "hybrid.warmup_steps": 5, "optimizer.type": "adamw"}),
        _train("fp16", {"precision.type": "fp16", "optimizer.type": "adamw", "precision.growth_interval": 7}),
        _train("bf16", {"precision.type": "bf16", "optimizer.type": "adamw"}),
        _train("8-bit moments", WIDE, {"optimizer.type": "adamw"}),
        _train("bf16 moments, muon", WIDE, {"optimizer.state_type": "bf16"}),
        _train("updates in backward", BACKWARD),
        _train("recomputed", {"engine.activation_checkpointing": True, "engine.fused_loss": True, "model.layers": 2}),
        _train("saved every step", {"checkpoint.interval": 1, "checkpoint.keep": 3, "optimizer.type": "adamw"}),
        _train("epochs, characters", {"data.tokenizer": "char", "data.prefetch": 2, "log.console": "verbose"}),
        _train("early stopping", {"evaluation.interval": 2, "evaluation.early_stopping_patience": 2, "optimizer.learning_rate": 0.1}),
        _train("tuned by itself", {"guard.auto_tune": True, "health.interval": 4, "optimizer.learning_rate": 0.3}),
        _train("leap", EAGER, verdicts=["kept"]),
        _train("leap, muon, averaged", EAGER, {"optimizer.type": "muon", "evaluation.ema_decay": 0.8}),
        _train("leap, offload", EAGER, PINNED),
        _train("leap, updates in backward", EAGER, BACKWARD),
        _train("leap, fp16", EAGER, {"precision.type": "fp16"}),
        _train("leap, 8-bit, accumulation", EAGER, WIDE, {"accumulation_steps": 2}),
        _train("leap, mlp", EAGER, {"predictor.type": "mlp", "predictor.hidden_dims": [8]}),
        _train("leap, momentum", EAGER, {"predictor.type": "momentum"}),
        _train("leap, rssm", EAGER, {"predictor.type": "rssm", "predictor.deterministic_dim": 8, "predictor.stochastic_dim": 2}),
        _train("rollout", EAGER, {"hybrid.mode": "rollout"}, verdicts=["kept"]),
        _train("rollout, offload", EAGER, PINNED, {"hybrid.mode": "rollout", "memory.lookahead": 2}),
        _tune("adapter"),
        _tune("adapter, auto", optimizer__learning_rate="auto", schedule__warmup_steps=6),
        _tune("adapter, auto, averaged", optimizer__learning_rate="auto", evaluation__ema_decay=0.8, lora__dropout=0.1),
        _tune("adapter, leap", hybrid__space="product", **{key.replace(".", "__"): value for key, value in EAGER.items()}),
        _fit("chain", own.full_batch, None, "kept"),
        _fit("chain, taken back", own.by_heart, None, "kept"),
        _fit("exact leap", own.bowl, None, "kept"),
        _fit("exact leap, refused", own.bowl, -1.0, "refused"),
        _fit("exact leap, rolled back", own.bowl, -2.0, "rolled back", **unguarded),
        _fit("exact rollout", own.bowl, None, "kept", hybrid__mode="rollout"),
        _fit("exact rollout, undone", own.bowl, -30.0, "refused", hybrid__mode="rollout"),
        _fit("noisy leap", own.regression, None, "kept"),
        _fit("noisy leap, rolled back", own.regression, -2.0, "rolled back", **unguarded),
        _fit("noisy rollout", own.regression, None, "kept", hybrid__mode="rollout"),
        _fit("own optimizer and scheduler", own.own_parts, None, ""),
        _fit("augmented samples", own.augmented, None, ""),
    ]
    if importlib.util.find_spec("tensorboardX"):
        found.append(_train("tracker", {"log.trackers": ["tensorboard"], "optimizer.type": "adamw"}))
    return {setup.name: setup for setup in found}


def write_inputs(setup: Setup, folder: Path, base: Path) -> None:
    """Everything that the run reads."""
    draw = random.Random(0)  # noqa: S311 - no secret
    text = " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"], k=700))
    lines = [f"{name} = {json.dumps(value)}" for name, value in setup.settings.items()]
    folder.mkdir(parents=True, exist_ok=True)
    if setup.command == "fit":
        return
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if setup.command == "train":
        (folder / "words.txt").write_text(text, encoding="utf-8")
        return
    colors = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
    records = [{"text": f"{n}: the {thing}?", "label": color} for n in range(20) for thing, color in colors.items()]
    (folder / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    shutil.copytree(base, folder / "base", dirs_exist_ok=True)


def write_base(folder: Path) -> Path:
    """A model to fine-tune: random weights, with embeddings large enough to say something."""
    import torch

    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.models import huggingface
    from foretrain.models.gpt2 import GPT2, GPT2Shape

    model = GPT2(GPT2Shape(layers=1, heads=2, width=16, context=32, vocab_size=257), 3)
    with torch.no_grad():
        model.token_embedding.weight.mul_(15)
    return huggingface.save(model, folder, ByteTokenizer())


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a process is to do."""

    setup: Setup
    folder: Path
    out: str = OUT
    how: str = "resume"
    """"resume", "start" (refused where there is a run) or "overwrite"."""
    bare: bool = False
    """Resume by the run folder's own config.toml."""
    poison: tuple[str, int] = ("", 0)
    """Of the predictor, and from which window on."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changed for this process."""

    @property
    def arguments(self) -> list[str]:
        words = [self.setup.command, *([] if self.bare else [FILE]), "--out", self.out]
        words += [] if self.how == "start" else [f"--{self.how}"]
        return words + [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]

    def carry_out(self) -> int:
        if self.setup.command == "fit":
            return self._fit()
        from foretrain.cli import main

        main(self.arguments)
        return 0

    def _fit(self) -> int:
        """As a program of the user's own does it that tells errors of foretrain in one line."""
        assert self.setup.parts is not None
        predictor = None if self.setup.factor is None else own.Scripted(self.setup.factor, *self.poison)
        try:
            parts = self.setup.parts(self.setup.settings | self.settings, predictor)
            how = {} if self.how == "start" else {self.how: True}
            parts.trainer.fit(parts.loader, parts.held_out, out=self.out, **how, **parts.options)
        except ForetrainError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code
        return 0


@dataclass(frozen=True)
class Outcome:
    """How a process ended. code: 128 + number after a signal."""

    code: int
    text: str

    @property
    def last(self) -> str:
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "")


class Process:
    """An order at work, in a fork of this process."""

    def __init__(self, order: Order, injections: Sequence[Injection] = (), note: Callable[[], Any] | None = None) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _be_child(order, injections, writer, note)
        os.close(writer)
        self._reader, self._parts = reader, list[bytes]()

    def _read(self, seconds: float | None) -> bool:
        """Whether there is more to come; None: wait for it."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return True
        part = os.read(self._reader, 1 << 16)
        self._parts.append(part)
        return bool(part)

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._read(0)

    def kill_after(self, seconds: float) -> None:
        """SIGKILL, unless it has ended by then."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._read(left):
                return
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        while not self._parts or self._parts[-1]:
            self._read(None)
        os.close(self._reader)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Outcome(code if code >= 0 else 128 - code, b"".join(self._parts).decode(errors="replace"))


def _be_child(
    order: Order, injections: Sequence[Injection], writer: int, note: Callable[[], Any] | None
) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal has it
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.chdir(order.folder)
        with ExitStack() as stack:
            for inject in injections:
                inject(stack)
            code = order.carry_out()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        if note is not None:
            note()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                try:
                    stream.flush()
                except OSError:
                    pass
        os._exit(code)


# --- what an end consists of -----------------------------------------------------------------------------------------

_TIMES = frozenset({"seconds", "total_seconds", "tokens_per_second", "environment", "memory", "sentence", "config"})


def without_times(tree: Any) -> Any:
    """Nor what names this machine's folders."""
    if isinstance(tree, dict):
        return {key: without_times(value) for key, value in tree.items() if key not in _TIMES}
    return [without_times(value) for value in tree] if isinstance(tree, list) else tree


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest(run: Path, log: bool = True, best: bool = True) -> dict[str, str]:
    """Name -> SHA-256 of everything that a run ends with, apart from its times."""
    _, newest = next(iter(CheckpointStore(run / "checkpoints").steps()))
    found = {path.name: _sha(path.read_bytes()) for path in sorted(newest.glob("*.safetensors"))}
    found["state.json"] = _sha(_text(json.loads((newest / "state.json").read_text("utf-8"))))
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", "model.safetensors", "tokenizer.json"):
        if (run / name).is_file():
            found[name if "/" in name or name[0] == "t" else f"./{name}"] = _sha(_ordered((run / name).read_bytes()))
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    if not best:
        summary.pop("best_checkpoint", None)
    found["summary.json"] = _sha(_text(summary))
    if best:
        for path in sorted((run / "checkpoints").glob("best-step-*/*.safetensors")):
            found[f"{path.parent.name}/{path.name}"] = _sha(path.read_bytes())
    if log:
        found["metrics.jsonl"] = _sha(_text(told(run / "metrics.jsonl")))
    return found


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its header in order: the library writes metadata in any."""
    size = int.from_bytes(content[:8], "little")
    if size > len(content):  # another kind of file
        return content
    return json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True).encode() + content[8 + size :]


def _text(tree: Any) -> bytes:
    return json.dumps(without_times(tree), sort_keys=True).encode()


def told(log: Path) -> dict[str, Any]:
    """What the log says last of each step. Every line of it must be JSON."""
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    kept = ("loss", "gradient_norm", "learning_rate", "tokens", "metrics", "best")
    return {
        f"{event['event']} {event['step']}": {name: event.get(name) for name in kept}
        for event in events
        if event["event"] in ("Progress", "Evaluated")
    }


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    digest: dict[str, str]
    seconds: float
    events: int
    """Of files."""
    operations: int
    """Of torch."""
    moves: dict[str, int]
    recovered: int
    reason: str
    size: int
    """Of its largest file."""


def reference(setup: Setup, folder: Path, base: Path, identity: str) -> Reference:
    """Made twice, so that it is known to be the same every time; found again where it was made before."""
    kept = folder / f"{re.sub('[^a-z0-9]+', '-', setup.name)}.json"
    if kept.is_file() and (found := json.loads(kept.read_text("utf-8")))["identity"] == identity:
        return Reference(**found["reference"])
    ends, notes = [], {}
    for number in range(2):
        place = folder / f"{kept.stem}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        write_inputs(setup, place, base)
        order, began = Order(setup, place.resolve(), how="start"), time.monotonic()
        injections: list[Injection] = []
        note: Callable[[], Any] | None = None
        if number:
            operations, events = Operations(), FileEvents(place)
            injections = [events.arm, lambda stack: stack.enter_context(operations) and None]
            note = partial(_note, place / "counted.json", operations, events)
        outcome = Process(order, injections, note).wait()
        if outcome.code != 0:
            raise RuntimeError(f"{setup.name}: the undisturbed run ended with {outcome.code}:\n{outcome.text}")
        if not number:
            notes["seconds"] = time.monotonic() - began
        ends.append(digest(place / OUT))
    if ends[0] != ends[1]:
        different = [name for name in ends[0].keys() | ends[1].keys() if ends[0].get(name) != ends[1].get(name)]
        raise RuntimeError(f"{setup.name}: two undisturbed runs differ in {different}")
    run = folder / f"{kept.stem}-1" / OUT
    events_told = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    moves = Counter(event["verdict"] for event in events_told if event["event"] == "Moved")
    if missing := setup.verdicts - moves.keys():
        raise RuntimeError(f"{setup.name}: no move was {' or '.join(missing)}, only {dict(moves)}")
    counted = json.loads((folder / f"{kept.stem}-1" / "counted.json").read_text("utf-8"))
    made = Reference(
        digest=ends[0],
        moves=dict(moves),
        recovered=sum(event["event"] in ("Recovered", "Tuned") for event in events_told),
        reason=json.loads((run / "summary.json").read_text("utf-8"))["reason"],
        size=max(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        **notes,
        **counted,
    )
    kept.write_text(json.dumps({"identity": identity, "reference": vars(made)}), encoding="utf-8")
    for number in range(2):
        shutil.rmtree(folder / f"{kept.stem}-{number}")
    return made


def _note(path: Path, operations: Operations, events: FileEvents) -> None:
    path.write_text(json.dumps({"operations": operations.count, "events": events.count}), encoding="utf-8")


def identity() -> str:
    """Of the code: what another version found is not gone on with."""
    import torch

    import foretrain

    here, there = Path(__file__).parent, Path(foretrain.__file__).parent
    files = [*sorted(here.glob("*faults*.py")), *sorted(there.rglob("*.py"))]
    content = b"".join(path.read_bytes() for path in files) + torch.__version__.encode()
    return _sha(content)[:16]
