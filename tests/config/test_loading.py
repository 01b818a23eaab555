"""Configuration: names, aliases, presets, limits, and what an error says."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from foretrain import config as configuration
from foretrain.config import KNOWN, Config, from_mapping, load, settings, to_mapping, to_toml
from foretrain.config.loading import LoadedConfig
from foretrain.config.names import BARE_ALIASES, KEY_ALIASES, NICKNAMES, PRESETS, RESERVED
from foretrain.errors import ConfigError


def value(config: Config, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def load_text(folder: Path, text: str, *overrides: str) -> LoadedConfig:
    path = folder / "file.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides)


# --- the blocks the methodology prints -----------------------------------------------------------------------------

BLOCKS: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: the block as printed, what it sets, how many of its keys only describe and change nothing
    "small models": (
        """
[hybrid_trainer_config]
warmup_steps = 100
full_steps = 20
max_predict_steps = 60
confidence_threshold = 0.85
divergence_threshold = 3.0

[predictor_config]
type = "Linear"  # Lightweight predictor sufficient

[learning_rate]
initial = 1e-4
schedule = "WarmupStableDecay"
warmup_steps = 100
stable_steps = 5000
""",
        {
            "hybrid.warmup_steps": 100,
            "hybrid.full_steps": 20,
            "hybrid.max_predict_steps": 60,
            "hybrid.confidence_threshold": 0.85,
            "hybrid.divergence_threshold": 3.0,
            "predictor.type": "linear",
            "optimizer.learning_rate": 0.0001,
            "schedule.type": "wsd",
            "schedule.warmup_steps": 100,
            "schedule.stable_steps": 5000,
        },
        0,
    ),
    "medium models": (
        """
[hybrid_trainer_config]
warmup_steps = 200
full_steps = 30
max_predict_steps = 80
confidence_threshold = 0.87
divergence_threshold = 2.5

[predictor_config]
type = "RSSM"
deterministic_dim = 256
stochastic_dim = 32
num_categoricals = 32
ensemble_size = 3

[learning_rate]
initial = 5e-5
schedule = "WarmupStableDecay"
warmup_steps = 200
stable_steps = 10000
""",
        {
            "hybrid.warmup_steps": 200,
            "hybrid.full_steps": 30,
            "hybrid.max_predict_steps": 80,
            "hybrid.confidence_threshold": 0.87,
            "hybrid.divergence_threshold": 2.5,
            "predictor.type": "rssm",
            "predictor.deterministic_dim": 256,
            "predictor.stochastic_dim": 32,
            "predictor.num_categoricals": 32,
            "predictor.ensemble_size": 3,
            "optimizer.learning_rate": 5e-5,
            "schedule.type": "wsd",
            "schedule.warmup_steps": 200,
            "schedule.stable_steps": 10000,
        },
        0,
    ),
    "large models": (
        """
[hybrid_trainer_config]
warmup_steps = 500
full_steps = 50
max_predict_steps = 100
confidence_threshold = 0.90
divergence_threshold = 2.0

[predictor_config]
type = "RSSM"
deterministic_dim = 512
stochastic_dim = 64
num_categoricals = 32
ensemble_size = 5

[learning_rate]
initial = 1e-5
schedule = "WarmupStableDecay"
warmup_steps = 500
stable_steps = 20000

[optimizer]
type = "AdamW"
beta1 = 0.9
beta2 = 0.999
weight_decay = 0.01
""",
        {
            "hybrid.warmup_steps": 500,
            "hybrid.full_steps": 50,
            "hybrid.max_predict_steps": 100,
            "hybrid.confidence_threshold": 0.9,
            "hybrid.divergence_threshold": 2.0,
            "predictor.type": "rssm",
            "predictor.deterministic_dim": 512,
            "predictor.stochastic_dim": 64,
            "predictor.num_categoricals": 32,
            "predictor.ensemble_size": 5,
            "optimizer.learning_rate": 1e-5,
            "schedule.type": "wsd",
            "schedule.warmup_steps": 500,
            "schedule.stable_steps": 20000,
            "optimizer.type": "adamw",
            "optimizer.beta1": 0.9,
            "optimizer.beta2": 0.999,
            "optimizer.weight_decay": 0.01,
        },
        0,
    ),
    "low confidence": (
        """
