"""What `thousand_faults.py` compares the ends of runs by, and the undisturbed runs that it compares them with."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faults_inject import FileEvents, Injection, Operations
from faults_runs import OUT, Order, Process
from faults_setups import Setup, write_inputs
from foretrain.persist.checkpoint import CheckpointStore

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
    loss: float
    """Held out, at the end."""
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
            injections = [events.arm, operations.arm]
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
    if missing := setup.verdicts - moves.keys() - ({"any"} if moves else set()):
        raise RuntimeError(f"{setup.name}: no move was {' or '.join(missing)}, only {dict(moves)}")
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    counted = json.loads((folder / f"{kept.stem}-1" / "counted.json").read_text("utf-8"))
    made = Reference(
        digest=ends[0],
        moves=dict(moves),
        recovered=sum(event["event"] in ("Recovered", "Tuned") for event in events_told),
        reason=summary["reason"],
        loss=summary["final_val_loss"],
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
