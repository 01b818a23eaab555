"""The policy: what was measured goes in, what to do next comes out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foretrain.config import from_mapping
from foretrain.engine.step import StepOutput
from foretrain.events import Phase
from foretrain.health.act import Action, Kind, Outcome
from foretrain.hybrid.account import account_of
from foretrain.hybrid.cycle import View
from foretrain.hybrid.deliberation import Deliberation
from foretrain.hybrid.judges.exact import Exact
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.judges.worth import Worth
from foretrain.hybrid.ledger import Audit
from foretrain.hybrid.plan import Decision, Plan
from foretrain.motion.observer import Moment, Observer
from foretrain.motion.predictors.base import Forecast
from foretrain.motion.predictors.momentum import MomentumPredictor
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.codec import put_together, snapshot, take_apart

WINDOW = 5
SETTINGS: dict[str, Any] = {
    "max_steps": 1000,
    "device": "cpu",
    "hybrid.warmup_steps": 40,
    "hybrid.full_steps": 10,
    "hybrid.window_steps": WINDOW,
    "hybrid.max_predict_steps": 20,
    "audit.time_budget": 0.1,
}


class Flight:
    """A policy over weights that fall along a straight line, exactly or under noise."""

    def __init__(self, noise: float = 0.0, kind: str = "full weights", **settings: Any) -> None:
        changed = {name.replace("__", "."): value for name, value in settings.items()}
        self.config = from_mapping({**SETTINGS, **changed})
        self.parameters = [nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(4))]
        optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        trajectory = Trajectory(self.parameters, window=WINDOW)
        predictor = MomentumPredictor()
        self.observer = Observer(trajectory, predictor, self.parameters, optimizer)
        self.policy = Deliberation(self.config, self.observer, kind)
        self.noise, self.step = noise, 0
        self.draw = torch.Generator().manual_seed(0)
        self.actions: list[Action] = []

    def full(self, loss: float | None = None, norm: float = 1.0) -> bool:
        """A full step; True at the end of a window, after everything was decided."""
        policy, observer = self.policy, self.observer
        observer.before_step()
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter) + self.noise * torch.randn(parameter.shape, generator=self.draw)
            parameter.data.sub_(parameter.grad, alpha=0.1 * 0.99**self.step)
        self.step += 1
        if loss is None:
            loss = 1.0 + 4 * 0.995**self.step + 0.02 * self.noise * float(torch.randn((), generator=self.draw))
        policy.count(1, policy.cycle.phase)
        skipped = float(not math.isfinite(loss))
        observer.after_step(StepOutput(torch.tensor(loss), torch.tensor(norm), torch.tensor(skipped)))
        if not observer.complete:
            return False
        total = self.config.max_steps
        moment = Moment(
            self.step, total, self.step, 0.1, 0.1, policy.phase_record(), 0.5, policy.appraiser.current_confidence
        )
        observer.measure(moment)
        record = observer.learn()
        self.actions += policy.watch(record, same_batch=self.noise == 0, fp16=False)
        policy.decide(self.step, total - self.step, trend=0)
        return True

    def until(self, phase: Phase, most: int = 300) -> Flight:
        while self.policy.cycle.phase is not phase:
            self.full()
            assert self.step < most, self.policy.last_reason
        return self

    def steps(self, count: int) -> Flight:
        for _ in range(count):
            self.full()
        return self


def audit(gain: float, horizon: int = 10) -> Audit:
    return Audit(100, horizon, 1.0, 1.1, gain, 0.1)


def judged(flight: Flight, kept: bool, worth: float = 5.0, cost: float = 2.0, found: Audit | None = None) -> Plan:
    """The move that the policy decided for, made and judged."""
    policy = flight.policy
    plan = policy.plan()
    policy.cycle.count(plan.horizon)
    policy.cycle.next(View(flight.step, confidence=1.0, horizon_reached=True))
    assert policy.cycle.phase is Phase.CORRECT
    policy.count(plan.correct_steps, Phase.CORRECT)
    policy.after_judgement(flight.step, plan, Judgement(kept, worth, cost, audit=found))
    assert policy.cycle.phase is Phase.FULL
    return plan


def exactly(worth: float, r2: float, flight: Flight) -> int:
    """Virtual steps that a move counts whose loss is exact."""
    flight.observer.quality.r2 = lambda windows: r2  # type: ignore[method-assign]
    move: Any = SimpleNamespace(plan=flight.policy.plan(), anchor=1.0, loss=0.5, exact_worth=lambda *losses: worth)
    return Exact().credit(move)


def worths(flight: Flight) -> Worth:
    return Worth(SimpleNamespace(progress=SimpleNamespace(backward_passes=0)), flight.policy.slope)  # type: ignore[arg-type]


# --- phases ----------------------------------------------------------------------------------------------------------


def test_the_way_through_the_phases() -> None:
    flight = Flight()
    assert flight.policy.cycle.phase is Phase.WARMUP
    flight.until(Phase.FULL)
    assert flight.step >= 40
    flight.until(Phase.PREDICT)
    assert "batches hardly differ" in flight.policy.last_reason
    steps = flight.policy.score.counts.steps
    assert steps["warmup"] + steps["full"] == flight.step
    assert steps["predict"] == steps["correct"] == 0


def test_the_plan_is_what_the_forecast_says_at_the_horizon() -> None:
    flight = Flight().until(Phase.PREDICT)
    plan, forecast = flight.policy.plan(), flight.observer.forecast
    assert forecast is not None
    assert 1 <= plan.horizon <= plan.longest <= 20
    assert np.array_equal(plan.coefficients, forecast.at(plan.horizon))
    assert plan.low_noise
    assert plan.audited  # the first one, and affordable
    assert plan.predicted_loss == pytest.approx(np.interp(plan.horizon, forecast.horizons, forecast.loss))


def test_without_a_forecast_there_is_no_plan() -> None:
    with pytest.raises(RuntimeError, match="nothing is forecast"):
        Flight().policy.plan()


def test_an_audit_is_as_long_as_the_budget_affords() -> None:
    rich = Flight(audit__time_budget=0.5, audit__steps=30).until(Phase.PREDICT).policy.plan()
    assert rich.audited
    assert rich.correct_steps == 30
    poor = Flight(audit__time_budget=0.01, audit__steps=30).until(Phase.PREDICT).policy.plan()
    assert poor.correct_steps < 30
    none = Flight(audit__time_budget=0.0).until(Phase.PREDICT).policy.plan()
    assert not none.audited
    assert none.correct_steps == Flight().config.hybrid.correct_steps


def test_a_move_must_fit_into_the_rest_of_the_run() -> None:
    flight = Flight().until(Phase.FULL)
    for left in (1000, 60, 40, 31, 30, 25, 10, 1, 0):
        flight.policy.cycle.phase, flight.policy.cycle.steps_in_phase = Phase.FULL, 10
        flight.policy.decide(flight.step, left, trend=0)
        if flight.policy.cycle.phase is Phase.PREDICT:
            plan = flight.policy.plan()
            assert plan.horizon <= plan.longest <= left - plan.correct_steps
        else:
            assert "the run is nearly over" in flight.policy.last_reason
    assert "the run is nearly over" in flight.policy.last_reason


def test_full_steps_without_a_move_are_cycles_too() -> None:
    flight = Flight(noise=3.0, audit__time_budget=0.0).until(Phase.FULL)
    cycle = flight.policy.cycle.number
    while not flight.policy.rest.steps and flight.step < 900:
        flight.full()
    assert flight.policy.cycle.number > cycle
    assert flight.policy.cycle.phase is Phase.FULL


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1000, [2, 4, 8, 16, 25, 25]), (100_000, [2, 4, 8, 16, 32, 64, 128, 256, 256]), (60, [2, 2])],
)
def test_rests_double_while_nothing_changes(steps: int, expected: list[int]) -> None:
    """Up to 256 windows and an eighth of the run."""
    flight = Flight(noise=3.0, audit__time_budget=1.0, max_steps=steps).until(Phase.FULL)
    policy, rests = flight.policy, []
    policy.observer.quality.trusted = lambda windows: False  # type: ignore[method-assign]
    while len(rests) < len(expected):
        flight.full()
        if policy.rest.steps:
            rests.append(policy.rest.steps // WINDOW)
            policy.rest.steps = 0
    assert rests == expected


def test_where_nothing_can_be_afforded_the_first_rest_is_the_longest() -> None:
    flight = Flight(noise=3.0, audit__time_budget=0.0).until(Phase.FULL)
    while not flight.policy.rest.steps and flight.step < 900:
        flight.full()
    assert flight.policy.rest.steps == 256 * WINDOW
    assert "not tried" in account_of(flight.policy, 100)["audit"]["sentence"]


def test_want_of_confidence_alone_trains_the_predictor_longer() -> None:
    flight = Flight().until(Phase.FULL)
    policy = flight.policy
    policy.confidence.estimate = lambda features: 0.1  # type: ignore[method-assign]
    flight.steps(60)
    assert policy.cycle.phase is Phase.FULL
    assert policy.score.counts.recoveries["force_full"] >= 1
    assert policy.cycle.earliest_predict_step > flight.config.hybrid.warmup_steps


def test_the_threshold_decides() -> None:
    flight = Flight(hybrid__confidence_threshold=0.9).until(Phase.FULL)
    flight.policy.confidence.estimate = lambda features: 0.89  # type: ignore[method-assign]
    flight.steps(40)
    assert flight.policy.cycle.phase is Phase.FULL
    flight.policy.cycle.earliest_predict_step = 0
    flight.policy.confidence.estimate = lambda features: 0.91  # type: ignore[method-assign]
    flight.until(Phase.PREDICT)


# --- what windows teach ----------------------------------------------------------------------------------------------


def test_every_step_of_a_window_is_guarded() -> None:
    flight = Flight().steps(60)
    for _ in range(WINDOW - 3):
        flight.full()
    flight.full(loss=math.nan)
    flight.full(loss=math.nan)
    flight.full(loss=math.nan)
    assert [action.kind for action in flight.actions] == [Kind.SKIP_BATCH, Kind.ROLL_BACK]  # each once a window
    assert flight.policy.recovery.rate_factor == pytest.approx(0.1)


def test_a_window_full_of_bad_batches_is_one_emergency() -> None:
    """Nothing can have taken effect in between."""
    flight = Flight(hybrid__window_steps=WINDOW, guard__patience=1).steps(60)
    for _ in range(WINDOW):
        flight.full(loss=math.nan)
    assert flight.policy.recovery.rollbacks == 1
    assert flight.policy.recovery.rate_factor == pytest.approx(0.1)


def test_overflows_of_the_fp16_loss_scale_are_no_emergency() -> None:
    flight = Flight().steps(60)
    observer = flight.observer
    for _ in range(WINDOW):
        observer.before_step()
        observer.after_step(StepOutput(torch.tensor(math.inf), torch.tensor(math.nan), torch.tensor(1.0)))
    moment = Moment(65, 1000, 65, 0.1, 0.1, flight.policy.phase_record(), 0.5, 0.5)
    observer.measure(moment)
    assert flight.policy.watch(observer.learn(), same_batch=False, fp16=True) == []
    assert flight.policy.rested(70, [(math.nan, math.nan)] * 5, fp16=True) == []


def test_a_rest_is_guarded_too() -> None:
    policy = Flight().steps(60).policy
    kinds = [action.kind for action in policy.rested(100, [(math.nan, 1.0)] * 3, fp16=False)]
    assert kinds == [Kind.SKIP_BATCH, Kind.ROLL_BACK]
    quiet = Flight().steps(60).policy
    assert quiet.rested(100, [(1.5, 1.0)] * 5, fp16=False) == []
    runaway = Flight(noise=3.0, audit__time_budget=0.0).steps(300).policy
    high = np.random.default_rng(0).normal(50.0, 5.0, 200).tolist()
    kinds = [action.kind for action in runaway.rested(200, [(loss, 5.0) for loss in high], fp16=False)]
    assert Kind.ROLL_BACK in kinds


@pytest.mark.parametrize(
    ("search", "noise", "searches"), [("auto", 0.0, True), ("auto", 3.0, False), (True, 3.0, True), (False, 0.0, False)]
)
def test_who_searches(search: Any, noise: float, searches: bool) -> None:
    assert Flight(noise=noise, hybrid__search=search).steps(40).policy.appraiser.searches is searches


# --- moves -----------------------------------------------------------------------------------------------------------


def test_where_nothing_was_measured_the_sentence_says_why() -> None:
    flight = Flight()
    early = "prediction was not tried: the run was over before there was enough to forecast from"
    assert account_of(flight.policy, 1)["audit"]["sentence"] == early
    while not flight.full():
        pass
    assert account_of(flight.policy, 5)["audit"]["sentence"] == early
    flight.policy.cycle.phase = Phase.FULL
    for reason, words in {
        "3 of 6 full steps are done; confidence 0.13 is below 0.50": "no forecast was likely enough to help",
        "3 of 6 full steps are done; the gate is shut: the run is nearly over": "the run is nearly over",
    }.items():
        flight.policy.last_reason = reason
        assert account_of(flight.policy, 5)["audit"]["sentence"] == f"prediction was not tried: {words}"
    flight.policy.score.counts.moves["refused"] = 2
    assert "none of 2 moves tried was kept" in account_of(flight.policy, 5)["audit"]["sentence"]


def test_worth_is_in_steps_of_this_run() -> None:
    flight = Flight().steps(60)
    fall = flight.policy.slope.per_step(low_noise=False)
    assert worths(flight).noisy(7 * fall) == pytest.approx(7.0)
    rising = Flight()
    for losses in ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), (1.6, 1.7, 1.8)):
        rising.policy.slope.add(losses)
    assert worths(rising).noisy(1.0) == 0.0


def test_worth_of_an_exact_fall_goes_by_the_ratio_of_losses() -> None:
    """Without noise a loss falls by a share per step."""
    flight = Flight()
    flight.policy.slope.add(tuple(0.97**step for step in range(5)))
    assert worths(flight).exact(0.5, 0.5 * 0.97**12) == pytest.approx(12.0)
    assert worths(flight).exact(0.5, 0.5 / 0.97**12) == pytest.approx(-12.0)


def test_worth_of_a_loss_below_zero_goes_by_its_fall() -> None:
    flight = Flight()
    flight.policy.slope.add((-1.0, -1.5, -2.0))
    assert worths(flight).exact(-2.0, -3.5) == pytest.approx(3.0)
    rising = Flight()
    rising.policy.slope.add((1.0, 2.0, 3.0))
    assert worths(rising).exact(3.0, 1.0) == 0.0


@pytest.mark.parametrize(("r2", "share"), [(1.0, 1.0), (0.99, 0.5), (0.98, 0.0), (-1.0, 0.0), (math.nan, 0.0)])
def test_predicted_steps_count_where_forecasts_came_nearly_exactly_true(r2: float, share: float) -> None:
    flight = Flight().until(Phase.PREDICT)
    horizon = flight.policy.plan().horizon
    assert exactly(1e9, r2, flight) == pytest.approx(share * horizon, abs=1)
    assert exactly(1e9, r2, flight) <= share * horizon + 1e-9
    assert exactly(1.5, r2, flight) == (1 if share else 0)
    for nothing in (0.0, -3.0, math.nan, math.inf):
        assert exactly(nothing, r2, flight) == 0


def test_a_disaster_is_measured_by_the_noise() -> None:
    noisy = Flight(noise=3.0).steps(80).policy
    decision = Decision("toy", 5, False, 5, "")

    def limit(policy: Deliberation, anchor: float) -> float:
        return policy.appraiser.plan(decision, policy.oversight.tolerance).disaster_limit(anchor)

    assert limit(noisy, 2.0) == pytest.approx(2.0 + 3.0 * noisy.guard.losses.sigma)
    assert limit(Flight().policy, 2.0) == pytest.approx(2.002)
    assert limit(Flight().policy, -2.0) > -2.0


def test_a_kept_move_counts_its_gain() -> None:
    flight = Flight().until(Phase.PREDICT)
    before = flight.policy.bandit.rewards
    judged(flight, kept=True, worth=12.0, cost=2.0)
    policy = flight.policy
    assert policy.score.ledger.exact_moves == 1
    assert policy.score.ledger.cost == 2.0
    assert policy.gate.wait == 0
    assert policy.bandit.rewards == before + 1
    assert policy.cycle.full_steps_needed == 10


def test_a_move_worth_less_than_it_cost_is_backed_off_from() -> None:
    flight = Flight().until(Phase.PREDICT)
    judged(flight, kept=True, worth=1.0, cost=2.0)
    assert flight.policy.gate.wait == 1


def test_a_move_taken_back_costs_and_doubles_the_full_steps() -> None:
    flight = Flight().until(Phase.PREDICT)
    judged(flight, kept=False, worth=12.0, cost=7.0)
    policy = flight.policy
    assert policy.score.ledger.exact_moves == 0
    assert policy.score.ledger.cost == 7.0
    assert policy.gate.wait == 1
    assert policy.cycle.full_steps_needed == 20
    assert policy.confidence.history[-1].kept is False
    assert policy.confidence.history[-1].weight == 1.0


@pytest.mark.parametrize("gain", [8.0, -8.0])
def test_an_audit_enters_the_ledger_and_the_gate(gain: float) -> None:
    flight = Flight().until(Phase.PREDICT)
    plan = judged(flight, kept=gain > 0, worth=gain, cost=30.0, found=audit(gain))
    policy = flight.policy
    assert [one.gain_steps for one in policy.score.ledger.audits] == [gain]
    assert policy.gate.count == 1
    assert policy.gate.mean == pytest.approx(max(-1.0, gain / plan.horizon))
    assert plan.low_noise
    assert policy.gate.spent == pytest.approx(30.0 - max(0.0, gain))  # an exact gain pays for its audit


def test_a_refused_move() -> None:
    flight = Flight().until(Phase.PREDICT)
    plan = flight.policy.plan()
    flight.policy.score.refused(flight.step, plan, 1.0)
    assert flight.policy.score.counts.moves["refused"] == 1
    assert flight.policy.score.ledger.cost == 1.0
    assert flight.policy.gate.wait == 1
    assert flight.policy.gate.spent == 0.0  # where noise is low, trying is not on the budget of audits
    assert flight.policy.confidence.history[-1].kept is False


def test_two_moves_undone_in_three_cycles_double_the_full_steps() -> None:
    flight = Flight().until(Phase.FULL)
    recovery, number = flight.policy.recovery, flight.policy.cycle.number
    assert recovery.cycle_ended(number, Outcome.UNDONE) == []
    (action,) = recovery.cycle_ended(number, Outcome.UNDONE)
    assert (action.kind, action.full_steps_factor) == (Kind.FORCE_FULL, 2)
    flight.policy.apply(action, 130)
    assert flight.policy.cycle.full_steps_needed == 20


def test_actions_reach_those_they_are_for() -> None:
    flight = Flight().until(Phase.FULL)
    policy = flight.policy
    allowed = policy.bandit.allowed
    policy.apply(Action(Kind.SHORTEN_HORIZON, ""), 50)
    assert policy.bandit.allowed == allowed / 2
    policy.apply(Action(Kind.FORCE_FULL, "", warmup_factor=2), 50)
    assert policy.cycle.earliest_predict_step == 90
    resets = []
    policy.observer.predictor.reset = lambda: resets.append(1)  # type: ignore[method-assign]
    policy.apply(Action(Kind.RESET_PREDICTOR, ""), 50)
    assert resets == [1]
    policy.apply(Action(Kind.CONTINUE, ""), 50)
    counted = {kind: count for kind, count in policy.score.counts.recoveries.items() if count}
    assert counted == {"shorten_horizon": 1, "force_full": 1, "reset_predictor": 1}


def test_the_summary_says_what_happened() -> None:
    flight = Flight().until(Phase.PREDICT)
    judged(flight, kept=True)
    summary = account_of(flight.policy, flight.step)
    assert summary["predictability"]["low_noise"] is True
    assert summary["audit"]["exact_moves"] == 1
    assert summary["confidence"]["outcomes"] == flight.policy.confidence.outcomes > 0
    assert summary["steps"]["correct"] > 0
    assert summary["forecast"]["5"]["count"] > 0


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3, 40, 47, 52, 120])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_state_goes_on_bit_for_bit(steps: int, noise: float) -> None:
    whole, half = Flight(noise).steps(steps), Flight(noise).steps(steps)
    state = put_together(snapshot({"policy": half.policy.state_dict(), "p": half.observer.predictor.state_dict()}))
    resumed = Flight(noise)
    for mine, theirs in zip(resumed.parameters, half.parameters, strict=True):
        mine.data.copy_(theirs.data)
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    resumed.draw.set_state(half.draw.get_state())
    resumed.step = half.step
    resumed.policy.load_state_dict(state["policy"])
    resumed.observer.predictor.load_state_dict(state["p"])
    for flight in (whole, resumed):
        while flight.policy.cycle.phase is Phase.PREDICT or flight.step < steps + 60:
            if flight.policy.cycle.phase is Phase.PREDICT:
                judged(flight, kept=True)
            flight.full()
    mine, theirs = take_apart(whole.policy.state_dict()), take_apart(resumed.policy.state_dict())
    assert mine.tree == theirs.tree
    assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors)


def test_a_forecast_that_is_no_number_has_no_confidence() -> None:
    flight = Flight().until(Phase.FULL)
    shape = flight.observer.forecast.coefficients.shape  # type: ignore[union-attr]
    bad = Forecast((5, 10, 20, 30, 40), np.full(shape, math.nan), np.ones(5), np.ones(5), disagreement=math.nan)
    assert 0 < flight.policy.appraiser.estimate(bad, 10) < 1
