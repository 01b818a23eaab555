"""Forecasts of the end in a real run: when they come, that they are saved, and what finished runs beside it are for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from foretrain import Bus, HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.events import Evaluated, Event, LossForecasted, Notice, RatesPlanned
from foretrain.forecast.records import LossForecast
from foretrain.forecast.stored import run_from_summary
from foretrain.loop.forecaster import kind_of

STEPS = 60
PLAIN = {"max_steps": STEPS, "hybrid.mode": "off", "evaluation.interval": 3, "health.interval": 0, "log.report": False}


def rows(seed: int, count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(x[:, :2] * 2) + x[:, 2:4]


BATCHES = [rows(seed) for seed in range(10)]
HELD_OUT = [rows(100, 64)]


def trainer(changes: dict[str, Any] | None = None, **options: Any) -> tuple[HybridTrainer, list[Event]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    made = HybridTrainer(
        model,
        options.pop("optimizer", None),
        supervised(F.mse_loss),
        from_mapping({**PLAIN, **(changes or {})}),
        bus=bus,
        **options,
    )
    return made, events


def run(changes: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], list[Event]]:
    fitted = {name: options.pop(name) for name in ("out", "resume", "on_interrupt") if name in options}
    made, events = trainer(changes, **options)
    return made.fit(BATCHES, HELD_OUT, progress=False, **fitted), events


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, Any], list[Event]]:
    return run()


def test_the_end_is_forecast_after_evaluations_from_a_tenth_on(whole: tuple[dict[str, Any], list[Event]]) -> None:
    summary, events = whole
    made = of(events, LossForecasted)
    assert made[0].step >= STEPS / 10
    assert made[-1].step < STEPS
    assert {event.step for event in made} <= {event.step for event in of(events, Evaluated)}
    for event in made:
        assert event.end == STEPS
        assert event.low <= event.loss <= event.high
        assert event.level == 0.8
        assert not event.calibrated
        assert event.path[-1] == (STEPS, *(round(number, 6) for number in (event.loss, event.low, event.high)))
        assert all(event.step < place[0] <= STEPS for place in event.path)
    told = summary["loss_forecast"]
    assert told["made"] == [[event.step, event.loss, event.low, event.high, event.end] for event in made]
    assert told["ended"]
    assert [check["share"] for check in told["checks"]] == [0.25, 0.5, 0.75]
    for check in told["checks"]:
        assert check["step"] <= check["share"] * STEPS
        assert check["held"] == (check["low"] <= summary["final_val_loss"] <= check["high"])
        truth = summary["final_val_loss"]
        assert check["error_percent"] == pytest.approx(100 * (check["loss"] - truth) / truth)
    assert run_from_summary(json.loads(json.dumps(summary))) is not None


def test_the_plan_is_told_once_and_is_that_of_the_run(whole: tuple[dict[str, Any], list[Event]]) -> None:
    (plan,) = of(whole[1], RatesPlanned)
    assert (plan.step, plan.total_steps) == (0, STEPS)
    assert plan.rates[-1] == 0
    assert max(plan.rates) == 1
    assert "Sequential" in plan.kind


def test_a_summary_tells_no_plan() -> None:
    made, events = trainer()
    made.fit(BATCHES, HELD_OUT, progress=False)
    made.engine.end_at(2 * STEPS)
    before = len(events)
    assert made.summary()["loss_forecast"]["curve"]["total_steps"] == 2 * STEPS
    assert len(events) == before


def test_few_evaluations_are_helped_by_training_losses() -> None:
    _, events = run({"evaluation.interval": 6, "log.interval": 1})
    assert of(events, LossForecasted)[0].step == 12  # three evaluations are not there; that of step 6 is too wide


def test_an_interval_that_could_be_anywhere_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may reach above the highest loss by what all losses lie apart, and no farther."""
    made, events = trainer({"max_steps": 100})
    forecaster = made.forecaster
    assert forecaster is not None
    forecaster.begin("kind", None)
    told = LossForecast(100, 1.0, 0.2, 7.9, 0.8, "law", calibrated=False)
    monkeypatch.setattr("foretrain.loop.forecaster.forecast", lambda *_, **__: told)
    for step, loss in ((20, 5.0), (40, 2.0), (60, 1.5), (80, 1.4)):
        made.engine.progress.global_step = step
        if step == 80:
            told = replace(told, high=8.7)  # above 5.0 and the 3.6 between 5.0 and 1.4
        forecaster.evaluated(loss)
    assert [event.step for event in of(events, LossForecasted)] == [40, 60]
    assert forecaster.last is None


def test_a_run_with_two_evaluations_is_of_use_to_later_ones_too() -> None:
    summary, events = run({"evaluation.interval": 30, "log.interval": 1})
    assert not [event for event in of(events, Notice) if "forecast" in event.message]
    assert [event.step for event in of(events, LossForecasted)] == [30]
    assert summary["loss_forecast"]["finished"]["residuals"]


def test_nothing_is_forecast_without_held_out_data_or_evaluations() -> None:
    made, events = trainer()
    summary = made.fit(BATCHES, progress=False)
    assert not of(events, LossForecasted)
    assert not of(events, RatesPlanned)
    assert summary["loss_forecast"] is None
    assert not of(run({"evaluation.interval": 0})[1], LossForecasted)


def test_a_loss_that_is_no_number_is_passed_over() -> None:
    made, events = trainer({"max_steps": 100})
    forecaster = made.forecaster
    assert forecaster is not None
    forecaster.begin("kind", None)
    for step in range(1, 40):
        made.engine.progress.global_step = step
        forecaster.evaluated(math.nan if step % 2 else 2 + 1 / step)
    found = of(events, LossForecasted)
    assert found[0].step == 10  # there were enough losses before, but not a tenth of the run
    assert all(event.step % 2 == 0 for event in found)