# Increase warmup
warmup_steps = 500  # was 100

# More full training per cycle
full_steps = 50     # was 20

# Upgrade predictor
[predictor_config]
type = "RSSM"       # was "Linear"
ensemble_size = 5   # was 1
""",
        {
            "predictor.type": "rssm",
            "predictor.ensemble_size": 5,
            "hybrid.warmup_steps": 500,
            "hybrid.full_steps": 50,
            "schedule.warmup_steps": None,
        },
        0,
    ),
    "frequent divergence": (
        # TOML puts the last two keys into [learning_rate]; they keep their meaning
        """
# Reduce sensitivity
divergence_threshold = 4.0  # was 2.0

# Lower learning rate
[learning_rate]
initial = 5e-5              # was 1e-4

# Increase batch size
batch_size = 64             # was 32

# More conservative prediction
max_predict_steps = 40      # was 100
""",
        {
            "hybrid.divergence_threshold": 4.0,
            "hybrid.max_predict_steps": 40,
            "optimizer.learning_rate": 5e-5,
            "batch_size": 64,
        },
        0,
    ),
    "overfitting": (
        # TOML puts all of it into [optimizer]
        """
# Add regularization
[optimizer]
weight_decay = 0.1          # was 0.01

# Increase dropout
dropout_rate = 0.2          # was 0.1

# Early stopping
early_stopping_patience = 5

# Reduce model capacity
hidden_dim = 512            # was 1024
num_layers = 12             # was 24
""",
        {
            "optimizer.weight_decay": 0.1,
            "model.dropout": 0.2,
            "evaluation.early_stopping_patience": 5,
            "model.width": 512,
            "model.layers": 12,
        },
        0,
    ),
    "underfitting": (
        """
# Increase model capacity
hidden_dim = 2048           # was 1024
num_layers = 24             # was 12

# Increase learning rate
initial_lr = 3e-4           # was 1e-4

# Reduce regularization
weight_decay = 0.001        # was 0.1
dropout_rate = 0.05         # was 0.2

# Train longer
max_steps = 50000           # was 10000
""",
        {
            "model.width": 2048,
            "model.layers": 24,
            "optimizer.learning_rate": 3e-4,
            "optimizer.weight_decay": 0.001,
            "model.dropout": 0.05,
            "max_steps": 50000,
        },
        0,
    ),
    "NaN loss, at once": (
        """
[optimizer]
gradient_clip_norm = 1.0  # Clip gradients to max norm

[divergence_config]
nan_check_enabled = true
""",
        {"optimizer.gradient_clip_norm": 1.0, "guard.nan_check": True},
        0,
    ),
    "NaN loss, prevention": (
        """
# Conservative learning rate
initial_lr = 1e-5

# Gradient clipping
gradient_clip_norm = 1.0

# Mixed precision (if using GPU)
use_mixed_precision = true
loss_scale = 128  # Dynamic loss scaling
""",
        {
            "optimizer.learning_rate": 1e-5,
            "optimizer.gradient_clip_norm": 1.0,
            "precision.type": "fp16",
            "precision.loss_scale": 128.0,
        },
        0,
    ),
    "specialist": (
        """
[hybrid_trainer_config]
warmup_steps = 100          # Less warmup needed
full_steps = 15             # Fewer full steps
max_predict_steps = 120     # Longer predictions
confidence_threshold = 0.82 # Lower threshold OK

[dataset]
domain = "medical"
num_examples = 50000
diversity_score = 0.3       # Low diversity
""",
        {
            "hybrid.warmup_steps": 100,
            "hybrid.full_steps": 15,
            "hybrid.max_predict_steps": 120,
            "hybrid.confidence_threshold": 0.82,
            "data.max_documents": 50000,
        },
        2,
    ),
    "generalist": (
        """
[hybrid_trainer_config]
warmup_steps = 500          # More warmup needed
full_steps = 50             # More full steps
max_predict_steps = 80      # Shorter predictions
confidence_threshold = 0.90 # Higher threshold

