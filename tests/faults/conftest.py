"""Real processes to kill, and the small run they are killed in."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import BENCHMARKS, load_script
from tests.waiting import HANGS

HERE = Path(__file__).parent


def wait_until(condition: Callable[[], Any], process: Any = None) -> Any:
    """The first true value of `condition`; fails when the process ends before, or the deadline passes."""
    deadline = time.monotonic() + HANGS
    while not (value := condition()):
        assert process is None or process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
    return value


@dataclass(frozen=True)
class Warm:
    """`foretrain` without its start-up time."""

    address: str
    module: Any

    @property
    def command(self) -> list[str]:
        """For others to start: behaves as `foretrain`."""
        return [sys.executable, "-IS", str(HERE / "warm_run.py"), self.address]

    def start(self, folder: Path, *arguments: str, log: str = "output.txt") -> Any:
        with (folder / log).open("a") as output:
            return self.module.Command(self.address, list(arguments), str(folder), output.fileno())


@pytest.fixture(scope="session")
def crash_matrix() -> Any:
    return load_script(BENCHMARKS / "crash_matrix.py")


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:  # a short path, as sockets need it
        address = Path(folder) / "socket"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "300"}
        server = subprocess.Popen([sys.executable, str(HERE / "warm.py"), "serve", str(address)], env=environment)
        try:
            wait_until(address.exists, server)
            yield Warm(str(address), load_script(HERE / "warm.py"))
        finally:
            server.kill()
            server.wait()


@dataclass(frozen=True)
class Workshop:
    """A folder with a configuration, its data, a finished run `undisturbed` and the same run as a kill after step 10
    leaves it, `killed`, with checkpoints of steps 3, 6 and 9. It is the current folder of the test."""

    folder: Path
    foretrain: Callable[..., tuple[int, str]]
    """foretrain("train", ...) gives the exit code and what was printed to standard error."""

    @property
    def killed(self) -> Path:
        return self.folder / "killed"

    @property
    def checkpoints(self) -> Path:
        return self.killed / "checkpoints"

    @property
    def newest(self) -> Path:
        return self.checkpoints / "step-00000009"

    def resume(self, *more: str) -> tuple[int, str]:
        return self.foretrain("train", "tiny.toml", "--out", "killed", "--resume", *more)

    def is_as_undisturbed(self, out: str = "killed") -> bool:
        ends = [self.folder / name for name in ("undisturbed", out)]
        last = "checkpoints/step-00000011"
        files = ["model/model.safetensors", *(f"{last}/{path.name}" for path in (ends[0] / last).glob("*.safetensors"))]
        assert len(files) == 7
        return all((ends[0] / name).read_bytes() == (ends[1] / name).read_bytes() for name in files)


@pytest.fixture(scope="session")
def finished(crash_matrix: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from foretrain import config
    from foretrain.recipes import train as run

    folder = tmp_path_factory.mktemp("finished")
    crash_matrix.write_inputs(folder, keep=100, steps=11)
    with contextlib.chdir(folder):
        run.train(config.load("tiny.toml").config, "undisturbed", progress=False)
    shutil.copytree(folder / "undisturbed", folder / "killed")
    for name in ("model", "checkpoints/step-00000011"):
        shutil.rmtree(folder / "killed" / name)
    (folder / "killed" / "summary.json").unlink()
    return folder


@pytest.fixture
def foretrain(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    from foretrain.cli.app import main

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return int(end.value.code or 0), capsys.readouterr().err

    return call


@pytest.fixture
def workshop(
    finished: Path, foretrain: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workshop:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Workshop(tmp_path, foretrain)
