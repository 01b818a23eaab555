"""A rank that is killed at any one of its writes leaves checkpoints that are whole: the new one, or the one before."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretrain.engine.world import FailedRank
from foretrain.persist import shards
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import OfRank
from foretrain.persist.pieces import Layouts, ReadBy

pytestmark = pytest.mark.xdist_group("shards killed")  # what is below is made once

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events of calls that change a folder; besides, files that are opened to be written, and files of tensors."""
BEFORE, NOW = 6, 7
"""The step that is saved already, and the one whose save is disturbed."""


class Pair:
    """Two processes that talk through a pipe. Where the other one is gone, it is as with gloo: an error."""

    size = 2

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self.pipe = rank, pipe

    def _other(self, sent: Any) -> Any:
        try:
            self.pipe.send(sent)
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("gloo: Connection closed by peer") from error

    def all_well(self, words: str | None) -> FailedRank | None:
        told = [words, self._other(words)][:: 1 if self.rank == 0 else -1]
        return next((FailedRank(rank, text) for rank, text in enumerate(told) if text is not None), None)

    def of_first(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        other: np.ndarray[Any, Any] = self._other(numbers)
        return numbers if self.rank == 0 else other


def state(rank: int, step: int) -> dict[str, Any]:
    """Every number in it tells of which step it is."""
    return {
        "model": {"weight": torch.full((64, 8), float(step)), "bias": torch.full((8,), float(step))},
        "batches": OfRank([torch.full((2, 3), 10 * step + rank)], rows=True),
        "step": step,
    }


def store(folder: Path, rank: int, pipe: Connection) -> CheckpointStore:
    reader = ReadBy(rank, 2, Layouts({}), dict)
    return CheckpointStore(folder, 2, Pair(rank, pipe), lambda step: reader)


def save(folder: Path, *steps: int, who: int = -1, at: int = -1) -> tuple[list[int], int]:
    """Two forks save steps; `who` is killed before its `at`-th write of the last one, or counts them. Returns how the
    forks ended, and how many writes there were."""
    ends = multiprocessing.Pipe()
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            code = 1
            try:
                ends[1 - rank].close()
                one = store(folder, rank, ends[rank])
                for step in steps[:-1]:
                    one.save(step, state(rank, step))
                writes = Writes(folder, at if rank == who else -1)
                one.save(steps[-1], state(rank, steps[-1]))
                if rank == who:
                    (folder.parent / "writes").write_text(str(writes.count))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for end in ends:
        end.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    counted = folder.parent / "writes"
    return codes, int(counted.read_text()) if at < 0 and who >= 0 else 0


class Writes:
    """Counts the writes of this process into a folder, and ends it before one of them."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        plain: Callable[..., None] = shards.save_file

        def save_file(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
            self.next()
            plain(tensors, path, **options)
            if self.count == self.at:  # it was written to its half
                os.truncate(path, path.stat().st_size // 2)
            self.next()

        shards.save_file = save_file  # type: ignore[attr-defined] - in a fork
        sys.addaudithook(self.hear)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        written = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        here = bool(given) and (str(given[0]).startswith(self.folder) or not str(given[0]).startswith("/"))
        if (written or event in CHANGES) and here:  # a folder is emptied by names without the way to it
            self.next()

    def next(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def all_kills(told: str) -> None:
    """Kill each of the ranks at each of its writes, and note what can be loaded then."""
    root, found = Path(told).parent, []
    ready = root / "ready" / "checkpoints"
    save(ready, 5, BEFORE)
    for who in range(2):
        shutil.copytree(ready, root / f"whole-{who}" / "checkpoints")
        codes, count = save(root / f"whole-{who}" / "checkpoints", NOW, who=who)
        assert codes == [0, 0]
        for at in range(count):
            folder = root / f"killed-{who}-{at}" / "checkpoints"
            shutil.copytree(ready, folder)
            codes, _ = save(folder, NOW, who=who, at=at)
            found.append({"who": who, "at": at, "codes": codes, "left": left_in(folder), **loaded(folder)})
    Path(told).write_text(json.dumps(found))


def loaded(folder: Path) -> dict[str, Any]:
    """What one process loads, and which steps its numbers are of."""
    newest = CheckpointStore(folder).load_newest()
    assert newest is not None
    model, rows = newest.state["model"], newest.state["batches"]
    steps = {newest.state["step"], *model["weight"].unique().int().tolist(), *model["bias"].unique().int().tolist()}
    return {"step": newest.step, "steps": sorted(steps), "rows": str(rows), "damaged": len(newest.rejected)}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    told = tmp_path_factory.mktemp("kills") / "found.json"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "foretrain.trainer"])
    process = context.Process(target=all_kills, args=(str(told),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    rows: list[dict[str, Any]] = json.loads(told.read_text())
    return rows


def test_whatever_is_loaded_is_of_one_step_and_the_newest_that_was_complete(found: list[dict[str, Any]]) -> None:
    writes = {who: sum(row["who"] == who for row in found) for who in range(2)}
    assert writes[0] > 12
    assert writes[1] >= 3
    for row in found:
        assert row["codes"][row["who"]] == -signal.SIGKILL
        assert row["damaged"] == 0
        assert row["steps"] == [row["step"]]
        renamed = f"step-{NOW:08d}" in row["left"]
        assert row["step"] == (NOW if renamed else BEFORE)
        assert f"step-{BEFORE:08d}" in row["left"]
        assert all(name.startswith((".tmp-", "step-")) for name in row["left"])
    assert {row["step"] for row in found if row["who"] == 0} == {BEFORE, NOW}
    assert {row["step"] for row in found if row["who"] == 1} == {BEFORE}


def test_the_rank_that_is_left_ends_where_the_other_is_gone_too_early(found: list[dict[str, Any]]) -> None:
    """Once the folder has its name the others need nothing more of the one that is gone, but to be told."""
    for row in found:
        assert row["codes"][1 - row["who"]] == 1
