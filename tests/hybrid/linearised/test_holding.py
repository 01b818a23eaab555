"""What leaps win on their own batches, and what the next batches show of it."""

from __future__ import annotations

import pytest

from foretrain.hybrid.linearised.holding import Holding


def after(holding: Holding, factors: list[tuple[float, float]], loss: float = 1.0) -> Holding:
    """Leaps that lower the loss of their batch by one factor; the next batch shows it raised by the other."""
    for fall, rise in factors:
        holding.leapt(loss, loss * fall)
        loss *= fall * rise
        holding.met(loss)
    return holding


def test_the_same_batch_shows_all_that_was_won() -> None:
    holding = after(Holding(), [(0.5, 1.0)] * 6)
    assert holding.due
    assert holding.rise == pytest.approx(0.0)
    assert holding.ask()
    assert holding.known
    assert not holding.due


def test_what_the_next_batch_does_not_show_was_learned_by_heart() -> None:
    holding = after(Holding(), [(0.5, 2.0)] * 6)
    assert not holding.ask()
    assert holding.noisy
    assert holding.known is False


def test_what_held_until_the_loss_was_far_lower_may_be_tried_again() -> None:
    holding = after(Holding(), [(1.0, 1.0)] + [(0.2, 1.2)] * 6)
    assert holding.ask()
    while after(holding, [(0.5, 2.0)] * 6, 1e-4).ask():
        pass
    assert not holding.noisy
    assert holding.known


def test_half_of_what_was_won_must_hold_at_first_and_a_tenth_later() -> None:
    some = [(0.1, 10**0.7)] * 6
    assert not after(Holding(), some).ask()
    assert after(after(Holding(), [(1.0, 1.0)]), some, 1e-3).ask()


def test_pauses_become_longer_until_something_holds() -> None:
    holding, pauses = Holding(), []
    for _ in range(8):
        assert not after(holding, [(0.9, 1 / 0.9)] * 6).ask()
        pauses.append(holding.pause)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    assert after(holding, [(0.1, 1.0)] * 6).ask()
    assert holding.pause == 1


def test_losses_that_have_no_logarithm_count_for_nothing() -> None:
    holding = Holding()
    holding.leapt(1.0, 0.0)
    holding.met(0.0)
    holding.leapt(1.0, 0.5)
    holding.met(float("nan"))
    holding.met(0.5)
    assert not holding.leaps
    assert holding.rise == 0.0
