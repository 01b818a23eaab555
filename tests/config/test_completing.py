"""`optimizer.beta2 = "auto"` becomes a number before anything is trained, saved or shown; so does the warm-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors
from torch import nn

from foretrain import HybridTrainer
from foretrain import config as configuration
from foretrain.config import (
    OptimizerConfig,
    changed,
    completing,
    from_mapping,
    load,
    parse_override,
    to_toml,
    with_beta2,
    with_warmup,
)
from foretrain.engine import schedule
from foretrain.engine.optim import build as optim
from foretrain.errors import ConfigError
from foretrain.events import Notice
from foretrain.measure import runs
from foretrain.measure.tasks import TextTask
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run
from foretrain.sweep.scoring import rate_plan
from foretrain.trainer import HybridTrainer as Trainer

Make = Callable[..., Any]
AUTO = {"optimizer.beta2": "auto"}


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half after a thousand tokens: the tiny batches of tests reach no limit."""
    monkeypatch.setattr(completing, "HALF_LIFE", 1000)


@pytest.mark.parametrize(
    ("rows", "length", "wanted"),
    [(64, 1024, 0.5 ** (65536 / 2e6)), (256, 1024, 0.5 ** (262144 / 2e6)), (1, 16, 0.999), (4096, 1024, 0.9)],
)
def test_it_follows_from_the_tokens_of_a_step(rows: int, length: int, wanted: float) -> None:
    config = from_mapping({**AUTO, "batch_size": rows, "accumulation_steps": 1})
    assert with_beta2(config, length).optimizer.beta2 == pytest.approx(wanted)
    parts = from_mapping({**AUTO, "batch_size": rows, "accumulation_steps": rows})
    assert with_beta2(parts, length).optimizer.beta2 == pytest.approx(wanted), "parts of a batch are one step"


def test_a_number_stays() -> None:
    config = from_mapping({"optimizer.beta2": 0.7})
    assert with_beta2(config, 1024) is config
    assert from_mapping({}).optimizer.beta2 == "auto"
    assert from_mapping({"preset": "finetune"}).optimizer.beta2 == 0.95, "nobody has measured another one there"


