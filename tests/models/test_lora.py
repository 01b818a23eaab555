"""LoRA layers: what they change, what they train, and that they come off again without a trace."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain.errors import CheckpointError, ConfigError
from foretrain.models import lora
from foretrain.models.lora import LoraLinear, LoraSettings

Make = Callable[..., Any]


class Conv1D(nn.Module):
    """Hugging Face's layer, in short."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf, generator=torch.Generator().manual_seed(0)))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def trained(model: nn.Module, seed: int = 3, size: float = 0.1) -> nn.Module:
    """Adapters away from their first values, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora.adapted_layers(model).values():
            layer.lora_b.add_(torch.randn(layer.lora_b.shape, generator=generator) * size)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# --- what the settings say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 0}, "rank = 0"),
        ({"rank": 2.0}, "rank = 2.0"),
        ({"rank": True}, "rank = True"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": math.nan}, "alpha = nan"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"dropout": -0.1}, "dropout = -0.1"),
        ({"targets": ()}, "tuple of patterns"),
        ({"targets": "q_proj"}, "tuple of patterns"),
        ({"bias": "some"}, "none, all, lora_only"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        LoraSettings(**wrong)


def test_the_scaling_is_alpha_over_rank_or_over_its_root() -> None:
    assert LoraSettings(rank=4, alpha=8).scaling == 2.0
    assert LoraSettings(rank=4, alpha=8, rank_stabilized=True).scaling == 4.0


# --- which layers ----------------------------------------------------------------------------------------------------


def test_by_default_every_linear_layer_but_a_head_gets_one(make_model: Make) -> None:
    names = lora.attach(make_model(), LoraSettings(), seed=0)
    assert len(names) == 2 * 4

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight
            self.lm_head = nn.Linear(8, 16)

    assert lora.attach(Tied(), LoraSettings(rank=2), seed=0) == ["inner"]
    assert lora.attach(Tied(), LoraSettings(rank=2, targets=("lm_head",)), seed=0) == ["lm_head"]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (("qkv",), 2),
        (("attention.qkv",), 2),
        (("*.attention.qkv",), 2),
        (("blocks.1.*",), 4),
        (("qkv", "blocks.0.*"), 5),
        (("blocks.0.attention.qkv",), 1),
    ],
)
def test_patterns_choose_by_path_or_last_parts(patterns: tuple[str, ...], count: int, make_model: Make) -> None:
    assert len(lora.attach(make_model(), LoraSettings(targets=patterns), seed=0)) == count


def test_a_pattern_without_a_layer_names_the_near_ones(make_model: Make) -> None:
    model = make_model()
    before = weights(model)
    with pytest.raises(ConfigError, match=r"did you mean .*qkv"):
        lora.attach(model, LoraSettings(targets=("out", "qkw")), seed=0)
    with pytest.raises(ConfigError, match="end in down, out, qkv, up"):
        lora.attach(model, LoraSettings(targets=("zzzzzz",)), seed=0)
    assert same(before, weights(model))
    with pytest.raises(ConfigError, match="none below its top level"):
        lora.attach(nn.Linear(3, 3), LoraSettings(rank=1), seed=0)


def test_a_rank_above_the_layers_size_is_refused(make_model: Make) -> None:
    with pytest.raises(ConfigError, match=r"rank = 33 .*qkv of size \(32, 96\).* at most 32"):
        lora.attach(make_model(), LoraSettings(rank=33), seed=0)


def test_a_second_adapter_and_a_missing_one_are_refused(make_model: Make) -> None:
    model = make_model()
    for call in (lora.detach, lora.merge, lora.unmerge, lora.adapter_state):
        with pytest.raises(ConfigError, match=r"call lora\.attach first"):
            call(model)
    lora.attach(model, LoraSettings(), seed=0)
    with pytest.raises(ConfigError, match="already has adapters"):
        lora.attach(model, LoraSettings(), seed=0)


def test_a_layer_used_at_two_places_has_one_adapter() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert lora.attach(model, LoraSettings(rank=2, targets=("0",)), seed=0) == ["0"]
    assert model[0] is model[2]
    lora.detach(model)
    assert model[0] is layer
    assert model[2] is layer


# --- what they compute -----------------------------------------------------------------------------------------------


def test_an_untrained_adapter_changes_no_logit_and_a_trained_one_does(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model().eval(), make_batch()[0]
    before = model(tokens)
    lora.attach(model, LoraSettings(dropout=0.5), seed=0)
    assert torch.equal(model(tokens), before)
    assert not torch.allclose(trained(model)(tokens), before, atol=1e-3)
    lora.detach(model)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Linear(6, 5, bias=False), Conv1D(5, 6)])
def test_the_layer_is_its_formula(layer: nn.Module) -> None:
    settings = LoraSettings(rank=3, alpha=5)
    adapted = LoraLinear(layer, settings, torch.Generator().manual_seed(1))
    nn.init.normal_(adapted.lora_b, generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(3))
    expected = layer(x) + (x @ adapted.lora_a.T @ adapted.lora_b.T) * (5 / 3)
    assert torch.allclose(adapted(x), expected, atol=1e-6)
    read = adapted.weight.T if isinstance(layer, Conv1D) else adapted.weight
    assert torch.allclose(F.linear(x, read, adapted.bias), expected, atol=1e-5)
    assert adapted.lora_a.abs().max() <= 1 / math.sqrt(6)


def test_the_first_weights_depend_on_the_seed_alone(make_model: Make) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(states))
        model = make_model()
        lora.attach(model, LoraSettings(), seed)
        states.append(lora.adapter_state(model))
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_dropout_acts_on_the_adapter_in_training_only(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model(), make_batch()[0]
    before = model.eval()(tokens)
    lora.attach(model, LoraSettings(dropout=0.5), seed=0)
    assert torch.equal(model.train()(tokens), before), "an untrained adapter is zero with dropout too"
    trained(model)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_an_adapter_takes_the_mode_of_its_layer(make_model: Make) -> None:
    model = make_model().eval()
    lora.attach(model, LoraSettings(), seed=0)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_adapters_work_beside_a_bfloat16_base(autocast: bool, make_model: Make, make_batch: Make) -> None:
    model = make_model() if autocast else make_model().bfloat16()
    lora.attach(model, LoraSettings(rank=4), seed=0)
    trained(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*make_batch())
    loss.backward()
    for layer in lora.adapted_layers(model).values():
        assert layer.lora_a.dtype == layer.lora_b.grad.dtype == torch.float32
        assert layer.lora_b.grad.isfinite().all()


def test_code_that_reads_the_weight_sees_the_adapter() -> None:
    """The encoder's fast path never calls its linear layers; attention never calls its output layer."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    lora.attach(model, LoraSettings(rank=4), seed=0)
    trained(model).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        fast = model(x)
    assert torch.allclose(fast, model(x), atol=1e-5)
    lora.detach(model)
    assert not torch.allclose(fast, model(x), atol=1e-3)


