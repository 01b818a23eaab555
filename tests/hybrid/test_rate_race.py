"""A learning rate that is found by trying several on the first steps."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worlds import Net
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import changed, from_mapping
from foretrain.config.schema import FIRST_RATE
from foretrain.errors import ConfigError
from foretrain.events import Event, Notice, RatesToTry, RateTrial, RateTried
from foretrain.hybrid import rate_race
from foretrain.hybrid.rate_plan import (
    at_length,
    centre_of,
    found_rate,
    next_exponent,
    plan_of,
    with_short_warmup,
)
from foretrain.launch.group import Group, RankPlace
from foretrain.loop.earlier import begin_with_last
from foretrain.show import narration

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(80, 16, 8, generator=GENERATOR)
TARGET = torch.randn(8, 1, generator=GENERATOR)
STEPS = 80
PLAN = plan_of(STEPS, adapters=False)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batches(scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(rows, scale * rows @ TARGET) for rows in INPUTS]


def probe(scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(4, 8), scale * torch.ones(4, 8) @ TARGET)]


def make(scale: float, first: float = 1e-3, bias: bool = False, **settings: Any) -> HybridTrainer:
    """The answer is `scale` long, so that many steps of Adam, or long ones, are needed where it is large."""
    torch.manual_seed(1)
    values = {
        "device": "cpu",
        "max_steps": STEPS,
        "optimizer.type": "adamw",
        "optimizer.learning_rate": "auto",
        "optimizer.weight_decay": 0.0,
        "schedule.type": "warmup",
        "schedule.warmup_steps": 5,
        "hybrid.mode": "off",
    }
    model = nn.Linear(8, 1, bias=bias)
    nn.init.zeros_(model.weight)
    trainer = HybridTrainer(model, loss_fn=loss, config=from_mapping(values | settings), probe=probe(scale))
    if trainer.race is not None:
        trainer.race.begin_with(first, "the test")
    return trainer


def train(trainer: HybridTrainer, scale: float, first: int = 0, last: int = STEPS) -> list[Tensor]:
    for batch in batches(scale)[first:last]:
        trainer.step(batch)
    return [p.detach().clone() for p in trainer.model.parameters()]


class Given:
    """A source of the rate that does as it is told."""

    rate_factor, clip = 1.0, math.inf


def as_it_was_raced(race: rate_race.RateRace, scale: float, **settings: Any) -> list[Tensor]:
    """The weights of a plain run that has the best rate from the start, and the chosen one from then on."""
    plain = make(scale, **{"optimizer.learning_rate": FIRST_RATE, **settings})
    source = Given()
    plain.engine.rate_sources = (source,)
    own = race.best == 0
    for index, batch in enumerate(batches(scale)):
        raced = index < (PLAN.length if own else PLAN.steps)
        source.rate_factor = (race._rate_of(race.best) if raced else race.rate) / FIRST_RATE
        plain.step(batch)
    return [p.detach().clone() for p in plain.model.parameters()]


@pytest.mark.parametrize("mode", ["off", "leap"])
@pytest.mark.parametrize(("scale", "best"), [(0.02, 1), (0.01, 0), (0.05, 3), (1.0, 3)])
def test_the_run_goes_on_from_the_best_rate_before_it_was_annealed(scale: float, best: int, mode: str) -> None:
    trainer = make(scale, **{"hybrid.mode": mode, "hybrid.warmup_steps": 1000})
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    weights = train(trainer, scale)
    race = trainer.race
    assert race is not None
    assert (race.best, race.open) == (best, False)
    assert race.tried[best] == min(race.tried.values())
    edge = len(race.tried) == 3  # short runs try no more
    assert edge or {best - 1, best + 1} <= set(race.tried)
    assert (race.found.low is None) == (best in (min(race.tried), max(race.tried)))
    assert all(torch.equal(a, b) for a, b in zip(weights, as_it_was_raced(race, scale), strict=True))
    told = [event for event in events if isinstance(event, RateTried)]
    assert [event.loss for event in told] == list(race.tried.values())
    trials = [event for event in events if isinstance(event, RateTrial)]
    assert (trials[0].learning_rate, trials[0].step, trials[0].others) == (1e-3, 0, 2 * PLAN.length)
    assert list(dict.fromkeys(event.learning_rate for event in trials)) == [event.learning_rate for event in told]
    others = len(race.tried) - 1
    cost = others * PLAN.length + PLAN.anneal + (PLAN.anneal if best else 0)
    price = RatesToTry(0, PLAN.length, 2 * PLAN.length + PLAN.anneal, 2 * (PLAN.length + PLAN.anneal), STEPS)
    assert next(event for event in events if isinstance(event, (RatesToTry, RateTrial))) == price
    assert price.least <= cost <= price.most
    summary = trainer.summary()
    assert summary["learning_rate"]["extra_steps"] == cost == trainer.backward_passes - STEPS
    assert summary["backward_passes"] == STEPS + cost
    assert summary["tokens"] == 16 * (STEPS + cost)
    assert summary["probe_tokens"] == 4 * len(race.tried)
    assert trainer.global_step == trainer.position == sum(summary["steps"].values()) == STEPS
    reading = trainer.engine.meter.read()
    assert reading is not None
    assert reading.steps == STEPS  # losses of rates that lost are no progress
    (said,) = [event.message for event in events if isinstance(event, Notice) and "learning rate" in event.message]
    assert said.startswith(f"the run goes on with a learning rate of {race.rate:.3g}, by {len(told)} that were tried")


def test_a_trial_is_judged_when_its_rate_has_fallen_to_nothing() -> None:
    trainer = make(0.01)
    train(trainer, 0.01, last=PLAN.length + 1)
    decays = {"schedule.type": "wsd", "schedule.decay_steps": PLAN.anneal, "max_steps": PLAN.length}
    annealed = make(0.01, **{"optimizer.learning_rate": 1e-3, **decays})
    train(annealed, 0.01, last=PLAN.length)
    assert trainer.race is not None
    assert trainer.race.tried[0] == pytest.approx(annealed.engine.probe_all(probe(0.01)), rel=1e-5)


@pytest.mark.parametrize("max_steps", [8, 80, 300, 1000, 100_000])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_price_that_is_told_is_that_of_the_rates_that_are_allowed(max_steps: int, adapters: bool) -> None:
    """The fewest and the most trials there are, wherever the best rate lies."""
    plan = plan_of(max_steps, adapters)
    prices = []
    for lowest in range(-plan.reach, plan.reach + 1):
        tried, spent, best = [0], plan.anneal, 0
        while plan.allows(len(tried), spent) and (exponent := next_exponent(plan, tried, best)) is not None:
            tried.append(exponent)
            spent += plan.length
            best = min(tried, key=lambda one: abs(one - lowest))
        prices.append(spent + (plan.anneal if best else 0))
    assert (min(prices), max(prices)) == plan.cost
    assert adapters or max_steps < 1000 or max(prices) <= 0.15 * max_steps


def test_what_a_race_costs_is_said_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(0.1)
    summary = trainer.fit(batches(0.1), probe(0.1), table=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("learning rate: ")]
    least, most = PLAN.cost
    assert lines[0] == (
        f"learning rate: looking for it takes {least} to {most} steps beside the run, {100 * least / STEPS:.0f} to "
        f"{100 * most / STEPS:.0f} % of its {STEPS}; each rate is tried on the first {PLAN.length}"
    )
    assert lines[1].startswith("learning rate: trying 0.001 first")
    assert least <= summary["learning_rate"]["extra_steps"] <= most


@pytest.mark.parametrize(
    ("rows", "changes", "warned"),
    [
        (4, {}, True),
        (40, {}, False),
        (4, {"evaluation.early_stopping_patience": 50}, False),
    ],
    ids=["20 passes", "2 passes", "20 passes that may end early"],
)
def test_a_run_that_passes_over_its_data_often_is_warned_of_overfitting(
    rows: int, changes: dict[str, Any], warned: bool
) -> None:
    trainer, told = make(0.1, **changes), list[Event]()
    trainer.bus.subscribe(told.append)
    summary = trainer.fit(batches(0.1)[:rows], probe(0.1), progress=False)
    passes = STEPS / rows
    assert summary["learning_rate"]["passes"] == passes
    said = [event for event in told if isinstance(event, Notice) and "overfit" in event.message]
    assert [event.level for event in said] == ["warning"] * warned
    if warned:
        (message,) = [event.message for event in said]
        assert message.startswith(f"the run passes over its training data {passes:.0f} times")
        assert f"on the first {PLAN.length / rows:.2g}: " in message
        assert "load_best=True" in message
        assert "evaluation.early_stopping_patience" in message


def test_a_run_that_ends_with_its_best_weights_is_not_warned(tmp_path: Path) -> None:
    trainer, told = make(0.1), list[Event]()
    trainer.bus.subscribe(told.append)
    trainer.fit(batches(0.1)[:4], probe(0.1), progress=False, out=tmp_path / "run", load_best=True)
    assert not trainer.racing
    assert not [event for event in told if isinstance(event, Notice) and "overfit" in event.message]


def test_where_nobody_knows_the_passes_nothing_is_said() -> None:
    trainer, told = make(0.1), list[Event]()
    trainer.bus.subscribe(told.append)
    summary = trainer.fit(iter(batches(0.1)), probe(0.1), progress=False)
    assert summary["learning_rate"]["passes"] is None
    assert not [event for event in told if isinstance(event, Notice) and "overfit" in event.message]


@pytest.mark.parametrize("stop", [3, PLAN.steps, PLAN.steps + 1, PLAN.length, PLAN.length + 1, 60])
def test_a_race_goes_on_exactly_after_a_stop(stop: int) -> None:
    settings = {"predictor.beta": 0.5, "hybrid.warmup_steps": 4}
    whole = make(0.1, **settings)
    straight = train(whole, 0.1)
    first = make(0.1, **settings)
    train(first, 0.1, 0, stop)
    second = make(0.1, 5e-3, **settings)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(train(second, 0.1, stop), straight, strict=True))
    assert second.summary()["learning_rate"] == whole.summary()["learning_rate"]


@pytest.mark.parametrize("scale", [0.1, 0.01], ids=["another rate", "the first rate"])
@pytest.mark.parametrize("calls", [2, PLAN.anneal + 3, PLAN.anneal + PLAN.length + 9])
def test_an_interrupted_trial_is_made_anew(calls: int, scale: float) -> None:
    whole, trainer, count = make(scale), make(scale), list[int]()
    straight = train(whole, scale)
    assert trainer.race is not None
    trainer.race.interrupted = lambda: bool(count.append(1)) or len(count) == calls
    weights = train(trainer, scale)
    assert whole.race is not None
    assert trainer.race.tried == whole.race.tried
    assert trainer.race.extra > whole.race.extra
    assert trainer.global_step == STEPS
    # the run made one more step of its own meanwhile, which the winner makes too
    assert all(torch.equal(a, b) for a, b in zip(weights, straight, strict=True))


@pytest.mark.parametrize(("stop", "other"), [(PLAN.steps + 1, 60), (10, 60), (PLAN.steps + 1, 400)])
def test_a_race_that_has_begun_keeps_its_plan_in_a_run_of_another_length(stop: int, other: int) -> None:
    settings = {"schedule.warmup_steps": None}  # it follows from the plan
    whole, first = make(0.1, **settings), make(0.1, **settings)
    train(whole, 0.1, 0, 60)
    train(first, 0.1, 0, stop)
    second = make(0.1, max_steps=other, **settings)
    assert plan_of(other, adapters=False) != PLAN
    second.load_state_dict(first.state_dict())
    told: list[Event] = []
    second.bus.subscribe(told.append)
    train(second, 0.1, stop, 60)
    assert second.global_step == second.position == 60
    found = second.summary()["learning_rate"]
    assert found["steps"] == PLAN.length
    assert {event.steps for event in told if isinstance(event, RateTried)} == {PLAN.length}
    expected = whole.summary()["learning_rate"]
    assert (found["tried"], found["extra_steps"]) == (expected["tried"], expected["extra_steps"])


@pytest.mark.parametrize("which", [1, 2], ids=["where trials begin", "where the first one ends"])
def test_a_copy_for_which_memory_does_not_suffice_leaves_the_first_rate(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls, told = make(0.1), list[int](), list[Event]()
    trainer.bus.subscribe(told.append)
    assert trainer.race is not None
    state = trainer.race.replay.state

    def failing() -> Any:
        calls.append(1)
        if len(calls) == which:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return state()

    monkeypatch.setattr(trainer.race.replay, "state", failing)
    train(trainer, 0.1)
    assert (trainer.race.open, trainer.race.rate, trainer.race.tried, trainer.global_step) == (False, 1e-3, {}, STEPS)
    assert len(calls) == which
    (said,) = [event.message for event in told if isinstance(event, Notice)]
    assert said == (
        "memory does not suffice to try other learning rates; the run goes on: its rate is the first one, 0.001, "
        "the test"
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_is_too_short_for_a_race_says_so(steps: int) -> None:
    trainer, told = make(0.1, max_steps=steps), list[Event]()
    trainer.bus.subscribe(told.append)
    summary = trainer.fit(batches(0.1), probe(0.1), progress=False)
    assert (summary["learning_rate"], trainer.racing) == (None, False)
    (said,) = [event.message for event in told if isinstance(event, Notice) and "learning rate" in event.message]
    assert said.startswith("the run ended before other learning rates were tried: its rate is the first one, 0.001")


def test_a_rate_that_fails_costs_little() -> None:
    """The loss explodes at once at any rate above the first."""
    settings = {"optimizer.type": "sgd", "optimizer.momentum": 0.0, "optimizer.gradient_clip_norm": 0}
    trainer = make(1.0, 1.0, **settings)
    told: list[Event] = []
    trainer.bus.subscribe(told.append)
    weights = train(trainer, 1.0)
    race = trainer.race
    assert race is not None
    assert math.isnan(race.tried[1])
    assert race.best < 0
    assert all(torch.equal(a, b) for a, b in zip(weights, as_it_was_raced(race, 1.0, **settings), strict=True))
    assert race.failed >= 1
    assert race.extra < (len(race.tried) - race.failed) * PLAN.length + 2 * PLAN.anneal + race.failed * PLAN.steps / 2
    (failed,) = [event for event in told if isinstance(event, RateTried) and event.learning_rate == 2.0]
    assert narration.line(failed) == "learning rate 2: failed, and was ended early"


def test_a_race_scales_both_rates_of_muon() -> None:
    trainer = make(0.1, bias=True, **{"optimizer.type": "muon", "optimizer.rest_rate_factor": 0.5})
    train(trainer, 0.1)
    assert trainer.race is not None
    rate = trainer.race.rate
    assert rate != 1e-3
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([rate, 0.5 * rate])


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_are_raced_as_it_was_measured_for_them() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 1))
    model[0].requires_grad_(False)
    config = from_mapping(
        {"device": "cpu", "max_steps": 40, "optimizer.learning_rate": "auto", "optimizer.type": "adamw"}
    )
    trainer = HybridTrainer(model, loss_fn=loss, config=config, probe=probe(1.0))
    train(trainer, 1.0, last=40)
    found = trainer.summary()["learning_rate"]
    rates = [float(rate) for rate in found["tried"]]
    assert found["first"] == FIRST_RATE
    assert found["steps"] == 10
    assert rates[1] / rates[0] == pytest.approx(math.sqrt(10), rel=0.01)
    assert min(found["tried"], key=found["tried"].get) == f"{found['chosen']:.3g}"
    assert found["extra_steps"] == 10 * (len(rates) - 1)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_raced_is_refused() -> None:
    config = from_mapping({"device": "cpu", "max_steps": 40, "optimizer.learning_rate": "auto"})
    with pytest.raises(ConfigError, match="needs held-out batches that judge rates, and there are none"):
        HybridTrainer(Net(), config=config).fit([INPUTS[0]], progress=False)
    endless = from_mapping({"device": "cpu", "optimizer.learning_rate": "auto", "hybrid.mode": "off"})
    trainer = HybridTrainer(nn.Linear(8, 1), loss_fn=loss, config=endless, probe=probe(1.0))
    with pytest.raises(ConfigError, match="nothing says how many there are: set max_steps"):
        trainer.step(batches(1.0)[0])
    for length in ({}, {"max_steps": 40}):
        timed = from_mapping({"device": "cpu", "optimizer.learning_rate": "auto", "max_time": "1h", **length})
        with pytest.raises(ConfigError, match="give max_steps instead of max_time, or set a rate"):
            HybridTrainer(nn.Linear(8, 1), loss_fn=loss, config=timed, probe=probe(1.0))
    model = nn.Linear(8, 1)
    with pytest.raises(ConfigError, match="is for optimizers named in the Config, and one is handed in"):
        HybridTrainer(model, torch.optim.Adam(model.parameters()), loss, config)
    with pytest.raises(ConfigError, match=r"set optimizer\.rest_rate_factor instead"):
        HybridTrainer(model, None, loss, changed(config, {"optimizer.rest_learning_rate": 1e-3}))


def test_fit_judges_by_its_held_out_batches_and_begins_with_the_last_run_of_the_same_kind(tmp_path: Path) -> None:
    def run(name: str, resume: bool = False, **settings: Any) -> dict[str, Any]:
        trainer = make(0.01, **settings)
        if trainer.race is not None:
            trainer.race.held_out = []
        return trainer.fit(batches(0.01), probe(0.01), out=tmp_path / name, resume=resume, progress=False)

    run("other", **{"optimizer.type": "sgd"})
    run("set", **{"optimizer.learning_rate": 0.004})  # nobody has found it
    first = run("first")["learning_rate"]
    assert (first["first"], first["origin"]) == (1e-3, "the test")
    run("larger", batch_size=3)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "summary.json").write_text("{")
    second = run("second", max_steps=60)["learning_rate"]
    expected = pytest.approx(at_length(first["chosen"], 80, 60), rel=0.01)
    assert (second["first"], second["origin"]) == (expected, "that of first")
    third = run("third", resume=True, max_steps=60)["learning_rate"]  # as a launcher begins it
    assert third["first"] == pytest.approx(second["chosen"], rel=0.01)
    page = (tmp_path / "third" / "report.html").read_text()
    assert "Learning rates that were tried" in page
    assert json.loads((tmp_path / "third" / "summary.json").read_text())["learning_rate"] == third


def test_rates_of_other_runs_that_cannot_be_meant_are_passed_over(tmp_path: Path) -> None:
    race = make(0.01).race
    assert race is not None
    good: dict[str, Any] = {
        "reason": "finished",
        "global_step": 80,
        "learning_rate": {"chosen": 2e-3},
        "loss_forecast": {"curve": {"kind": "a kind"}},
    }
    strange: list[Any] = [{"learning_rate": {"chosen": rate}} for rate in (1e30, 1e-30, 0.0, -1e-3, "1e-3", None, 9e-3)]
    strange += [{"global_step": steps} for steps in (-5, 0, 1e300, 10**400, math.nan, "80")]
    strange += [{"reason": "interrupted"}, {"learning_rate": None}, {"loss_forecast": {"curve": {"kind": "other"}}}]
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "summary.json")
    (tmp_path / "strange").mkdir()
    for values in strange:
        (tmp_path / "strange" / "summary.json").write_text(json.dumps({**good, **values}))
        begin_with_last(race, "a kind", 80, tmp_path / "new")
        assert (race.centre, race.origin) == (1e-3, "the test"), values
    (tmp_path / "strange" / "summary.json").write_text(json.dumps(good))
    begin_with_last(race, "", 80, tmp_path / "new")
    begin_with_last(race, "a kind", 80, tmp_path / "strange")
    assert race.centre == 1e-3
    begin_with_last(race, "a kind", 80, tmp_path / "new")
    assert (race.centre, race.origin) == (2e-3, "that of strange")


class Told(Group):
    """Another process than the one that looks at the folder of runs."""

    def from_first(self, say: Callable[[], str]) -> str:
        return '[0.004, "that of first"]'


def test_of_several_processes_one_looks_for_rates_of_other_runs(tmp_path: Path) -> None:
    race = make(0.01).race
    assert race is not None
    begin_with_last(race, "a kind", 80, tmp_path / "not" / "there", Told(RankPlace(rank=1, size=2)))
    assert (race.centre, race.origin) == (0.004, "that of first")


# --- the plan, and what follows from it -------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "warmup"), [(10, 1), (60, 7), (1000, 27), (5000, 137)])
def test_a_trial_sees_twice_the_warmup(steps: int, warmup: int) -> None:
    config = from_mapping({"optimizer.learning_rate": "auto", "max_steps": steps})
    assert with_short_warmup(config, adapters=False).schedule.warmup_steps == warmup
    assert with_short_warmup(changed(config, {"schedule.warmup_steps": 7}), adapters=False).schedule.warmup_steps == 7
    plain = changed(config, {"optimizer.learning_rate": 1e-3})
    assert with_short_warmup(plain, adapters=False).schedule.warmup_steps is None


def test_the_search_goes_on_beyond_an_edge_and_comes_back() -> None:
    def search(best_of_all: int, adapters: bool = False) -> list[int]:
        plan, tried = plan_of(100_000, adapters), {0: float(abs(best_of_all))}
        while (found := next_exponent(plan, tried, min(tried, key=tried.__getitem__))) is not None:
            tried[found] = abs(found - best_of_all)
        return list(tried)

    assert search(0) == [0, 1, -1]
    assert search(1) == [0, 1, 3, 2]
    assert search(5) == [0, 1, 3, 5, 7, 6, 4]
    assert search(-4) == [0, 1, -1, -3, -5, -2, -4]
    assert search(2, adapters=True) == [0, 1, 2, 3]
    assert search(-9, adapters=True) == [0, 1, -1, -2, -3]


@pytest.mark.parametrize("steps", [1000, 1001, 1333, 5000, 100_000])
def test_a_race_costs_at_most_fifteen_percent(steps: int) -> None:
    plan = plan_of(steps, adapters=False)
    assert 2 * plan.length + 2 * plan.anneal <= 0.15 * steps + 2
    assert plan.allows(2, plan.budget)
    assert not plan.allows(3, 2 * plan.length + plan.anneal)
    assert plan.allows(3, plan.length + plan.anneal)  # one of them failed early


def test_the_vertex_of_a_parabola_is_chosen() -> None:
    plan, long = plan_of(1000, adapters=False), 1000
    shrunk = (long / plan.length) ** -plan.exponent

    def bowl(place: float) -> float:
        return 2.0 + 0.1 * (place - 0.3) ** 2

    for places in ((-1, 0, 1), (-1, 0, 3)):
        found = found_rate(plan, 1e-3, {place: bowl(place) for place in places}, long)
        assert found.rate == pytest.approx(1e-3 * 2**0.3 * shrunk)
        assert found.low is not None
        assert found.high is not None
        assert bowl(math.log2(found.high / 1e-3 / shrunk)) == pytest.approx(2.0 * 1.005)
        assert bowl(math.log2(found.low / 1e-3 / shrunk)) == pytest.approx(2.0 * 1.005)
    edge = found_rate(plan, 1e-3, {0: 3.0, 1: 2.0, 2: 1.0, -1: math.nan}, long)
    assert (edge.rate, edge.low) == (pytest.approx(4e-3 * shrunk), None)
    edge = found_rate(plan, 1e-3, {0: 3.0, 1: 2.0, 3: 1.0}, long)
    assert (edge.rate, edge.low) == (pytest.approx(4e-3 * shrunk), None)  # not so far
    beyond = found_rate(plan, 1e-3, {place: bowl(place) for place in (1, 2, 3)}, long)
    assert beyond.rate == pytest.approx(1e-3 * 2**0.3 * shrunk)
    assert found_rate(plan, 1e-3, {place: bowl(place) for place in (3, 4, 5)}, long).rate == pytest.approx(
        4e-3 * shrunk
    )
    assert found_rate(plan, 1e-3, {0: math.nan, 1: math.nan}, long).rate == 1e-3
    beside = found_rate(plan, 1e-3, {0: 2.0, 1: math.nan, -1: 2.1}, long)
    assert beside.rate == pytest.approx(1e-3 * shrunk)


def test_the_first_rate_falls_with_the_width() -> None:
    def centre(width: int, kind: str = "adamw", steps: int = 1000) -> float:
        config = from_mapping({"optimizer.type": kind, "max_steps": steps})
        return centre_of(config, nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)))

    assert centre(64) == pytest.approx(2 * centre(256), rel=0.05)
    assert centre(64, "sgd") > centre(64)
    assert centre(64, steps=4000) <= centre(64)
