"""The four phases: every transition of the table, and nothing else whatever the view."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config.schema import HybridConfig
from foretrain.events import Phase
from foretrain.hybrid.cycle import Cycle, View

LEGAL: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (Phase.WARMUP, Phase.FULL),
        (Phase.FULL, Phase.PREDICT),
        (Phase.PREDICT, Phase.CORRECT),
        (Phase.PREDICT, Phase.FULL),
        (Phase.CORRECT, Phase.FULL),
    }
)
CONFIG = HybridConfig(warmup_steps=20, full_steps=5, max_predict_steps=12, correct_steps=3)
GOOD = View(step=1000, loss_stable=True, baseline_recorded=True, confidence=0.9, gate_open=True)


def machine_in(phase: Phase, steps: int = 0, config: HybridConfig = CONFIG) -> Cycle:
    """A machine that came into a phase the ordinary way."""
    machine = Cycle(config)
    if phase is not Phase.WARMUP:
        machine.next(GOOD)
    if phase in (Phase.PREDICT, Phase.CORRECT):
        machine.count(config.full_steps)
        machine.next(GOOD)
    if phase is Phase.CORRECT:
        machine.next(replace(GOOD, horizon_reached=True))
    assert machine.phase is phase
    machine.count(steps)
    return machine


def test_warmup_needs_steps_a_settled_loss_and_a_baseline() -> None:
    machine = Cycle(CONFIG)
    assert "19 of 20" in machine.next(replace(GOOD, step=19)).reason
    assert "settled" in machine.next(replace(GOOD, step=20, loss_stable=False)).reason
    assert "gradient norm" in machine.next(replace(GOOD, step=20, baseline_recorded=False)).reason
    assert machine.phase is Phase.WARMUP
    assert machine.next(replace(GOOD, step=20)).phase is Phase.FULL
    assert machine.number == 1


def test_warmup_does_not_last_for_ever() -> None:
    machine = Cycle(CONFIG)
    assert not machine.next(replace(GOOD, step=59, loss_stable=False)).changed
    gone = machine.next(replace(GOOD, step=60, loss_stable=False))
    assert gone.phase is Phase.FULL
    assert "not settled" in gone.reason
    assert "enough" in gone.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"confidence": 0.41}, "confidence 0.41 is below 0.50"),
        ({"confidence": 0.5}, "confidence 0.50 is not above 0.50"),
        ({"confidence": math.nan}, "confidence nan is not above 0.50"),
        ({"recent_divergence": True}, "diverged"),
        ({"gate_open": False, "gate_reason": "3 of 4 leaps cost more than they gave"}, "3 of 4 leaps"),
        ({"step": 19}, "step 19 is before step 20"),
    ],
)
def test_full_goes_on_with_a_reason(change: dict[str, Any], reason: str) -> None:
    machine = machine_in(Phase.FULL, steps=5)
    view = replace(GOOD, **change)
    stayed = machine.next(view)
    assert stayed.phase is Phase.FULL
    assert not stayed.changed
    assert reason in stayed.reason
    assert len(machine.why_not_predict(view)) == 1
    assert machine.next(GOOD).phase is Phase.PREDICT


def test_full_needs_its_steps() -> None:
    machine = machine_in(Phase.FULL, steps=4)
    assert machine.next(GOOD).reason == "4 of 5 full steps are done"
    machine.count()
    assert machine.next(GOOD).changed


def test_an_exact_loss_needs_neither_warm_up_nor_confidence() -> None:
    """Each leap is judged at once. But the gate may be shut, and there are full steps in between."""
    machine = Cycle(CONFIG)
    unknown = View(3, exact=True, recent_divergence=True)
    assert not machine.next(replace(unknown, exact=False)).changed
    assert "same loss" in machine.next(unknown).reason
    assert machine.phase is Phase.FULL
    machine.count(CONFIG.full_steps - 1)
    assert not machine.next(replace(unknown, gate_open=True)).changed
    machine.count()
    assert "the gate is shut" in machine.next(unknown).reason
    assert "exact" in machine.next(replace(unknown, gate_open=True)).reason
    assert machine.phase is Phase.PREDICT


def test_leaps_of_a_chain_may_go_on_beyond_the_longest_predicted_phase() -> None:
    machine = machine_in(Phase.PREDICT)
    machine.count(CONFIG.max_predict_steps)
    with pytest.raises(ValueError, match="exceed"):
        machine.count(1)
    machine.count(1, limited=False)
    assert machine.steps_in_phase == CONFIG.max_predict_steps + 1


def test_mode_off_never_predicts() -> None:
    machine = machine_in(Phase.FULL, 50, CONFIG.model_copy(update={"mode": "off"}))
    assert machine.next(GOOD).reason == "hybrid.mode is off"


@pytest.mark.parametrize(
    ("change", "target", "undo"),
    [
        ({"diverged": True}, Phase.FULL, True),
        ({"diverged": True, "horizon_reached": True}, Phase.FULL, True),
        ({"confidence": 0.3}, Phase.FULL, True),
        ({"confidence": math.nan}, Phase.FULL, True),
        ({"prediction_error": 0.21}, Phase.CORRECT, False),
        ({"prediction_error": math.nan}, Phase.CORRECT, False),
        ({"oscillating": True}, Phase.CORRECT, False),
        ({"horizon_reached": True}, Phase.CORRECT, False),
        ({"prediction_error": 0.2}, Phase.PREDICT, False),
        ({"prediction_error": -0.9}, Phase.PREDICT, False),
        ({"gate_open": False, "recent_divergence": True}, Phase.PREDICT, False),
    ],
)
def test_leaving_predict(change: dict[str, Any], target: Phase, undo: bool) -> None:
    transition = machine_in(Phase.PREDICT, 6).next(replace(GOOD, **change))
    assert (transition.phase, transition.undo) == (target, undo)
    assert transition.reason


@pytest.mark.parametrize(("made", "said"), [(6, "after 6 leaps"), (1, "after 1 leap")])
def test_a_chain_has_an_end_and_no_horizon(made: int, said: str) -> None:
    transition = machine_in(Phase.PREDICT, made).next(replace(GOOD, horizon_reached=True, chained=True))
    assert transition.reason == f"the chain is over {said}"


def test_predict_ends_at_its_longest() -> None:
    machine = machine_in(Phase.PREDICT, 12)
    assert machine.next(GOOD).phase is Phase.CORRECT
    with pytest.raises(ValueError, match="max_predict_steps = 12"):
        machine_in(Phase.PREDICT, 6).count(7)


def test_a_kept_move_and_an_undone_one() -> None:
    machine = machine_in(Phase.CORRECT, 2)
    done = replace(GOOD, correct_done=True)
    assert machine.next(done).reason == "2 of 3 validating steps are done"
    machine.count()
    kept = machine.next(done)
    assert (kept.phase, kept.undo, machine.full_steps_needed) == (Phase.FULL, False, 5)

    worse = machine_in(Phase.CORRECT, 3)
    undone = worse.next(replace(done, worse_than_anchor=True))
    assert (undone.phase, undone.undo, worse.full_steps_needed) == (Phase.FULL, True, 10)


def test_an_unjudged_move_is_undone_in_the_end() -> None:
    machine = machine_in(Phase.CORRECT, 11)
    assert not machine.next(GOOD).changed
    machine.count()
    assert machine.next(GOOD).undo


def test_rollbacks_double_the_full_steps_up_to_eight_times_and_a_kept_move_resets_them() -> None:
    machine = machine_in(Phase.CORRECT, 3)
    needed = []
    for _ in range(5):
        machine.next(replace(GOOD, diverged=True))
        needed.append(machine.full_steps_needed)
        machine.count(machine.full_steps_needed - 1)
        assert not machine.next(GOOD).changed
        machine.count()
        assert machine.next(GOOD).phase is Phase.PREDICT
        machine.next(replace(GOOD, horizon_reached=True))
        machine.count(3)
    assert needed == [10, 20, 40, 40, 40]
    machine.next(replace(GOOD, correct_done=True))
    assert machine.full_steps_needed == 5


def test_low_confidence_alone_does_not_lengthen_the_wait() -> None:
    machine = machine_in(Phase.PREDICT, 3)
    machine.next(replace(GOOD, confidence=0.1))
    assert machine.full_steps_needed == 5


def test_force_full_and_postpone() -> None:
    machine = machine_in(Phase.PREDICT, 3)
    assert machine.force_full("explosion").undo
    machine.count(10)
    machine.postpone(1100)
    assert "before step 1100" in machine.next(GOOD).reason
    assert machine.next(replace(GOOD, step=1100)).phase is Phase.PREDICT
    full = machine_in(Phase.FULL, 5)
    assert full.force_full("doubt").undo is False
    assert not full.next(GOOD).changed
    assert Cycle(CONFIG).force_full("doubt").phase is Phase.WARMUP


views = st.builds(
    View,
    step=st.integers(0, 200),
    loss_stable=st.booleans(),
    baseline_recorded=st.booleans(),
    confidence=st.floats(0, 1) | st.just(math.nan),
    recent_divergence=st.booleans(),
    gate_open=st.booleans(),
    horizon_reached=st.booleans(),
    prediction_error=st.floats(-1, 1) | st.just(math.inf),
    oscillating=st.booleans(),
    diverged=st.booleans(),
    worse_than_anchor=st.booleans(),
    correct_done=st.booleans(),
)
moves = st.tuples(st.integers(0, 20), views | st.just(GOOD), st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(st.lists(moves, max_size=60))
def test_only_legal_transitions_happen_whatever_is_seen(story: list[tuple[int, View, int]]) -> None:
    machine = Cycle(CONFIG)
    step = 0
    for steps, view, extra in story:
        if machine.phase is Phase.PREDICT:
            steps = min(steps, machine.predict_steps_left)
        machine.count(steps)
        step += steps
        before = machine.phase
        planned = machine.decide(replace(view, step=step))
        transition = machine.next(replace(view, step=step))
        assert transition == planned
        assert transition.reason
        assert machine.phase is transition.phase
        assert transition.changed == (transition.phase is not before)
        if transition.changed:
            assert (before, transition.phase) in LEGAL
            assert machine.steps_in_phase == 0
        assert (before, transition.phase) != (Phase.CORRECT, Phase.PREDICT)
        if machine.phase is Phase.PREDICT:
            assert step >= CONFIG.warmup_steps
            assert machine.steps_in_phase < CONFIG.max_predict_steps  # there is room for another step
        assert 5 <= machine.full_steps_needed <= 40
        if extra == 0:
            machine.force_full("chance")
            assert machine.phase in (Phase.WARMUP, Phase.FULL)
        restored = Cycle(CONFIG)
        restored.load_state_dict(json.loads(json.dumps(machine.state_dict())))
        assert restored.state_dict() == machine.state_dict()