def test_it_compiles_whole(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model(), make_batch()[0]
    lora.attach(model, LoraSettings(dropout=0.1), seed=0)
    trained(model).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens), model(tokens), atol=1e-5)


# --- what they train -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_gradients_reach_the_adapters_and_the_chosen_biases_and_nothing_else(
    bias: Any, make_model: Make, make_batch: Make
) -> None:
    model = make_model()
    model.position_embedding.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    lora.attach(model, LoraSettings(targets=("qkv",), bias=bias), seed=0)
    trained(model)
    model(*make_batch()).backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    adapters = {f"blocks.{i}.attention.qkv.{kind}" for i in (0, 1) for kind in ("lora_a", "lora_b")}
    biases = {
        "none": set(),
        "lora_only": {f"blocks.{i}.attention.qkv.base.bias" for i in (0, 1)},
        "all": {name for name, _ in model.named_parameters() if name.endswith("bias")},
    }[bias]
    assert got == adapters | biases
    assert got == {name for name, p in model.named_parameters() if p.requires_grad}
    lora.detach(model)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}


def test_training_lowers_the_loss_and_detaching_restores_every_bit(make_model: Make, make_batch: Make) -> None:
    model, batch = make_model(), make_batch()
    before, modules = weights(model), [type(m) for m in model.modules()]
    lora.attach(model, LoraSettings(bias="all"), seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(30):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    lora.detach(model)
    assert same(before, weights(model))
    assert modules == [type(m) for m in model.modules()]


def test_gradients_are_exact() -> None:
    layer = LoraLinear(nn.Linear(4, 3).double(), LoraSettings(rank=2), torch.Generator().manual_seed(0))
    nn.init.normal_(layer.lora_b, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    assert layer.lora_a.dtype == torch.double
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, layer.lora_a, layer.lora_b))


# --- merging ---------------------------------------------------------------------------------------------------------


