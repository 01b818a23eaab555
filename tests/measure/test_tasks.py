"""The task of a configuration: what every arm of a seed shares, and what no decision may see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors

from foretrain.config import Config, changed, from_mapping
from foretrain.config.schema import FIRST_RATE
from foretrain.errors import DataError
from foretrain.measure.runs import Spec, _with_growth, carry_out
from foretrain.measure.tasks import FinetuneTask, Job, ModelShelf, TextTask
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.recipes.train import build_model

TINY: dict[str, Any] = {
    "batch_size": 2,
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.context": 16,
    "evaluation.batches": 3,
    "device": "cpu",
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = " ".join(f"line {number} says {number * number}." for number in range(3000))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    return from_mapping({**TINY, "data.path": str(tmp_path / "book.txt"), "data.cache": str(tmp_path / "cache")})


def rows(batches: list[Any]) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for inputs, _ in batches for row in inputs}


def test_what_is_reported_was_seen_by_no_decision(config: Config) -> None:
    job = TextTask(config).job(config)
    assert len(job.held_out) == len(job.test) == 3
    assert not rows(job.held_out) & rows(job.test)


def test_too_little_held_out_text_is_refused(config: Config) -> None:
    small = config.model_copy(update={"batch_size": 4096})
    with pytest.raises(DataError, match="two parts"):
        TextTask(small).job(small)


def test_runs_of_one_seed_begin_at_the_same_weights_and_data(config: Config) -> None:
    task = TextTask(config)
    first = task.job(config)
    begun = {name: value.clone() for name, value in first.model.state_dict().items()}
    batch = next(iter(first.loader))
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.add_(1.0)  # as training would
    second = task.job(config)
    assert second.model is first.model, "compiled code stays valid"
    assert all(torch.equal(value, begun[name]) for name, value in second.model.state_dict().items())
    assert all(torch.equal(one, other) for one, other in zip(batch, next(iter(second.loader)), strict=True))
    other = task.job(config.model_copy(update={"seed": 2}))
    assert not all(torch.equal(value, begun[name]) for name, value in other.model.state_dict().items())


def test_another_engine_gets_another_model(config: Config) -> None:
    config = from_mapping({**TINY, "model.vocab_size": 64})
    shelf = ModelShelf()
    first = shelf.with_weights_of(config, build_model)
    assert shelf.with_weights_of(config.model_copy(update={"seed": 9}), build_model) is first
    engine = config.engine.model_copy(update={"activation_checkpointing": True})
    assert shelf.with_weights_of(config.model_copy(update={"engine": engine}), build_model) is not first


# --- fine-tuning -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tuning(tmp_path: Path) -> Config:
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    return config_for(base, data, data__held_out=0.3, max_steps=30, evaluation__interval=0)


def test_arms_of_a_fine_tuning_see_the_same_and_nobody_trains_on_what_judges(tuning: Config) -> None:
    task = FinetuneTask(tuning)
    hybrid, plain = (task.job(changed(tuning, {"hybrid.mode": mode})) for mode in ("leap", "off"))
    assert hybrid.model is plain.model
    for one, other in zip(hybrid.loader, plain.loader, strict=False):
        assert torch.equal(one[0], other[0])
        assert not rows([one]) & rows(hybrid.probe)
        if hybrid.loader.position > 20:
            break
    assert not rows(hybrid.held_out) & rows(hybrid.test)
    assert [p.requires_grad for p in plain.model.parameters()].count(True) == 2 * 4 * 2


def test_a_comparison_of_fine_tuning_counts_both_arms(tuning: Config) -> None:
    task, warmed = FinetuneTask(tuning), set[str]()
    results = [carry_out(task, Spec(arm, 1, 1.0, 30, settings), tuning, warmed) for arm, settings in ARMS]
    plain, hybrid, auto = results
    shared = plain["account"]["batches"].keys() & hybrid["account"]["batches"].keys()
    assert shared
    assert all(plain["account"]["batches"][at] == hybrid["account"]["batches"][at] for at in shared)
    assert plain["account"]["first_weights"] == hybrid["account"]["first_weights"]
    assert plain["probe_tokens"] == 0
    assert hybrid["probe_tokens"] > 0
    assert auto["learning_rate"] != FIRST_RATE  # what it found
    assert auto["backward_passes"] > plain["backward_passes"]


ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {"hybrid.mode": "off"}),
    ("hybrid", {}),
    ("auto", {"optimizer.learning_rate": "auto"}),
)


def test_a_comparison_reads_templates_as_a_run_does(tuning: Config) -> None:
    """A shell hands `\\n` on as two characters."""
    escaped, written = (
        FinetuneTask(changed(tuning, {"data.prompt": prompt})) for prompt in ("Q: {text}\\nA:", "Q: {text}\nA:")
    )
    assert escaped.fingerprint == written.fingerprint


def test_growth_that_is_auto_is_decided_before_anything_is_warmed_up() -> None:
    class Deep:
        title = fingerprint = "deep"

        def job(self, config: Config) -> Job:
            return Job(GPT2(GPT2Shape(4, 2, 32, 16, 32)), [], [], [], length=length)

    config = from_mapping({"growth.layers": "auto", "max_steps": 40, "batch_size": 4, "device": "cpu"})
    length: int | None = 16
    assert _with_growth(Deep(), config).growth.stages == [(2, 0.5)]
    length = None
    assert _with_growth(Deep(), config).growth.stages == []
