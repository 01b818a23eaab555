"""Finished runs with the same plan foretell this one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.forecast.curves import CONSTANT, PLAN, lawful, seen

from foretrain.forecast import plans
from foretrain.forecast.points import cleaned
from foretrain.forecast.records import RatePlan
from foretrain.forecast.transfer import Transferred, transferred


def foretold(share: float, *siblings: float, noise: float = 0.0) -> Transferred | None:
    steps, losses = cleaned(seen(lawful(floor=2.7, noise=noise), share))
    others = [lawful(floor=floor, seed=9, noise=noise) for floor in siblings]
    return transferred(steps, losses, others, PLAN, PLAN, PLAN.total_steps)


def test_a_run_falls_as_its_sibling_did() -> None:
    found = foretold(0.25, 3.0)
    assert found is not None
    assert found.loss == pytest.approx(lawful(floor=2.7).losses[-1], rel=1e-3)


def test_of_losses_that_scatter_a_sibling_is_believed_as_it_was() -> None:
    """Few losses that scatter by more than half a percent do not tell by how much more this run falls than that one."""
    wrong = []
    for seed in range(12):
        steps, losses = cleaned(seen(lawful(noise=0.02, seed=seed), 0.25))
        found = transferred(steps, losses, [lawful(noise=0.02, seed=100 + seed)], PLAN, PLAN, PLAN.total_steps)
        assert found is not None
        wrong.append(found.loss / lawful().losses[-1] - 1)
    assert float(np.sqrt(np.mean(np.square(wrong)))) < 0.01


def test_the_nearer_and_the_more_alike_the_surer() -> None:
    near, far, noisy = foretold(0.5, 2.72), foretold(0.5, 4.0), foretold(0.5, 2.72, noise=0.05)
    assert near is not None
    assert far is not None
    assert noisy is not None
    assert near.spread < far.spread
    assert near.spread < noisy.spread


def test_other_plans_lengths_and_unfinished_runs_are_no_siblings() -> None:
    steps, losses = cleaned(seen(lawful(), 0.5))
    longer = plans.resized(PLAN, 10000)
    others = [lawful(CONSTANT), seen(lawful(), 0.9), dataclasses.replace(lawful(), plan=longer)]
    assert transferred(steps, losses, others, PLAN, PLAN, 5000) is None
    assert transferred(steps, losses, [lawful()], PLAN, longer, 10000) is None
    kept = RatePlan(5000, np.array([0.0, 100.0, 5000.0]), np.array([0.0, 1.0, 1.0]))
    assert transferred(steps, losses, [lawful()], kept, PLAN, 5000) is not None  # the same so far