def test_merging_keeps_the_logits_and_unmerging_every_bit(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model().eval(), make_batch()[0]
    lora.attach(model, LoraSettings(), seed=0)
    trained(model)
    before, logits = weights(model), model(tokens)
    lora.merge(model)
    assert torch.allclose(model(tokens), logits, atol=1e-5)
    assert not same(before, weights(model))
    with pytest.raises(ConfigError, match="is merged already"):
        lora.merge(model)
    with pytest.raises(ConfigError, match="before loading another"):
        lora.load_adapter_state(model, lora.adapter_state(model))
    lora.unmerge(model)
    lora.unmerge(model)
    assert same(before, weights(model))
    assert torch.equal(model(tokens), logits)


def test_detaching_a_merged_adapter_restores_or_keeps(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model().eval(), make_batch()[0]
    bare = weights(model)
    lora.attach(model, LoraSettings(), seed=0)
    trained(model)
    adapted = model(tokens)
    with pytest.raises(ConfigError, match="is not merged"):
        lora.detach(model, keep_merged=True)
    lora.merge(model)
    other = copy.deepcopy(model)
    lora.detach(model)
    assert same(bare, weights(model))
    lora.detach(other, keep_merged=True)
    assert torch.allclose(other(tokens), adapted, atol=1e-5)
    assert bare.keys() == weights(other).keys()


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**16),
    st.floats(0.01, 100),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.booleans(),
)
def test_merge_and_unmerge_for_any_layer(
    inputs: int, outputs: int, seed: int, alpha: float, dtype: torch.dtype, conv: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = Conv1D(outputs, inputs) if conv else nn.Linear(inputs, outputs)
    model = nn.Sequential(base).to(dtype)
    with torch.no_grad():
        base.weight.copy_(torch.randn(base.weight.shape, generator=generator))
    lora.attach(model, LoraSettings(rank=min(inputs, outputs), alpha=alpha, rank_stabilized=conv), seed)
    trained(model, seed, size=1.0)
    before = base.weight.detach().clone()
    lora.merge(model)
    update = model[0].update().detach()
    expected = before.double() + update.double()
    precision = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * (dtype != torch.float64)
    size = float(before.abs().max() + update.abs().max())
    assert torch.allclose(base.weight.double(), expected, rtol=0, atol=2 * precision * size)
    lora.unmerge(model)
    assert torch.equal(base.weight, before)


def test_a_shared_weight_is_not_merged_into() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    lora.attach(model, LoraSettings(rank=2, targets=("1",)), seed=0)
    with pytest.raises(ConfigError, match="shares its weight"):
        lora.merge(model)


def test_a_computed_weight_is_not_merged_into() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))
    lora.attach(model, LoraSettings(rank=2, targets=("0",)), seed=0)
    with pytest.raises(ConfigError, match="no plain floating-point weight"):
        lora.merge(model)


# --- the state -------------------------------------------------------------------------------------------------------


def test_a_state_goes_out_and_in_again(make_model: Make, make_batch: Make) -> None:
    one, other, tokens = make_model().eval(), make_model().eval(), make_batch()[0]
    settings = LoraSettings(targets=("out",), bias="lora_only")
    lora.attach(one, settings, seed=0)
    lora.attach(other, settings, seed=9)
    with torch.no_grad():
        trained(one).blocks[0].attention.out.base.bias.add_(1)
    state = lora.adapter_state(one)
    assert state.keys() == {f"blocks.{i}.attention.out.{kind}" for i in (0, 1) for kind in ("lora_a", "lora_b", "bias")}
    lora.load_adapter_state(other, state)
    assert torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: s.pop("blocks.1.attention.qkv.lora_b"), "has no tensor blocks.1.attention.qkv.lora_b"),
        (lambda s: s.update({"extra.lora_a": torch.zeros(1)}), "a tensor extra.lora_a that the model has no place for"),
        (lambda s: s.update({"blocks.1.attention.qkv.lora_b": torch.zeros(96, 9)}), r"shape \[96, 9\]"),
        (lambda s: s["blocks.1.attention.qkv.lora_b"].fill_(math.nan), "no finite numbers"),
        (lambda s: s.update({"blocks.1.attention.qkv.lora_b": torch.zeros(96, 8).long()}), "no finite numbers"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Any, words: str, make_model: Make) -> None:
    model = make_model()
    lora.attach(model, LoraSettings(targets=("qkv",)), seed=0)
    before = weights(model)
    state = {name: value + 1 for name, value in lora.adapter_state(model).items()}
    damage(state)
    with pytest.raises(CheckpointError, match=words):
        lora.load_adapter_state(model, state)
    assert same(before, weights(model))
