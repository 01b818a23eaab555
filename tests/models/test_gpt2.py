"""GPT-2: its size, its first loss, its causality, and that options change what they should and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foretrain.config import ModelConfig, OptimizerConfig
from foretrain.engine.optim import build as optim
from foretrain.errors import ConfigError
from foretrain.models.gpt2 import GPT2, SIZES, GPT2Shape, shape_from_config
from foretrain.models.lora import LoraSettings, attach
from foretrain.models.recomputing import recomputed_blocks

Make = Callable[..., Any]


# --- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # as published, and as Hugging Face counts them
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    shape = SIZES[name]
    with torch.device("meta"):
        model = GPT2(shape)
    count = sum(p.numel() for p in model.parameters())
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.width
    assert shape.padded_vocab_size == 50304
    assert count - padding == parameters


def test_the_tiny_one_has_0_9_million_parameters_with_bytes() -> None:
    model = GPT2(replace(SIZES["gpt2-tiny"], vocab_size=257))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.9e6, rel=0.1)


def test_small_vocabularies_are_not_padded_and_large_ones_are_aligned() -> None:
    shape = GPT2Shape(1, 1, 8)
    assert [replace(shape, vocab_size=size).padded_vocab_size for size in (65, 257, 1023, 1024, 1025, 50257)] == [
        65,
        257,
        1023,
        1024,
        1152,
        50304,
    ]


def test_settings_change_single_numbers_of_a_named_size() -> None:
    shape = shape_from_config(ModelConfig(type="gpt2-small", layers=3, vocab_size=99, dropout=0.1, bias=False))
    assert shape == GPT2Shape(3, 12, 768, 1024, 99, dropout=0.1, bias=False)


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (256, 4), (512, 8), (32, 1)])
def test_unset_heads_follow_the_width(width: int, heads: int) -> None:
    assert shape_from_config(ModelConfig(width=width)).heads == heads


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"model\.heads = 3 does not divide model\.width = 32"):
        GPT2Shape(layers=1, heads=3, width=32)


# --- first weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [64, 1030, 5000])
def test_the_first_loss_is_within_two_percent_of_ln_v(vocab_size: int, make_model: Make, make_batch: Make) -> None:
    model = make_model(vocab_size=vocab_size)
    loss = model(*make_batch(rows=16, vocab_size=vocab_size)).item()
    assert loss == pytest.approx(math.log(vocab_size), rel=0.02)


def test_first_weights_have_the_spread_of_gpt2(make_model: Make) -> None:
    model = make_model(width=128, layers=2)
    residual = 0.02 / math.sqrt(2 * 2)
    for name, p in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            assert p.std().item() == pytest.approx(residual, rel=0.05), name
        elif p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(p, torch.ones_like(p) if name.endswith("norm.weight") else torch.zeros_like(p)), name


def test_xavier_changes_the_hidden_matrices_only(make_model: Make) -> None:
    plain, xavier = make_model(), make_model(initialization="xavier_uniform")
    for name, p in xavier.named_parameters():
        if p.ndim == 2 and "embedding" not in name:
            rows, columns = p.shape
            bound = math.sqrt(6 / (rows + columns))
            assert 0.95 * bound < p.abs().max().item() <= bound, name
    assert torch.equal(plain.token_embedding.weight, xavier.token_embedding.weight)


def test_one_seed_gives_one_set_of_weights_whatever_else_is_random(make_model: Make) -> None:
    first = make_model(seed=3).state_dict()
    torch.manual_seed(999)
    torch.rand(5)
    second, third = make_model(seed=3).state_dict(), make_model(seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], third["token_embedding.weight"])


def test_making_a_model_leaves_the_global_generator_to_torch_alone(make_model: Make) -> None:
    model = make_model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.initialize(torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(3), expected)


# --- forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"normalization": "rmsnorm", "bias": False}, {"heads": 1}])
def test_a_later_token_never_changes_an_earlier_prediction(
    changes: dict[str, Any], make_model: Make, make_batch: Make
) -> None:
    model = make_model(**changes).eval()
    tokens = make_batch(rows=2)[0]
    before = model(tokens)
    for place in (1, 7, 15):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 64
        after = model(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place], after[:, place])


def test_short_sequences_see_the_same_positions(make_model: Make, make_batch: Make) -> None:
    model = make_model().eval()
    tokens = make_batch(rows=2)[0]
    assert torch.allclose(model(tokens[:, :5]), model(tokens)[:, :5], atol=1e-6)


def test_too_long_a_sequence_is_an_error_that_says_what_to_change(make_model: Make) -> None:
    with pytest.raises(ConfigError, match=r"17 tokens does not fit model\.context = 16"):
        make_model()(torch.zeros(1, 17, dtype=torch.long))


def test_the_head_is_the_token_embedding(make_model: Make, make_batch: Make) -> None:
    model = make_model(vocab_size=1030).eval()
    tokens = make_batch()[0]
    expected = F.linear(model.hidden(tokens), model.token_embedding.weight[:1030])
    assert model(tokens).shape == (4, 16, 1030)
    assert torch.allclose(model(tokens), expected, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 1030])
def test_the_loss_is_the_mean_cross_entropy_of_counted_targets(
    fused: bool, vocab_size: int, make_model: Make, make_batch: Make
) -> None:
    model = make_model(options={"fused_loss": fused}, vocab_size=vocab_size)
    tokens, targets = make_batch(vocab_size=vocab_size)
    targets = targets.clone()
    targets[0, 3:] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert model.loss((tokens, targets)).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_padding_rows_stay_zero_while_the_rest_is_trained(
    fused: bool, kind: str, make_model: Make, make_batch: Make
) -> None:
    model = make_model(options={"fused_loss": fused}, vocab_size=1030)
    before = model.token_embedding.weight.detach().clone()
    optimizer = optim.build(model, OptimizerConfig(type=kind))
    for number in range(3):
        optimizer.zero_grad()
        model(*make_batch(seed=number, vocab_size=1030)).backward()
        optimizer.step()
    after = model.token_embedding.weight
    assert after.shape[0] == 1152
    assert torch.count_nonzero(after[1030:]) == 0
    assert not torch.equal(before[:1030], after[:1030])


# --- options -------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, batch: Any) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(11)
    loss = model(*batch)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("share", [True, 0.5, 0.3])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(
    share: bool | float, dropout: float, make_model: Make, make_batch: Make
) -> None:
    batch = make_batch()
    plain_loss, plain = gradients(make_model(dropout=dropout, layers=3).train(), batch)
    checkpointed = make_model(options={"activation_checkpointing": share}, dropout=dropout, layers=3).train()
    loss, recomputed = gradients(checkpointed, batch)
    assert loss == plain_loss
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("layers", "share", "blocks"),
    [
        (4, 0.0, set()),
        (4, 0.5, {1, 3}),
        (4, 0.01, {3}),
        (6, 1 / 3, {2, 5}),
        (5, 0.8, {1, 2, 3, 4}),
        (4, 1.0, {0, 1, 2, 3}),
    ],
)
def test_a_share_of_the_blocks_is_spread_evenly(layers: int, share: float, blocks: set[int]) -> None:
    assert recomputed_blocks(layers, share) == blocks


def test_random_states_are_kept_only_where_recomputed_blocks_draw(make_model: Make) -> None:
    every = {"activation_checkpointing": 1.0}
    assert make_model(options=every, dropout=0.1).draws_again
    assert not make_model(options=every).draws_again
    assert not make_model(dropout=0.1).draws_again
    adapted = make_model(options=every)
    attach(adapted, LoraSettings(rank=2, dropout=0.1), seed=1)
    assert adapted.draws_again


def test_dropout_acts_in_training_and_not_in_evaluation(make_model: Make, make_batch: Make) -> None:
    tokens = make_batch()[0]
    model, without = make_model(dropout=0.4), make_model()
    torch.manual_seed(0)
    assert not torch.allclose(model.train()(tokens), without(tokens), atol=1e-4)
    assert torch.equal(model.eval()(tokens), without(tokens))


def test_without_bias_no_vector_but_the_norms_scales_is_left(make_model: Make) -> None:
    names = [name for name, p in make_model(bias=False).named_parameters() if p.ndim == 1]
    assert len(names) == 5
    assert all(name.endswith("norm.weight") for name in names)


def test_rmsnorm_does_not_subtract_the_mean(make_model: Make) -> None:
    norm = make_model(normalization="rmsnorm").final_norm
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)) + 5
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(norm(x), expected, atol=1e-5)


def test_every_parameter_takes_part_in_the_loss(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    model(*make_batch(rows=16)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_training_memorises_a_batch(make_model: Make, make_batch: Make) -> None:
    model, batch = make_model(), make_batch(rows=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_flops_per_token_follow_the_matrices(make_model: Make) -> None:
    model = make_model()
    matrices = 64 * 32 + 2 * (12 * 32 * 32)
    assert model.flops_per_token() == 6 * matrices + 12 * 2 * 32 * 16
