"""Runs that end in time, or at a held-out loss: what is planned, what is told, and going on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foretrain import Config, ConfigError, HybridTrainer
from foretrain.config import ScheduleConfig, from_mapping, load, to_toml
from foretrain.engine.compiling import Workload, weigh
from foretrain.engine.schedule import DecayPlan
from foretrain.events import Evaluated, Event, Notice, Planned, Progress, RunStarted
from foretrain.forecast.law import FittedLaw
from foretrain.forecast.records import RatePlan
from foretrain.loop.deadline import Deadline
from foretrain.loop.goal import Goal
from foretrain.loop.targets import length_in_words
from foretrain.recipes.frame import check_steps


class Clock:
    """Time that passes only where the loss is computed: as much as `pace` says for the second that it is."""

    def __init__(self, pace: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.pace = 0.0, pace

    def __call__(self) -> float:
        return self.now


class Endless:
    def __iter__(self) -> Iterator[torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(8, 4, generator=drawn)


HELD_OUT = [torch.randn(8, 4, generator=torch.Generator().manual_seed(5))]
SMALL = {
    "device": "cpu",
    "hybrid": {"mode": "off"},
    "optimizer": {"type": "adamw", "learning_rate": 0.05},
    "forecast": {"enabled": False},
}


TO_A_LOSS = {
    "until_loss": 0.7,
    "max_steps": 600,
    "optimizer": {"type": "adamw", "learning_rate": 0.01},
    "forecast": {"enabled": True},
}


def trained(clock: Clock | None = None, events: list[Event] | None = None, **given: Any) -> HybridTrainer:
    """A trainer of a small module; every loss takes its time on the clock."""
    torch.manual_seed(0)
    optimizer = given.pop("own", None)
    model = nn.Linear(4, 1)
    goal = torch.tensor([[1.0], [-2.0], [0.5], [1.5]])

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if clock is not None:
            clock.now += clock.pace(clock.now)
        return ((model(batch) - batch @ goal) ** 2).mean() + 0.5

    built = optimizer(model) if optimizer else None
    usual = {name: value for name, value in SMALL.items() if name != "optimizer" or built is None}
    trainer = HybridTrainer(model, built, loss, Config(**{**usual, **given}))
    if events is not None:
        trainer.bus.subscribe(events.append)
    if clock is not None and trainer.targets is not None:
        trainer.targets.clock = clock
    return trainer


def rates(events: list[Event]) -> list[float]:
    return [event.learning_rate for event in events if isinstance(event, Progress)]


# --- times and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d 2h", 93600), ("1.5h", 5400), ("5 min", 300)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert Config(max_time=text).max_time == seconds


@pytest.mark.parametrize("text", ["", "h", "2", "2x", "1m1h", "1..5h", "-2h", "0s", "soon", "9" * 400 + "h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_time"):
        Config(max_time=text)


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf")])
def test_numbers_that_are_no_time_or_loss_are_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="max_time"):
        Config(max_time=number)
    if number not in (0, -1):
        with pytest.raises(ConfigError, match="until_loss"):
            Config(until_loss=number)


def test_max_time_alone_limits_no_steps_and_is_written_down_so(tmp_path: Path) -> None:
    alone = from_mapping({"max_time": "2h", "preset": "finetune"})
    assert not alone.steps_are_limited  # the preset's 300 steps are not the user's
    file = tmp_path / "config.toml"
    file.write_text(to_toml(alone))
    assert not load(file).config.steps_are_limited
    both = from_mapping({"max_time": "2h", "max_steps": 50})
    file.write_text(to_toml(both))
    assert load(file).config.steps_are_limited
    assert load(file).config == both
    told = length_in_words(alone), length_in_words(both), length_in_words(from_mapping({"until_loss": 3.2}))
    assert told == ("2h00m", "50 steps or 2h00m", "800 steps, until a held-out loss of 3.2000")


def test_growth_needs_to_know_the_steps() -> None:
    with pytest.raises(ConfigError, match="max_time does not say how many"):
        from_mapping({"max_time": "2h", "growth.layers": 2})
    assert from_mapping({"max_time": "2h", "growth.layers": 2, "max_steps": 100}).growth.stages


def test_compiling_is_weighed_by_the_time_there_is() -> None:
    work = Workload(blocks=12, parameters=124_000_000, trained=124_000_000, tokens=100_000, steps=800)
    assert weigh(work, from_mapping({"max_time": "2h"})).pays
    assert not weigh(work, from_mapping({"max_time": "1m"})).pays
    alone, limited = (weigh(work, from_mapping({"max_time": "2h"} | more)) for more in ({}, {"max_steps": 800}))
    assert (alone.eager, limited.eager < 300) == (7200, True)


def test_a_loop_of_ones_own_is_refused_in_one_sentence() -> None:
    for given in ({"max_time": 5}, {"until_loss": 1.0}):
        with pytest.raises(ConfigError, match=r"is for fit\(\)"):
            trained(**given).step(HELD_OUT[0])


# --- the plan of a decay ---------------------------------------------------------------------------------------------


def test_a_revised_decay_never_rises_and_ends_at_its_end() -> None:
    plan = DecayPlan(10, 100, 0.0, 200)
    for step, end in ((50, 400), (120, 300), (150, 180), (170, 500)):
        revised = plan.revised(step, 100, end)
        assert revised.at(step) == pytest.approx(plan.at(step))
        assert all(revised.at(now) <= revised.at(now + 1) for now in range(step, end))
        assert revised.at(end) == 1.0
        plan = revised
    assert DecayPlan(10, 100, 0.0, 200).revised(50, 300, 400).at(299) == 0.0


# --- by the clock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_a_run_ends_in_time_with_its_rate_decayed(kind: str) -> None:
    events: list[Event] = []
    clock = Clock()
    trainer = trained(clock, events, max_time=400, schedule={"type": kind}, log={"interval": 1})
    summary = trainer.fit(Endless(), HELD_OUT, progress=False)
    assert summary["reason"] == "finished"
    assert 396 <= clock.now <= 401
    told = rates(events)
    if kind == "constant":
        assert told == [0.05] * len(told)
        return
    assert told[-1] < 0.02 * 0.05
    top = told.index(max(told))
    assert 10 < top < 30  # 5 % of the steps, once the pace is known
    assert all(later <= earlier for earlier, later in zip(told[top:], told[top + 1 :], strict=False))
    if kind == "wsd":
        assert 0.65 < sum(rate == 0.05 for rate in told) / len(told) + top / len(told) < 0.75


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_machine_that_becomes_slower_or_faster_changes_the_steps_and_not_the_end(factor: float) -> None:
    events: list[Event] = []
    clock = Clock(lambda now: factor if now > 100 else 1.0)
    trained(clock, events, max_time=300, log={"interval": 1}).fit(Endless(), HELD_OUT, progress=False)
    assert 292 <= clock.now <= 303
    told = rates(events)
    assert told[-1] < 0.08 * 0.05
    assert (len(told) < 165) if factor > 1 else (len(told) > 700)


def test_slow_only_in_the_decay() -> None:
    events: list[Event] = []
    clock = Clock(lambda now: 5.0 if now > 240 else 1.0)
    trained(clock, events, max_time=300, log={"interval": 1}).fit(Endless(), HELD_OUT, progress=False)
    assert 290 <= clock.now <= 306
    told = rates(events)
    top = told.index(max(told))
    assert all(later <= earlier for earlier, later in zip(told[top:], told[top + 1 :], strict=False))
    assert told[-1] < 0.15 * 0.05  # some ten steps are left for the second half of the decay


def test_whichever_comes_first_ends_the_run() -> None:
    clock = Clock()
    few = trained(clock, max_time=10_000, max_steps=30).fit(Endless(), HELD_OUT, progress=False)
    assert few["global_step"] == 30
    clock = Clock()
    summary = trained(clock, max_time=100, max_steps=10_000).fit(Endless(), HELD_OUT, progress=False)
    assert summary["global_step"] < 100
    assert clock.now == pytest.approx(100, abs=2)
    assert summary["target"] == {"max_time": 100, "spent": pytest.approx(100, abs=2)}


def test_epochs_beside_a_time_limit_the_steps() -> None:
    batches = [torch.randn(8, 4) for _ in range(7)]
    assert trained(Clock(), max_time=1e30, epochs=2).fit(batches, HELD_OUT, progress=False)["global_step"] == 14


def test_what_steps_evaluations_and_saving_take_is_planned_for(tmp_path: Path) -> None:
    """A single loss takes as long in an evaluation: ten of these batches make evaluations dear."""
    clock = Clock()
    trained(clock, max_time=500).fit(Endless(), HELD_OUT * 10, progress=False, out=tmp_path / "run")
    assert 490 <= clock.now <= 501


def test_the_progress_says_the_end_as_an_estimate_and_the_time_left() -> None:
    events: list[Event] = []
    trained(Clock(), events, max_time=200, log={"interval": 1}).fit(Endless(), HELD_OUT, progress=False)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert (started.max_steps, started.planned) == (0, True)
    told = [event for event in events if isinstance(event, Progress)]
    assert told[0].planned_end is None
    middle = told[len(told) // 2]
    assert middle.planned_end == pytest.approx(len(told), rel=0.1)
    assert middle.seconds_left == pytest.approx(100, rel=0.15)


def test_ten_evaluations_and_five_checkpoints_by_the_clock(tmp_path: Path) -> None:
    events: list[Event] = []
    clock = Clock(lambda now: 0.2 if now < 100 else 2.0)  # most steps lie in the first quarter
    trained(clock, events, max_time=400).fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    assert 9 <= sum(isinstance(event, Evaluated) for event in events) <= 11


def test_a_time_that_is_over_before_the_first_step_is_refused() -> None:
    clock = Clock()
    clock.now = 7.0
    with pytest.raises(ConfigError, match=r"max_time = 5.0 s is over before the first step: the start took 7.0 s"):
        trained(clock, max_time=5).fit(Endless(), HELD_OUT, progress=False)


def test_a_rate_of_ones_own_is_left_alone_and_the_run_ends_in_time() -> None:
    events: list[Event] = []
    clock = Clock()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    trainer = trained(clock, events, max_time=100, own=sgd)
    trainer.fit(Endless(), HELD_OUT, progress=False)
    assert clock.now == pytest.approx(100, abs=2)
    assert set(rates(events)) == {0.01}
    assert any("learning rate is that of your own" in event.message for event in events if isinstance(event, Notice))


def test_a_scheduler_that_cannot_go_on_limits_the_steps() -> None:
    def made(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=25)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = HybridTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, batch: model(batch).square().mean(),
        Config(device="cpu", hybrid={"mode": "off"}, max_time=1000),
        scheduler=made,
    )
    assert trainer.fit(Endless(), HELD_OUT, progress=False)["global_step"] == 25


def test_a_resumed_run_goes_on_with_the_time_that_is_left(tmp_path: Path) -> None:
    clock, events = Clock(), []
    trainer = trained(clock, max_time=300)
    trainer.bus.subscribe(lambda event: trainer.stop() if isinstance(event, Progress) and clock.now > 120 else None)
    first = trainer.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    assert first["reason"] == "stopped early"
    again = trained(clock, events, max_time=300, log={"interval": 1})
    summary = again.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)
    assert clock.now == pytest.approx(300, abs=3)
    assert summary["global_step"] > first["global_step"] > 50
    assert rates(events)[-1] < 0.02 * 0.05
    over = trained(clock, max_time=300).fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)
    assert over["global_step"] == summary["global_step"]  # nothing was left


def test_more_time_for_a_finished_run_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    first = trained(clock, max_time=100).fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    longer = trained(clock, max_time=200)
    summary = longer.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)
    assert summary["global_step"] > first["global_step"] + 50
    assert clock.now == pytest.approx(200, abs=3)


def test_a_target_may_be_set_when_a_run_is_resumed(tmp_path: Path) -> None:
    trained(max_steps=20).fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    later = trained(Clock(), max_time=100, max_steps=40)
    assert later.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)["global_step"] == 40


def test_a_step_that_does_other_work_is_no_change_of_pace() -> None:
    """As a race of learning rates, which takes a third of the time in one step."""
    events: list[Event] = []
    seen: list[float] = []

    def pace(now: float) -> float:
        seen.append(now)
        return 100.0 if len(seen) == 50 else 1.0

    clock = Clock(pace)
    trained(clock, events, max_time=300, log={"interval": 1}).fit(Endless(), HELD_OUT, progress=False)
    assert clock.now == pytest.approx(300, abs=3)
    told = [event for event in events if isinstance(event, Progress)]
    after = [event.planned_end for event in told if 60 < event.step < 100]
    assert all(end is not None and 170 < end < 230 for end in after)
    assert told[-1].learning_rate < 0.02 * 0.05


@pytest.mark.parametrize("slow", [[60.0] * 5, [60.0, 40.0, 20.0, 8.0, 3.0]])
def test_slow_first_steps_do_not_decide_the_warm_up(slow: list[float]) -> None:
    steps = iter(slow)
    trainer = trained(Clock(lambda now: next(steps, 1.0)), max_time=1000, evaluation={"interval": 0})
    trainer.fit(Endless(), progress=False)
    assert trainer.targets is not None
    assert trainer.targets.plan.warmup == pytest.approx(0.05 * trainer.global_step, rel=0.2)


def test_a_steady_pace_is_believed_soon_and_another_one_later() -> None:
    deadline, clock = Deadline(1000), Clock()
    deadline.clock = clock
    deadline.begin(0)
    believed = {}
    for step in range(1, 40):
        clock.now += 5.0 if 4 <= step < 8 else 1.0
        deadline.look(step)
        believed[step] = deadline.steady, deadline.surely_steady
    assert [step for step, (steady, _) in believed.items() if not steady] == [1, 2, 3, 4, 8]
    assert min(step for step, (_, surely) in believed.items() if surely) == 21


def test_the_clock_survives_a_rollback() -> None:
    deadline, clock = Deadline(100), Clock()
    deadline.clock = clock
    deadline.begin(0)
    for step in (1, 2, 3, 4, 5, 6, 2, 3, 4):
        clock.now += 1
        if deadline.due(step):
            deadline.look(step)
            deadline.look_again(step, 100, 70)
    assert deadline.pace == pytest.approx(1.0)
    assert deadline.steps_in(10) == pytest.approx(10, abs=1)


def test_steps_that_were_made_before_do_not_refuse_a_run_by_the_clock(tmp_path: Path) -> None:
    trained(max_steps=20).fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("max_steps = 20")
    check_steps(tmp_path / "run", from_mapping({"max_time": "1h"}))
    with pytest.raises(ConfigError, match="nothing left to do"):
        check_steps(tmp_path / "run", from_mapping({"max_time": "1h", "max_steps": 5}))


# --- until a loss ----------------------------------------------------------------------------------------------------

TRUTH = FittedLaw.of(floor=2.0, scale=0.6, exponent=0.4, drop=0.21, learned=500.0)


def follow(goal: Goal, limit: int, noise: float = 0.0) -> tuple[list[str], int]:
    """Drive a goal by a law that it does not know: what was decided, and the last step."""
    drawn, told, usual = np.random.default_rng(0), [], DecayPlan(20, round(0.7 * limit), 0.0, limit)
    knots = {0: 0.0}
    for step in range(limit + 1):
        plan = goal.decay or usual
        knots[step] = goal._level(plan, step)
        if step < goal.next_evaluation and step < limit:
            continue
        real = RatePlan(max(1, step), np.array(list(knots)), np.array(list(knots.values())))
        before = goal.decay
        loss = TRUTH.loss_at(real, step) if step else 5.0
        goal.evaluated(step, loss * (1 + noise * drawn.standard_normal()), plan, limit)
        if goal.decay is not None and before is None:
            told.append(f"decay at {step}")
        if goal.decay is None and before is not None:
            told.append(f"above at {step}")
        if goal.met_at is not None:
            return told, step
    return told, limit


@pytest.mark.parametrize(("target", "noise"), [(2.75, 0.0), (2.6, 0.002), (2.45, 0.0)])
def test_the_decay_is_begun_so_that_the_goal_is_met(target: float, noise: float) -> None:
    goal = Goal(target, ScheduleConfig(), 0.0)
    told, _ = follow(goal, 4000, noise)
    assert goal.met_at is not None
    assert told[0].startswith("decay")
    assert goal.losses[-1] == pytest.approx(target, rel=0.01)
    shortest = next(
        length
        for length in range(50, 6000, 10)
        if TRUTH.loss_at(
            RatePlan(length, np.array([0, 20, 0.8 * length, length]), np.array([0.0, 1.0, 1.0, 0.0])), length
        )
        <= target
    )
    assert goal.met_at < 1.6 * shortest


def test_a_goal_that_cannot_be_met_is_left_to_the_limit() -> None:
    goal = Goal(1.5, ScheduleConfig(), 0.0)
    told, last = follow(goal, 800)
    assert (goal.met_at, last, told) == (None, 800, [])


def test_a_goal_is_forgotten_as_far_as_a_rollback_goes() -> None:
    goal = Goal(1.0, ScheduleConfig(), 0.0)
    plan = DecayPlan(0, 700, 0.0, 1000)
    for step in (10, 20, 30, 40, 25):
        goal.evaluated(step, 3.0 - step / 100, plan, 1000)
    assert goal.steps == [10, 20, 25]


@pytest.mark.parametrize(
    ("step", "decay", "copied"),
    [(299, None, 0), (310, DecayPlan(10, 300, 0.0, 375), 300), (340, DecayPlan(10, 330, 0.4, 400), 300)],
    ids=["before it", "before it was stretched", "after that"],
)
def test_a_decay_is_forgotten_as_far_as_a_rollback_goes(step: int, decay: DecayPlan | None, copied: int) -> None:
    goal = Goal(1.0, ScheduleConfig(), 0.0)
    goal.decay, goal.length, goal.tries, goal.copied = DecayPlan(10, 330, 0.4, 400), 75, 1, 300
    goal.steps, goal.losses, goal.next_evaluation = [100, 200, 300, 330, 350], [3.0, 2.0, 1.5, 1.4, 0.9], 360
    goal.knots, goal.met_at = [(10, 1.0), (100, 1.0), (200, 1.0), (300, 1.0), (330, 0.6), (350, 0.4)], 350
    goal.taken_back(step)
    assert (goal.decay, goal.tries, goal.copied) == (decay, int(decay is not None), copied)
    assert (goal.steps[-1] <= step, goal.knots[-1][0] <= step) == (True, True)
    assert (goal.next_evaluation, goal.met_at) == (step, None)


@pytest.mark.parametrize("losses", [[float("nan")] * 9, [float("inf")] * 9, [1e308, -1e308] * 5, [3.0] * 9, [0.0] * 9])
def test_losses_that_fit_no_law_decide_nothing_and_end_nothing(losses: list[float]) -> None:
    goal, plan = Goal(-1.7e308, ScheduleConfig(), 0.0), DecayPlan(2, 700, 0.0, 1000)
    for number, loss in enumerate(losses):
        goal.evaluated(10 * number, loss, plan, 1000)
    assert goal.met_at is None
    assert goal.next_evaluation > 10 * (len(losses) - 1)


def test_a_run_ends_at_its_loss_and_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    trainer = trained(None, events, until_loss=0.6, max_steps=2000)
    summary = trainer.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    assert summary["reason"] == "finished"
    assert 0.5 < summary["final_val_loss"] <= 0.6
    assert summary["target"]["met_at"] == summary["global_step"] < 2000
    assert [event.what for event in events if isinstance(event, Planned)][-1] == "met"
    again = trained(until_loss=0.6, max_steps=2000)
    over = again.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)
    assert over["global_step"] == summary["global_step"]


def test_a_loss_that_is_met_at_the_start_ends_the_run_there() -> None:
    events: list[Event] = []
    summary = trained(None, events, until_loss=100.0, max_steps=50).fit(Endless(), HELD_OUT, progress=False)
    assert (summary["global_step"], summary["reason"]) == (0, "finished")
    assert any(isinstance(event, Planned) and event.what == "met" for event in events)


def test_a_loss_below_what_is_possible_is_told_early_and_the_run_goes_to_its_limit() -> None:
    events: list[Event] = []
    summary = trained(None, events, until_loss=-3.0, max_steps=200).fit(Endless(), HELD_OUT, progress=False)
    assert summary["global_step"] == 200
    assert summary["target"]["met_at"] is None
    told = [event for event in events if isinstance(event, Planned) and event.what == "out of reach"]
    assert told[0].step <= 120  # the first losses fall so fast that nothing can be said of the end
    assert "within max_steps = 200" in told[0].text
    assert "steps would" in told[0].text


def test_a_loss_without_held_out_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="until_loss is a held-out loss"):
        trained(until_loss=0.6, max_steps=20).fit(Endless(), progress=False)


def test_patience_and_best_weights_do_not_count_what_only_a_target_asks_for(tmp_path: Path) -> None:
    """Losses that are measured for the target come often: patience of two would end the run long before."""
    events: list[Event] = []
    settings = {"interval": 100, "early_stopping_patience": 2}
    trainer = trained(None, events, until_loss=0.1, max_steps=300, evaluation=settings)
    trainer.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run")
    best = {event.step for event in events if isinstance(event, Evaluated) and event.best}
    assert best <= {100, 200, 300}
    assert sum(isinstance(event, Evaluated) for event in events) > 10


def test_both_targets_together() -> None:
    clock = Clock()
    summary = trained(clock, until_loss=0.1, max_time=100).fit(Endless(), HELD_OUT, progress=False)
    assert clock.now == pytest.approx(100, abs=4)
    assert summary["target"]["met_at"] is None
    clock = Clock()
    summary = trained(clock, until_loss=0.9, max_time=5000).fit(Endless(), HELD_OUT, progress=False)
    assert summary["target"]["met_at"] is not None
    assert clock.now < 4000


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[HybridTrainer, list[Event]]:
    events: list[Event] = []
    trainer = trained(None, events, **TO_A_LOSS)
    trainer.fit(Endless(), HELD_OUT, progress=False)
    return trainer, events


@pytest.mark.parametrize("stop", [90, 200, 270])
def test_a_run_to_a_loss_that_is_interrupted_ends_with_the_same_bits(
    tmp_path: Path, stop: int, uninterrupted: tuple[HybridTrainer, list[Event]]
) -> None:
    """What is decided depends on steps and losses alone, and is saved: before the decay, in it, and after it."""
    whole, told = uninterrupted
    assert [event.what for event in told if isinstance(event, Planned)] == ["decay", "above", "met"]
    first = trained(log={"interval": 1}, **TO_A_LOSS)
    halt = lambda event: first.stop() if isinstance(event, Progress) and event.step == stop else None  # noqa: E731
    first.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", callbacks=[halt])
    assert first.global_step == stop < whole.global_step
    rest: list[Event] = []
    second = trained(None, rest, **TO_A_LOSS)
    second.fit(Endless(), HELD_OUT, progress=False, out=tmp_path / "run", resume=True)
    assert second.global_step == whole.global_step
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    plans = [event for event in told if isinstance(event, Planned) and event.step > stop]
    assert plans == [event for event in rest if isinstance(event, Planned)]


def test_a_rate_that_is_found_decays_when_it_is_said_to_and_not_before_it_is_found() -> None:
    """What is seen while rates are tried belongs to steps that others may replace: it decides nothing."""
    events: list[Event] = []
    found = {"type": "adamw", "learning_rate": "auto"}
    given = {**TO_A_LOSS, "until_loss": 0.9, "optimizer": found, "log": {"interval": 1}}
    trainer = trained(None, events, **given)
    assert trainer.race is not None
    trainer.race.begin_with(0.002, "the test")
    noted: list[int] = []

    def follow(event: Event) -> None:
        if trainer.racing and trainer.targets is not None and trainer.targets.goal is not None:
            noted.append(len(trainer.targets.goal.steps) + trainer.targets.goal.copied)

    summary = trainer.fit(Endless(), HELD_OUT, progress=False, callbacks=[follow])
    assert noted
    assert not any(noted)
    assert summary["learning_rate"]["chosen"] != 0.002
    decay = next(event for event in events if isinstance(event, Planned) and event.what == "decay")
    rates = {event.step: event.learning_rate for event in events if isinstance(event, Progress)}
    before = [rates[step] for step in range(decay.step - 50, decay.step + 1)]
    assert before == [pytest.approx(summary["learning_rate"]["chosen"])] * len(before)
    after = [rates[step] for step in range(decay.step + 1, trainer.global_step + 1)]
    assert len(after) > 5
    assert all(earlier > later for earlier, later in pairwise(after))
    assert after[-1] < 0.9 * before[-1]
