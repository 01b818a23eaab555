"""`memory.budget` in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors

from foretrain.config import Config, given, load
from foretrain.config.paths import value_of
from foretrain.errors import ConfigError
from foretrain.models import gpt2
from foretrain.planning import budget as budget_module
from foretrain.planning.estimate import estimate, target_of
from foretrain.planning.levers import LEVERS
from foretrain.planning.plan import NothingFitsError
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run


def budget_of(config: Config, share: float, vocab_size: int = 257) -> str:
    """A share of what the configuration needs by itself."""
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    needed = estimate(config, target_of(config, gpt2.shape_from_config(model))).needed
    return f"{share * needed / 1000:.3f}KB"


def test_a_run_takes_the_settings_of_the_plan_and_writes_them_down(
    tmp_path: Path, text_file: Path, make_config: Callable[..., Any]
) -> None:
    settings = {"data.path": str(text_file), "batch_size": 8, "hybrid.mode": "off", "optimizer.type": "adamw"}
    plain = make_config(settings)
    config = make_config({**settings, "memory.budget": budget_of(plain, 0.8)})
    said: list[str] = []
    run.train(config, tmp_path / "run", progress=False, say=said.append)
    written = load(tmp_path / "run" / "config.toml").config
    levers = [name for name in LEVERS if value_of(written, name) != value_of(config, name)]
    assert levers
    assert all(any(f": {name} is" in line for line in said) for name in levers)
    assert sum("nothing can hold the run to them" in line for line in said) == 1
    assert written.memory.budget == config.memory.budget
    # going on takes the same settings, though all of them are named by now
    more = load(tmp_path / "run" / "config.toml", ["max_steps=8"]).config
    assert run.train(more, tmp_path / "run", resume=True, progress=False)["global_step"] == 8


def test_a_budget_that_changes_what_is_computed_says_so(make_config: Callable[..., Any]) -> None:
    shape = {"model.vocab_size": 257, "model.width": 256, "hybrid.mode": "off", "optimizer.type": "adamw"}
    fixed = {name: value_of(make_config(shape), name) for name in LEVERS if name != "optimizer.state_type"}
    plain = make_config(shape | fixed)
    config = make_config(shape | fixed | {"memory.budget": budget_of(plain, 0.9)})
    said: list[str] = []
    target = target_of(config, gpt2.shape_from_config(config.model))
    planned = budget_module.within_budget(config, target, given(config), said.append)
    assert planned.optimizer.state_type != "fp32"
    assert "note: what is computed changes a little, by optimizer.state_type" in said


def test_without_a_budget_nothing_is_changed(make_config: Callable[..., Any]) -> None:
    config = make_config()
    target = target_of(config, gpt2.shape_from_config(config.model))
    assert budget_module.within_budget(config, target, given(config)) is config


def test_a_budget_that_nothing_fits_stops_the_run(tmp_path: Path, text_file: Path, make_config: Any) -> None:
    config = make_config({"data.path": str(text_file), "memory.budget": "10KB"})
    with pytest.raises(NothingFitsError, match="the smallest possible is"):
        run.train(config, tmp_path / "run", progress=False)
    assert issubclass(NothingFitsError, ConfigError)


def test_the_allocator_gets_no_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Any]
) -> None:
    asked: list[tuple[float, Any]] = []
    monkeypatch.setattr(budget_module, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(budget_module, "_capped", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *values: asked.append(values))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    for budget in (2 * 10**9, 80 * 10**9):
        budget_module.cap_allocator(make_config(), budget, lambda text: None)
    assert asked == [(0.25, 3), (1.0, 3)]
    asked.clear()
    for _ in range(2):  # a run without a budget is not held to that of an earlier one in the same process
        budget_module.within_budget(make_config(), target_of(make_config(), gpt2.SIZES["gpt2-tiny"]), frozenset())
    assert asked == [(1.0, 3)]


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_comes_in_pages_unless_somebody_chose_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(budget_module, "_capped", set())
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *values: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(own, "expandable_segments:False")
    budget_module._cap(torch.device("cuda", 0), 0.5)
    assert asked == ([] if own else ["expandable_segments:True"])


def test_fine_tuning_keeps_to_a_budget_too(tmp_path: Path) -> None:
    base, examples = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    config = config_for(base, examples, max_steps=2)
    shape = tuning.base_of(config).model.shape
    length = tuning.prepare(tuning.with_templates(config), tuning.base_of(config)).train.length
    target = target_of(config, shape, length=length, adapters=True, evaluated_rows=config.batch_size)
    needed = estimate(config, target).needed
    config = config_for(base, examples, max_steps=2, memory__budget=f"{0.9 * needed / 1000:.3f}KB")
    said: list[str] = []
    tuning.finetune(config, tmp_path / "run", progress=False, say=said.append)
    assert any("instead of" in line for line in said)
    assert load(tmp_path / "run" / "config.toml").config != config


def test_what_the_plain_loop_would_need_instead_is_said(make_config: Callable[..., Any]) -> None:
    plain = make_config({"model.vocab_size": 257, "batch_size": 16, "model.context": 64})
    settings = {
        "model.vocab_size": 257, "batch_size": 16, "model.context": 64, "memory.budget": budget_of(plain, 0.5)
    }  # fmt: skip
    config = make_config(settings)
    said: list[str] = []
    target = target_of(config, gpt2.shape_from_config(config.model))
    assert budget_module.within_budget(config, target, given(config), said.append).hybrid.mode == "off"
    assert sum("hybrid.mode is off instead of leap" in line for line in said) == 1
    assert any(line.endswith('full weights; hybrid.mode = "leap" keeps it') for line in said)
    said.clear()
    config = make_config({**settings, "hybrid.mode": "leap"})
    assert budget_module.within_budget(config, target, given(config), said.append).hybrid.mode == "leap"
    assert any(line.startswith('note: without prediction (hybrid.mode = "off"): that fits ') for line in said), said
