"""The choice of the horizon: sensible without history, then learned from gain per cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretrain.hybrid.horizon import HorizonBandit
from foretrain.persist.codec import put_together, take_apart


def play(bandit: HorizonBandit, best: int, cycles: int, seed: int = 0) -> list[int]:
    """Choices in a world where the reward falls off around a best horizon, with noise."""
    random = np.random.default_rng(seed)
    chosen = []
    for _ in range(cycles):
        horizon = bandit.choose(0.8, bandit.longest)
        chosen.append(horizon)
        reward = 2.0 - 1.5 * abs(math.log2(horizon / best)) + random.normal(0, 0.3)
        cost = 3 + horizon / 30
        bandit.reward(horizon, reward * cost, cost)
    return chosen


@pytest.mark.parametrize(("confidence", "expected"), [(0.5, 30), (0.9, 97), (1.0, 120), (0.1, 10), (math.nan, 10)])
def test_without_history_it_follows_confidence(confidence: float, expected: int) -> None:
    assert HorizonBandit(120, 10).choose(confidence, 120) == expected


@pytest.mark.parametrize(("longest", "arms"), [(60, (10, 20, 40, 60)), (25, (10, 20, 25)), (5, (5,)), (200, None)])
def test_arms_end_at_the_maximum(longest: int, arms: tuple[int, ...] | None) -> None:
    assert HorizonBandit(longest, 10).arms == (arms or (10, 20, 40, 60, 80, 200))


def test_limits_hold_with_and_without_history() -> None:
    for bandit in (HorizonBandit(80, 10), HorizonBandit(80, 10)):
        for limit in (0, 1, 7, 10, 33, 80, 500):
            for confidence in (0.0, 0.6, 1.0):
                chosen = bandit.choose(confidence, limit)
                assert 0 <= chosen <= min(limit, 80)
                assert chosen >= min(10, limit)
        play(bandit, 40, 5)


@pytest.mark.parametrize("best", [10, 20, 40, 80, 120])
def test_it_finds_the_best_horizon(best: int) -> None:
    good = 0
    for seed in range(5):
        late = play(HorizonBandit(120, 10), best, 60, seed)[30:]
        good += sum(abs(math.log2(horizon / best)) <= 0.6 for horizon in late)
    assert good >= 0.85 * 150


def test_it_adapts_when_the_world_changes() -> None:
    for seed in range(5):
        bandit = HorizonBandit(80, 10)
        assert np.median(play(bandit, 80, 40, seed)[20:]) >= 60
        assert np.median(play(bandit, 10, 60, seed)[30:]) <= 20


def test_shorten_halves_and_recovers() -> None:
    bandit = HorizonBandit(80, 10)
    play(bandit, 80, 30)
    assert bandit.choose(0.8, 80) >= 60
    bandit.shorten()
    assert bandit.choose(0.8, 80) <= 40
    for _ in range(9):
        bandit.shorten()
    assert bandit.choose(0.8, 80) == 10
    for _ in range(15):
        bandit.reward(10, -1.0, 3.0)  # even failures let longer moves come back in time
    assert bandit.allowed == 80


def test_rewards_without_meaning_are_ignored() -> None:
    bandit = HorizonBandit(80, 10)
    bandit.reward(10, math.nan, 3.0)
    bandit.reward(10, 5.0, 0.0)
    assert bandit.rewards == 0
    bandit.reward(10, 1e30, 1.0)
    assert bandit.choose(math.nan, 80) in bandit.arms


def test_it_is_deterministic_and_its_state_survives() -> None:
    first, second = HorizonBandit(80, 10), HorizonBandit(80, 10)
    assert play(first, 40, 25) == play(second, 40, 25)
    copy = HorizonBandit(80, 10)
    copy.load_state_dict(put_together(take_apart(first.state_dict())))
    assert play(copy, 20, 25, 3) == play(second, 20, 25, 3)
