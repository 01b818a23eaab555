"""What leaps were worth where the loss is exact: on the low side, in words, and nothing where nothing was kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.hybrid.exact_gain import ExactGain, Point
from foretrain.motion.losses import WindowLosses
from foretrain.motion.records import WindowRecord


def slope_of(pace: float, windows: int = 3, start: float = 1.0) -> WindowLosses:
    """A loss that falls by this share per step."""
    slope, step = WindowLosses(), 0
    for _ in range(windows):
        slope.add(tuple(start * math.exp(-pace * (step + index)) for index in range(10)))
        step += 10
    return slope


def window(losses: tuple[float, ...], step: int, share: float = 1.0) -> WindowRecord:
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(WindowRecord)), 0.0)
    return WindowRecord(**values | {"step": step, "losses": losses, "rate_share": share})


def kept(pace: float = 0.01, end: float = 0.1, chained: str = "quasi-Newton") -> ExactGain:
    gain = ExactGain()
    gain.kept(Point(1.0, 40, passes=40), end, Point(end, 145, 2.5, 150), slope_of(pace), 100, chained)
    return gain


def test_a_fall_is_worth_what_the_optimizer_alone_would_have_needed() -> None:
    gain = kept()
    assert gain.worth == pytest.approx(math.log(10) / 0.01)
    told = gain.summary()
    assert told is not None
    assert (told["loss"], told["step"], told["seconds"], told["trend_steps"]) == (0.1, 145, 2.5, 230)
    assert told["sentence"] == (
        "Quasi-Newton leaps took the training loss from 1.0000 (step 40) to 0.1000 (step 145, 2.5 s); at the pace of "
        "the optimizer's own steps just before them that would have taken some 230 steps, here it took 110 gradients"
    )


def test_leaps_that_cost_more_than_a_gradient_count_what_they_cost() -> None:
    gain = ExactGain()
    now = Point(1e-6, 645, 2.5, passes=150)
    gain.kept(Point(1.0, 40, passes=40), 1e-6, now, slope_of(0.01), 600, "linearised", beyond=500)
    assert gain.worth == pytest.approx(math.log(1e6) / 0.01)
    told = gain.summary()
    assert told is not None
    assert (told["gradients"], told["cost_steps"], told["leaps"]) == (110, 610, "linearised")
    assert told["sentence"].endswith("would have taken some 1,300 steps, here it counts as 610 steps")


def test_leaps_that_cost_more_than_they_were_worth_are_no_gain() -> None:
    gain = ExactGain()
    now = Point(0.1, 645, 2.5, passes=150)
    gain.kept(Point(1.0, 40, passes=40), 0.1, now, slope_of(0.01), 600, "linearised", beyond=500)
    assert gain.sentence() == (
        "Linearised leaps took the training loss from 1.0000 (step 40) to 0.1000 (step 645, 2.5 s); how many steps the "
        'optimizer alone would have taken is not known: compare with hybrid.mode = "off"'
    )


def test_a_leap_counts_a_few_steps_at_the_most() -> None:
    gain = kept(pace=1e-6)
    assert gain.worth == 500
    assert "more than 500 steps" in gain.sentence()


def test_where_the_optimizer_no_longer_lowers_the_loss_there_is_no_number() -> None:
    gain = kept(pace=-0.01)
    told = gain.summary()
    assert told is not None
    assert told["trend_steps"] is None
    assert told["sentence"].endswith("the optimizer's own steps just before them no longer lowered it")


def test_a_fall_that_took_as_long_as_without_is_no_gain() -> None:
    gain = kept(pace=0.1)
    told = gain.summary()
    assert told is not None
    assert told["trend_steps"] is None
    assert told["sentence"] == (
        "The training loss came down to 0.1000 (step 145, 2.5 s); on the way quasi-Newton leaps lowered it by a factor "
        "of 10, which is not shown to have saved steps"
    )


def test_a_leap_counts_one_step_where_the_optimizer_had_stopped() -> None:
    assert kept(pace=-0.01).worth == 100
    assert kept(pace=-0.01, chained="").worth == 0


def test_the_faster_pace_counts() -> None:
    slope = slope_of(0.01)
    slope.last_log_fall = 0.02
    gain = ExactGain()
    gain.kept(Point(1.0), 0.1, Point(0.1, 10), slope, 100, "quasi-Newton")
    assert gain.worth == pytest.approx(math.log(10) / 0.02)


def test_while_the_rate_warms_up_the_pace_is_that_at_its_peak() -> None:
    gain = ExactGain()
    gain.watched(window((1.0,), 10, share=0.2), 0.0, 10)
    gain.watched(window((0.9,), 20, share=0.5), 0.0, 20)
    gain.kept(Point(1.0), 0.1, Point(0.1, 10), slope_of(0.01), 100, "quasi-Newton")
    assert gain.worth == pytest.approx(math.log(10) / 0.02)


def test_what_later_moves_add_to_little_is_told_beside_the_best_point() -> None:
    gain = kept()
    gain.kept(Point(0.1, 500, passes=600), 0.099, Point(0.099, 520, 9.0, 700), slope_of(0.1), 20, "quasi-Newton")
    told = gain.summary()
    assert told is not None
    assert (told["loss"], told["step"], told["lowest_loss"], told["lowest_step"]) == (0.1, 145, 0.099, 520)
    assert told["sentence"].endswith("; the lowest was 0.09900 (step 520, 9.0 s)")


def test_the_optimizer_may_come_lower_by_itself() -> None:
    gain = kept(pace=0.1)
    gain.watched(window((0.2, math.nan, 0.05), 200), 4.0, 220)
    assert (gain.lowest, gain.by_moves) == (Point(0.05, 200, 4.0, 220), False)
    assert "came down to 0.05000 (step 200, 4.0 s)" in gain.sentence()


def test_a_loss_below_zero_goes_by_its_fall() -> None:
    slope = WindowLosses()
    slope.add((-1.0, -1.5, -2.0))
    gain = ExactGain()
    gain.kept(Point(-2.0), -22.0, Point(-22.0, 30, 1.0, 10), slope, 100, "quasi-Newton")
    assert gain.worth == pytest.approx(40.0)
    assert "some 40 steps" in gain.sentence()


def test_single_leaps_by_forecast() -> None:
    gain = kept(chained="")
    assert gain.sentence().startswith("A leap took the training loss from")
    assert "just before it" in gain.sentence()


def test_nothing_is_said_where_nothing_was_kept() -> None:
    gain = ExactGain()
    gain.watched(window((1.0, 0.5), 10), 1.0, 10)
    assert gain.summary() is None


def test_state_comes_back() -> None:
    gain, other = kept(), ExactGain()
    gain.watched(window((0.2, 0.05), 200, share=0.5), 4.0, 220)
    other.load_state_dict(gain.state_dict())
    assert other.state_dict() == gain.state_dict()
    assert other.summary() == gain.summary()


# --- a run ---------------------------------------------------------------------------------------------------------


def poisson(model: nn.Module, points: Tensor) -> Tensor:
    """-u'' = pi^2 sin(pi x) between 0 and 1, 0 at both ends."""
    points = points.clone().requires_grad_(True)
    solution = model(points)
    (slope,) = torch.autograd.grad(solution.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), points, create_graph=True)
    ends = model(torch.tensor([[0.0], [1.0]]))
    return (bend + torch.pi**2 * torch.sin(torch.pi * points)).square().mean() + 10 * ends.square().mean()


def network(mode: str = "leap", steps: int = 150, decay: float = 0.0) -> HybridTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=decay)
    config = from_mapping(
        {"device": "cpu", "max_steps": steps, "hybrid.mode": mode, "schedule.type": "constant", "health.interval": 0}
    )
    return HybridTrainer(model, optimizer, poisson, config)


POINTS = torch.linspace(0, 1, 32)[:, None]


def test_a_physics_informed_network_says_what_its_leaps_were_worth() -> None:
    """And the optimizer alone really needs more steps than that."""
    summary = network().fit([POINTS], progress=False)
    told = summary["exact"]
    assert told["sentence"].startswith("Quasi-Newton leaps took the training loss from")
    assert told["trend_steps"] > told["gradients"]
    assert 0 < told["step"] <= 150
    assert 0 < told["seconds"] <= summary["seconds"]
    plain = network("off", steps=1000)
    steps = 0
    while steps < told["trend_steps"] and plain.step(POINTS).loss > told["loss"]:
        steps += 1
    assert steps >= told["trend_steps"]
    assert "not measured" in summary["audit"]["sentence"]
    assert "it cost" not in summary["audit"]["sentence"]


def test_a_run_that_kept_no_move_says_nothing() -> None:
    assert network(steps=15).fit([POINTS], progress=False)["exact"] is None
