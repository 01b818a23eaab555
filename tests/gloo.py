"""Functions that run in several processes (gloo ranks) at once, all of them forks of a server that has torch loaded."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LONGEST = 120
"""Seconds that ranks may take: far more than they need."""
_PATIENCE = 60
"""Seconds that a rank waits for another one."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. result: what its function returned, None where it failed; error: type and words of what it
    raised."""

    code: int
    result: Any = None
    error: str = ""
    trace: str = ""


def run_ranks(size: int, work: Callable[..., Any], *given: Any) -> list[Outcome]:
    """Call work(rank, *given) in `size` processes, which can talk to each other, and wait for all of them. What it
    returns must be JSON."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "foretrain.trainer"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [context.Process(target=_rank, args=(rank, size, name, work, given)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_LONGEST)
            if process.exitcode is None:
                process.kill()
                process.join()
        return [_outcome(process.exitcode or 0, folder / f"{rank}.json") for rank, process in enumerate(ranks)]


def results(size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What the ranks returned. Fails where one of them failed."""
    outcomes = run_ranks(size, work, *given)
    failed = [f"rank {rank}: {one.trace or one.code}" for rank, one in enumerate(outcomes) if one.code or one.error]
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]


def _outcome(code: int, path: Path) -> Outcome:
    return Outcome(code, **json.loads(path.read_text())) if path.is_file() else Outcome(code)


@contextmanager
def fewer(size: int) -> Iterator[bool]:
    """The first `size` ranks are the world inside of the block; the others, which get False, wait at its end."""
    rank, whole = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank < size:
        _meet(rank, size)
    yield rank < size
    if rank < size:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    _meet(rank, whole)


def in_forks(work: Callable[[], object]) -> int:
    """Call it in a fork of each rank; these are a world of their own. Returns how this rank's fork ended: 0, 1 where
    it raised, or the negative number of the signal that killed it."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _meet(rank, size)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    _meetings[size] += 1  # the one of the forks
    _meet(rank, size)
    return os.waitstatus_to_exitcode(status)


_meetings: Counter[int] = Counter()


def _meet(rank: int, size: int) -> None:
    """Form a group. Each has a file of its own, by which its ranks find each other."""
    _meetings[size] += 1
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['GLOO_FOLDER']}/group-of-{size}-{_meetings[size]}",
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=_PATIENCE),
    )


def _rank(rank: int, size: int, folder: str, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "GLOO_FOLDER": folder}
    _meet(rank, size)
    told: dict[str, Any] = {}
    try:
        told["result"] = work(rank, *given)
        torch.distributed.barrier()
    except Exception as error:  # noqa: BLE001 - the test is told
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    if "error" not in told:
        torch.distributed.destroy_process_group()
