"""Choosing tokens: each rule against its definition, draws against the distribution, seeds against each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretrain.errors import InputError
from foretrain.serve.sampling import (
    FIRST_LOOK,
    Chooser,
    Sampling,
    apply_temperature,
    draw,
    keep_top_k,
    keep_top_p,
    next_tokens,
    penalize_repetition,
)

logit = st.floats(-20, 20, width=32) | st.sampled_from([-1.0, 0.0, 1.0])  # the latter for ties
rows_of_logits = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(logit, min_size=width, max_size=width), min_size=1, max_size=3)
)


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


def by_rank(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-9},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"stop_tokens": (-1,)},
        {"stop_strings": ("",)},
        {"stop_strings": "end"},
    ],
)
def test_impossible_settings_are_named_with_what_is_possible(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^{next(iter(wrong))} = .*(must be|write)"):
        Sampling(**wrong)


def test_lists_of_stops_are_kept_as_tuples() -> None:
    sampling = Sampling(stop_tokens=[1, 2], stop_strings=["a"])
    assert (sampling.stop_tokens, sampling.stop_strings) == ((1, 2), ("a",))
    assert hash(sampling) == hash(Sampling(stop_tokens=(1, 2), stop_strings=("a",)))


# --- rules ---------------------------------------------------------------------------------------------------------


@given(rows_of_logits, st.integers(0, 50))
def test_top_k_keeps_exactly_k_and_of_equal_ones_the_first(rows: list[list[float]], k: int) -> None:
    result = keep_top_k(torch.tensor(rows), k)
    width = len(rows[0])
    count = width if k == 0 else min(k, width)
    assert kept(result) == [set(by_rank(row)[:count]) for row in rows]
    assert torch.equal(result[result.isfinite()], torch.tensor(rows)[result.isfinite()])


@given(rows_of_logits, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(rows: list[list[float]], p: float) -> None:
    logits = torch.tensor(rows)
    probabilities = logits.double().softmax(-1)
    for row, tokens, chances in zip(rows, kept(keep_top_p(logits, p)), probabilities, strict=True):
        order = by_rank(row)
        assert tokens == set(order[: len(tokens)]), "a more probable token is missing"
        assert tokens
        assert chances[order[: len(tokens)]].sum() >= p - 1e-5
        assert chances[order[: len(tokens) - 1]].sum() < p + 1e-5


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_top_p_on_many_tokens_is_top_p_on_few(p: float, spread: float) -> None:
    """The first look suffices for some rows and not for others; the result may not depend on it."""
    width = 4 * FIRST_LOOK
    logits = spread * torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    ordered, order = logits.sort(descending=True, stable=True)
    chances = ordered.double().softmax(-1)
    sizes = (chances.cumsum(-1) - chances < p).sum(-1).tolist()
    for tokens, expected, size in zip(kept(keep_top_p(logits, p)), order.tolist(), sizes, strict=True):
        assert abs(len(tokens) - size) <= (0 if p < 0.99 and spread else 2)  # float32 against float64
        assert tokens == set(expected[: len(tokens)])


def test_the_penalty_makes_what_occurred_less_probable_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 2.0, -2.0]]


def test_low_temperatures_stay_finite_and_become_greedy() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3]])
    cold = apply_temperature(logits, 1e-5)
    assert not cold.isnan().any()
    assert cold.softmax(-1).tolist() == [[1.0, 0.0, 0.0]]


@given(rows_of_logits, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_a_token_that_may_be_drawn(rows: list[list[float]], uniform: float) -> None:
    logits = keep_top_k(torch.tensor(rows), 2)
    uniforms = torch.full((len(rows),), uniform, dtype=torch.float64)
    for token, tokens in zip(draw(logits, uniforms).tolist(), kept(logits), strict=True):
        assert token in tokens


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_no_token_without_weight(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert draw(logits, torch.tensor([uniform], dtype=torch.float64)).item() in (1, 3)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    uniforms = torch.zeros(2, dtype=torch.float64)
    assert next_tokens(logits, Sampling(temperature=0), uniforms, None).tolist() == [1, 0]
    assert next_tokens(logits, Sampling(top_k=1), uniforms, None).tolist() == [1, 0]


# --- distribution --------------------------------------------------------------------------------------------------


def defined(logits: list[float], sampling: Sampling, seen: set[int]) -> np.ndarray:
    """The distribution, written down slowly."""
    penalty = sampling.repetition_penalty
    changed = [
        value if token not in seen else value / penalty if value > 0 else value * penalty
        for token, value in enumerate(logits)
    ]
    weights = np.exp(np.array(changed) / sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    chances = weights / weights.sum()
    total, nucleus = 0.0, []
    for token in order:
        if total < sampling.top_p:
            nucleus.append(token)
        total += chances[token]
    chances[[token for token in order if token not in nucleus]] = 0
    return chances / chances.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.5),
        Sampling(seed=3, temperature=2.0),
        Sampling(seed=4, top_k=4),
        Sampling(seed=5, top_p=0.7),
        Sampling(seed=6, repetition_penalty=1.8),
        Sampling(seed=7, temperature=1.3, top_k=6, top_p=0.9, repetition_penalty=1.3),
    ],
)
def test_draws_follow_the_defined_distribution(sampling: Sampling) -> None:
    logits = [1.5, -0.5, 0.3, 2.0, -2.0, 0.9, -1.2, 0.0]
    seen = {0, 1, 3}
    draws = 20_000
    uniforms = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(sampling.seed or 0))
    mask = torch.tensor([[token in seen for token in range(8)]]).expand(draws, -1)
    tokens = next_tokens(torch.tensor([logits]).expand(draws, -1), sampling, uniforms, mask)
    counts = np.bincount(tokens.numpy(), minlength=8)
    expected = defined(logits, sampling, seen) * draws
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_successive_draws_of_one_seed_follow_the_distribution_and_are_independent() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    steps = 9000
    chooser = Chooser([Sampling(seed=11)], [[]], steps, 3, torch.device("cpu"))
    tokens = np.array([chooser.choose(logits)[0].item() for _ in range(steps)])
    chances = logits[0].double().softmax(-1).numpy()
    assert stats.chisquare(np.bincount(tokens, minlength=3), steps * chances).pvalue > 1e-3
    pairs = np.bincount(3 * tokens[:-1:2] + tokens[1::2], minlength=9)
    assert stats.chisquare(pairs, (steps // 2) * np.outer(chances, chances).ravel()).pvalue > 1e-3


# --- a batch of choices --------------------------------------------------------------------------------------------


def chosen(samplings: list[Sampling], rows: list[int], steps: int = 30) -> list[list[int]]:
    """Row `r` of `rows` always sees the r-th of a fixed series of logits."""
    series = torch.randn(8, steps, 50, generator=torch.Generator().manual_seed(5))
    chooser = Chooser(samplings, [[row] for row in rows], steps, 50, torch.device("cpu"))
    return [list(one) for one in zip(*[chooser.choose(series[rows, s])[0].tolist() for s in range(steps)], strict=True)]


MIXED = [
    Sampling(seed=1),
    Sampling(seed=1, temperature=0.7, top_k=9),
    Sampling(temperature=0),
    Sampling(seed=3, top_p=0.5),
    Sampling(seed=4, repetition_penalty=1.5),
    Sampling(seed=4, repetition_penalty=1.5),
]


def test_each_row_is_what_it_is_alone_with_any_neighbours() -> None:
    together = chosen(MIXED, [0, 1, 2, 3, 4, 5])
    for row, sampling in enumerate(MIXED):
        assert chosen([sampling], [row]) == [together[row]]


def test_seeds_reproduce_and_differ_and_no_seed_is_always_new() -> None:
    texts = chosen([Sampling(seed=1), Sampling(seed=1), Sampling(seed=2), Sampling(), Sampling()], [0, 0, 0, 0, 0])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 4


def test_fewer_steps_are_a_beginning_of_more() -> None:
    few, many = (Chooser([Sampling(seed=9)], [[]], steps, 50, torch.device("cpu")) for steps in (3, 500))
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        assert few.choose(logits)[0].item() == many.choose(logits)[0].item()


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])
    hot = Sampling(temperature=5.0, top_k=1, repetition_penalty=3.0)
    token, log_probability = Chooser([hot], [[2]], 1, 4, torch.device("cpu")).choose(logits)
    assert token.item() == 1
    assert log_probability.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_what_was_chosen_counts_as_seen() -> None:
    chooser = Chooser([Sampling(temperature=0, repetition_penalty=2.0)], [[0]], 4, 3, torch.device("cpu"))
    logits = torch.tensor([[3.0, 2.9, 1.0]])  # the first is in the prompt and counts 1.5, and so on
    assert [chooser.choose(logits)[0].item() for _ in range(4)] == [1, 0, 0, 0]
