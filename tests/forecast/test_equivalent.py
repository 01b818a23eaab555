"""Training losses between few evaluations: lifted to them, and never beyond."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.forecast.equivalent import held_out_equivalent, thinned, with_training


def test_training_losses_are_lifted_to_the_evaluations() -> None:
    training = [(float(step), 3.0 - step / 100) for step in range(5, 100, 10)]
    steps, losses = held_out_equivalent([(50, 3.0), (90, 2.6)], training)
    lifted = dict(zip(steps.tolist(), losses.tolist(), strict=True))
    assert lifted[50] == 3.0
    assert lifted[90] == 2.6
    assert lifted[5] == pytest.approx(3.0 - 0.05 + 0.5)  # the first distance holds before it
    assert steps[-1] == 90
    assert (np.diff(steps) > 0).all()


def test_four_evaluations_are_taken_alone() -> None:
    training = [(float(step), 3.0) for step in range(5, 100, 10)]
    evaluations = [(20, 3.0), (40, 2.6), (60, 2.5), (80, 2.4)]
    assert held_out_equivalent(evaluations, training)[0].tolist() == [20, 40, 60, 80]
    assert held_out_equivalent(evaluations[:3], training)[0].tolist() == [5, 15, 20, 25, 35, 40, 45, 55, 60]
    assert with_training(evaluations, training)[0].tolist() == [5, 15, 20, 25, 35, 40, 45, 55, 60, 80]


def test_what_is_learned_by_heart_does_not_look_like_progress() -> None:
    training = [(float(step), 3.0 - step / 50) for step in range(5, 100, 10)]
    _, losses = held_out_equivalent([(10, 3.0), (90, 3.0)], training)
    assert np.abs(losses - 3.0).max() < 0.11


def test_a_loss_that_falls_fast_is_never_below_0() -> None:
    """Training losses are means since the last time: behind what is measured where losses fall fast."""
    training = [(5.0, 6.0), (15.0, 3.0), (25.0, 0.5), (31.0, 0.2)]
    steps, losses = with_training([(16, 1.2), (32, 0.025)], training)
    assert steps.tolist() == [5, 15, 16, 32]
    assert losses.min() == 0.025
    below = [(at, loss - 5.0) for at, loss in training]  # losses that may be negative stay
    assert len(with_training([(16, -3.8), (32, -4.975)], below)[0]) == 6


def test_without_training_losses_there_are_the_evaluations() -> None:
    steps, losses = held_out_equivalent([(10, 3.0), (20, 2.0)], [])
    assert (steps.tolist(), losses.tolist()) == ([10, 20], [3.0, 2.0])
    assert len(held_out_equivalent([], [(1.0, 2.0)])[0]) == 0


def test_thinning_halves_and_keeps_the_mean() -> None:
    assert thinned([(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]) == [(1.0, 2.0), (4.0, 5.0)]
