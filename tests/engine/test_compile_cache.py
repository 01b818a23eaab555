"""Compiled code is kept from run to run in the user's cache folder, and what compiling took is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.engine.compile_cache import FOLDER, Compilation, keep_compiled

RUN = """
import json, sys
import torch
from torch import nn
from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Notice
torch.manual_seed(0)
said = []
settings = {"max_steps": 2, "device": "cpu", "hybrid.mode": "off", "engine.compile": sys.argv[1] == "compiled"}
trainer = HybridTrainer(nn.Linear(4, 1), "sgd", nn.MSELoss(), from_mapping(settings))
trainer.bus.subscribe(lambda event: said.append([event.message, event.level]) if isinstance(event, Notice) else None)
loss = [float(trainer.step((torch.ones(2, 4), torch.ones(2, 1))).loss) for step in range(2)]
print(json.dumps({"said": said, "loss": loss}))
"""


def made(folder: Path, how: str = "compiled") -> dict[str, Any]:
    """What a run in a process of its own says, with `folder` as the user's cache folder."""
    given = {name: value for name, value in os.environ.items() if name != FOLDER}
    given |= {"XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    given |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    done = subprocess.run([sys.executable, "-c", RUN, how], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept = cache / "foretrain" / "compiled"
    first = made(cache)
    ((cold, level),) = first["said"]
    assert level == "info"
    assert cold.startswith("compiled in ")
    assert cold.endswith(f" s; {kept} keeps it for the next run of this model")
    there = files(kept)
    assert there
    second = made(cache)
    ((warm, _),) = second["said"]
    assert warm.endswith(f" s, from what earlier runs left in {kept}")
    assert first["loss"] == second["loss"]
    assert {name for name in files(kept) - there if name.endswith((".so", ".cpp"))} == set(), "nothing is compiled anew"


def test_a_run_that_is_not_compiled_says_and_keeps_nothing(tmp_path: Path) -> None:
    found = made(tmp_path / "cache", "eager")
    assert found["said"] == []
    assert not (tmp_path / "cache" / "foretrain" / "compiled").exists()


def test_where_its_user_chose_a_folder_that_is_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_compiled()
    assert os.environ[FOLDER] == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("named", [True, False])
def test_else_it_is_the_users_cache_folder(named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache") if named else "")
    keep_compiled()
    folder = tmp_path / "cache" if named else tmp_path / "home" / ".cache"
    assert os.environ[FOLDER] == str(folder / "foretrain" / "compiled")
    assert (folder / "foretrain" / "compiled").is_dir()


def test_a_folder_that_torch_has_named_by_itself_is_nobodys_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    utils = SimpleNamespace(default_cache_dir=lambda: "/somewhere/temporary")
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.cache_dir_utils", utils)  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(FOLDER, "/somewhere/temporary")
    keep_compiled()
    assert os.environ[FOLDER] == str(tmp_path / "cache" / "foretrain" / "compiled")


def test_where_nothing_can_be_written_it_stays_with_torchs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled()
    assert os.environ[FOLDER] == ""


@pytest.mark.parametrize(
    ("seconds", "hits", "misses", "words"),
    [
        (0, 0, 0, ""),
        (31.4, 0, 2, "compiled in 31 s; /c keeps it for the next run of this model"),
        (4.2, 2, 0, "compiled in 4.2 s, from what earlier runs left in /c"),
        (
            12.0,
            1,
            1,
            "compiled in 12 s, in part from what earlier runs left there; /c keeps it for the next run of this model",
        ),
        (3.0, 0, 0, "compiled in 3.0 s"),
    ],
)
def test_words(seconds: float, hits: int, misses: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before the trainer was made is not its own."""
    counted = SimpleNamespace(
        cumulative_time_spent_ns={"entire_frame_compile": 7 * 10**9, "inductor_compile": 5 * 10**9},
        counters={"inductor": {"fxgraph_cache_miss": 5}},
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", counted)  # type: ignore[arg-type]
    monkeypatch.setenv(FOLDER, "/c")
    compilation = Compilation()
    counted.cumulative_time_spent_ns = {
        "entire_frame_compile": (7 + seconds / 2) * 1e9,
        "entire_backward_compile": seconds / 2 * 1e9,
    }
    counted.counters = {
        "inductor": {"fxgraph_cache_miss": 5 + misses},
        "aot_autograd": {"autograd_cache_hit": hits},
    }
    assert compilation.words() == words
