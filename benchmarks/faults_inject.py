"""What `thousand_faults.py` does to a process from inside, before it begins: each function arms one fault."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain import HybridTrainer
from foretrain.engine.engine import Engine
from foretrain.engine.step import FullStep

Act = Callable[[], None]
Injection = Callable[[ExitStack], None]
"""Called in the process that it is for; whatever must be left again is entered on the stack."""


def tell_fired(mark: bytes = b"1") -> None:
    """Tell the parent that the fault has really happened."""
    if channel[0] >= 0:
        os.write(channel[0], mark)


SPOILED = b"n"
"""A loss was made not finite: this happens in any process of an item, beside its other faults."""
channel = [-1]
"""Of this process, where its parent reads."""


# --- what happens ----------------------------------------------------------------------------------------------------


def send(*names: str) -> Act:
    """These signals to itself, one after the other."""

    def act() -> None:
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))

    return act


def limit_files(size: int) -> Act:
    """No file can grow beyond this many bytes, as on a disk that fills up; below 0: as large as any."""

    def act() -> None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if size < 0 else size, most))

    return act


def drop_capabilities() -> None:
    """Root is subject to permission bits from here on, as anybody else."""
    if os.getuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)())


def write_protect(folder: Path) -> Act:
    def act() -> None:
        drop_capabilities()
        set_modes(folder, 0o555, 0o444)

    return act


def set_modes(folder: Path, folders: int, files: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(folders if path.is_dir() else files)


def wait_for(path: Path, ready: Path) -> Act:
    """Say that it is ready, and stand still until the file is there."""

    def act() -> None:
        ready.touch()
        while not path.exists():
            time.sleep(0.005)

    return act


# --- when it happens -------------------------------------------------------------------------------------------------


def at_step(step: int, act: Act) -> Injection:
    """Once, before the first step from this one on."""

    def inject(stack: ExitStack) -> None:
        taken, done = HybridTrainer.step, []

        def stepped(trainer: HybridTrainer, batch: Any) -> Any:
            if trainer.global_step >= step and not done:
                done.append(step)
                tell_fired()
                act()
            return taken(trainer, batch)

        HybridTrainer.step = stepped  # type: ignore[method-assign]

    return inject


class Operations(TorchDispatchMode):
    """Counts operations of torch that make a new tensor, and acts at one of them."""

    def __init__(self, number: int = 0, act: Act = lambda: None) -> None:
        super().__init__()
        self.number, self.act, self.count = number, act, 0

    def arm(self, stack: ExitStack) -> None:
        stack.enter_context(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function._schema.is_mutable:
            self.count += 1
            if self.count == self.number:
                tell_fired()
                self.act()
        return function(*args, **(kwargs or {}))


def at_operation(number: int, act: Act, everywhere: bool = True) -> Injection:
    """everywhere: not only inside of `fit`."""
    if everywhere:
        return Operations(number, act).arm

    def inject(stack: ExitStack) -> None:
        fit = HybridTrainer.fit

        def fitted(*arguments: Any, **options: Any) -> Any:
            with Operations(number, act):
                return fit(*arguments, **options)

        HybridTrainer.fit = fitted  # type: ignore[method-assign]

    return inject


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of 1.00 GiB")


class FileEvents:
    """Counts what is opened for writing, made, renamed, removed and synced below a folder, and acts before one."""

    _NAMES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod")

    def __init__(self, folder: Path, number: int = 0, act: Act = lambda: None) -> None:
        self.folder, self.number, self.act, self.count = str(folder.resolve()), number, act, 0

    def arm(self, stack: ExitStack) -> None:
        synced = os.fsync

        def sync(descriptor: int) -> None:
            self._see()
            synced(descriptor)

        os.fsync = sync
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self._NAMES or not arguments or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        path = os.fsdecode(arguments[0])
        if (path if path.startswith("/") else f"{Path.cwd()}/{path}").startswith(self.folder):
            self._see()

    def _see(self) -> None:
        self.count += 1
        if self.count == self.number:
            tell_fired()
            self.act()


def at_file_event(folder: Path, number: int, act: Act) -> Injection:
    return FileEvents(folder, number, act).arm


def failing_sync(number: int, how: str) -> Injection:
    """One call of fsync says that the disk is full, or broken."""

    def inject(stack: ExitStack) -> None:
        synced, seen = os.fsync, [0]

        def sync(descriptor: int) -> None:
            seen[0] += 1
            if seen[0] == number:
                tell_fired()
                code = getattr(errno, how)
                raise OSError(code, os.strerror(code))
            synced(descriptor)

        os.fsync = sync

    return inject


# --- what is wrong all along -----------------------------------------------------------------------------------------


def not_finite(passes: frozenset[int]) -> Injection:
    """The losses of these backward passes are not a number."""

    def inject(stack: ExitStack) -> None:
        loss, taken, bad = FullStep.loss, Engine.full, [False]

        def full(engine: Engine, *arguments: Any) -> Any:
            bad[0] = engine.progress.backward_passes in passes
            if bad[0]:
                tell_fired(SPOILED)
            try:
                return taken(engine, *arguments)
            finally:
                bad[0] = False

        def spoiled(step: FullStep, batch: Any) -> Any:
            value = loss(step, batch)
            return value * torch.nan if bad[0] else value

        Engine.full = full  # type: ignore[method-assign]
        FullStep.loss = spoiled  # type: ignore[method-assign]

    return inject


def clock(jumps: dict[int, float], steady: float) -> Injection:
    """The time of day jumps by so many seconds at a step, for good; the steady clocks jump forward by `steady`."""

    def inject(stack: ExitStack) -> None:
        from foretrain.recipes import finetune as tuning
        from foretrain.recipes import train as run
        from foretrain.show import jsonl

        real, monotonic, counter = time.time, time.monotonic, time.perf_counter
        now = {"day": 0.0, "steady": 0.0}

        class Moved(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.now(tz) + timedelta(seconds=now["day"])

        time.time = lambda: real() + now["day"]
        time.monotonic = lambda: monotonic() + now["steady"]
        time.perf_counter = lambda: counter() + now["steady"]
        for module in (run, tuning, jsonl):
            module.datetime = Moved  # type: ignore[misc]
        for step, jump in jumps.items():
            at_step(step, lambda jump=jump: now.update(day=now["day"] + jump, steady=now["steady"] + steady))(stack)

    return inject


def output_to(path: Path) -> Injection:
    """What is printed goes to a file, as in a batch job."""

    def inject(stack: ExitStack) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    return inject


def no_output(how: str) -> Injection:
    """Nobody reads what is printed: "pipe": its reader is gone; "closed": there is no standard output at all."""

    def inject(stack: ExitStack) -> None:
        if how == "pipe":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
        else:
            os.close(1)
            sys.stdout = None  # type: ignore[assignment]  # as Python has it after `>&-`

    return inject


def failing_tracker(number: int) -> Injection:
    """The tracker cannot write any more, from its entry `number` on."""

    def inject(stack: ExitStack) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        written, seen = EventsWriter.write_event, [0]

        def write(writer: Any, event: Any) -> Any:
            seen[0] += 1
            if seen[0] >= number:
                tell_fired()
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(writer, event)

        EventsWriter.write_event = write

    return inject


def failing_callback(number: int) -> Injection:
    """A listener of the user's own raises at its event `number`."""

    def inject(stack: ExitStack) -> None:
        from foretrain.events import Bus

        emit, seen = Bus.emit, [0]

        def heard(event: Any) -> None:
            seen[0] += 1
            if seen[0] == number:
                tell_fired()
                raise ArithmeticError("poisoned listener")

        def told(bus: Bus, event: Any) -> None:
            if not seen[0]:
                seen[0] = 1
                bus.subscribe(heard)
            emit(bus, event)

        Bus.emit = told  # type: ignore[method-assign]

    return inject


def broken_batch(position: int) -> Injection:
    """The loader raises where this batch should be, once."""

    def inject(stack: ExitStack) -> None:
        from faults_own import Places

        Places.broken = position

    return inject