[dataset]
domain = "general"
num_examples = 10000000
diversity_score = 0.9       # High diversity
""",
        {
            "hybrid.warmup_steps": 500,
            "hybrid.full_steps": 50,
            "hybrid.max_predict_steps": 80,
            "hybrid.confidence_threshold": 0.9,
            "data.max_documents": 10000000,
        },
        2,
    ),
    "warm-up, stable, decay": (
        """
[learning_rate_schedule]
type = "WarmupStableDecay"

# Phase 1: Warmup (linear increase)
warmup_steps = 500
warmup_init = 1e-6
warmup_target = 1e-4

# Phase 2: Stable (constant)
stable_steps = 10000
stable_rate = 1e-4

# Phase 3: Decay (cosine)
decay_steps = 5000
decay_min = 1e-6
""",
        {
            "schedule.type": "wsd",
            "schedule.warmup_steps": 500,
            "schedule.warmup_rate": 1e-6,
            "optimizer.learning_rate": 1e-4,
            "schedule.stable_steps": 10000,
            "schedule.decay_steps": 5000,
            "schedule.final_rate": 1e-6,
        },
        0,
    ),
    "cyclic": (
        """
[learning_rate_schedule]
type = "Cyclic"
base_lr = 1e-5
max_lr = 1e-4
cycle_length = 1000
mode = "triangular"  # or "triangular2", "exp_range"
""",
        {
            "schedule.type": "cyclic",
            "schedule.base_rate": 1e-5,
            "optimizer.learning_rate": 1e-4,
            "schedule.cycle_length": 1000,
            "schedule.mode": "triangular",
        },
        0,
    ),
    "vanishing gradients": (
        """
# Enable residual connections
use_residual = true

# Use LayerNorm instead of BatchNorm
normalization = "LayerNorm"

# Better weight initialization
weight_init = "xavier_uniform"
""",
        {"model.residual": True, "model.normalization": "layernorm", "model.initialization": "xavier_uniform"},
        0,
    ),
    "example session": (
        """
# Medium model (1B params), specialist task (code)
[hybrid_trainer_config]
warmup_steps = 200
full_steps = 30
max_predict_steps = 80
confidence_threshold = 0.87

[model]
hidden_dim = 2048
num_layers = 24
vocab_size = 50000

