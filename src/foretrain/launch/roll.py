"""The roll: which rank is at which step, whether one was asked to stop, and which one no longer answers.

Nothing of it is sent in a step. A thread tells the launcher's store where this process is, some times a second at
most, and looks there for two words: that a rank was asked to stop, and that this process was given up by the others.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from foretrain.errors import ForetrainError
from foretrain.launch.group import Group

_OFTEN = 0.5
"""Seconds between two looks. Chosen: a signal is followed within a second, and 1,024 ranks ask 2,048 times a second."""
_ANSWER = 5.0
"""Seconds in which a rank that is well answers, once a collective operation has failed on another one."""
_OF_THE_GROUP = re.compile(
    r"gloo|nccl|Connection (closed|reset) by peer|Timed out waiting|Broken pipe|process group|ProcessGroup", re.I
)
"""What torch's errors say where an operation of several processes failed."""


class LostRank(ForetrainError):
    """A rank that the others wait for does not answer any more."""


def of_the_group(error: BaseException) -> bool:
    """Whether an error says that processes could not work together, and not that something is wrong in this one."""
    if isinstance(error, torch.distributed.DistError):
        return not isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and _OF_THE_GROUP.search(str(error)) is not None


class Roll:
    """Keeps the roll while a run goes on. For one process alone it does nothing.

    A rank that was asked to stop may not do so by itself: the others would wait for it for ever. The thread of each
    rank promises a step at whose end it looks again, and all stop after the last step that any of them promised: the
    threads promise even while their processes are in the middle of a step and wait for each other.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.asked = ""
        """The signal that this process got; set by its handler."""
        self.agreed = ""
        """The signal after which all stop now."""
        self._done = 0
        """Steps since the run began here: the same number in all processes after the same step."""
        self._step = 0
        """The step of the run, for messages."""
        self._last: int | None = None
        """At the end of this step it is looked, or known, when to stop."""
        self._settled = False
        self._leaving = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._prefix = ""
        """What this run's words in the store begin with: a process may make several runs, one after the other."""

    def __enter__(self) -> Roll:
        if not self.group.alone:
            number = self.group.store.add(f"foretrain/runs/{self.group.rank}", 1)
            self._prefix = f"foretrain/run-{number}"
            self._thread = threading.Thread(target=self._keep, name="foretrain-roll", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    # --- the run's own thread ----------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        """The run is at the end of a step, as all others are, or will be."""
        if self._thread is None:
            return
        with self._lock:
            self._done += 1
            self._step = step
            last = self._last
        if last is None or self._done < last:
            return
        if not self._settled:
            last = self._last = self._settle()
        if self._done >= last:
            self.agreed = self.group.store.get(self._stop).decode()

    def _settle(self) -> int:
        """Return the step after which all stop, when all have made their promise."""
        keys = [self._key("promise", rank) for rank in range(self.group.size)]
        self.group.store.wait(keys, timedelta(seconds=self.group.timeout))
        self._settled = True
        return max(int(promise) for promise in self.group.store.multi_get(keys))

    def explain(self, error: BaseException) -> LostRank | None:
        """Say which rank is lost, where processes could not work together; None for any other error."""
        if self._thread is None or not of_the_group(error):
            return None
        self._leaving = True
        try:
            lost = self._lost()
            steps = {rank: self._step_of(rank) for rank in (*lost, self.group.rank)}
            if lost:
                self.group.store.set(self._given_up, " ".join(map(str, lost)))
        except RuntimeError:  # the store is gone with the process, or the machine, that held it
            lost, steps = [], {}
        own = f"rank {self.group.rank} waits for it after step {self._step}"
        cause = " ".join(str(error).split())[:200]
        if not lost:
            return LostRank(f"processes lost each other after step {self._step} ({cause}); start again with --resume")
        names = ", ".join(f"rank {rank} hangs or is gone, last seen after step {steps[rank]}" for rank in lost)
        return LostRank(f"{names}; {own} (distributed.timeout_seconds = {self.group.timeout:g}: {cause})")

    def _lost(self) -> list[int]:
        """Return the ranks that do not answer: those that are well have met the same error, and come here too."""
        store, rank = self.group.store, self.group.rank
        store.set(self._key("here", rank), str(self._step))
        until = time.monotonic() + _ANSWER
        lost: list[int] = []
        for other in range(self.group.size):
            left = timedelta(seconds=max(0.01, until - time.monotonic()))
            if other != rank and not _comes(store, self._key("here", other), left):
                lost.append(other)
        return lost

    def _step_of(self, rank: int) -> str:
        key = self._key("step", rank)
        return self.group.store.get(key).decode() if self.group.store.check([key]) else "0"

    # --- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        shared: Any = self.group.store
        store: Store = shared.clone()  # a connection of its own: the run may wait on the other one
        told = -1
        while not self._over.wait(min(_OFTEN, self.group.timeout / 8)):
            try:
                if self._step != told:
                    told = self._step
                    store.set(self._key("step", self.group.rank), str(told))
                self._look_for_stop(store)
                self._look_whether_given_up(store)
            except RuntimeError:  # the store is gone: the run is told by its next operation with the others
                return

    def _look_for_stop(self, store: Store) -> None:
        if self._last is not None:
            return
        if self.asked:
            store.compare_set(self._stop, "", self.asked)
        if store.check([self._stop]):
            with self._lock:
                self._last = self._done + 1
            store.set(self._key("promise", self.group.rank), str(self._last))

    def _look_whether_given_up(self, store: Store) -> None:
        """The others have left: what this process does can be of no use any more, and may never come to an end."""
        if self._leaving or not store.check([self._given_up]):
            return
        if str(self.group.rank) in store.get(self._given_up).decode().split():
            sys.stderr.write(f"rank {self.group.rank}: the others have given it up after step {self._step}\n")
            sys.stderr.flush()
            os._exit(1)

    @property
    def _stop(self) -> str:
        return f"{self._prefix}/stop"

    @property
    def _given_up(self) -> str:
        return f"{self._prefix}/given-up"

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"


def _comes(store: Store, key: str, left: timedelta) -> bool:
    try:
        store.wait([key], left)
    except RuntimeError:
        return False
    return True
