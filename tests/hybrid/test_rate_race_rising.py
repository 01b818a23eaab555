"""A race of learning rates in a run whose warm-up is longer than a trial."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.hybrid.test_rate_race import PLAN, STEPS, Given, batches, make, train
from torch import Tensor

from foretrain.config import changed, from_mapping
from foretrain.config.schema import FIRST_RATE
from foretrain.hybrid.rate_plan import with_rise
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
    lowest = min(exponent for exponent, known in race.tried.items() if math.isfinite(known))
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


@pytest.mark.parametrize("scale", [0.02, 0.01], ids=["the first rate is lowest", "another is lowest"])
@pytest.mark.parametrize("stop", [5, PLAN.steps + 2, PLAN.length, PLAN.length + 1, RISE - 3, RISE + 5])
def test_it_goes_on_exactly_after_a_stop(stop: int, scale: float) -> None:
    whole, first, second = (make(scale, **LONG) for _ in range(3))
    straight = train(whole, scale)
    train(first, scale, 0, stop)
    second.load_state_dict(first.state_dict())
    again = train(second, scale, stop)
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    assert second.summary()["learning_rate"] == whole.summary()["learning_rate"]


@pytest.mark.parametrize("scale", [0.1, 0.02, 0.01])
@pytest.mark.parametrize("calls", [2, PLAN.anneal + 3, PLAN.anneal + PLAN.length + 9])
def test_an_interrupted_trial_is_made_anew(calls: int, scale: float) -> None:
    whole, trainer, count = make(scale, **LONG), make(scale, **LONG), list[int]()
    straight = train(whole, scale)
    assert trainer.race is not None
    trainer.race.interrupted = lambda: bool(count.append(1)) or len(count) == calls
    weights = train(trainer, scale)
    assert all(torch.equal(a, b) for a, b in zip(weights, straight, strict=True))


@pytest.mark.parametrize("other", [60, 400])
def test_a_race_that_has_begun_keeps_the_warmup_of_its_trials(other: int) -> None:
    whole, first = make(0.1, **LONG), make(0.1, **LONG)
    train(whole, 0.1, 0, 60)
    train(first, 0.1, 0, 10)
    second = make(0.1, max_steps=other, **LONG)
    second.load_state_dict(first.state_dict())
    train(second, 0.1, 10, 60)
    assert second.race is not None
    assert whole.race is not None
    assert second.race.tried == pytest.approx(whole.race.tried, rel=1e-4), "rounding of the factor differs"


def test_a_race_of_before_goes_on_with_the_warmup_of_the_run() -> None:
    first, second = make(0.01, **SHORT), make(0.01, **SHORT)
    straight = train(make(0.01, **SHORT), 0.01)
    train(first, 0.01, 0, PLAN.steps + 2)
    state = first.state_dict()
    del state["race"]["plan"]["rise"]
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(straight, train(second, 0.01, PLAN.steps + 2), strict=True))


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_rates_that_fail_are_not_gone_on_from(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(0.01, **LONG)
    race = trainer.race
    assert race is not None
    measured = race._held_out_loss

    def failing() -> float:
        loss = measured()
        return math.nan if len(race.tried) == failed else loss

    monkeypatch.setattr(race, "_held_out_loss", failing)
    weights = train(trainer, 0.01)
    assert [place for place, loss in enumerate(race.tried.values()) if math.isnan(loss)] == [failed]
    for mine, wanted in zip(weights, as_it_was_raced(race, 0.01), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("which", [1, 2])
def test_without_memory_for_copies_the_run_has_its_own_warmup(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, calls = make(0.1, **LONG), list[int]()
    assert trainer.race is not None
    state = trainer.race.replay.state

    def failing() -> object:
        calls.append(1)
        if len(calls) == which:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return state()

    monkeypatch.setattr(trainer.race.replay, "state", failing)
    rates = [trainer.step(batch).learning_rate for batch in batches(0.1)]
    assert not trainer.race.open
    assert rates[PLAN.length + 3] == pytest.approx(1e-3 * risen(PLAN.length + 3, RISE))
    assert rates[-1] == pytest.approx(1e-3)


def test_the_plan_that_forecasts_go_by_is_the_runs_own_from_the_start() -> None:
    trainer = make(0.01, **LONG)
    before = [trainer.engine.schedule(step) for step in range(STEPS)]
    train(trainer, 0.01)
    assert [trainer.engine.schedule(step) for step in range(STEPS)] == before
    assert before[RISE - 1] < before[RISE]
    assert trainer.config.schedule.warmup_steps is None, "what a run writes down says nothing of its trials"


def test_a_warmup_that_a_trial_sees_stays() -> None:
    trainer = make(0.01, **{"schedule.warmup_steps": None, "schedule.warmup_share": 0.1})
    assert trainer.config.schedule.warmup_steps is None
    assert trainer.engine.schedule(7) < trainer.engine.schedule(8) == trainer.engine.rate.peak
    train(trainer, 0.01)
    assert trainer.race is not None
    assert trainer.race.best != min(trainer.race.tried)
    assert trainer.race.end is None


def test_another_length_moves_the_end_of_the_warmup() -> None:
    first = make(0.01, **LONG)
    train(first, 0.01, 0, PLAN.length + 3)
    longer = make(0.01, max_steps=2 * STEPS, **LONG)
    longer.load_state_dict(first.state_dict())
    assert longer.race is not None
    assert not longer.race.open
    peak = longer.engine.rate.peak
    assert longer.engine.schedule(2 * RISE - 2) < longer.engine.schedule(2 * RISE) == peak


@pytest.mark.parametrize(("share", "rise"), [(0.1, 8), (0.13, 10), (0.6, 10)])
def test_a_trial_sees_more_than_its_warmup(share: float, rise: int) -> None:
    config = from_mapping({"optimizer.learning_rate": "auto", "max_steps": STEPS, "schedule.warmup_share": share})
    plan = with_rise(PLAN, config)
    assert plan.rise == rise
    assert plan.steps >= 2 * rise
    assert with_rise(PLAN, changed(config, {"schedule.warmup_steps": 30})) is PLAN
    assert with_rise(PLAN, changed(config, {"schedule.type": "constant"})) is PLAN


@pytest.mark.parametrize("settings", [{"schedule.type": "cosine", "schedule.decay_steps": 5}, {"schedule.type": "wsd"}])
def test_no_trial_sees_a_decay_of_the_run(settings: dict[str, Any]) -> None:
    trainer, seen = make(0.01, **LONG, **settings), list[float]()
    assert trainer.race is not None
    full = trainer.race.replay.full

    def noted(index: int, given: Any) -> Any:
        output = full(index, given)
        seen.append(float(trainer.engine.rate.used))
        return output

    trainer.race.replay.full = noted  # type: ignore[method-assign]
    train(trainer, 0.01, 0, PLAN.length + 1)
    first = trainer.race._rate_of(list(trainer.race.tried)[1])
    trial = seen[PLAN.anneal : PLAN.anneal + PLAN.steps]  # after the first rate's fall
    assert trial[PLAN.warmup :] == pytest.approx([first] * (PLAN.steps - PLAN.warmup))


def test_the_best_end_is_gone_on_from_where_the_warmup_is_over() -> None:
    trainer = make(0.01, **{"schedule.warmup_steps": None, "schedule.warmup_share": PLAN.warmup / STEPS})
    weights = train(trainer, 0.01)
    same = train(make(0.01, **SHORT), 0.01)
    for mine, wanted in zip(weights, same, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "warmup"])
@pytest.mark.parametrize(("share", "rises"), [(0.125, False), (0.2, False), (0.6, True)])
def test_a_run_rises_on_while_its_warmup_lasts(kind: str, share: float, rises: bool) -> None:
    trainer, told = make(0.01, **LONG | {"schedule.warmup_share": share, "schedule.type": kind}), list[bool]()
    race = trainer.race
    assert race is not None
    measured = race._held_out_loss
    race._held_out_loss = lambda: told.append(race._rises_on) or measured()  # type: ignore[method-assign, func-returns-value]
    train(trainer, 0.01)
    assert set(told) == {rises}
