"""Blocks are found in models of ours, in those of transformers, and in others."""

from __future__ import annotations

import pytest
from tests.causal import make_inner
from torch import nn

from foretrain.models.blocks import blocks_of
from foretrain.models.gpt2 import GPT2, GPT2Shape


def test_our_own_model_has_them_in_a_list() -> None:
    model = GPT2(GPT2Shape(layers=3, heads=2, width=24, context=16, vocab_size=97))
    assert blocks_of(model) == list(model.blocks)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("gpt_neox", "GPTNeoXLayer")]
)
def test_those_of_transformers_are_found_by_themselves(family: str, name: str) -> None:
    assert [type(block).__name__ for block in blocks_of(make_inner(family, num_hidden_layers=3))] == 3 * [name]


def test_a_list_inside_of_blocks_is_none_of_blocks() -> None:
    """Sixteen experts in two layers, for example."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    layers = nn.ModuleList([Layer(), Layer()])
    assert blocks_of(nn.Sequential(nn.Linear(4, 4), layers)) == list(layers)


def test_blocks_that_share_weights_are_left_out() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), "head": nn.Linear(4, 4)})
    first, second, third, last = list(model["list"])
    second.weight = first.weight
    model["head"].bias = last.bias
    assert blocks_of(model) == [third]


def test_without_a_list_there_are_none() -> None:
    assert blocks_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) == []
