"""Number formats of moments: bf16 and 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretrain.engine.optim.moments import BLOCK, chance, decode, encode, round_by_chance

STEP = torch.tensor(7.0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Over six orders of magnitude, as moments are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (-6 * torch.rand(shape, generator=generator))


@pytest.mark.parametrize("size", [BLOCK, 5 * BLOCK, 1000, 1])
def test_eight_bits_hold_roots_as_shares_of_the_largest_in_a_block(size: int) -> None:
    x = numbers(size)
    codes, scales = encode(x)
    assert codes.dtype is torch.int8
    assert codes.shape == x.shape
    assert torch.equal(scales, torch.stack([part.abs().max() for part in x.split(BLOCK)]))
    found, largest = decode(codes, scales), scales.repeat_interleave(BLOCK)[:size]
    # a code is off by half at the most: so is the root of the share, in 127ths
    assert ((found / largest).abs().sqrt() - (x / largest).abs().sqrt()).abs().max() <= 0.5 / 127 + 1e-6
    assert not (found * x < 0).any()


@pytest.mark.parametrize("size", [5 * BLOCK, 1000])
def test_what_has_not_changed_is_stored_as_it_was(size: int) -> None:
    codes, scales = encode(numbers(3, size))
    again, scales_again = encode(decode(codes, scales))
    assert torch.equal(codes, again)
    assert torch.equal(scales, scales_again)


def test_the_chance_is_even_and_differs_from_step_to_step() -> None:
    x = numbers(20_000).abs()
    one, other = chance(x, STEP), chance(x, STEP + 1)
    assert torch.equal(one, chance(x, STEP))
    assert ((one >= 0) & (one < 65536)).all()
    for drawn in (one, other, chance(torch.full((1,), 0.3).expand(1), torch.arange(20_000.0))):
        counts = torch.bincount(drawn * 16 // 65536, minlength=16)
        assert counts.min() > 1000
    assert (one == other).float().mean() < 0.01
    assert abs(float(torch.corrcoef(torch.stack([one.float(), other.float()]))[0, 1])) < 0.03


def test_rounding_by_chance_is_right_on_average() -> None:
    x = numbers(64).abs()
    bf16 = torch.stack([round_by_chance(x, torch.tensor(float(step))).float() for step in range(4000)])
    torch.testing.assert_close(bf16.mean(0), x, rtol=3e-4, atol=0)
    assert (bf16 != bf16[0]).any()
    block = torch.cat([x / x.max() + 1e-3, torch.ones(BLOCK - 64)])
    codes = torch.stack([decode(*encode(block, torch.tensor(float(step)))) for step in range(4000)])
    torch.testing.assert_close(codes.mean(0), block, rtol=2e-2, atol=0)


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    x = torch.full((BLOCK,), 1e-20)
    x[0], x[1] = 1.0, 0.0
    codes, scales = encode(x, STEP)
    assert codes.dtype is torch.uint8
    assert codes[0] == 255
    assert codes[1] == 0
    assert (codes[2:] == 1).all()
    assert (decode(codes, scales)[2:] > 0).all()
    assert torch.equal(decode(*encode(torch.zeros(BLOCK), STEP)), torch.zeros(BLOCK))
