"""A race of learning rates in a run whose warm-up is longer than a trial."""

from __future__ import annotations

import math

import pytest
import torch
from tests.hybrid.test_rate_race import PLAN, STEPS, Given, batches, make, train
from torch import Tensor

from foretrain.config.schema import FIRST_RATE
from foretrain.hybrid.rate_race import RateRace

LONG = {"schedule.warmup_steps": None, "schedule.warmup_share": 0.6}
SHORT = {"schedule.warmup_steps": None}
RISE = round(0.6 * STEPS)


def risen(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / (steps + 1))


def as_it_was_raced(race: RateRace, scale: float) -> list[Tensor]:
    """The weights of a plain run at the lowest rate that was tried, with a trial's warm-up, and from then on at the
    chosen one with the run's own."""
    plain = make(scale, **{"optimizer.learning_rate": FIRST_RATE, "schedule.warmup_steps": 0})
    source = Given()
    plain.engine.rate_sources = (source,)
    lowest = min(race.tried)
    for index, batch in enumerate(batches(scale)):
        if index < (PLAN.length if lowest == 0 else PLAN.steps):
            source.rate_factor = race._rate_of(lowest) / FIRST_RATE * risen(index, PLAN.warmup)
        else:
            source.rate_factor = race.rate / FIRST_RATE * risen(index, RISE)
        plain.step(batch)
    return [p.detach().clone() for p in plain.model.parameters()]


@pytest.mark.parametrize(("scale", "lowest"), [(0.02, 0), (0.01, -1)])
def test_the_run_goes_on_from_the_lowest_rate_with_its_own_warmup(scale: float, lowest: int) -> None:
    trainer = make(scale, **LONG)
    rates = [trainer.step(batch).learning_rate for batch in batches(scale)]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    race = trainer.race
    assert race is not None
    assert not race.open
    assert min(race.tried) == lowest
    assert race.best > lowest
    assert rates[PLAN.length + 1] < rates[PLAN.length + 5] < rates[RISE]
    assert rates[RISE + 1] == rates[-1] == pytest.approx(race.rate)
    assert rates[PLAN.length + 5] == pytest.approx(race.rate * risen(PLAN.length + 5, RISE))
    for mine, wanted in zip(weights, as_it_was_raced(race, scale), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [0.02, 0.01])
def test_trials_are_those_of_a_run_with_a_short_warmup(scale: float) -> None:
    long, short = make(scale, **LONG), make(scale, **SHORT)
    train(long, scale)
    train(short, scale)
    assert long.race is not None
    assert short.race is not None
    assert long.race.tried == short.race.tried
    assert long.race.rate == short.race.rate
    own, other = long.race.extra, short.race.extra
    assert own == other + (PLAN.anneal if min(long.race.tried) and not short.race.best else 0) - (
        PLAN.anneal if short.race.best and not min(long.race.tried) else 0
    )


@pytest.mark.parametrize("stop", [5, PLAN.steps + 2, PLAN.length, PLAN.length + 1, RISE - 3, RISE + 5])
def test_it_goes_on_exactly_after_a_stop(stop: int) -> None:
    whole, first, second = (make(0.01, **LONG) for _ in range(3))
    straight = train(whole, 0.01)
    train(first, 0.01, 0, stop)
    second.load_state_dict(first.state_dict())
    again = train(second, 0.01, stop)
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    assert second.summary()["learning_rate"] == whole.summary()["learning_rate"]


def test_a_warmup_that_a_trial_sees_stays() -> None:
    trainer = make(0.01, **{"schedule.warmup_steps": None, "schedule.warmup_share": 0.1})
    assert trainer.config.schedule.warmup_steps is None
    assert trainer.engine.schedule(7) < trainer.engine.schedule(8) == trainer.engine.rate.peak
    train(trainer, 0.01)
    assert trainer.race is not None
    assert trainer.race.best != min(trainer.race.tried)
    assert math.isfinite(trainer.race.rate)


def test_another_length_moves_the_end_of_the_warmup() -> None:
    first = make(0.01, **LONG)
    train(first, 0.01, 0, PLAN.length + 3)
    longer = make(0.01, max_steps=2 * STEPS, **LONG)
    longer.load_state_dict(first.state_dict())
    assert longer.race is not None
    assert not longer.race.open
    peak = longer.engine.rate.peak
    assert longer.engine.schedule(2 * RISE - 2) < longer.engine.schedule(2 * RISE) == peak
