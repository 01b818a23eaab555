"""Forecasts are scored on what followed them, by vectors kept by hand; state goes on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretrain.engine.step import StepOutput
from foretrain.motion.observer import Moment, Observer
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.records import HORIZONS_IN_WINDOWS, LAST_WINDOW, PhaseRecord, WindowRecord
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.codec import put_together, snapshot, take_apart

WINDOW = 4


class Recording(Predictor):
    """Repeats the last window; keeps all it was told and all it said."""

    name = "recording"

    def __init__(self) -> None:
        self.told: list[tuple[Situation, list[Followed]]] = []
        self.said: list[Forecast] = []

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        coefficients = np.zeros((len(horizons), *situation.gram.shape[:2]))
        coefficients[:, :, LAST_WINDOW] = np.asarray(horizons)[:, None] / situation.window
        loss = situation.loss - 0.01 * np.asarray(horizons)
        self.said.append(Forecast(tuple(horizons), coefficients, loss, np.full(len(horizons), 0.1)))
        return self.said[-1]

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.told.append((situation, list(followed)))

    def reset(self) -> None:
        self.told.clear()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Watched:
    """Weights that move as told, under an observer."""

    def __init__(self, predictor: Predictor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(6, 5, generator=generator)), nn.Parameter(torch.zeros(7))]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.predictor = predictor or Recording()
        trajectory = Trajectory(self.parameters, ["w", "b"], window=WINDOW)
        self.observer = Observer(trajectory, self.predictor, self.parameters, self.optimizer)
        self.draw = torch.Generator().manual_seed(1)
        self.step_number = 0
        self.weights: list[list[Tensor]] = [self.copy()]
        """At the end of each window."""
        self.records: list[WindowRecord] = []

    def copy(self) -> list[Tensor]:
        return [p.detach().clone().double() for p in self.parameters]

    def step(self, loss: float = 2.0, norm: float = 1.0, skipped: float = 0.0) -> WindowRecord | None:
        observer = self.observer
        observer.before_step()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=self.draw) - 0.5
                parameter.sub_(parameter.grad, alpha=0.1)
        self.step_number += 1
        output = StepOutput(torch.tensor(loss), torch.tensor(norm), torch.tensor(skipped))
        observer.after_step(output)
        if not observer.complete:
            return None
        phase = PhaseRecord("full", 1, 0, 1)
        observer.measure(Moment(self.step_number, 400, self.step_number, 0.1, 0.1, phase, 0.5, 0.5))
        record = observer.learn()
        self.weights.append(self.copy())
        self.records.append(record)
        return record

    def windows(self, count: int) -> Watched:
        for number in range(count * WINDOW):
            self.step(loss=3.0 - 0.01 * (self.step_number + number % 2))
        return self


def test_a_window_is_told_of_once_and_as_it_was() -> None:
    run = Watched()
    assert [run.step(loss) is not None for loss in (4.0, 3.0, 2.0, 1.0)] == [False, False, False, True]
    record = run.records[0]
    assert record.losses == (4.0, 3.0, 2.0, 1.0)
    assert record.gradient_norms == (1.0,) * 4
    assert record.step == 4
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(run.weights[1], run.weights[0], strict=True)))
    assert record.displacement_norm == pytest.approx(moved, rel=1e-5)
    length = math.sqrt(sum(float(w.square().sum()) for w in run.weights[1]))
    assert record.weight_norm == pytest.approx(length, rel=1e-5)


def test_cosines_are_those_of_successive_displacements() -> None:
    run = Watched().windows(3)
    flat = [torch.cat([p.flatten() for p in weights]) for weights in run.weights]
    last, before = flat[3] - flat[2], flat[2] - flat[1]
    expected = float(last @ before / last.norm() / before.norm())
    assert run.records[2].cosines[LAST_WINDOW] == pytest.approx(expected, rel=1e-4)
    assert run.records[0].cosines == (0.0,) * 4


def test_a_forecast_is_scored_by_what_followed_it_and_nothing_else() -> None:
    """Displacements taken by hand from the weights at the ends of windows."""
    run = Watched().windows(20)
    assert isinstance(run.predictor, Recording)
    flat = [[p.flatten() for p in weights] for weights in run.weights]
    seen = set()
    for end, (_, followed) in enumerate(run.predictor.told, start=1):
        for item in followed:
            windows = item.horizon // WINDOW
            begin = end - windows
            assert item.situation.step == begin * WINDOW  # made before what it is scored on
            seen.add(windows)
            for group in range(2):
                after = flat[end][group] - flat[begin][group]
                last = flat[begin][group] - flat[begin - 1][group]
                assert item.square[group] == pytest.approx(float(after @ after), rel=1e-4)
                assert item.dots[group, LAST_WINDOW] == pytest.approx(float(after @ last), rel=1e-3, abs=1e-4)
    assert seen == set(HORIZONS_IN_WINDOWS)


def test_every_window_scores_the_forecast_made_before_it() -> None:
    """One of one window each, from the second window on; longer ones while a basis is frozen."""
    run = Watched().windows(20)
    counts = {windows: tally.count for windows, tally in run.observer.quality.tallies.items()}
    assert counts[1] == 19
    assert counts[8] == 2


def test_scoring_comes_before_learning() -> None:
    """A predictor that learns the answer by heart must not be scored after having been told it."""

    class Cheat(Recording):
        def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
            made = super().forecast(situation, horizons)
            for _, followed in self.told[-1:]:
                for item in followed:
                    made.coefficients[:] = item.target()
            return made

    run = Watched(Cheat()).windows(30)
    assert run.observer.quality.r2(1) < 0.9


def test_smoothed_loss_follows_the_losses() -> None:
    run = Watched()
    smoothed = math.nan
    for number in range(3 * WINDOW):
        loss = 3.0 - 0.1 * number
        smoothed = loss if math.isnan(smoothed) else smoothed + (loss - smoothed) / 16
        run.step(loss=loss)
    assert run.observer.smoothed_loss == pytest.approx(smoothed, rel=1e-5)


def test_predicted_loss_is_what_was_said_a_window_ago() -> None:
    run = Watched().windows(5)
    assert isinstance(run.predictor, Recording)
    assert run.observer.predicted_loss == run.predictor.said[-2].loss[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_no_numbers(bad: float) -> None:
    run = Watched().windows(2)
    before = run.observer.smoothed_loss
    for index in range(WINDOW):
        run.step(loss=bad if index == 1 else before, norm=bad, skipped=1.0 if index == 1 else 0.0)
    assert math.isnan(run.records[-1].losses[1])
    assert run.observer.smoothed_loss == pytest.approx(before)
    assert math.isfinite(run.observer.smoothed_loss)
    state = run.observer.situation
    assert state is not None
    assert np.isfinite(state.state).all()
    run.windows(2)
    assert np.isfinite(run.observer.situation.state).all()


def test_a_whole_window_without_a_number() -> None:
    run = Watched()
    for _ in range(2 * WINDOW):
        run.step(loss=math.nan, norm=math.nan, skipped=1.0)
    assert math.isnan(run.observer.smoothed_loss)
    run.windows(2)
    assert math.isfinite(run.observer.smoothed_loss)


def test_weights_that_are_no_numbers_are_not_scored() -> None:
    run = Watched().windows(3)
    before = run.observer.quality.state_dict()
    with torch.no_grad():
        run.parameters[0][0, 0] = math.nan
    run.windows(1)
    assert run.observer.quality.state_dict() == before
    assert run.observer.scored == []


# --- restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, WINDOW - 1])
def test_a_restart_drops_pending_forecasts_and_opens_a_window_here(steps: int) -> None:
    run = Watched().windows(3)
    for _ in range(steps):
        run.step()
    with torch.no_grad():
        run.parameters[0].add_(5.0)  # a move
    run.observer.restart()
    assert run.observer.forecast is None
    assert run.observer.situation is None
    begin = run.copy()
    before = run.observer.quality.state_dict()
    told = len(run.predictor.told)
    run.windows(1)
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(run.copy(), begin, strict=True)))
    assert run.records[-1].displacement_norm == pytest.approx(moved, rel=1e-5)
    assert len(run.records[-1].losses) == WINDOW
    assert run.observer.quality.state_dict() == before
    assert run.predictor.told[told][1] == []
    run.windows(1)
    assert run.observer.quality.tallies[1].count == before["tallies"][1]["count"] + 1


def test_no_horizon_reaches_across_a_move() -> None:
    run = Watched().windows(3)
    with torch.no_grad():
        run.parameters[0].add_(1000.0)
    run.observer.restart()
    run.windows(10)
    for _, followed in run.predictor.told:
        for item in followed:
            assert item.square.sum() < 1000.0


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [0, 1, 3, WINDOW, 2 * WINDOW, 5 * WINDOW + 2, 8 * WINDOW, 9 * WINDOW, 17 * WINDOW + 3]
)
def test_state_goes_on_bit_for_bit(steps: int) -> None:
    """Also right after a basis was frozen, and in the middle of a window."""
    whole = Watched(LinearPredictor(1.0, 0.97))
    half = Watched(LinearPredictor(1.0, 0.97))
    for number in range(steps):
        whole.step(loss=3.0 - 0.01 * number)
        half.step(loss=3.0 - 0.01 * number)
    state = put_together(
        snapshot({"observer": half.observer.state_dict(), "predictor": half.observer.predictor.state_dict()})
    )
    resumed = Watched(LinearPredictor(1.0, 0.97))
    with torch.no_grad():
        for mine, theirs in zip(resumed.parameters, half.parameters, strict=True):
            mine.copy_(theirs)
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
    resumed.draw.set_state(half.draw.get_state())
    resumed.step_number = half.step_number
    resumed.observer.load_state_dict(state["observer"])
    resumed.observer.predictor.load_state_dict(state["predictor"])
    for number in range(steps, steps + 12 * WINDOW):
        loss = 3.0 - 0.01 * number
        one, other = whole.step(loss), resumed.step(loss)
        assert repr(one) == repr(other)
        mine, theirs = take_apart(whole.observer.state_dict()), take_apart(resumed.observer.state_dict())
        assert mine.tree == theirs.tree, number
        assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors), number
