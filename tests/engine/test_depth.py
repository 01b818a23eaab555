"""Blocks that are passed over, and made from others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foretrain.engine.depth import Depth, copy_state, spread
from foretrain.errors import ConfigError
from foretrain.models.gpt2 import GPT2, GPT2Shape

SHAPE = GPT2Shape(layers=4, heads=2, width=16, context=8, vocab_size=40)
TOKENS = torch.arange(16).view(2, 8)


def tiny(seed: int = 0, layers: int = 4) -> GPT2:
    return GPT2(GPT2Shape(layers=layers, heads=2, width=16, context=8, vocab_size=40), seed)


@given(st.data(), st.integers(1, 40))
def test_blocks_are_evenly_spread_and_the_first_is_among_them(data: st.DataObject, total: int) -> None:
    layers = data.draw(st.integers(1, total))
    found = spread(layers, total)
    assert len(set(found)) == layers
    assert found[0] == 0
    assert found[-1] < total
    gaps = [later - earlier for earlier, later in zip(found, (*found[1:], total), strict=True)]
    assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 6), st.integers(1, 6))
def test_blocks_of_a_depth_that_divides_another_are_among_its_blocks(layers: int, times: int) -> None:
    assert set(spread(layers, 2 * times * layers)) <= set(spread(times * layers, 2 * times * layers))


def test_a_model_whose_blocks_are_passed_over_computes_like_a_shallow_one() -> None:
    deep, shallow = tiny(), tiny(layers=2)
    depth = Depth(deep, "blocks")
    depth.use((0, 2))
    for number, source in ((0, 0), (1, 2)):
        shallow.blocks[number].load_state_dict(depth.blocks[source].state_dict())
    for part in ("token_embedding", "position_embedding", "final_norm"):
        getattr(shallow, part).load_state_dict(getattr(deep, part).state_dict())
    assert torch.equal(deep(TOKENS), shallow(TOKENS))
    assert not any(p.requires_grad for p in depth.blocks[1].parameters())
    depth.silence()
    depth.use(range(4))
    assert torch.equal(deep(TOKENS), shallow(TOKENS)), "silent blocks add nothing"
    assert all(p.requires_grad for p in deep.parameters())


def test_a_model_can_be_shown_whole_again() -> None:
    model = tiny()
    Depth(model, "blocks").use((0,))
    assert len(model.blocks) == 1
    again = Depth(model, "blocks")
    assert len(model.blocks) == again.layers == 4
    assert all(p.requires_grad for p in model.parameters())


def test_a_new_block_is_the_last_one_before_it_with_its_state() -> None:
    model = tiny()
    optimizer = torch.optim.Adam(model.parameters())
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    depth = Depth(model, "blocks")
    depth.use((0, 2))
    assert depth.sources(range(4)) == {1: 0, 3: 2}
    pairs = depth.copy({1: 0, 3: 2})
    copy_state(optimizer, model, pairs)
    named = dict(model.named_parameters())
    assert len(pairs) == 2 * len(list(model.blocks[0].parameters()))
    for new, old in pairs:
        assert torch.equal(named[new], named[old])
        for name, value in optimizer.state[named[old]].items():
            assert torch.equal(optimizer.state[named[new]][name], value)
            assert optimizer.state[named[new]][name] is not value


class Own(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.stack = nn.ModuleList(nn.Linear(width, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner.stack:
            x = layer(x)
        return x


def test_any_list_of_blocks_can_be_named() -> None:
    model = Own(3, 3, 3)
    depth = Depth(model, "inner.stack")
    depth.use((0,))
    x = torch.randn(2, 3)
    assert torch.equal(model(x), model.inner.stack[0](x))
    assert len(model.inner.stack) == len(model.inner.stack[:5]) == 1
    assert list(model.state_dict()) == list(Own(3, 3, 3).state_dict()), "all of it is still there"


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        (Own(3, 3), "blocks", "names no nn.ModuleList of blocks in Own; it has 'inner.stack'"),
        (nn.Linear(2, 2), "blocks", "it has none to grow by"),
        (Own(3, 4), "inner.stack", r"inner\.stack\.1 has other parameters than inner\.stack\.0"),
    ],
)
def test_what_cannot_grow_is_refused(model: nn.Module, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Depth(model, name)


def test_shared_and_frozen_blocks_are_refused() -> None:
    shared = Own(3, 3)
    shared.inner.stack[1] = shared.inner.stack[0]
    with pytest.raises(ConfigError, match="shares weights"):
        Depth(shared, "inner.stack")
    frozen = Own(3, 3)
    frozen.inner.stack[1].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"needs all of inner.stack to be trained"):
        Depth(frozen, "inner.stack")
