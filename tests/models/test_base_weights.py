"""An adapter knows the weights it was trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.errors import CheckpointError
from foretrain.models import base_weights, lora
from foretrain.models.adapter_files import load_adapter, read_adapter, save_adapter
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.models.lora import LoraSettings
from foretrain.serve.adapters import AdapterRegistry


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def gpt2(vocab_size: int = 65) -> GPT2:
    return GPT2(GPT2Shape(layers=1, heads=2, width=16, context=8, vocab_size=vocab_size), 1)


@torch.no_grad()
def tuned(model: nn.Module, **settings: Any) -> nn.Module:
    """With an adapter whose every number was trained."""
    model = copy.deepcopy(model)
    lora.attach(model, LoraSettings(rank=2, **settings), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)
    return model


@pytest.mark.parametrize("make", [plain, gpt2])
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter_fits_the_weights_it_was_trained_on(merged: bool, bias: str, make: Any, tmp_path: Path) -> None:
    model = tuned(make(), bias=bias)
    if merged:
        lora.merge(model)
    folder = save_adapter(model, tmp_path / "adapter")
    assert read_adapter(folder).base_checksum
    load_adapter(make(), folder)


@pytest.mark.parametrize("name", ["token_embedding.weight", "blocks.0.attention.qkv.weight", "final_norm.bias"])
def test_another_base_is_refused_unless_it_is_meant(name: str, tmp_path: Path) -> None:
    folder = save_adapter(tuned(gpt2()), tmp_path / "adapter")
    other = gpt2()
    with torch.no_grad():
        other.get_parameter(name)[0].add_(1e-3)
    with pytest.raises(CheckpointError, match=r"trained on other weights than those of this model.*--any-base"):
        load_adapter(other, folder)
    lora.refuse_adapted(other)  # it has none
    load_adapter(copy.deepcopy(other), folder, any_base=True)
    registry = AdapterRegistry(other)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        registry.load("one", folder)
    registry.load("one", folder, any_base=True)
    AdapterRegistry(gpt2()).load("one", folder)


@torch.no_grad()
def test_rows_of_the_embedding_that_no_token_has_do_not_count(tmp_path: Path) -> None:
    folder = save_adapter(tuned(gpt2(1025)), tmp_path / "adapter")
    other = gpt2(1025)
    assert len(other.token_embedding.weight) > 1025
    other.token_embedding.weight[1025:] = 7
    load_adapter(other, folder)


def test_what_cannot_be_compared_is_taken(tmp_path: Path) -> None:
    """A model in another number format, and adapters of other programs."""
    folder = save_adapter(tuned(plain()), tmp_path / "adapter")
    load_adapter(plain().bfloat16(), folder)
    base_weights.check("", base_weights.checksum(plain()))
