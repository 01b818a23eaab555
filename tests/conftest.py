"""What the tests share: tiny data, tiny models, and a cache folder of their own."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; before torch is imported
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # what asks a Hub, asks one on loopback; before huggingface_hub is imported

import gc
import getpass
import itertools
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

COMPILED = Path(tempfile.gettempdir()) / f"foretrain-tests-compiled-{getpass.getuser()}"
"""Compiled code is kept here, since homes of tests are new for each of them."""
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))

settings.register_profile(
    "foretrain",
    deadline=None,  # a test asserts behaviour, never the clock
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("foretrain")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells hand it to what they start in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own in it
ROOM = 2 * 2**30
"""Bytes. All folders of all tests take some 450 MB."""
if os.access(IN_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(IN_MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))  # some 10,000 files are synced: no disk to wait for


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Memory is given back, unless somebody will want to look at what a failed test left."""
    folder = session.config._tmp_path_factory._basetemp  # type: ignore[attr-defined]
    controls = not hasattr(session.config, "workerinput")
    if controls and exitstatus == 0 and folder is not None and folder.is_relative_to(IN_MEMORY):
        shutil.rmtree(folder, ignore_errors=True)


TINY: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 4,
    "device": "cpu",
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 16,
    "evaluation.batches": 2,
    "log.interval": 1,
}


@pytest.fixture(autouse=True, scope="module")
def loaded_modules_are_no_garbage() -> None:
    """Some 200,000 objects of libraries would be looked through at every collection, and comparisons collect often.
    The small collections in between, by default one for every 700 new objects, take a tenth of the time of a test."""
    gc.set_threshold(20_000, 20, 100)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def seeds_without_a_stack() -> None:
    """Without a GPU, every `torch.manual_seed` formats two stacks for an error message that never comes: 2 ms each."""
    import torch

    for device in (torch.cuda, torch.xpu):
        device.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that are not there yet. (pytest looks through all earlier ones for the next number.)"""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_folders(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to, or reads from, the user's home."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("HF_HOME", str(home / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def same_torch_afterwards() -> Iterator[None]:
    """A trainer sets a few switches of the whole process; no test leaves them changed for the next."""
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def words(count: int, seed: int = 0) -> str:
    """Reproducible text with something to learn in it."""
    generator = random.Random(seed)  # noqa: S311 - no secret
    vocabulary = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "home", "again"]
    return " ".join(generator.choice(vocabulary) for _ in range(count))


@pytest.fixture
def make_text() -> Callable[..., str]:
    """make_text(word_count, seed) gives reproducible text."""
    return words


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A few thousand characters of text."""
    path = tmp_path / "tiny.txt"
    path.write_text(words(1200), encoding="utf-8")
    return path


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """make_config({"optimizer.type": "sgd"}) gives a tiny configuration with these settings changed."""
    from foretrain.config import from_mapping

    return lambda changes=None: from_mapping({**TINY, **(changes or {})})


@pytest.fixture
def tiny_settings() -> list[str]:
    """The tiny configuration as arguments of the command line."""
    return [argument for name, value in TINY.items() for argument in ("--set", f"{name}={value}")]


@pytest.fixture
def tiny_shape() -> Any:
    from foretrain.models.gpt2 import GPT2Shape

    return GPT2Shape(layers=2, heads=2, width=32, context=16, vocab_size=64)


@pytest.fixture
def make_model(tiny_shape: Any) -> Callable[..., Any]:
    """make_model(seed, dropout=0.1) gives a tiny GPT-2; keywords of GPT2 itself go through `options`."""
    from dataclasses import replace

    from foretrain.models.gpt2 import GPT2

    def make(seed: int = 1, options: dict[str, Any] | None = None, **changes: Any) -> GPT2:
        return GPT2(replace(tiny_shape, **changes), seed, **(options or {}))

    return make


@pytest.fixture
def make_batch(tiny_shape: Any) -> Callable[..., Any]:
    """make_batch(rows, seed) gives random (tokens, targets) for the tiny shape."""
    import torch

    def make(rows: int = 4, seed: int = 0, vocab_size: int = tiny_shape.vocab_size, length: int = tiny_shape.context):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return make


@pytest.fixture
def command() -> Callable[..., int]:
    """command("config", "check", "file") gives the exit code."""
    from foretrain.cli import app as cli

    def call(*arguments: Any) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return int(ended.value.code or 0)

    return call
