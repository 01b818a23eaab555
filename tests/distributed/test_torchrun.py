"""`torchrun ... -m foretrain train` on two gloo ranks. A start takes seconds, so each serves several checks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrain.config import from_mapping
from foretrain.events import Event, Notice, Resumed
from foretrain.models import gpt2
from foretrain.models.huggingface import load as load_weights
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.recipes import train as run

SETTINGS: dict[str, Any] = {
    "max_steps": 60,
    "batch_size": 8,
    "device": "cpu",
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "model.dropout": 0.1,
    "data.tokenizer": "byte",
    "optimizer.type": "adamw",
    "optimizer.learning_rate": "auto",
    "schedule.type": "constant",
    "hybrid.warmup_steps": 10,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": 5,
    "evaluation.batches": 2,
    "evaluation.interval": 20,
    "checkpoint.interval": 10,
    "health.interval": 0,
    "growth.layers": 1,
    "distributed.type": "fsdp2",
}
FAULTS = [[0, 1, 15, "SIGTERM"], [1, 1, 34, "SIGKILL"]]
"""The second one while growth is on trial."""


def start(folder: Path, out: str, data: Path, faults: list[Any], restarts: int) -> subprocess.CompletedProcess[str]:
    """Two ranks; the same command begins and goes on. No run lies beside another one: it would begin with its rate."""
    settings = {**SETTINGS, "data.path": str(data), "data.cache": str(folder / "cache")}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    worker = [str(Path(__file__).parent / "worker.py"), "train", "--out", str(folder / out / "run"), "--resume"]
    told = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULTS": json.dumps(faults)}
    command = [sys.executable, *launcher, *worker, *told]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def weights_of(folder: Path) -> tuple[int, str]:
    step, path = next(CheckpointStore(folder / "checkpoints").steps())
    digest, weights = hashlib.sha256(), checkpoint.read(path)["model"]
    for name in sorted(weights):
        digest.update(weights[name].contiguous().numpy().tobytes())
    return step, digest.hexdigest()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """One run that was never disturbed, and one that a signal and a kill fell on."""
    folder = tmp_path_factory.mktemp("ranks")
    data = folder / "text.txt"
    data.write_text(" ".join(f"word{number * 7919 % 97}" for number in range(4000)))
    printed = {}
    for name, faults, restarts in (("whole", [], 0), ("hurt", FAULTS, 3)):
        done = start(folder, name, data, faults, restarts)
        assert done.returncode == 0, done.stderr[-6000:]
        printed[name] = done.stderr + done.stdout
    return folder, printed


@pytest.mark.xdist_group("torchrun")
def test_two_ranks_are_one_run(runs: tuple[Path, dict[str, str]]) -> None:
    folder, printed = runs
    told = printed["whole"]
    assert told.count("2 ranks, each with a shard of the weights (FSDP2)") == 1
    assert told.count("run finished") == 1
    summary = json.loads((folder / "whole" / "run" / "summary.json").read_text())
    assert (summary["reason"], summary["global_step"]) == ("finished", 60)
    race = summary["learning_rate"]
    assert (race["steps"], len(race["tried"])) == (21, 3)
    assert told.count("the run goes on with a learning rate of") == 1
    assert summary["tokens"] == (60 + race["extra_steps"]) * 8 * 32
    log = [json.loads(line) for line in (folder / "whole" / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log if line["event"] == "Evaluated"]
    assert steps == [20, 40, 60]
    moves = [(move["verdict"], move["step"], move["layers"]) for move in summary["growth"]["moves"]]
    assert moves == [("made", 30, 2), ("kept", 38, 2)]


@pytest.mark.xdist_group("torchrun")
def test_the_model_is_written_as_of_one_process(runs: tuple[Path, dict[str, str]]) -> None:
    folder, _ = runs
    config = from_mapping({**SETTINGS, "model.vocab_size": 257})
    model = gpt2.build(config.model, seed=99)
    load_weights(model, folder / "whole" / "run" / "model")
    saved = checkpoint.read(next(CheckpointStore(folder / "whole" / "run" / "checkpoints").steps())[1])["model"]
    own = model.state_dict()
    assert all((own[name] == weight).all() for name, weight in saved.items())


@pytest.mark.xdist_group("torchrun")
def test_after_a_signal_to_one_rank_and_a_kill_it_ends_with_the_same_bits(runs: tuple[Path, dict[str, str]]) -> None:
    folder, printed = runs
    told = printed["hurt"]
    assert told.count("SIGTERM: stopped after step") == 1
    assert "exitcode: 143" in told  # of all ranks, so that the launcher begins anew
    assert "exitcode: -9" in told
    assert "rank 1 hangs or is gone, last seen after step" in told
    assert told.count("resumed from step") == 2
    assert weights_of(folder / "hurt" / "run") == weights_of(folder / "whole" / "run")


@pytest.mark.xdist_group("torchrun")
def test_one_process_goes_on_with_the_run_of_two(runs: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, _ = runs
    shutil.copytree(folder / "whole" / "run", tmp_path / "alone")
    for late in ("step-00000060", "best-step-00000060"):
        shutil.rmtree(tmp_path / "alone" / "checkpoints" / late, ignore_errors=True)
    data = {"data.path": str(folder / "text.txt"), "data.cache": str(folder / "cache")}
    config = from_mapping({**SETTINGS, **data, "hybrid.linear_rows": 0})
    events: list[Event] = []
    summary = run.train(config, tmp_path / "alone", resume=True, progress=False, listeners=[events.append])
    assert [event.step for event in events if isinstance(event, Resumed)] == [50]
    assert any("saved by 2 processes" in event.message for event in events if isinstance(event, Notice))
    whole = json.loads((folder / "whole" / "run" / "summary.json").read_text())
    assert summary["tokens"] == whole["tokens"]
    assert summary["final_val_loss"] == pytest.approx(whole["final_val_loss"], rel=0.02)  # dropout draws otherwise
