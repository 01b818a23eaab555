"""Runs of several ranks go on from their checkpoints: on as many with the same bits, on others with the same state."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import ranked
from tests.engine import test_ranks
from tests.gloo import fewer, results
from torch import Tensor

from foretrain import HybridTrainer, load_weights
from foretrain.errors import ForetrainError
from foretrain.events import Notice
from foretrain.persist import checkpoint, shards
from foretrain.persist.codec import RANDOM
from foretrain.persist.folder import RunFolder

pytestmark = pytest.mark.xdist_group("resumed ranks")  # what is below is made once

END, OPEN = 150, 140
"""Steps of a run, and one at which a leap is being validated."""
PHASES = {10: "warmup", 50: "full"}
"""Steps after which a run goes on for ten more, to a checkpoint that is compared."""
NOISY = {"evaluation.ema_decay": 0.9, "audit.time_budget": 0.9, "checkpoint.keep": 50, "evaluation.interval": 0}
NOISY |= {"hybrid.warmup_steps": 20, "health.interval": 0}
OF_OTHER_RANKS = {"random", "batch", "batches", "sample", "loader"}
"""Entries that are not the same on another number of ranks."""
OF_THE_CLOCK = {"meta", "seconds", "spent", "clock"}


class Rows:
    """A rank's rows of every batch."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.position = batches, 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield ranked.own_rows(self.batches(self.position))
            self.position += 1


def noisy(kind: str, **more: Any) -> HybridTrainer:
    return ranked.trainer(kind, True, {**NOISY, "max_steps": 240, "checkpoint.interval": 10, **more})


def exact(kind: str) -> HybridTrainer:
    settings = {"hybrid.warmup_steps": 20, "hybrid.full_steps": 10, "max_steps": 50, "checkpoint.interval": 10}
    return ranked.trainer(kind, False, {**settings, "evaluation.interval": 0, "checkpoint.keep": 50})


def linearised(kind: str) -> HybridTrainer:
    """Its chain begins at step 5, and its leaps count two steps each."""
    settings = {"hybrid.linear_rows": 24, "hybrid.warmup_steps": 10, "max_steps": 40, "checkpoint.interval": 1}
    return ranked.trainer(kind, False, {**settings, "evaluation.interval": 0, "checkpoint.keep": 50})