def test_other_words_are_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'beta2.*fast.*allowed: number ≥ 0, < 1 or "auto"'):
        from_mapping({"optimizer.beta2": "fast"})
    with pytest.raises(ConfigError, match=r'allowed: number ≥ 0, < 1 or "auto"'):
        from_mapping({"optimizer.beta2": 1.5})
    assert parse_override("optimizer.beta2=auto") == ("optimizer.beta2", "auto")
    (tmp_path / "auto.toml").write_text(to_toml(from_mapping(AUTO)), encoding="utf-8")
    assert load(tmp_path / "auto.toml").config.optimizer.beta2 == "auto"


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What runs used and said."""

    betas: list[float] = field(default_factory=list)
    configured: list[Any] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Notes every trainer's second beta, and what its configuration says of it."""
    seen, fit = Seen(), Trainer.fit

    def noted(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        result = fit(trainer, *arguments, **options)
        (beta,) = {group["betas"][1] for group in trainer.optimizer.param_groups}
        seen.betas.append(beta)
        seen.configured.append(trainer.config.optimizer.beta2)
        return result

    monkeypatch.setattr(Trainer, "fit", noted)
    return seen


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("rows", [4, 8])
def test_a_run_writes_the_number_down_and_goes_on_with_it(
    rows: int, seen: Seen, make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    wanted = 0.5 ** (rows * 16 / 1000)
    settings = {**AUTO, "data.path": str(text_file), "batch_size": rows, "max_steps": 2}
    events: list[Any] = []
    summary = run.train(make_config(settings), tmp_path / "run", progress=False)
    assert summary["config"]["optimizer"]["beta2"] == pytest.approx(wanted)
    written = load(tmp_path / "run" / "config.toml").config
    assert written.optimizer.beta2 == pytest.approx(wanted)
    for resumed in (written, make_config(settings)):  # as it was written, and as the user wrote it
        longer = resumed.model_copy(update={"max_steps": resumed.max_steps + 2})
        run.train(longer, tmp_path / "run", resume=True, progress=False, listeners=[events.append])
    assert not [event for event in events if isinstance(event, Notice) and "beta2" in str(event)]
    assert seen.betas == seen.configured == [pytest.approx(wanted)] * 3


@pytest.mark.usefixtures("short_memory")
def test_fine_tuning_counts_the_length_of_its_rows(seen: Seen, tmp_path: Path) -> None:
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    tuning.finetune(
        config_for(base, data, optimizer__beta2="auto", max_steps=2, batch_size=4), tmp_path / "run", progress=False
    )
    length = tuning.prepare(config_for(base, data), tuning.base_of(config_for(base, data))).train.length
    assert seen.betas == seen.configured == [pytest.approx(0.5 ** (4 * length / 1000))]


@pytest.mark.usefixtures("short_memory")
def test_a_compared_run_has_it_too(seen: Seen, make_config: Make, text_file: Path) -> None:
    config = make_config({**AUTO, "data.path": str(text_file), "hybrid.mode": "off", "evaluation.batches": 1})
    runs.carry_out(TextTask(config), runs.Spec("plain", 1, 1.0, 3), config, set())
    assert seen.betas == [pytest.approx(0.5 ** (4 * 16 / 1000))]


# --- models of the user's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "adam", "muon"])
def test_an_own_module_gets_the_usual_number(kind: str) -> None:
    config = from_mapping({**AUTO, "optimizer.type": kind, "device": "cpu"})
    trainer = HybridTrainer(nn.Linear(3, 3), None, nn.MSELoss(), config)
    assert {group["betas"][1] for group in trainer.optimizer.param_groups} == {0.95}
    assert trainer.config.optimizer.beta2 == 0.95


def test_an_optimizer_that_is_handed_in_makes_it_useless_and_that_is_said() -> None:
    model = nn.Linear(3, 3)
    own = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.7))
    with pytest.warns(UserWarning, match=r"optimizer\.beta2 of the Config: no effect"):
        trainer = HybridTrainer(model, own, nn.MSELoss(), from_mapping({"optimizer.beta2": 0.8, "device": "cpu"}))
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.7)


def test_an_optimizer_can_be_built_before_the_number_is_known() -> None:
    built = optim.build(nn.Linear(3, 3), OptimizerConfig(type="adamw", beta2="auto"))
    assert built.param_groups[0]["betas"] == (0.9, 0.95)


# --- the warm-up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "share"), [("adamw", completing.LONG_WARMUP), ("adam", completing.LONG_WARMUP)])
def test_adam_has_a_long_warmup_in_a_language_model_with_random_weights(kind: str, share: float) -> None:
    config = with_warmup(from_mapping({"optimizer.type": kind}))
    assert config.schedule.warmup_share == share
    assert schedule.warmup_of(config.schedule, 1000) == round(1000 * share)
    assert schedule.warmup_of(config.schedule, 100_000) == schedule.LONGEST_WARMUP


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.type": "muon"},
        {"optimizer.type": "sgd"},
        {"optimizer.type": "adamw", "schedule.warmup_steps": 7},
        {"optimizer.type": "adamw", "schedule.warmup_share": 0.03},
    ],
)
def test_other_warmups_stay(settings: dict[str, Any]) -> None:
    config = from_mapping(settings)
    assert with_warmup(config) is config
    told = {"schedule.warmup_steps": 7, "schedule.warmup_share": 30}
    assert schedule.warmup_of(config.schedule, 1000) == next((told[name] for name in settings if name in told), 50)


