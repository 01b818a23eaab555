"""Muon orthogonalises the parts of a fused matrix as if each were a parameter of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.config import OptimizerConfig
from foretrain.engine.optim import build as optim
from foretrain.engine.optim import muon as muon_module
from foretrain.engine.optim.muon import Muon
from foretrain.errors import ConfigError
from foretrain.models import lora
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.models.lora import LoraSettings

SHAPE = GPT2Shape(layers=2, heads=2, width=64, context=16, vocab_size=32)
WIDTH = 16


def matrix(rows: int, columns: int, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1)


def fused_and_apart(rows: int = 3 * WIDTH, columns: int = WIDTH) -> tuple[nn.Parameter, list[nn.Parameter]]:
    fused = matrix(rows, columns, seed=1)
    return fused, [nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]


def set_gradients(fused: nn.Parameter, apart: list[nn.Parameter], step: int) -> None:
    fused.grad = matrix(*fused.shape, seed=100 + step).detach()
    for part, gradient in zip(apart, fused.grad.chunk(3), strict=True):
        part.grad = gradient.clone()


def trained(model: GPT2, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> Tensor:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.context + 1), generator=generator)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def muon_for(model: nn.Module, **settings: Any) -> Muon:
    optimizer = optim.build(model, OptimizerConfig(type="muon", **settings))
    assert isinstance(optimizer, Muon)
    return optimizer


def fused_weights(model: GPT2) -> set[Tensor]:
    return {block.attention.qkv.weight for block in model.blocks}


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3 * WIDTH, WIDTH), (3 * WIDTH, 8), (12, 40)])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_fused_matrix_moves_as_its_parts_would_by_themselves(
    shape: tuple[int, int], scale: str, nesterov: bool
) -> None:
    fused, apart = fused_and_apart(*shape)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "scale": scale, "nesterov": nesterov}
    one, other = Muon([{"params": [fused]}], parts={fused: 3}, **settings), Muon([{"params": apart}], **settings)
    start, whole = fused.detach().clone(), nn.Parameter(fused.detach().clone())
    unsplit = Muon([{"params": [whole]}], **settings)
    for step in range(5):
        set_gradients(fused, apart, step)
        whole.grad = fused.grad
        for optimizer in (one, other, unsplit):
            optimizer.step()
        torch.testing.assert_close(fused, torch.cat(apart), rtol=1e-5, atol=1e-6)
    assert (fused - whole).norm() > 0.1 * (whole - start).norm()


def test_parts_and_whole_matrices_of_one_shape_go_through_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = muon_module.orthogonalize

    def counted(matrices: Tensor) -> Tensor:
        calls.append(tuple(matrices.shape))
        return plain(matrices)

    monkeypatch.setattr(muon_module, "orthogonalize", counted)
    width = SHAPE.width
    for split, batches in (
        (True, {(8, width, width), (2, 4 * width, width), (2, width, 4 * width)}),
        (False, {(2, 3 * width, width), (2, width, width), (2, 4 * width, width), (2, width, 4 * width)}),
    ):
        calls.clear()
        model = GPT2(SHAPE)
        trained(model, muon_for(model, split_fused=split), steps=1)
        assert len(calls) == len(batches)
        assert set(calls) == batches


def test_without_the_split_a_fused_matrix_is_one_matrix() -> None:
    model, marked = GPT2(SHAPE), GPT2(SHAPE)
    for block in model.blocks:
        del block.attention.qkv.fused_parts
    unmarked = trained(model, muon_for(model))
    assert torch.equal(unmarked, trained(marked, muon_for(marked, split_fused=False)))


@pytest.mark.parametrize("state_type", ["bf16", "8bit"])
def test_narrow_momentum_is_that_of_the_fused_matrix(state_type: str) -> None:
    model, exact, whole = GPT2(SHAPE), GPT2(SHAPE), GPT2(SHAPE)
    narrow = muon_for(model, state_type=state_type)
    wanted, other = trained(exact, muon_for(exact)), trained(whole, muon_for(whole, split_fused=False))
    assert (trained(model, narrow) - wanted).norm() < 0.3 * (other - wanted).norm()
    for weight in fused_weights(model):
        kept = narrow.state[weight]["momentum_buffer"]
        assert kept.shape == weight.shape
        assert kept.dtype is {"bf16": torch.bfloat16, "8bit": torch.int8}[state_type]


@pytest.mark.parametrize("state_type", ["fp32", "8bit"])
def test_a_bad_step_changes_nothing(state_type: str) -> None:
    model = GPT2(SHAPE)
    optimizer = muon_for(model, state_type=state_type)
    before = trained(model, optimizer)
    momenta = {weight: optimizer.state[weight]["momentum_buffer"].clone() for weight in fused_weights(model)}
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    for weight, momentum in momenta.items():
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)


# --- where the parts come from, and where they go --------------------------------------------------------------------


@pytest.mark.parametrize("state_type", ["fp32", "8bit"])
def test_a_state_holds_nothing_of_the_parts_and_a_loaded_one_goes_on_alike(state_type: str) -> None:
    model, other = GPT2(SHAPE), GPT2(SHAPE)
    optimizer, loaded = muon_for(model, state_type=state_type), muon_for(other, state_type=state_type)
    trained(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    unsplit = muon_for(GPT2(SHAPE), state_type=state_type, split_fused=False)
    assert [group.keys() for group in state["param_groups"]] == [group.keys() for group in unsplit.param_groups]
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    assert torch.equal(trained(model, optimizer, first=3), trained(other, loaded, first=3))


def test_parts_of_what_is_unfrozen_later_are_apart_too() -> None:
    model, fresh = GPT2(SHAPE), GPT2(SHAPE)
    late = {name: p for name, p in model.named_parameters() if name.startswith("blocks.1.")}
    for p in late.values():
        p.requires_grad_(False)
    optimizer = muon_for(model)
    assert set(optimizer.parts) == {model.blocks[0].attention.qkv.weight}
    for p in late.values():
        p.requires_grad_(True)
    optim.add(optimizer, model, late, OptimizerConfig(type="muon"))
    assert set(optimizer.parts) == fused_weights(model)
    together = trained(fresh, muon_for(fresh))
    torch.testing.assert_close(trained(model, optimizer), together, rtol=1e-4, atol=1e-5)


def test_a_frozen_fused_matrix_beside_an_adapter_is_left_alone() -> None:
    model = GPT2(SHAPE)
    lora.attach(model, LoraSettings(rank=2), seed=1)
    optimizer = muon_for(model)
    assert optimizer.parts == {}
    before = model.blocks[0].attention.qkv.base.weight.clone()
    trained(model, optimizer)
    assert torch.equal(model.blocks[0].attention.qkv.base.weight, before)
    assert model.blocks[0].attention.qkv.lora_b.norm() > 0


@pytest.mark.parametrize("parts", [5, 0, -2, 1.5, "three"])
def test_parts_that_do_not_fit_are_refused_in_words(parts: Any) -> None:
    layer = nn.Linear(4, 12)
    layer.fused_parts = parts
    with pytest.raises(ConfigError, match=r"0\.fused_parts = .*the 12 rows .*split_fused = false"):
        muon_for(nn.Sequential(layer))
    assert muon_for(nn.Sequential(layer), split_fused=False).parts == {}
