"""How a process joins the others and leaves them: what torchrun's environment says becomes a process group."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from foretrain.errors import ConfigError, InputError
from foretrain.launch.group import ALONE, Group, OtherRankFailed, RankPlace, place_of
from foretrain.launch.roll import LostRank, of_the_group

_SHORTLY = timedelta(seconds=5)
"""How long a process that has failed looks for the store, to hear whether another one has said so already."""
_joined: list[Group] = []
"""The group that this process has joined by itself; none, or one."""


def current_group() -> Group:
    """Return the group that this process is in: the one that was joined here, or torch's own default group."""
    if _joined:
        return _joined[0]
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return ALONE
    from torch.distributed.distributed_c10d import _get_default_store  # a group that the caller's own code has made

    place = RankPlace(distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK") or 0))
    return _group_of(place, _get_default_store())


@cache
def _group_of(place: RankPlace, store: Any) -> Group:
    """Make one object per group: it counts what was asked."""
    return Group(place, store)


@contextlib.contextmanager
def joined(device: str, timeout_seconds: float) -> Iterator[Group]:
    """Join the processes that were started together, and leave them at the end of the block.

    A process that was started alone stays alone; a group that is there already (Ray Train makes one) is used as it is.
    """
    place = place_of()
    if place is None or torch.distributed.is_initialized():
        yield current_group()
        return
    backend = _take_device(device, place)
    limit = timedelta(seconds=timeout_seconds)
    group = Group(place, store_of(place, limit), timeout_seconds)
    _joined.append(group)
    try:
        device_id = torch.device("cuda", place.local_rank) if backend == "nccl" else None
        torch.distributed.init_process_group(
            backend, store=group.store, rank=place.rank, world_size=place.size, timeout=limit, device_id=device_id
        )
        yield group
        group.meet()  # who leaves first takes what others still wait for
    except RuntimeError as error:
        if not of_the_group(error):
            raise
        cause = " ".join(str(error).split())[:200]
        raise LostRank(
            f"{place.size} processes lost each other, or did not find each other within {timeout_seconds:g} s "
            f"(distributed.timeout_seconds): {cause}"
        ) from error
    finally:
        _joined.clear()
        with contextlib.suppress(RuntimeError, ValueError):  # after a failure there may be nothing left to take down
            torch.distributed.destroy_process_group()


def _take_device(device: str, place: RankPlace) -> str:
    """Take this process's GPU, and return what sends numbers between such devices."""
    kind, _, number = device.partition(":")
    if number:
        raise ConfigError(
            f"device = {device!r} names one device for {place.size} processes; set device = {kind!r}, and each takes "
            "the one with its own number"
        )
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return "gloo"
    if kind == "mps":
        raise ConfigError("device = 'mps' is one device, and several processes were started; start one, or use 'cpu'")
    if place.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"process {place.local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; start as "
            "many processes as there are GPUs (torchrun --nproc-per-node), or set device = 'cpu'"
        )
    torch.cuda.set_device(place.local_rank)
    return "nccl"


def store_of(place: RankPlace, timeout: timedelta) -> Any:
    """Return the launcher's store, under a prefix of this attempt: addresses that an earlier attempt left there, of
    processes that are gone, must not be found."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise InputError(
            f"WORLD_SIZE = {place.size}, but MASTER_ADDR and MASTER_PORT do not say where the processes meet; start "
            "them with torchrun"
        )
    made_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = place.rank == 0 and not made_by_launcher
    store = TCPStore(address, int(port), place.size, master, timeout, wait_for_workers=False)
    return PrefixStore(f"attempt-{place.attempt}", store)


def tells_of(error: BaseException, place: RankPlace) -> bool:
    """Return whether this process is the one that tells of a failure: each is told once, by rank 0 if it met it too."""
    if isinstance(error, OtherRankFailed):
        return False
    words = type(error).__name__ if isinstance(error, LostRank) else str(error)
    key = f"foretrain/told/{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    try:
        store = store_of(place, _SHORTLY)
        if place.rank == 0:
            store.set(key, "by rank 0")
            return True
        try:
            store.wait([key], _SHORTLY)
        except RuntimeError:
            return bool(store.compare_set(key, "", str(place.rank)).decode() == str(place.rank))
        return False
    except (RuntimeError, InputError):  # the others are gone
        return True