[optimizer]
type = "AdamW"
learning_rate = 5e-5
weight_decay = 0.01
""",
        {
            "hybrid.warmup_steps": 200,
            "hybrid.full_steps": 30,
            "hybrid.max_predict_steps": 80,
            "hybrid.confidence_threshold": 0.87,
            "model.width": 2048,
            "model.layers": 24,
            "model.vocab_size": 50000,
            "optimizer.type": "adamw",
            "optimizer.learning_rate": 5e-5,
            "optimizer.weight_decay": 0.01,
        },
        0,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_printed_block_loads_as_it_stands(name: str, tmp_path: Path) -> None:
    text, expected, reserved = BLOCKS[name]
    loaded = load_text(tmp_path, text)
    assert {key: value(loaded.config, key) for key in expected} == expected
    assert len(loaded.notices) == reserved
    untouched = KNOWN - set(expected)
    assert {key: value(loaded.config, key) for key in untouched} == {key: value(Config(), key) for key in untouched}


def test_a_notice_names_the_key_and_why_it_changes_nothing(tmp_path: Path) -> None:
    notices = load_text(tmp_path, BLOCKS["specialist"][0]).notices
    assert notices == tuple(
        f"dataset.{key} has no effect: it only describes the data" for key in ("domain", "diversity_score")
    )


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names_load_with_a_notice(name: str) -> None:
    loaded = load(None, [f"{name}=1"])
    assert loaded.config == Config()
    assert len(loaded.notices) == 1
    assert name in loaded.notices[0]


def test_every_alias_leads_to_a_known_name() -> None:
    targets = {target for names in KEY_ALIASES.values() for target in names} | set(BARE_ALIASES.values())
    assert targets <= KNOWN | set(RESERVED)
    assert not KNOWN & set(RESERVED)


# --- presets -------------------------------------------------------------------------------------------------------

RATES = {"small": 1e-4, "medium": 5e-5, "large": 1e-5, "specialist": 1e-4, "generalist": 1e-4}
HYBRID_VALUES = {
    # warmup_steps, full_steps, max_predict_steps, confidence_threshold, divergence_threshold
    "small": (100, 20, 60, 0.85, 3.0),
    "medium": (200, 30, 80, 0.87, 2.5),
    "large": (500, 50, 100, 0.90, 2.0),
    "specialist": (100, 15, 120, 0.82, 3.0),
    "generalist": (500, 50, 80, 0.90, 2.5),
    "conservative": (200, 30, 25, 0.90),
    "balanced": (100, 20, 40, 0.85),
    "aggressive": (50, 15, 80, 0.75),
    "measured": (),
}


def test_all_presets_are_there() -> None:
    assert set(PRESETS) == set(HYBRID_VALUES) | {"finetune"}


def test_the_preset_of_a_command_gives_way_to_one_that_is_named(tmp_path: Path) -> None:
    assert load(None, preset="finetune").config.preset == "finetune"
    assert load(None, ["preset=small"], preset="finetune").config.preset == "small"
    (tmp_path / "a.toml").write_text('preset = "large"\nmax_steps = 7\n')
    assert load(tmp_path / "a.toml", preset="finetune").config.preset == "large"
    assert {key: value(load(None, preset="finetune").config, key) for key in PRESETS["finetune"]} == PRESETS["finetune"]


@pytest.mark.parametrize("name", sorted(HYBRID_VALUES))
def test_a_preset_gives_its_values(name: str) -> None:
    config = load(None, [f"preset={name}"]).config
    assert config.preset == name
    rate = RATES.get(name, Config().optimizer.learning_rate)
    assert config.optimizer.learning_rate == rate
    keys = ("warmup_steps", "full_steps", "max_predict_steps", "confidence_threshold", "divergence_threshold")
    expected = dict(zip((f"hybrid.{key}" for key in keys), HYBRID_VALUES[name], strict=False))
    assert {key: PRESETS[name][key] for key in expected} == expected
    assert {key: value(config, key) for key in expected} == expected
    assert {key for key in PRESETS[name] if key.startswith("hybrid.")} == set(expected)


@pytest.mark.parametrize("name", sorted(HYBRID_VALUES))
def test_no_preset_chooses_a_predictor_that_does_not_pay_or_a_model_size(name: str) -> None:
    loaded = load(None, [f"preset={name}"])
    assert loaded.config.predictor == Config().predictor
    assert loaded.config.model == Config().model
    said = (f"preset = {name!r} sets phases and rates, no model size: that is model.type",)
    assert loaded.notices == (said if name in RATES else ())


def test_the_file_overrides_its_preset_and_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    text = 'preset = "large"\n[learning_rate]\ninitial = 7e-4\n'
    assert load_text(tmp_path, text).config.optimizer.learning_rate == 7e-4
    assert load_text(tmp_path, text, "optimizer.learning_rate=9e-4").config.optimizer.learning_rate == 9e-4
    assert load_text(tmp_path, 'preset = "large"').config.optimizer.learning_rate == 1e-5


def test_an_unknown_preset_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"preset=huge.*\"measured\".*\"aggressive\""):
        load(None, ["preset=huge"])


# --- command line overrides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("data.path=book.txt", "data.path", "book.txt"),
        ("data.path=folder/with space/*.txt", "data.path", "folder/with space/*.txt"),
        ('data.path="quoted.txt"', "data.path", "quoted.txt"),
        ('data.path=["a.txt", "b.txt"]', "data.path", ["a.txt", "b.txt"]),
        ("data.path=", "data.path", ""),
        ("data.path=a=b.txt", "data.path", "a=b.txt"),
        ("max_steps=2000", "max_steps", 2000),
        ("max_steps=2_000", "max_steps", 2000),
        (" max_steps = 7 ", "max_steps", 7),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("model.dropout=0", "model.dropout", 0.0),
        ("model.bias=false", "model.bias", False),
        ("engine.compile=true", "engine.compile", True),
        ("engine.compile=auto", "engine.compile", "auto"),
        ("optimizer.type=MUON", "optimizer.type", "muon"),
        ("schedule.type=WarmupStableDecay", "schedule.type", "wsd"),
        ("schedule.type=WarmupOnly", "schedule.type", "warmup"),
        ("use_mixed_precision=false", "precision.type", "fp32"),
        ("dataset.path=book.txt", "data.path", "book.txt"),
        ("learning_rate.initial=1e-3", "optimizer.learning_rate", 1e-3),
    ],
)
def test_overrides_are_read_as_their_values(text: str, name: str, expected: Any) -> None:
    got = value(load(None, [text]).config, name)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize("text", ["max_steps", "=3", " = 3", ""])
def test_an_override_without_key_and_value_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as key=value"):
        load(None, [text])


def test_of_two_overrides_of_one_key_the_later_counts() -> None:
    assert load(None, ["seed=1", "seed=2"]).config.seed == 2


# --- names that are wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("max_step", "max_steps"),
        ("batchsize", "batch_size"),
        ("model.droput", "model.dropout"),
        ("sedule.type", "schedule.type"),
        ("data.tokeniser", "data.tokenizer"),
        ("hybrid.full_step", "hybrid.full_steps"),
        ("somewhere.nan_chek", "guard.nan_check"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"{wrong}=1"])
    assert str(caught.value) == f"--set: unknown key {wrong}; did you mean {nearest}?"


def test_a_key_like_nothing_known_points_to_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown key qqqqq; `foretrain config show` lists every key"):
        load(None, ["qqqqq=1"])


def test_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file\.toml: unknown key model\.colour"):
        load_text(tmp_path, "[model]\ncolour = 3\n")


def test_two_names_for_one_setting_with_different_values_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "[learning_rate]\ninitial = 1e-4\n[optimizer]\nlearning_rate = 2e-4\n")
    message = str(caught.value)
    for part in ("learning_rate.initial = 0.0001", "optimizer.learning_rate = 0.0002", "keep one of them"):
        assert part in message


def test_two_names_for_one_setting_with_one_value_are_fine(tmp_path: Path) -> None:
    text = "[learning_rate]\ninitial = 1e-4\n[optimizer]\nlearning_rate = 1e-4\n"
    assert load_text(tmp_path, text).config.optimizer.learning_rate == 1e-4


def test_upper_and_lower_case_of_one_value_are_no_contradiction(tmp_path: Path) -> None:
    text = '[learning_rate]\nschedule = "WarmupStableDecay"\n[schedule]\ntype = "wsd"\n'
    assert load_text(tmp_path, text).config.schedule.type == "wsd"


# --- values that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "max_steps=0",
        "batch_size=0",
        "batch_size=2.5",
        "accumulation_steps=0",
        "seed=-1",
        "seed=9223372036854775808",
        "model.type=gpt5",
        "model.dropout=1.0",
        "model.dropout=nan",
        "model.layers=0",
        "model.residual=false",
        "model.bias=maybe",
        "data.held_out=0",
        "data.held_out=1",
        "data.bpe_size=256",
        "data.prefetch=-1",
        "data.path=3",
        "optimizer.type=adagrad",
        "optimizer.learning_rate=0",
        "optimizer.learning_rate=-1",
        "optimizer.learning_rate=inf",
        "optimizer.learning_rate=nan",
        "optimizer.learning_rate=fast",
        "optimizer.weight_decay=-0.1",
        "optimizer.beta1=1",
        "optimizer.gradient_clip_norm=-1",
        "schedule.type=exponential",
        "schedule.cycle_length=1",
        "schedule.decay_steps=0",
        "schedule.gamma=1.5",
        "precision.type=fp8",
        "precision.loss_scale=0",
        "engine.compile=perhaps",
        "evaluation.batches=0",
        "evaluation.ema_decay=1",
        "checkpoint.keep=1",
        "guard.max_skipped_steps=0",
        "log.interval=0",
    ],
)
def test_an_impossible_value_is_an_error_in_one_line_that_names_the_setting(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [text])
    message = str(caught.value)
    assert message.startswith(f"--set {text}: ")
    assert message.count("; allowed: ") == 1
    assert "nput should" not in message, "pydantic's words"
    assert "\n" not in message


def test_who_said_a_wrong_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("max_steps = 5\n[optimizer]\ntype = 'adamx'\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, ["max_steps=7"])
    kinds = '"adamw" | "adam" | "sgd" | "muon"'
    assert str(caught.value) == f"{file}: optimizer.type = 'adamx': there is no such value; allowed: {kinds}"
    with pytest.raises(ConfigError) as caught:
        load(file, ["optimizer.type=adamz"])
    assert str(caught.value) == f"--set optimizer.type=adamz: there is no such value; allowed: {kinds}"
    with pytest.raises(ConfigError) as caught:
        load(file, ["max_steps=", "optimizer.type=adam"])
    assert str(caught.value) == "--set max_steps=: no value is given; allowed: integer ≥ 1"


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_common_names_are_understood_well_enough_to_say_the_right_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.learning_rate\?"):
        load(None, [f"{name}=3"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("predictor.lr", "predictor.learning_rate"),
        ("model.size", "model.type"),
        ("model.preset", "model.type"),
        ("data.block_size", "model.context"),
        ("block_size", "model.context"),
        ("n_layer", "model.layers"),
        ("model.n_embd", "model.width"),
        ("training.num_train_epochs", "epochs"),
        ("per_device_train_batch_size", "batch_size"),
        ("gradient_accumulation_steps", "accumulation_steps"),
        ("warmup_ratio", "schedule.warmup_share"),
        ("bf16", "precision.type"),
        ("max_grad_norm", "optimizer.gradient_clip_norm"),
        ("eval_interval", "evaluation.interval"),
    ],
)
def test_names_of_other_tools_lead_to_ours(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"{name}=3"])
    assert str(caught.value) == f"--set: unknown key {name}; did you mean {meant}?"


def test_every_name_of_other_tools_means_a_setting_and_is_none() -> None:
    assert set(NICKNAMES.values()) <= KNOWN
    assert not set(NICKNAMES) & (KNOWN | set(RESERVED) | set(KEY_ALIASES) | set(BARE_ALIASES))


BOTH = (
    "hybrid.warmup_steps (full steps before anything is predicted) or schedule.warmup_steps (steps of linear warm-up); "
    "write the full name"
)


@pytest.mark.parametrize("name", ["warmup_steps", "optimizer.warmup_steps"])
def test_a_short_key_with_two_meanings_is_refused_with_both(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"{name}=10", "full_steps=20"])
    assert str(caught.value) == f"--set: {name} can mean {BOTH}"
    for text in (f"{name} = 10", f"{name} = 10\n[hybrid]\nfull_steps = 20", f"full_steps = 20\noptimizer.{name} = 10"):
        with pytest.raises(ConfigError, match=r"file\.toml: .*warmup_steps can mean hybrid\.warmup_steps .* or sched"):
            load_text(tmp_path, text)
    with pytest.raises(ConfigError, match="can mean"):
        configuration.changed(Config(), {name: 10})


def test_a_key_without_its_section_is_found() -> None:
    with pytest.raises(ConfigError, match=r"did you mean audit\.time_budget\?"):
        load(None, ["time_budget=0.1"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch_size=4", "accumulation_steps=3"], "accumulation_steps = 3 does not divide batch_size = 4"),
        (["max_steps=10", "schedule.warmup_steps=10"], "schedule.warmup_steps = 10 leaves nothing of max_steps = 10"),
        (
            ["schedule.type=cosine", "max_steps=10", "schedule.warmup_steps=11"],
            "schedule.warmup_steps = 11 leaves nothing of max_steps = 10",
        ),
        (["guard.auto_tune=true", "health.interval=0"], "set health.interval = 100, or guard.auto_tune = false"),
        (["schedule.type=cyclic", "schedule.base_rate=1"], "schedule.base_rate = 1.0 is above optimizer.learning_rate"),
    ],
)
def test_values_that_do_not_fit_together_are_an_error(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert words in str(caught.value)


def test_a_longer_warm_up_than_the_run_is_fine_where_nothing_follows_it() -> None:
    assert load(None, ["schedule.type=warmup", "max_steps=10", "schedule.warmup_steps=20"]).config


def test_a_section_given_as_a_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key model"):
        load_text(tmp_path, "model = 3\n")


def test_broken_toml_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file\.toml: not valid TOML: .*line 2"):
        load_text(tmp_path, "seed = 1\nmax_steps =\n")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config init FILE"):
        load(tmp_path / "none.toml")


def test_the_configuration_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3


# --- in and out ----------------------------------------------------------------------------------------------------


def test_what_is_printed_loads_back_equal(tmp_path: Path) -> None:
    config = from_mapping({"preset": "large", "data.path": ["a b.txt", 'c"d.txt'], "model": {"layers": 3}, "seed": 5})
    for comments in (True, False):
        assert load_text(tmp_path, to_toml(config, comments)).config == config
    assert from_mapping(to_mapping(config)) == config


def test_the_defaults_load_back_equal_and_without_notice(tmp_path: Path) -> None:
    assert load_text(tmp_path, to_toml(Config())) == LoadedConfig(Config(), ())


def test_the_changed_values_alone_load_back_equal(tmp_path: Path) -> None:
    config = from_mapping({"max_steps": 5, "model.layers": 3, "precision.type": "bf16"})
    text = to_toml(config, comments=False, changed_only=True)
    assert "batch_size" not in text
    assert load_text(tmp_path, text).config == config


def test_a_preset_overridden_by_the_default_survives_the_way_out_and_in(tmp_path: Path) -> None:
    settings = {"optimizer.type": Config().optimizer.type, "hybrid.confidence_threshold": 0.5}
    config = from_mapping({"preset": "small", **settings})
    assert load_text(tmp_path, to_toml(config)).config == config
    assert load_text(tmp_path, to_toml(config, changed_only=True)).config == config


def test_the_printed_file_explains_every_setting() -> None:
    text = to_toml(Config())
    for setting in settings():
        assert setting.meaning, setting.name
        assert f"# {setting.meaning}" in text
        assert f"{setting.name.rpartition('.')[2]} =" in text


def test_settings_are_listed_once_with_kind_and_limits() -> None:
    listed = {setting.name: setting for setting in settings()}
    assert set(listed) == KNOWN
    assert len(list(settings())) == len(KNOWN)
    assert listed["model.dropout"].kind == "number ≥ 0, < 1"
    assert listed["optimizer.type"].kind == '"adamw" | "adam" | "sgd" | "muon"'
    assert listed["data.path"].kind == "string or list of strings"
    assert listed["forecast.copies"].kind == "list of numbers > 0, < 1"
    assert listed["growth.layers"].kind == 'integer ≥ 0 or list of integers ≥ 1 or "auto"'
    assert listed["model.layers"].default is None


def test_trackers_are_a_list_or_names_with_commas() -> None:
    for text in ('["tensorboard", "mlflow"]', "tensorboard,mlflow", "tensorboard, mlflow"):
        assert load(overrides=[f"log.trackers={text}"]).config.log.trackers == ["tensorboard", "mlflow"]
    assert load(overrides=["log.trackers="]).config.log.trackers == []
    assert load().config.log.trackers == []
    with pytest.raises(ConfigError, match=r"log\.trackers.*allowed: list of \"tensorboard\" \| "):
        load(overrides=["log.trackers=comet"])
    listed = {setting.name: setting for setting in settings()}
    assert listed["log.trackers"].kind == 'list of "tensorboard" | "wandb" | "mlflow" | "trackio"'


def test_the_old_name_of_return_ahead_loads_and_the_new_one_is_printed(tmp_path: Path) -> None:
    config = load_text(tmp_path, "[memory]\nlookahead = 2\n").config
    assert config.memory.return_ahead == load(None, ["memory.lookahead=2"]).config.memory.return_ahead == 2
    assert "return_ahead = 2" in to_toml(config)
    assert "lookahead" not in to_toml(config)
    with pytest.raises(ConfigError, match=r"did you mean memory=\{'return_ahead': 3\}\?"):
        Config(memory={"lookahead": 3})