def as_of(rank: int, run: str, step: int) -> str:
    """The folder of a run as it was after a step."""
    folder = f"{run}-{step}"
    if rank == 0:
        shutil.copytree(run, folder)
        for path in Path(folder, "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
    torch.distributed.barrier()
    return folder


# --- what ranks do ---------------------------------------------------------------------------------------------------


def resume(rank: int, folder: str) -> dict[str, Any]:
    """A run, and what goes on from its middle; of shards and of replicas, in the middle of a leap and of a chain."""
    told: dict[str, Any] = {}
    for kind, batches, made, step in (
        ("fsdp2", ranked.words, noisy, OPEN),
        ("fsdp2", ranked.points, exact, 30),
        ("ddp", ranked.points, exact, 30),
        ("ddp", ranked.points, linearised, 13),
    ):
        name = f"{folder}/{kind}-{made.__name__}"
        whole, rest = made(kind), made(kind)
        end = END if made is noisy else None
        whole.fit(Rows(batches), out=name, progress=False, pause_at=end)
        rest.fit(Rows(batches), out=as_of(rank, name, step), resume=True, progress=False, pause_at=end)
        told[f"{kind} {made.__name__}"] = [ranked.digest(whole), ranked.digest(rest), _shown(whole), _shown(rest)]
    for step in PHASES:
        out = as_of(rank, f"{folder}/fsdp2-noisy", step)
        noisy("fsdp2").fit(Rows(ranked.words), out=out, resume=True, progress=False, pause_at=step + 10)
    return told


def _shown(trainer: HybridTrainer) -> dict[str, Any]:
    shown = {name: trainer.summary().get(name) for name in ("steps", "moves", "backward_passes", "audit")}
    return json.loads(json.dumps(shown, default=str))


def pass_on(rank: int, folder: str) -> None:
    """One state, from 2 ranks to 1, to 3 and back to 2, and from 2 to 3."""
    for size, source, target in ((1, "2", "2-1"), (3, "2-1", "2-1-3"), (2, "2-1-3", "2-1-3-2"), (3, "2", "2-3")):
        with fewer(size) as takes_part:
            if takes_part:
                trainer = noisy("one" if size == 1 else "fsdp2")
                loaded = ranked.store_of(trainer, f"{folder}/{source}").load_newest()
                assert loaded is not None
                trainer.load_state_dict(loaded.state)
                ranked.store_of(trainer, f"{folder}/{target}").save(loaded.step, trainer.state_dict())


def run_with_a_full_disk(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 has no space left at the save of step 20; then the run is gone on with in one process."""
    real, trainer = shards.save_file, noisy("fsdp2", max_steps=30)
    said: list[str] = []
    trainer.bus.subscribe(lambda event: said.append(event.message) if isinstance(event, Notice) else None)

    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if rank == 1 and "20" in path.parent.name:
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "save_file", save_file)
        trainer.fit(Rows(ranked.words), out=f"{folder}/full", progress=False)
    told = {"step": trainer.global_step, "said": [text for text in said if "cannot save" in text]}
    with fewer(1) as goes_on:
        if goes_on:
            rest = noisy("one", max_steps=40)
            rest.bus.subscribe(lambda event: said.append(event.message) if isinstance(event, Notice) else None)
            rest.fit(Rows(ranked.words), out=f"{folder}/full", resume=True, progress=False)
            told |= {"position": rest.position, "notice": [text for text in said if "process" in text]}
    return told


def come_second(rank: int, folder: str) -> str:
    """A run in a folder that another run holds."""
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(RunFolder(Path(folder, "held"), resume=True))
        torch.distributed.barrier()
        try:
            noisy("fsdp2").fit(Rows(ranked.words), out=f"{folder}/held", resume=True, progress=False)
        except ForetrainError as error:
            return str(error)
        finally:
            torch.distributed.barrier()
    return ""


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All of the above, on at most three ranks."""
    told: dict[str, Any] = {"path of three": test_ranks.path("fsdp2")}
    with fewer(2) as takes_part:
        if takes_part:
            told |= resume(rank, folder)
    if rank == 0:
        shutil.copytree(f"{folder}/fsdp2-noisy/checkpoints/step-{OPEN:08d}", f"{folder}/2/step-{OPEN:08d}")
    pass_on(rank, folder)
    with fewer(2) as takes_part:
        if takes_part:
            told["full"] = run_with_a_full_disk(rank, folder)
            told["second"] = come_second(rank, folder)
    return told


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, results(3, everything, str(folder))


# --- what is compared ------------------------------------------------------------------------------------------------


def leaves(state: Any, left_out: frozenset[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of a state; of tensors their bits. Random states are left out by their form."""
    if isinstance(state, dict) and not (state.keys() == RANDOM and "random" in left_out):
        for key, value in state.items():
            if key not in left_out:
                yield from leaves(value, left_out, f"{path}.{key}")
    elif isinstance(state, (list, tuple)):
        for place, value in enumerate(state):
            yield from leaves(value, left_out, f"{path}.{place}")
    elif isinstance(state, Tensor):
        bits = state.contiguous().view(torch.uint8) if state.ndim else state.reshape(1).contiguous().view(torch.uint8)
        yield path, (str(state.dtype), tuple(state.shape), bits.numpy().tobytes())
    elif not isinstance(state, dict):
        yield path, "nan" if isinstance(state, float) and math.isnan(state) else state


def differences(first: Path, second: Path, left_out: frozenset[str]) -> list[str]:
    one, other = (dict(leaves(checkpoint.read(path), left_out)) for path in (first, second))
    assert len(one) > 500 or any(name in str(first) for name in ("exact", "linearised", "points"))
    return [path for path in one.keys() | other.keys() if one.get(path, "none") != other.get(path, "none")]


def test_three_ranks_see_and_move_what_one_process_does(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """The same path of the weights, whose parts are not of one size here."""
    alone = test_ranks.path("one")
    for rank in ran[1]:
        assert rank["path of three"] == ran[1][0]["path of three"]
        assert rank["path of three"]["moved"] == alone["moved"]
        for own, other in zip(rank["path of three"]["dots"], alone["dots"], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_a_resumed_run_ends_with_the_same_bits(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = ran
    runs = [("fsdp2", "noisy", OPEN, END), ("fsdp2", "exact", 30, 50), ("ddp", "exact", 30, 50)]
    for kind, name, step, end in [*runs, ("ddp", "linearised", 13, 40)]:
        run = folder / f"{kind}-{name}"
        at = checkpoint.read(run / "checkpoints" / f"step-{step:08d}")
        assert at["hybrid"]["policy"]["move"] is not None
        for rank in told[:2]:
            whole, rest, shown, shown_rest = rank[f"{kind} {name}"]
            assert whole == rest == told[0][f"{kind} {name}"][0]
            assert shown == shown_rest
            assert shown["moves"]["kept"] > 0
        ends = [path / "checkpoints" / f"step-{end:08d}" for path in (run, run.with_name(f"{run.name}-{step}"))]
        assert differences(*ends, frozenset(OF_THE_CLOCK)) == []


def test_a_run_goes_on_from_any_phase(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = ran
    phases = {("fsdp2-noisy", OPEN): "correct", ("fsdp2-exact", 30): "predict"}  # both in the middle of a move
    phases |= {("fsdp2-noisy", step): phase for step, phase in PHASES.items()}
    for (run, step), phase in phases.items():
        state = checkpoint.read(folder / run / "checkpoints" / f"step-{step:08d}")
        assert state["hybrid"]["policy"]["cycle"]["phase"] == phase
    for step in PHASES:
        runs = (folder / "fsdp2-noisy", folder / f"fsdp2-noisy-{step}")
        ends = [run / "checkpoints" / f"step-{step + 10:08d}" for run in runs]
        assert differences(*ends, frozenset(OF_THE_CLOCK)) == []


@pytest.mark.parametrize("way", ["2-1-3-2", "2-3"])
def test_a_state_is_the_same_on_any_number_of_ranks(way: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = ran
    first, last = (folder / name / f"step-{OPEN:08d}" for name in ("2", way))
    assert differences(first, last, frozenset(OF_THE_CLOCK | OF_OTHER_RANKS)) == []
    where = json.loads((last / "where.json").read_text())
    assert where["ranks"] == int(way[-1])
    names = where["tensors"].keys()
    for part in ("model.", "optimizer.state.", "average.", "hybrid.policy.snapshots.safe.model."):
        cut = [name for name in names if name.startswith(part) and len(where["tensors"][name]["shape"]) > 1]
        assert cut
        assert all(len(where["patterns"][where["tensors"][name]["pieces"]]) == where["ranks"] for name in cut)
    assert "hybrid.policy.observer.trajectory.basis_parts.0" in names
    assert "hybrid.policy.move.state.judge_of_move.mean.0" in names


def test_weights_of_a_sharded_run_are_those_of_one_process(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """The file at the end, and the weights of a checkpoint, by the names of one process."""
    folder, _ = ran
    run = folder / "fsdp2-noisy"
    state = checkpoint.read_weights(run / "checkpoints" / f"step-{END:08d}")
    finished, from_checkpoint = (
        load_weights(ranked.tiny(), run),
        load_weights(ranked.tiny(), run / "checkpoints" / f"step-{END:08d}"),
    )
    assert state["model"].keys() == ranked.tiny().state_dict().keys()
    for name, value in finished.state_dict().items():
        assert torch.equal(value, from_checkpoint.state_dict()[name])
        assert value.shape == state["model"][name].shape
    assert not torch.equal(
        finished.state_dict()["position_embedding.weight"], state["model"]["position_embedding.weight"]
    )


def test_a_full_disk_of_one_rank_is_a_warning_of_all(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = ran
    for rank in told[:2]:
        assert rank["full"]["step"] == 30
        (text,) = rank["full"]["said"]
        assert "cannot save the checkpoint of step 20: rank 1: the disk is full (No space left on device)" in text
        assert "the checkpoint of step 10 is intact" in text
        assert text.endswith("the run goes on and tries again at the next save")
    names = sorted(path.name for path in (folder / "full" / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000030", "step-00000040"]
    assert told[0]["full"]["position"] == 40
    (notice,) = told[0]["full"]["notice"]
    assert notice.startswith("saved by 2 processes, and goes on in 1: ")


def test_a_folder_that_another_run_holds_is_refused_on_all_ranks(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = ran
    text = f"out='{folder}/held': another run is writing there; wait for it or choose another folder"
    assert told[0]["second"] == text
    assert told[1]["second"] == f"rank 0: {text}"
    assert not (folder / "held" / "checkpoints").exists()
