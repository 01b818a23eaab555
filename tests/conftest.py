"""What the tests share: tiny data, tiny models, and a cache folder of their own."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; before torch is imported

import gc
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

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
    """Some 200,000 objects of libraries would be looked through at every collection, and comparisons collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to, or reads from, the user's home."""
    home = tmp_path_factory.mktemp("home")
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
