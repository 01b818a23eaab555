"""Properties of the configuration: what goes out comes back in."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from foretrain.config import Config, from_mapping, load, settings, to_mapping, to_toml
from foretrain.errors import ConfigError

positive = st.floats(1e-12, 1e6)
fraction = st.floats(0, 0.999)
count = st.integers(1, 10**9)
size = st.integers(1, 2**12)
count_or_zero = st.integers(0, 10**9)
# what a file can hold: no lone surrogates
text = st.text(st.characters(codec="utf-8"), max_size=20)
paths = text | st.lists(text, max_size=3)
switch = st.sampled_from(["auto", True, False])

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "preset": st.sampled_from(["measured", "small", "medium", "large", "specialist", "generalist", "balanced"]),
    "max_steps": st.integers(2, 10**9),
    "batch_size": st.sampled_from([8, 24, 120]),
    "accumulation_steps": st.sampled_from([1, 2, 4, 8]),
    "seed": st.integers(0, 2**63 - 1),
    "device": text,
    "model.type": st.sampled_from(["gpt2-tiny", "gpt2-small", "gpt2-xl"]),
    "model.layers": size,
    "model.heads": size,
    "model.width": size,
    "model.context": size,
    "model.vocab_size": size,
    "model.dropout": fraction,
    "model.bias": st.booleans(),
    "model.normalization": st.sampled_from(["layernorm", "rmsnorm"]),
    "model.initialization": st.sampled_from(["gpt2", "xavier_uniform"]),
    "model.weights": text,
    "data.path": paths,
    "data.tokenizer": text,
    "data.vocabulary": text,
    "data.bpe_size": st.integers(257, 1_000_000),
    "data.text_field": text,
    "data.held_out": st.floats(1e-6, 0.999),
    "data.validation_path": paths,
    "data.max_documents": count,
    "data.cache": text,
    "data.prefetch": st.integers(0, 1000),
    "optimizer.type": st.sampled_from(["adamw", "adam", "sgd", "muon"]),
    "optimizer.learning_rate": positive,
    "optimizer.weight_decay": st.floats(0, 1e3),
    "optimizer.beta1": fraction,
    "optimizer.momentum": fraction,
    "optimizer.nesterov": st.booleans(),
    "optimizer.rest_learning_rate": positive,
    "optimizer.rest_rate_factor": positive,
    "optimizer.split_fused": st.booleans(),
    "optimizer.beta2": fraction | st.just("auto"),
    "schedule.type": st.sampled_from(["wsd", "cosine", "constant", "warmup"]),
    "schedule.stable_steps": count_or_zero,
    "schedule.decay_steps": count,
    "schedule.final_rate": st.floats(0, 1),
    "precision.type": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    "precision.loss_scale": positive,
    "engine.compile": switch,
    "engine.cuda_graph": switch,
    "engine.fused_loss": switch,
    "evaluation.interval": count_or_zero,
    "evaluation.ema_decay": fraction,
    "checkpoint.keep": st.integers(2, 10**6),
    "guard.nan_check": st.booleans(),
    "log.interval": count,
    "memory.budget": st.sampled_from(["", "14GB", "6GiB", "0.5 TB"]),
}
changed = st.dictionaries(st.sampled_from(sorted(VALUES)), st.none(), max_size=12).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


def loaded(content: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.toml"
        path.write_bytes(content.encode("utf-8"))
        return load(path).config


@given(changed)
@example({"data.path": 'quote " backslash \\ newline \n return \r tab \t delete \x7f end'})
@example({"data.path": [], "model.weights": "'''", "data.cache": '"""'})
@example({"optimizer.learning_rate": 1e-05, "precision.loss_scale": 1e6})
@example({"preset": "small", "optimizer.learning_rate": 2e-3})
def test_what_is_written_loads_back_equal(changes: dict[str, Any]) -> None:
    config = from_mapping(changes)
    for name, value in changes.items():
        part: Any = config
        for key in name.split("."):
            part = getattr(part, key)
        assert part == value
    assert from_mapping(to_mapping(config)) == config
    assert loaded(to_toml(config)) == config
    assert loaded(to_toml(config, comments=False)) == config
    assert loaded(to_toml(config, changed_only=True)) == config


@given(st.text(max_size=30))
@example("1\nseed = 2")
@example("2024-01-01")
@example("[1, [2]]")
@example("{a = 1}")
def test_an_override_is_understood_or_refused_in_our_words(word: str) -> None:
    for name in ("data.path", "max_steps", "optimizer.learning_rate", "precision.type", word):
        with contextlib.suppress(ConfigError):
            assert isinstance(load(None, [f"{name}={word}"]).config, Config)


@given(st.text(st.characters(codec="utf-8"), max_size=30))
@example("[model]\ntype = {}")
@example("[[model]]\nlayers = 3")
@example("model.layers = [1]")
@example("precision.type = [true]")
def test_a_file_is_understood_or_refused_in_our_words(content: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(loaded(content), Config)


@given(st.sampled_from(sorted(setting.name for setting in settings())))
def test_every_default_can_be_said(name: str) -> None:
    default = next(setting.default for setting in settings() if setting.name == name)
    if default is not None:
        assert from_mapping({name: default}) == Config()