def test_a_run_that_is_resumed_forecasts_the_same(whole: tuple[dict[str, Any], list[Event]], tmp_path: Path) -> None:
    def stop_at_31(event: Event) -> None:
        if isinstance(event, Evaluated) and event.step == 30:
            made.stop()

    made, first = trainer({"checkpoint.interval": 30})
    made.fit(BATCHES, HELD_OUT, progress=False, out=tmp_path / "run", callbacks=[stop_at_31])
    (tmp_path / "run" / "summary.json").unlink()
    summary, second = run({"checkpoint.interval": 30}, out=tmp_path / "run", resume=True)
    assert [e for e in of(first, LossForecasted) if e.step <= 30] + of(second, LossForecasted) == of(
        whole[1], LossForecasted
    )
    assert summary["loss_forecast"] == whole[0]["loss_forecast"]


def test_a_rollback_takes_evaluations_and_forecasts_back() -> None:
    made, _ = trainer({"max_steps": 100})
    forecaster = made.forecaster
    assert forecaster is not None
    forecaster.begin("kind", None)
    for step in (*range(5, 60, 5), 30):
        made.engine.progress.global_step = step
        forecaster.trained(step, 3.0)
        forecaster.evaluated(2 + 1 / step)
    assert [step for step, _ in forecaster.evaluations] == [5, 10, 15, 20, 25, 30]
    assert [one[0] for one in forecaster.made] == sorted({one[0] for one in forecaster.made})
    assert forecaster.made[-1][0] == 30
    assert [step for step, _ in forecaster.training] == [2.5, 7.5, 12.5]  # they help up to the third evaluation


def test_forecasts_for_another_length_are_not_judged_by_the_end_of_this_one(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    summary, _ = run({"max_steps": 2 * STEPS}, out=tmp_path / "run", resume=True)
    told = summary["loss_forecast"]
    assert {one[4] for one in told["made"]} == {STEPS, 2 * STEPS}
    assert [(check["share"], check["step"] > STEPS) for check in told["checks"]] == [(0.75, True)]


def test_a_run_that_met_its_goal_ends_there_and_is_of_use_to_later_ones(tmp_path: Path) -> None:
    summary, _ = run({"max_steps": 400, "until_loss": 0.6}, out=tmp_path / "run")
    told, end = summary["loss_forecast"], summary["global_step"]
    assert summary["target"]["met_at"] == end < 400
    assert (told["ended"], told["checks"]) == (True, [])
    assert told["finished"]["residuals"]
    stored = run_from_summary(json.loads(json.dumps(summary)))
    assert stored is not None
    assert stored.curve.plan.total_steps == stored.curve.plan.steps[-1] == stored.curve.steps[-1] == end
    assert stored.curve.plan.multipliers[0] == 0  # the warm-up


def test_finished_runs_beside_it_are_found_and_a_resumed_run_keeps_to_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(out=tmp_path / name)
    run({"schedule.type": "constant"}, out=tmp_path / "other-schedule")
    made, _ = trainer()
    summary = made.fit(BATCHES, HELD_OUT, progress=False, out=tmp_path / "three")
    assert (summary["loss_forecast"]["siblings"], summary["loss_forecast"]["own_finished_runs"]) == (2, 3)
    state = made.state_dict()
    again, _ = trainer()
    again.load_state_dict(state)
    assert again.forecaster is not None
    again.forecaster.begin("kind", tmp_path / "elsewhere" / "x")
    assert len(again.forecaster.siblings) == 2
    assert len(again.forecaster.history.runs) == 3


def test_a_scheduler_of_the_users_own_is_known_unless_it_watches_the_loss() -> None:
    def known(make: Callable[[Any], Any]) -> bool:
        _, events = run(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), scheduler=make)
        assert of(events, LossForecasted)
        return bool(of(events, RatesPlanned)[0].steps)

    assert known(lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS))
    assert not known(lr_scheduler.ReduceLROnPlateau)


def test_data_of_which_nothing_can_be_seen_makes_no_kind() -> None:
    made, _ = trainer()
    sparse = torch.eye(3).to_sparse()
    assert kind_of(made.engine, "net", "", [(sparse, sparse)]) == ""
    assert kind_of(made.engine, "net", "", [["a text"]]) == ""
    assert "data 0123" in kind_of(made.engine, "net", "0123", [["a text"]])


def test_a_plan_is_saved_to_the_last_bit() -> None:
    made, _ = trainer(
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01), scheduler=lambda one: lr_scheduler.StepLR(one, 7, 0.3)
    )
    assert made.forecaster is not None
    made.engine.end_at(STEPS)
    made.forecaster.begin("kind", None)
    plan, saved = made.forecaster._plan, made.forecaster.state_dict()
    made.forecaster.load_state_dict(saved)
    assert made.forecaster._plan is not plan
    assert made.forecaster.state_dict() == saved


def test_other_held_out_data_makes_another_kind() -> None:
    first, second = trainer(), trainer()
    first[0].fit(BATCHES, HELD_OUT, progress=False)
    second[0].fit(BATCHES, [rows(101, 64)], progress=False)
    assert of(first[1], RatesPlanned)[0].kind != of(second[1], RatesPlanned)[0].kind


def test_a_forecast_that_fails_is_told_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr("foretrain.loop.forecaster.forecast", fail)
    monkeypatch.setattr("foretrain.loop.forecaster.finished", fail)
    summary, events = run()
    assert summary["reason"] == "finished"
    (notice,) = (event for event in of(events, Notice) if "cannot be forecast" in event.message)
    assert "by chance" in notice.message
