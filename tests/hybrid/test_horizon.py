"""The choice of the horizon: sensible without history, then learned from gain per cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from foretrain.hybrid.horizon import HorizonBandit, HorizonContext
from foretrain.persist.codec import put_together, take_apart

EVEN = HorizonContext(confidence=0.8, r2=0.3, progress=0.5, log_noise=0.0)
World = Callable[[HorizonContext], float]


def play(
    bandit: HorizonBandit, best: World, cycles: int, seed: int = 0, contexts: tuple[HorizonContext, ...] = (EVEN,)
) -> list[int]:
    """Choices in a world where the reward falls off around a best horizon, with noise."""
    random = np.random.default_rng(seed)
    chosen = []
    for cycle in range(cycles):
        context = contexts[cycle % len(contexts)]
        horizon = bandit.choose(context, context.confidence, bandit.longest)
        chosen.append(horizon)
        reward = 2.0 - 1.5 * abs(math.log2(horizon / best(context))) + random.normal(0, 0.3)
        cost = 3 + horizon / 30
        bandit.reward(horizon, context, reward * cost, cost)
    return chosen


@pytest.mark.parametrize(("confidence", "expected"), [(0.5, 30), (0.9, 97), (1.0, 120), (0.1, 10), (math.nan, 10)])
def test_without_history_it_follows_confidence(confidence: float, expected: int) -> None:
    assert HorizonBandit(120, 10).choose(EVEN, confidence, 120) == expected


@pytest.mark.parametrize(("longest", "arms"), [(60, (10, 20, 40, 60)), (25, (10, 20, 25)), (5, (5,)), (200, None)])
def test_arms_end_at_the_maximum(longest: int, arms: tuple[int, ...] | None) -> None:
    assert HorizonBandit(longest, 10).arms == (arms or (10, 20, 40, 60, 80, 200))


def test_limits_hold_with_and_without_history() -> None:
    for bandit in (HorizonBandit(80, 10), HorizonBandit(80, 10)):
        for limit in (0, 1, 7, 10, 33, 80, 500):
            for confidence in (0.0, 0.6, 1.0):
                chosen = bandit.choose(EVEN, confidence, limit)
                assert 0 <= chosen <= min(limit, 80)
                assert chosen >= min(10, limit)
        play(bandit, lambda _: 40, 5)


@pytest.mark.parametrize("best", [10, 20, 40, 80, 120])
def test_it_finds_the_best_horizon(best: int) -> None:
    good = 0
    for seed in range(5):
        late = play(HorizonBandit(120, 10), lambda _: best, 60, seed)[30:]
        good += sum(abs(math.log2(horizon / best)) <= 0.6 for horizon in late)
    assert good >= 0.85 * 150


def test_it_adapts_when_the_world_changes() -> None:
    for seed in range(5):
        bandit = HorizonBandit(80, 10)
        assert np.median(play(bandit, lambda _: 80, 40, seed)[20:]) >= 60
        assert np.median(play(bandit, lambda _: 10, 60, seed)[30:]) <= 20


def test_the_context_matters() -> None:
    quiet = HorizonContext(confidence=0.9, r2=0.8, progress=0.3, log_noise=-2.0)
    noisy = HorizonContext(confidence=0.6, r2=0.05, progress=0.3, log_noise=2.0)
    for seed in range(5):
        chosen = play(HorizonBandit(80, 10), lambda c: 80 if c.r2 > 0.5 else 10, 120, seed, (quiet, noisy))[60:]
        assert np.mean(chosen[0::2]) > 60
        assert np.mean(chosen[1::2]) < 25


def test_shorten_halves_and_recovers() -> None:
    bandit = HorizonBandit(80, 10)
    play(bandit, lambda _: 80, 30)
    assert bandit.choose(EVEN, 0.8, 80) >= 60
    bandit.shorten()
    assert bandit.choose(EVEN, 0.8, 80) <= 40
    for _ in range(9):
        bandit.shorten()
    assert bandit.choose(EVEN, 0.8, 80) == 10
    for _ in range(15):
        bandit.reward(10, EVEN, -1.0, 3.0)  # even failures let longer moves come back in time
    assert bandit.allowed == 80


def test_rewards_without_meaning_are_ignored() -> None:
    bandit = HorizonBandit(80, 10)
    bandit.reward(10, EVEN, math.nan, 3.0)
    bandit.reward(10, EVEN, 5.0, 0.0)
    assert bandit.rewards == 0
    strange = HorizonContext(math.nan, -math.inf, math.inf, 1e9)
    bandit.reward(10, strange, 1e30, 1.0)
    assert bandit.choose(strange, 0.5, 80) in bandit.arms


def test_it_is_deterministic_and_its_state_survives() -> None:
    first, second = HorizonBandit(80, 10), HorizonBandit(80, 10)
    assert play(first, lambda _: 40, 25) == play(second, lambda _: 40, 25)
    copy = HorizonBandit(80, 10)
    copy.load_state_dict(put_together(take_apart(first.state_dict())))
    assert play(copy, lambda _: 20, 25, 3) == play(second, lambda _: 20, 25, 3)
