"""Reading with a cache gives what reading everything anew gives, row by row, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.models.gpt2 import GPT2, GPT2Shape

Make = Callable[..., Any]


def lively(model: GPT2, factor: float = 8.0) -> GPT2:
    """First weights hardly tell tokens and places apart; larger ones do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)
    return model.eval()


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]), padding


# --- against the forward pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"normalization": "rmsnorm", "bias": False}, {"heads": 1, "vocab_size": 1030}])
@pytest.mark.parametrize("prompt", [1, 2, 7, 16])
def test_every_step_has_the_logits_of_the_whole_sequence(
    changes: dict[str, Any], prompt: int, make_model: Make, make_batch: Make
) -> None:
    model = lively(make_model(**changes))
    tokens = make_batch(rows=3, vocab_size=model.shape.vocab_size)[0]
    whole = model(tokens)
    cache = model.make_cache(3, 16)
    logits = [model.decode(tokens[:, :prompt], cache)]
    logits += [model.decode(tokens[:, place : place + 1], cache) for place in range(prompt, 16)]
    assert torch.allclose(torch.stack(logits, 1), whole[:, prompt - 1 :], rtol=0, atol=1e-5)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_any_pieces_and_any_padding_give_each_row_what_it_gets_alone(pieces: list[int], shorter: list[int]) -> None:
    model = lively(GPT2(GPT2Shape(2, 2, 16, context=40, vocab_size=32), seed=1))
    generator = torch.Generator().manual_seed(sum(pieces))
    total = 10 + sum(pieces)
    rows = [torch.randint(32, (total - less,), generator=generator) for less in (0, *shorter)]
    tokens, padding = left_padded(rows)
    cache = model.make_cache(len(rows), total, padding)
    place = 0
    for count in (10, *pieces):
        logits = model.decode(tokens[:, place : place + count], cache)
        place += count
        for row, empty in enumerate(padding):
            alone = model(tokens[row : row + 1, empty:place])[0, -1]
            assert torch.allclose(logits[row], alone, rtol=0, atol=1e-5)


def test_short_rows_go_on_after_the_longest_has_filled_its_context(make_model: Make, make_batch: Make) -> None:
    model = lively(make_model())
    long, short = make_batch(rows=2)[0]
    cache = model.make_cache(2, 16 + 12, [0, 12])
    model.decode(left_padded([long, short[:4]])[0], cache)
    for place in range(4, 16):
        logits = model.decode(torch.stack([long[:1], short[place : place + 1]]), cache)
        assert torch.allclose(logits[1], model(short[None, : place + 1])[0, -1], rtol=0, atol=1e-5)
        assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_cache_has_the_dtype_of_the_model(dtype: torch.dtype, make_model: Make, make_batch: Make) -> None:
    model = make_model().eval().to(dtype)
    tokens = make_batch(rows=2)[0]
    cache = model.make_cache(2, 16, [0, 3])
    model.decode(tokens[:, :8], cache)
    logits = model.decode(tokens[:, 8:9], cache)
    assert cache.buffer.dtype == logits.dtype == dtype
    alone = model(tokens[1:, 3:9])[0, -1]
    assert torch.allclose(logits[1].float(), alone.float(), atol=1e-9 if dtype == torch.float64 else 2e-2)


def test_under_autocast_the_cache_is_narrow(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model().eval(), make_batch(rows=2)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.make_cache(2, 16, [0, 3])
        model.decode(tokens[:, :8], cache)
        logits = model.decode(tokens[:, 8:9], cache)
    assert cache.buffer.dtype == torch.bfloat16
    assert torch.allclose(logits[0].float(), model(tokens[:1, :9])[0, -1], atol=2e-2)


# --- what it leaves alone ------------------------------------------------------------------------------------------


def test_nothing_is_allocated_anew_and_nothing_is_recorded(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model(dropout=0.5).train(), make_batch(rows=2)[0]
    cache = model.make_cache(2, 16)
    address = cache.buffer.data_ptr()
    assert cache.buffer.shape == (2, 2, 2, 2, 16, 16)
    first = model.decode(tokens, cache)
    assert (cache.used, cache.buffer.data_ptr()) == (16, address)
    assert not first.requires_grad
    assert torch.equal(first, model.decode(tokens, model.make_cache(2, 16))), "no dropout here"


def test_training_goes_on_as_if_nothing_had_been_decoded(make_model: Make, make_batch: Make) -> None:
    one, other = make_model(), make_model()
    other.decode(make_batch()[0], other.make_cache(4, 16))
    for model in (one, other):
        model(*make_batch()).backward()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_with_the_numbers(make_model: Make) -> None:
    model = make_model()
    with pytest.raises(InputError, match=r"a cache of 17 tokens does not fit model\.context = 16"):
        model.make_cache(1, 17)
    with pytest.raises(InputError, match=r"padding .* does not fit 2 rows of 8 tokens"):
        model.make_cache(2, 8, [1, 2, 3])
    cache = model.make_cache(2, 4)
    with pytest.raises(InputError, match="6 tokens do not fit a cache of 4: 2 too many"):
        model.decode(torch.zeros(2, 6, dtype=torch.long), cache)
    with pytest.raises(InputError, match="the cache is for 2 rows, 3 were given"):
        model.decode(torch.zeros(3, 2, dtype=torch.long), cache)
    assert cache.used == 0
