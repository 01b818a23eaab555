"""What `engine.compile = "auto"` becomes in a run: decided, said, written down, kept, and planned alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors

from foretrain.config import Config, from_mapping, load, to_mapping
from foretrain.engine import compiling
from foretrain.measure import runs
from foretrain.measure.tasks import TextTask
from foretrain.models.gpt2 import SIZES
from foretrain.planning.estimate import PlanTarget, compiles, estimate, target_of, workload_of
from foretrain.recipes import compiling as decisions
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

Make = Callable[..., Any]
ON_GPU = PlanTarget(SIZES["gpt2-small"], True, "bf16", 1024)
SHORT = {"batch_size": 16, "max_steps": 400}
LONG = {"batch_size": 16, "max_steps": 10_000}


@pytest.mark.parametrize(("settings", "wanted"), [(SHORT, False), (LONG, True)])
def test_auto_becomes_an_answer_on_a_gpu(settings: dict[str, Any], wanted: bool) -> None:
    said: list[str] = []
    decided = decisions.with_compiling(from_mapping(settings), ON_GPU, said.append)
    assert decided.engine.compile is wanted
    assert len(said) == (not wanted)
    assert all("torch.compile is left out: compiling takes about 30 s" in line for line in said)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("settings", [SHORT, LONG])
def test_what_is_given_stays(settings: dict[str, Any], explicit: bool) -> None:
    said: list[str] = []
    config = from_mapping({**settings, "engine.compile": explicit})
    assert decisions.with_compiling(config, ON_GPU, said.append) is config
    assert compiles(config, ON_GPU) is explicit
    assert not said


def test_elsewhere_auto_stays() -> None:
    config = from_mapping(SHORT)
    assert decisions.with_compiling(config, replace(ON_GPU, cuda=False)) is config


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SHORT, LONG])
def test_a_plan_is_that_of_the_run(settings: dict[str, Any]) -> None:
    planned = from_mapping({**settings, "hybrid.mode": "off"})
    begun = decisions.with_compiling(planned, ON_GPU)
    assert estimate(planned, ON_GPU) == estimate(begun, ON_GPU)
    other = from_mapping({**settings, "hybrid.mode": "off", "engine.compile": not begun.engine.compile})
    assert estimate(planned, ON_GPU).peak != estimate(other, ON_GPU).peak


@pytest.mark.parametrize(
    "lever",
    [
        {"accumulation_steps": 16},
        {"memory.offload": True},
        {"engine.activation_checkpointing": True},
        {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0},
    ],
)
def test_no_lever_of_a_memory_plan_changes_the_answer(lever: dict[str, Any]) -> None:
    for steps in range(200, 4000, 200):
        without, with_it = (from_mapping({"batch_size": 16, "max_steps": steps} | more) for more in ({}, lever))
        assert compiles(without, ON_GPU) is compiles(with_it, ON_GPU)


@pytest.mark.parametrize("frozen", [False, True])
def test_planned_work_is_that_of_the_model(frozen: bool, make_config: Make) -> None:
    config = make_config({"max_steps": 100, "batch_size": 4})
    model = run.build_model(config)
    if frozen:
        tuning.lora.attach(model, tuning.settings_of(config), 1)
    target = target_of(config, model.shape, adapters=frozen)
    assert workload_of(config, target) == compiling.known_workload(config, model, has_end=True)


def test_of_epochs_a_plan_knows_no_length() -> None:
    assert workload_of(from_mapping({"epochs": 1}), ON_GPU) is None
    assert compiles(from_mapping({"epochs": 0.001}), ON_GPU)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on the CPU decide as if they had a GPU."""

    def target(*arguments: Any, **options: Any) -> PlanTarget:
        return replace(target_of(*arguments, **options), cuda=True)

    monkeypatch.setattr(run, "target_of", target)
    monkeypatch.setattr(tuning, "target_of", target)
    monkeypatch.setattr(decisions, "choose_device", lambda name: torch.device("cuda"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes of every run whether it was compiled; nothing is."""
    seen: list[bool] = []
    fit = HybridTrainer.fit

    def noted(trainer: HybridTrainer, *arguments: Any, **options: Any) -> Any:
        seen.append(trainer.engine.full_step.compiled)
        return fit(trainer, *arguments, **options)

    monkeypatch.setattr(HybridTrainer, "fit", noted)
    monkeypatch.setattr(torch, "compile", lambda loss, **options: loss)
    return seen


def written(folder: Path) -> Any:
    return load(folder / "config.toml").config.engine.compile


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("length", [{"max_steps": 2}, {"epochs": 0.01}])
def test_a_short_run_writes_it_down_and_keeps_it_when_it_grows(
    length: dict[str, Any], compiled: list[bool], make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    base = make_config({"data.path": str(text_file)})
    config = from_mapping({**_plain(base), **length, "engine.compile": "auto"})
    said: list[str] = []
    run.train(config, tmp_path / "run", progress=False, say=said.append)
    assert written(tmp_path / "run") is False
    assert len([line for line in said if "torch.compile is left out" in line]) == 1
    longer = from_mapping({**_plain(base), "max_steps": 10**7, "engine.compile": "auto"})
    assert decisions.as_it_began(longer, tmp_path / "run").engine.compile is False
    assert compiles(longer, replace(ON_GPU, shape=run.build_model(longer).shape)), "by itself it would"
    assert compiled == [False]


def _plain(config: Config) -> dict[str, Any]:
    """Return the settings without a length."""
    values = to_mapping(config)
    return {name: value for name, value in values.items() if name not in ("max_steps", "epochs", "engine")}


@pytest.mark.usefixtures("on_gpu")
def test_a_run_that_is_worth_it_writes_that_down(
    compiled: list[bool], make_config: Make, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "LEAST_COMPILING", 0.0)
    monkeypatch.setattr(compiling, "COMPILING", 0.0)
    config, said = make_config({"data.path": str(text_file), "max_steps": 2}), list[str]()
    run.train(config, tmp_path / "run", progress=False, say=said.append)
    assert written(tmp_path / "run") is True
    assert compiled == [True]
    assert not [line for line in said if "compil" in line]


@pytest.mark.usefixtures("on_gpu")
def test_fine_tuning_decides_and_keeps_it_too(compiled: list[bool], tmp_path: Path) -> None:
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    config = config_for(base, data, max_steps=2, batch_size=4, engine__compile="auto")
    tuning.finetune(config, tmp_path / "run", progress=False)
    assert written(tmp_path / "run") is False
    tuning.finetune(config.model_copy(update={"max_steps": 3}), tmp_path / "run", resume=True, progress=False)
    assert compiled == [False, False]


@pytest.mark.parametrize(("before", "wanted"), [("false", False), ("true", True), ('"auto"', True)])
@pytest.mark.usefixtures("on_gpu")
def test_a_resumed_run_goes_on_as_it_began(before: str, wanted: bool, tmp_path: Path) -> None:
    """One that wrote "auto" is older than the choice: it was compiled."""
    (tmp_path / "config.toml").write_text(f"[engine]\ncompile = {before}\n", encoding="utf-8")
    assert decisions.as_it_began(from_mapping(SHORT), tmp_path).engine.compile is wanted
    explicit = from_mapping({"engine.compile": not wanted})
    assert decisions.as_it_began(explicit, tmp_path) is explicit


def test_off_a_gpu_a_resumed_run_stays_with_auto(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[engine]\ncompile = true\n", encoding="utf-8")
    config = from_mapping({"device": "cpu"})
    assert decisions.as_it_began(config, tmp_path) is config


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_a_comparison_compiles_however_short_its_runs_are(
    make_config: Make, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It charges no run for the time that compiling takes."""
    config = make_config({"data.path": str(text_file), "device": "cpu", "max_steps": 2})
    job = TextTask(config).job(config)
    assert runs._compiled(config, job) is config
    monkeypatch.setattr(runs, "choose_device", lambda name: torch.device("cuda"))
    assert runs._compiled(config, job).engine.compile is True
    explicit = from_mapping({"engine.compile": False})
    assert runs._compiled(explicit, job) is explicit
    assert runs._compiled(config, replace(job, length=None)) is config, "an own task decides as before"
