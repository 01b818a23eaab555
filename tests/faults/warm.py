"""Runs `foretrain` commands in forks of one process that has torch loaded already: the same commands, without the
seconds their imports take. The crash matrix alone starts some nine hundred of them.

    python warm.py serve SOCKET               waits for commands
    python -IS warm_run.py SOCKET ARGS...     behaves as `foretrain ARGS...` would
"""

import importlib.util
import os
import select
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

SECONDS_PER_COMMAND = 1800  # ends what hangs; a busy machine takes its time
POWER_CUT = Path(__file__).parents[2] / "benchmarks" / "power_cut.py"


class Command:
    """One command at work in a process of its own."""

    def __init__(self, address: str, arguments: list[str], folder: str, output: int = 2) -> None:
        environment = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("CKPT_CHAOS_")]
        order = "\0".join([folder, str(len(environment)), *environment, *arguments])
        self._code: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [order.encode()], [output, output])

    def send_signal(self, number: int) -> None:
        """Sent by the parent of the process."""
        with suppress(OSError):  # it has ended already
            self._connection.sendall(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code if there is one yet."""
        return self.wait() if self._code is not None or select.select([self._connection], [], [], 0)[0] else None

    def wait(self, seconds: float | None = None) -> int:
        """The exit code, 128 + number after a signal. TimeoutError if the command is still at work by then."""
        if self._code is None:
            self._connection.settimeout(seconds)
            self._code = int(self._connection.recv(16) or b"1")
            self._connection.close()
        return self._code


def serve(address: str) -> None:
    """Import what a command would import, then fork once for each."""
    import ckpt_chaos.targets.common
    import torch
    import torch._dynamo  # every optimizer does

    import foretrain.cli
    import foretrain.recipes.train

    assert ckpt_chaos.targets.common
    assert foretrain.recipes.train
    _power_cut()
    torch.set_num_threads(1)
    _train_once()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(8)
        _attend(listener)


def _attend(listener: socket.socket) -> None:
    """Start what is asked for, pass signals on, and say how each command ended."""
    at_work: dict[socket.socket, tuple[int, int]] = {}
    while True:
        ends = {gone: connection for connection, (_, gone) in at_work.items()}
        ready, _, _ = select.select([listener, *at_work, *ends], [], [])
        for one in ready:
            if one is listener:
                connection, _ = listener.accept()
                at_work[connection] = _start(connection)
            elif one in ends:
                _over(ends[one], *at_work.pop(ends[one]))
            elif one in at_work:  # asked to, or nobody waits for it any more
                os.kill(at_work[one][0], (one.recv(1) or bytes([signal.SIGKILL]))[0])


def _start(connection: socket.socket) -> tuple[int, int]:
    """The number of the process that carries the command out, and what can be read from (nothing) once it is gone."""
    message, descriptors, _, _ = socket.recv_fds(connection, 65536, 2)
    gone, held = os.pipe()
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            code = _work(message.decode().split("\0"), descriptors)
        finally:
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(code)
    for descriptor in (held, *descriptors):
        os.close(descriptor)
    return worker, gone


def _over(connection: socket.socket, worker: int, gone: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    os.close(gone)
    with connection, suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())


def _power_cut() -> Any:
    """The script that loses what was not synced, as a module."""
    if "power_cut" not in sys.modules:
        spec = importlib.util.spec_from_file_location("power_cut", POWER_CUT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["power_cut"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["power_cut"])
    return sys.modules["power_cut"]


def _train_once() -> None:
    """Import and remember once what a run needs on its way, for all forks. It is nearly half of what a run takes."""
    import gc
    import tempfile

    from foretrain.cli.app import main

    small = ["max_steps=2", "batch_size=4", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"]
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        (text := Path(folder) / "words.txt").write_text("alpha beta gamma " * 100, encoding="utf-8")
        settings = [*small, f"data.path={text}", f"data.cache={folder}", "data.prefetch=0", "evaluation.batches=2"]
        arguments = ["train", "--out", f"{folder}/run", *(part for one in settings for part in ("--set", one))]
        with redirect_stdout(nowhere), redirect_stderr(nowhere), suppress(SystemExit):
            main(arguments)
    gc.collect()
    gc.freeze()  # no collection touches, and so copies, what all forks share


def _work(order: list[str], descriptors: list[int]) -> int:
    from ckpt_chaos.targets.common import arm_from_env

    from foretrain.cli.app import main

    signal.alarm(SECONDS_PER_COMMAND)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal has it
    for target, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, target)
    folder, count, *rest = order
    os.chdir(folder)
    os.environ.update(entry.split("=", 1) for entry in rest[: int(count)])
    arm_from_env(0, lazy=True)
    _power_cut().arm()
    try:
        main(rest[int(count) :])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    serve(sys.argv[2])
