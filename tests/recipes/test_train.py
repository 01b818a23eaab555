"""From a configuration to a finished run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foretrain.config import load
from foretrain.data import tokens
from foretrain.errors import CheckpointError, ConfigError, DataError
from foretrain.events import RunStarted
from foretrain.persist import checkpoint
from foretrain.recipes import train as run
from foretrain.recipes.export import export_checkpoint

Make = Callable[..., Any]


def test_the_summary_is_what_is_written(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    summary = run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")) == summary


def test_the_loss_falls_on_real_text(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 60, "optimizer.learning_rate": 1e-2, "data.tokenizer": "char", "batch_size": 8}
    summary = run.train(make_config({**settings, "data.path": str(text_file)}), tmp_path / "run", progress=False)
    characters = len(set(text_file.read_text(encoding="utf-8"))) + 1
    assert summary["final_val_loss"] < 0.8 * np.log(characters)


def test_what_a_run_announces(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    config = make_config({"data.path": str(text_file), "max_steps": 1})
    run.train(config, tmp_path / "run", progress=False, listeners=[events.append])
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.title == "gpt2-tiny"
    assert started.details["batch"] == "4 x 16 tokens, 1 steps"
    assert started.details["folder"] == str(tmp_path / "run")
    corpus = tokens.prepare(config.data)
    assert started.details["data"].startswith(f"tiny.txt, {len(corpus.train):,} tokens to train on")


def test_accumulation_changes_neither_training_nor_evaluation(
    make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    settings = {"data.path": str(text_file), "max_steps": 3, "evaluation.batches": 1000}
    plain = run.train(make_config(settings), tmp_path / "plain", progress=False)
    parts = run.train(make_config({**settings, "accumulation_steps": 2}), tmp_path / "parts", progress=False)
    assert parts["final_val_loss"] == pytest.approx(plain["final_val_loss"], rel=1e-5)
    assert parts["final_train_loss"] == pytest.approx(plain["final_train_loss"], rel=1e-5)


def test_two_runs_of_one_configuration_are_equal_to_the_bit(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    models = []
    for name in ("one", "two"):
        torch.rand(3)
        run.train(make_config({"data.path": str(text_file), "model.dropout": 0.2}), tmp_path / name, progress=False)
        models.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_the_model_is_exported_at_averaged_weights(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    config = make_config({"data.path": str(text_file), "evaluation.ema_decay": 0.5})
    run.train(config, tmp_path / "run", progress=False)
    state = checkpoint.read(tmp_path / "run" / "checkpoints" / "step-00000006")
    own = state["model"]["final_norm.weight"]
    names = list(state["model"])
    average = state["average"]["average"][names.index("final_norm.weight")] / (1 - 0.5 ** state["average"]["updates"])
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")["transformer.ln_f.weight"]
    assert torch.equal(exported, average)
    assert not torch.equal(exported, own)
    export_checkpoint(tmp_path / "run", tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["transformer.ln_f.weight"], average)


def test_the_report_links_to_the_model(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=False)
    assert 'href="model/"' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_what_is_no_gpt2_is_trained_but_not_exported(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    config = make_config({"data.path": str(text_file), "model.normalization": "rmsnorm", "model.bias": False})
    summary = run.train(config, tmp_path / "run", progress=False)
    assert summary["reason"] == "finished"
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(CheckpointError, match=r"model\.bias = true"):
        export_checkpoint(tmp_path / "run", tmp_path / "model")


def test_token_files_need_no_tokenizer(make_config: Make, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(500) % 40)
    config = make_config({"data.path": str(tmp_path / "a.npy"), "model.vocab_size": 40})
    said: list[str] = []
    assert run.train(config, tmp_path / "run", progress=False, say=said.append)["global_step"] == 6
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    export_checkpoint(tmp_path / "run", tmp_path / "exported", said.append)
    for folder, words in zip((tmp_path / "run" / "model", tmp_path / "exported"), said, strict=True):
        assert not list(folder.glob("tokenizer*"))
        assert words.startswith(f"{folder} has no tokenizer: the data came as tokens")


def test_training_starts_from_given_weights(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    settings = {"data.path": str(text_file), "max_steps": 30, "optimizer.learning_rate": 1e-2}
    first = run.train(make_config(settings), tmp_path / "first", progress=False)
    given = {"model.weights": str(tmp_path / "first" / "model"), "max_steps": 1, "optimizer.learning_rate": 1e-9}
    again = make_config({**settings, **given})
    second = run.train(again, tmp_path / "second", progress=False)
    assert second["final_val_loss"] == pytest.approx(first["final_val_loss"], rel=1e-4)


def test_the_written_configuration_gives_the_run_again(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    config = make_config({"data.path": str(text_file), "preset": "small", "max_steps": 2})
    first = run.train(config, tmp_path / "first", progress=False)
    second = run.train(load(tmp_path / "first" / "config.toml").config, tmp_path / "second", progress=False)
    assert first["config"] == second["config"]
    assert first["final_val_loss"] == second["final_val_loss"]


def test_too_short_a_text_is_an_error_and_leaves_no_run(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    with pytest.raises(DataError, match="too few"):
        run.train(make_config({"data.path": str(tmp_path / "short.txt")}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_an_impossible_shape_is_an_error(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.heads = 3"):
        run.train(make_config({"data.path": str(text_file), "model.heads": 3}), tmp_path / "run", progress=False)


@pytest.mark.parametrize("epochs", [None, 0.3])
def test_growth_that_is_auto_is_decided_before_the_first_step_and_written_down(
    epochs: float | None, make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    events: list[Any] = []
    model = {"model.layers": 4, "model.width": 64, "model.heads": 2}
    settings = {"data.path": str(text_file), "growth.layers": "auto", "hybrid.mode": "off", "max_steps": 20}
    config = make_config(settings | model).model_copy(update={"epochs": epochs})
    summary = run.train(config, tmp_path / "run", progress=False, listeners=[events.append])
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.details["growth"].startswith("2 of 4 blocks until 50% of the run, because")
    assert summary["growth"]["moves"][0]["verdict"] == "made"
    written = load(tmp_path / "run" / "config.toml").config.growth
    assert (written.layers, written.at) == (2, 0.5)
    again = run.train(load(tmp_path / "run" / "config.toml").config, tmp_path / "run", resume=True, progress=False)
    assert again["growth"] == summary["growth"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.vocab_size": 50257}, "of a step lies in the blocks, and it was seen to pay from 60% on"),
        ({"max_steps": 3}, "a run of 3 steps is too short to judge it"),
    ],
)
def test_growth_that_is_auto_and_off_says_why(
    changes: dict[str, Any], why: str, make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    events: list[Any] = []
    settings = {"data.path": str(text_file), "growth.layers": "auto", "max_steps": 1, **changes}
    run.train(make_config(settings), tmp_path / "run", progress=False, listeners=[events.append])
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.details["growth"].startswith("off, because")
    assert why in started.details["growth"]
    assert load(tmp_path / "run" / "config.toml").config.growth.layers == 0


def test_growth_that_is_auto_is_off_for_given_weights(make_config: Make, text_file: Path, tmp_path: Path) -> None:
    settings = {"data.path": str(text_file), "max_steps": 1}
    run.train(make_config(settings), tmp_path / "first", progress=False)
    events: list[Any] = []
    weights = {"model.weights": str(tmp_path / "first" / "model"), "growth.layers": "auto"}
    run.train(make_config(settings | weights), tmp_path / "run", progress=False, listeners=[events.append])
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.details["growth"].startswith("off, because the run starts from weights that have learned")


def test_an_earlier_run_is_not_deleted_for_one_whose_growth_is_refused(
    make_config: Make, text_file: Path, tmp_path: Path
) -> None:
    settings = {"data.path": str(text_file), "max_steps": 2}
    run.train(make_config(settings), tmp_path / "run", progress=False)
    late = make_config(settings | {"growth.layers": 1, "model.layers": 2})
    with pytest.raises(ConfigError, match=r"set growth.layers = 0, or train for more steps"):
        run.train(late, tmp_path / "run", overwrite=True, progress=False)
    assert (tmp_path / "run" / "summary.json").is_file()
