"""Which settings a module of somebody's own goes by in `HybridTrainer`, and that it is told which it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain import Config, HybridTrainer
from foretrain.config import KNOWN, from_mapping, settings
from foretrain.config.reach import OF_COMMANDS, OF_LANGUAGE_MODELS, without_effect
from foretrain.config.schema import Section
from foretrain.events import Notice

ON_OCCASION = frozenset(
    {
        *(
            "growth.at",
            "optimizer.beta2",
            "optimizer.rest_rate_factor",
            "optimizer.weight_decay",
            "preset",
        ),  # in config
        *("guard.auto_tune", "guard.max_rollbacks", "guard.prediction_error"),  # when something goes wrong
        *("hybrid.correction_interval", "hybrid.monitor_interval", "memory.return_ahead"),  # in rollouts
        *("preset", "precision.loss_scale", "precision.tf32", "schedule.gamma", "log.console"),
    }
)
"""Read by trainers, too, but not in the runs below: tests/test_config_effects.py shows what each does in one."""
COMMANDS = ("foretrain.recipes", "foretrain.cli", "foretrain.planning", "foretrain.config")


def data(count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [(x, x[:, :1]) for x in (torch.randn(16, 4, generator=draw) for _ in range(count))]


def own() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def watched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of settings, as trainers read them."""
    read: set[str] = set()
    plain = Section.__getattribute__
    usual = Config()
    names = {
        type(value).__name__: name for name in Config.model_fields if isinstance(value := getattr(usual, name), Section)
    }

    def reading(section: Section, name: str) -> Any:
        by = str(sys._getframe(1).f_globals.get("__name__"))
        if by.startswith("foretrain.") and not by.startswith(COMMANDS):
            kind = type(section).__name__
            read.add(name if kind == "Config" else f"{names[kind]}.{name}")
        return plain(section, name)

    monkeypatch.setattr(Section, "__getattribute__", reading)
    return read


def test_trainers_read_all_settings_but_those_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = watched(monkeypatch)
    runs: list[dict[str, Any]] = [
        {},
        {"optimizer.type": "adamw", "optimizer.weight_decay": 0.0, "forecast.copies": [0.3]},
        {"predictor.type": "rssm", "optimizer.type": "sgd", "schedule.type": "cyclic"},
        {"predictor.type": "mlp", "predictor.beta": 0.5, "hybrid.linear_rows": 0, "optimizer.learning_rate": "auto"},
    ]
    for number, changes in enumerate(runs):
        config = from_mapping({"max_steps": 60, "device": "cpu", "hybrid.warmup_steps": 10, **changes})
        batches = data(60) if number % 2 else 60 * data(1)
        trainer = HybridTrainer(own(), None, nn.MSELoss(), config)
        trainer.fit(batches, data(2), out=tmp_path / str(number), progress=False)
    assert sorted(KNOWN - read - OF_COMMANDS - OF_LANGUAGE_MODELS - ON_OCCASION) == []
    assert not ON_OCCASION & (OF_COMMANDS | OF_LANGUAGE_MODELS)
    never = {name for name in read & OF_COMMANDS if not name.startswith(("model.", "lora."))}
    assert never == set(), "a setting that trainers read is no setting of commands"


def test_what_has_no_effect_is_told_once_before_the_first_step() -> None:
    given = {"max_steps": 5, "device": "cpu", "hybrid.mode": "off", "memory.budget": "4GB", "data.path": "a.txt"}
    given |= {"engine.fused_loss": True, "evaluation.batches": 40, "lora.rank": 4}
    trainer = HybridTrainer(own(), None, nn.MSELoss(), from_mapping(given))
    told: list[str] = []
    trainer.bus.subscribe(lambda event: told.append(event.message) if isinstance(event, Notice) else None)
    for batch in data(3):
        trainer.step(batch)
    (text,) = told
    assert text.startswith(
        "no effect on Sequential, which HybridTrainer was handed: data.path, engine.fused_loss, lora.rank, "
        "memory.budget; "
    ), "what is as usual is not told"


def test_language_models_of_ours_are_what_these_settings_are_for(
    make_model: Callable[..., Any], make_batch: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    config = make_config({"engine.fused_loss": True, "data.path": "a.txt"})
    assert without_effect(config)
    trainer = HybridTrainer(make_model(), config=config)
    told: list[str] = []
    trainer.bus.subscribe(lambda event: told.append(event.message) if isinstance(event, Notice) else None)
    trainer.step(make_batch())
    assert told == []


def test_the_summary_names_only_what_had_an_effect() -> None:
    trainer = HybridTrainer(own(), None, nn.MSELoss(), from_mapping({"max_steps": 2, "device": "cpu"}))
    told = trainer.fit(data(2), progress=False)["config"]
    for name in (OF_COMMANDS | OF_LANGUAGE_MODELS) - {"model.type"}:
        section, _, key = name.rpartition(".")
        assert key not in told.get(section, {}), name
    assert told["model"]["type"].endswith("Sequential")


def test_the_page_says_of_each_whose_it_is() -> None:
    meanings = {setting.name: setting.meaning for setting in settings()}
    usual = Config()
    for name in OF_COMMANDS:
        about = type(getattr(usual, name.partition(".")[0])).__doc__ or ""
        assert "`foretrain" in meanings[name] + about, name
    for name in OF_LANGUAGE_MODELS:
        assert meanings[name].startswith("Language models"), name