def rate_at(step: int, config: Any, folder: Path) -> float:
    run.train(config, folder, progress=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return next(float(line["learning_rate"]) for line in lines if line.get("step") == step and "learning_rate" in line)


def test_train_has_it_with_random_weights_alone(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    values = {"data.path": str(text_file), "max_steps": 40, "log.interval": 1, "optimizer.learning_rate": 1e-3}
    adamw = make_config({**values, "optimizer.type": "adamw"})
    warmup = round(40 * completing.LONG_WARMUP)
    assert rate_at(2, adamw, tmp_path / "fresh") == pytest.approx(2e-3 / (warmup + 1))
    assert load(tmp_path / "fresh" / "config.toml").config.schedule.warmup_share == completing.LONG_WARMUP
    from_weights = make_config(
        {**values, "optimizer.type": "adamw", "model.weights": str(tmp_path / "fresh" / "model")}
    )
    assert rate_at(2, from_weights, tmp_path / "from weights") == pytest.approx(2e-3 / 3), "two steps of forty"


def test_it_is_what_the_pages_say() -> None:
    assert completing.LONG_WARMUP == 0.1


@pytest.mark.parametrize("rate", [1e-3, "auto"])
@pytest.mark.parametrize("as_written", [True, False], ids=["as it was written", "as the user wrote it"])
def test_a_run_that_is_resumed_from_its_folder_goes_on_with_the_same_rates(
    make_config: Make, text_file: Path, tmp_path: Path, rate: float | str, as_written: bool
) -> None:
    values = {"data.path": str(text_file), "max_steps": 60, "log.interval": 1, "optimizer.type": "adamw"}
    config = make_config({**values, "optimizer.learning_rate": rate, "schedule.warmup_steps": None, "batch_size": 2})

    def losses(folder: Path) -> dict[int, tuple[float, float]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        return {
            line["step"]: (line["learning_rate"], line["loss"])
            for line in lines
            if {"learning_rate", "loss"} <= line.keys()
        }

    run.train(config, tmp_path / "one" / "whole", progress=False)
    run.train(config, tmp_path / "other" / "parts", progress=False, pause_at=10)
    again = load(tmp_path / "other" / "parts" / "config.toml").config if as_written else config
    run.train(again, tmp_path / "other" / "parts", resume=True, progress=False)
    whole, parts = losses(tmp_path / "one" / "whole"), losses(tmp_path / "other" / "parts")
    assert len(whole) >= 50
    assert {step: parts.get(step) for step in whole} == whole


def test_a_run_of_before_keeps_its_warmup(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    values = {"data.path": str(text_file), "max_steps": 40, "log.interval": 1, "optimizer.learning_rate": 1e-3}
    config = make_config({**values, "optimizer.type": "adamw"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "with_warmup", lambda config: config)
        run.train(config, tmp_path / "run", progress=False, pause_at=3)
    assert load(tmp_path / "run" / "config.toml").config.schedule.warmup_share == "auto"
    run.train(config, tmp_path / "run", resume=True, progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if {"learning_rate", "loss"} <= line.keys()}
    assert rates[4] == pytest.approx(1e-3), "two steps of forty"


def test_a_trial_of_a_sweep_is_planned_with_it(make_config: Make) -> None:
    config = make_config({"optimizer.type": "adamw", "max_steps": 1000, "schedule.warmup_steps": None})
    planned = rate_plan(config)
    assert float(np.interp(70, planned.steps, planned.multipliers)) == pytest.approx(0.7, abs=0.02)
    tuned = rate_plan(changed(config, {"preset": "finetune"}))
    assert float(np.interp(70, tuned.steps, tuned.multipliers)) == pytest.approx(1.0, abs=0.02)


def test_a_comparison_of_given_weights_does_not_have_it(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    values = {"data.path": str(text_file), "max_steps": 2, "evaluation.batches": 1, "optimizer.type": "adamw"}
    run.train(make_config(values), tmp_path / "base", progress=False)
    config = make_config({**values, "model.weights": str(tmp_path / "base" / "model")})
    assert completing.with_warmup(config) is config
    assert TextTask(config).job(config).pretrains


def test_a_compared_run_has_it_where_its_weights_are_random(make_config: Make, text_file: Path) -> None:
    values = {"data.path": str(text_file), "hybrid.mode": "off", "evaluation.batches": 1, "optimizer.type": "adamw"}
    task = TextTask(make_config(values))
    assert task.job(make_config(values)).pretrains
    seen: list[Any] = []

    def noted(job: Any, spec: Any, config: Any) -> Any:
        seen.append(config.schedule.warmup_share)
        return made(job, spec, config)

    made = runs._trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_trainer", noted)
        runs.carry_out(task, runs.Spec("plain", 1, 1.0, 3), make_config(values), set())
    assert seen[-1] == completing.LONG_WARMUP
