"""From what went wrong to what is done: the eight actions, the emergency table, and hands off a healthy run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.act import PAUSE, Action, Context, Kind, Outcome, Recovery
from foretrain.health.detect import Detector
from foretrain.health.signs import Severity, Signal, StepDiagnosis, StepReading, Symptom

FULL = Context(Phase.FULL)
OPEN = Context(Phase.CORRECT, move_open=True)
NORMAL = StepDiagnosis(0, Severity.NORMAL)


def make(**changes: float) -> Recovery:
    return Recovery(HybridConfig(), GuardConfig.model_validate(changes))


def verdict(
    signal: Signal, level: Severity = Severity.WARNING, exit_to: Phase | None = None, **more: Any
) -> StepDiagnosis:
    return StepDiagnosis(100, level, (Symptom(signal, level, str(signal), exit_to),), exit_to, str(signal), **more)


def kinds(actions: list[Action]) -> list[Kind]:
    return [action.kind for action in actions]


NOT_FINITE = verdict(Signal.NOT_FINITE, Severity.CRITICAL)
EXPLOSION = verdict(Signal.GRADIENT_EXPLOSION, setback=0.5)
SPIKE = verdict(Signal.GRADIENT_EXPLOSION, setback=0.01)
OSCILLATION = verdict(Signal.OSCILLATION, Severity.CRITICAL)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_a_healthy_run_is_left_alone(noise: float) -> None:
    for seed in range(5):
        hybrid = HybridConfig()
        guard, recovery = Detector(hybrid, GuardConfig()), make()
        random = np.random.default_rng(seed)
        for step in range(2000):
            loss = 2 + 8.8 * math.exp(-step / 60) + noise * random.standard_t(5)
            norm = math.exp(random.normal(0, 0.5))
            for action in recovery.decide(guard.check(StepReading(step, Phase.FULL, loss, norm)), FULL):
                assert action.kind in (Kind.CONTINUE, Kind.FORCE_FULL)
                assert (action.rate_factor, action.clip) == (1.0, None)
            assert (recovery.rate_factor, recovery.clip) == (1.0, math.inf)
            assert recovery.threshold == hybrid.confidence_threshold


def test_one_bad_batch_is_skipped_and_three_roll_back_with_a_tenth_of_the_rate() -> None:
    recovery = make()
    assert kinds(recovery.decide(NOT_FINITE, FULL)) == [Kind.SKIP_BATCH]
    assert recovery.rate_factor == 1.0
    recovery.decide(NORMAL, FULL)
    assert kinds(recovery.decide(NOT_FINITE, FULL)) == [Kind.SKIP_BATCH]
    assert kinds(recovery.decide(NOT_FINITE, FULL)) == [Kind.SKIP_BATCH]
    third = recovery.decide(NOT_FINITE, FULL)
    assert kinds(third) == [Kind.ROLL_BACK]
    assert third[0].rate_factor == recovery.rate_factor == 0.1


def test_harmed_weights_are_rolled_back_at_once() -> None:
    recovery = make()
    harmed = Context(Phase.FULL, skipped=False)
    assert kinds(recovery.decide(NOT_FINITE, harmed)) == [Kind.ROLL_BACK]
    assert recovery.rate_factor == 0.1


@pytest.mark.parametrize("context", [Context(Phase.PREDICT), Context(Phase.FULL, predicted=True)])
def test_a_move_that_is_not_finite_is_undone_and_the_predictor_reset(context: Context) -> None:
    recovery = make()
    for _ in range(10):  # part of the method, not an emergency: no abort, no other learning rate
        assert kinds(recovery.decide(NOT_FINITE, context)) == [Kind.ROLL_BACK, Kind.RESET_PREDICTOR]
    assert recovery.rate_factor == 1.0


def test_explosion_needs_repeated_evidence() -> None:
    recovery = make()
    assert kinds(recovery.decide(EXPLOSION, FULL)) == [Kind.CONTINUE]
    for _ in range(30):
        recovery.decide(NORMAL, FULL)
    assert kinds(recovery.decide(EXPLOSION, FULL)) == [Kind.CONTINUE]
    assert kinds(recovery.decide(EXPLOSION, FULL)) == [Kind.CONTINUE]
    action = recovery.decide(EXPLOSION, FULL)[0]
    assert (action.kind, action.rate_factor, action.clip) == (Kind.FORCE_FULL, 0.5, 1.0)
    assert (recovery.rate_factor, recovery.clip) == (0.5, 1.0)
    recovery.decide(EXPLOSION, FULL)
    assert recovery.rate_factor == 0.5  # a change is given time to work
    for _ in range(PAUSE):
        recovery.decide(EXPLOSION, FULL)
    assert recovery.rate_factor == 0.25


def test_a_spike_that_costs_next_to_nothing_is_no_explosion() -> None:
    recovery = make()
    for _ in range(200):
        assert kinds(recovery.decide(SPIKE, FULL)) == [Kind.CONTINUE]
    assert (recovery.rate_factor, recovery.clip) == (1.0, math.inf)


def test_what_was_taken_is_given_back() -> None:
    recovery = make()
    for _ in range(3):
        recovery.decide(NOT_FINITE, FULL)
    rates = []
    for _ in range(5):
        for _ in range(PAUSE):
            recovery.decide(NORMAL, FULL)
        rates.append(recovery.rate_factor)
    assert rates == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0])
    assert recovery.rollbacks == 0


def test_clipping_ends_when_the_rate_is_back() -> None:
    recovery = make()
    for _ in range(3):
        recovery.decide(EXPLOSION, FULL)
    for _ in range(PAUSE - 1):
        recovery.decide(NORMAL, FULL)
    assert recovery.clip == 1.0
    recovery.decide(NORMAL, FULL)
    assert (recovery.rate_factor, recovery.clip) == (1.0, math.inf)


def test_oscillation_acts_only_if_it_persists_and_the_loss_no_longer_falls() -> None:
    recovery = make()
    falling = verdict(Signal.OSCILLATION, Severity.CRITICAL, improving=True)
    warning = verdict(Signal.OSCILLATION)
    for _ in range(3 * PAUSE):
        recovery.decide(falling, FULL)
        recovery.decide(warning, FULL)
    assert recovery.rate_factor == 1.0
    early = [action for _ in range(PAUSE - 1) for action in recovery.decide(OSCILLATION, FULL)]
    assert {action.rate_factor for action in early} == {1.0}
    found = recovery.decide(OSCILLATION, FULL)
    assert [(action.rate_factor, action.clip) for action in found if action.clip] == [(0.3, 1.0)]
    assert (recovery.rate_factor, recovery.clip) == (0.3, 1.0)


def test_a_diverging_open_move_is_undone_with_the_rate_as_it_was() -> None:
    recovery = make()
    deviation = verdict(Signal.LOSS_DEVIATION, exit_to=Phase.FULL)
    actions = recovery.decide(deviation, OPEN)
    assert kinds(actions) == [Kind.ROLL_BACK, Kind.SHORTEN_HORIZON, Kind.RAISE_THRESHOLD]
    assert actions[0].rate_factor == recovery.rate_factor == 1.0
    assert recovery.threshold == pytest.approx(0.55)
    for _ in range(20):
        recovery.decide(deviation, OPEN)
    assert recovery.threshold == pytest.approx(0.98)
    for _ in range(10 * PAUSE):
        recovery.decide(NORMAL, FULL)
    assert recovery.threshold == 0.5


def test_without_an_open_move_a_high_loss_only_stops_prediction() -> None:
    recovery = make()
    actions = recovery.decide(verdict(Signal.LOSS_DEVIATION, Severity.CRITICAL), FULL)
    assert kinds(actions) == [Kind.FORCE_FULL]
    assert actions[0].rate_factor == 1.0


def test_prediction_error_and_drift() -> None:
    recovery = make()
    wrong = verdict(Signal.PREDICTION_ERROR, exit_to=Phase.CORRECT)
    assert kinds(recovery.decide(wrong, Context(Phase.PREDICT, move_open=True))) == [Kind.SHORTEN_HORIZON]
    drift = recovery.decide(verdict(Signal.DRIFT), FULL)
    assert (drift[0].kind, drift[0].full_steps_factor) == (Kind.FORCE_FULL, 2)


@pytest.mark.parametrize(("signal", "factor"), [(Signal.RUNAWAY, 0.5), (Signal.RUIN, 0.1)])
def test_ruin_takes_more_of_the_rate_than_a_runaway(signal: Signal, factor: float) -> None:
    recovery = make()
    (action,) = recovery.decide(verdict(signal, Severity.CRITICAL), FULL)
    assert (action.kind, action.rate_factor) == (Kind.ROLL_BACK, factor)
    assert recovery.rate_factor == factor


def test_a_runaway_rolls_back_and_in_the_end_aborts() -> None:
    runaway = verdict(Signal.RUNAWAY, Severity.CRITICAL)
    recovery = make(max_rollbacks=2)
    seen = []
    for _ in range(3):
        seen += kinds(recovery.decide(runaway, FULL))
        for _ in range(PAUSE):
            recovery.decide(NORMAL, FULL)
    assert seen == [Kind.ROLL_BACK, Kind.ROLL_BACK, Kind.ABORT]
    patient = make(max_rollbacks=2)
    patient.decide(runaway, FULL)
    assert kinds(patient.decide(runaway, FULL)) == [Kind.FORCE_FULL]  # the rollback is given time to work
    assert kinds(make(max_rollbacks=0).decide(runaway, FULL)) == [Kind.ABORT]


def test_rollbacks_are_forgotten_after_a_good_stretch() -> None:
    recovery = make(max_rollbacks=1)
    runaway = verdict(Signal.RUNAWAY, Severity.CRITICAL)
    for _ in range(5):
        assert kinds(recovery.decide(runaway, FULL)) == [Kind.ROLL_BACK]
        for _ in range(200):
            recovery.decide(NORMAL, FULL)


def test_patience_counts_the_steps_that_are_not_finite() -> None:
    assert kinds(make(patience=1).decide(NOT_FINITE, FULL)) == [Kind.ROLL_BACK]


def test_a_divergence_loop_doubles_the_full_steps() -> None:
    recovery = make()
    assert recovery.cycle_ended(1, Outcome.UNDONE) == []
    assert recovery.cycle_ended(5, Outcome.UNDONE) == []
    loop = recovery.cycle_ended(7, Outcome.UNDONE)
    assert (loop[0].kind, loop[0].full_steps_factor) == (Kind.FORCE_FULL, 2)
    assert recovery.loops == 1
    assert recovery.cycle_ended(8, Outcome.UNDONE) == []


def test_low_confidence_over_several_cycles_trains_the_predictor_longer() -> None:
    recovery = make()
    assert recovery.cycle_ended(1, Outcome.LOW_CONFIDENCE) == []
    assert recovery.cycle_ended(2, Outcome.LOW_CONFIDENCE) == []
    assert recovery.cycle_ended(3, Outcome.KEPT) == []
    actions = [action for cycle in range(4, 7) for action in recovery.cycle_ended(cycle, Outcome.LOW_CONFIDENCE)]
    assert [(action.kind, action.warmup_factor) for action in actions] == [(Kind.FORCE_FULL, 2)]
    assert recovery.distrusts == 1


def test_state_survives_a_round_trip() -> None:
    recovery = make()
    story = [NOT_FINITE, EXPLOSION, NORMAL, EXPLOSION, EXPLOSION, OSCILLATION, NOT_FINITE, NOT_FINITE]
    for item in story:
        recovery.decide(item, FULL)
    recovery.cycle_ended(1, Outcome.UNDONE)
    copy = make()
    copy.load_state_dict(json.loads(json.dumps(recovery.state_dict())))
    for item in [*story, *story]:
        assert copy.decide(item, FULL) == recovery.decide(item, FULL)
    assert copy.state_dict() == recovery.state_dict()
