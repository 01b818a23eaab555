"""The length of a run that ends at a target."""

from __future__ import annotations

import numpy as np
from tests.forecast.curves import CONSTANT, PLAN, lawful, seen, true_law

from foretrain.forecast import plans
from foretrain.forecast.records import LossCurve
from foretrain.forecast.target import steps_to


def test_the_length_is_the_smallest_whose_end_meets_the_target() -> None:
    part = seen(lawful(), 0.5)
    target = true_law().loss_at(plans.resized(PLAN, 8000), 8000)
    found = steps_to(part, target)
    assert found is not None
    assert found.steps is not None
    assert found.earliest is not None
    assert found.latest is not None
    assert found.earliest <= found.steps <= found.latest
    assert found.earliest <= 8000 <= found.latest
    assert abs(found.steps / 8000 - 1) < 0.3


def test_a_lower_target_takes_longer() -> None:
    part = seen(lawful(), 0.5)
    lengths = [steps_to(part, target) for target in (2.9, 2.85, 2.8)]
    steps = [found.steps for found in lengths if found is not None and found.steps is not None]
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert steps[0] < steps[2]


def test_a_target_out_of_reach_is_said_with_what_the_longest_run_comes_to() -> None:
    found = steps_to(seen(lawful(), 0.5), 2.0, at_most=10000)
    assert found is not None
    assert found.steps is None
    assert found.at_most == 10000
    assert 2.7 < found.at_longest.loss < 2.9


def test_the_decay_cannot_have_begun_before_now() -> None:
    part = seen(lawful(), 0.5)
    found = steps_to(part, 100.0)  # met already
    assert found is not None
    assert found.steps is not None
    assert plans.decay_start(plans.resized(PLAN, found.steps)) >= 2499
    assert found.steps < 5000


def test_constant_rates_and_too_little_seen() -> None:
    found = steps_to(seen(lawful(CONSTANT), 0.5), true_law().loss_at(plans.resized(CONSTANT, 7000), 7000))
    assert found is not None
    assert found.steps is not None
    assert abs(found.steps / 7000 - 1) < 0.1
    assert steps_to(LossCurve(np.array([1.0]), np.array([2.0]), PLAN), 1.0) is None
