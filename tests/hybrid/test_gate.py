"""The gate opens on measured worth only, keeps to its budget, and backs off."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.hybrid.gate import PRIORS, Ask, Gate
from foretrain.hybrid.judges.judgement import Judgement, Trusted
from foretrain.hybrid.ledger import Audit
from foretrain.hybrid.scorekeeper import Scorekeeper

NOISY = Ask(horizon=20, steps_left=800, needed_after=20, trusted=True, low_noise=False, decaying=False, cost=25.0)
EXACT = replace(NOISY, low_noise=True)


def gate(budget: float = 0.03, kind: str = "full weights", max_steps: int = 1000) -> Gate:
    return Gate(max_steps, budget, kind)


def proven(worth: float = 0.5, audits: int = 6) -> Gate:
    """A gate that has seen moves gain."""
    made = gate(budget=0.5)
    for _ in range(audits):
        made.audited(20, 20 * worth, cost=25.0)
    return made


@pytest.mark.parametrize("kind", sorted(PRIORS))
def test_what_is_known_before_the_run_opens_no_gate_by_itself(kind: str) -> None:
    made = gate(budget=0.0, kind=kind)
    assert made.interval()[0] <= 0
    answer = made.ask(NOISY)
    assert not answer.open
    assert "not tried" in answer.reason
    assert answer.rest


def test_adapters_start_from_a_better_prior() -> None:
    assert gate(kind="adapters").posterior()[0] > gate(kind="full weights").posterior()[0]


def test_the_first_move_of_a_noisy_run_is_an_audit() -> None:
    answer = gate().ask(NOISY)
    assert (answer.open, answer.audited) == (True, True)


def test_an_audit_must_fit_into_what_is_left_of_the_budget() -> None:
    made = gate(budget=0.03)  # 30 full steps
    made.spend(5.0)
    assert made.ask(NOISY).open
    made.spend(0.1)
    answer = made.ask(NOISY)
    assert not answer.open
    assert "budget" in answer.reason


@pytest.mark.parametrize("low_noise", [False, True])
@pytest.mark.parametrize(
    ("change", "word"),
    [({"horizon": 0}, "nearly over"), ({"steps_left": 20}, "nearly over"), ({"trusted": False}, "do not beat")],
)
def test_some_things_shut_every_gate(change: dict[str, object], word: str, low_noise: bool) -> None:
    answer = proven().ask(replace(NOISY, low_noise=low_noise, **change))
    assert not answer.open
    assert word in answer.reason


@pytest.mark.parametrize("ask", [NOISY, EXACT], ids=["noisy", "exact"])
def test_nothing_is_tried_while_the_learning_rate_warms_up(ask: Ask) -> None:
    """Any leap would seem to gain there, because steps are short on purpose. Chains do not depend on the rate."""
    answer = proven().ask(replace(ask, rising=True))
    assert not answer.open
    assert "warms up" in answer.reason
    assert proven().ask(replace(ask, rising=True, chained=True)).open


@pytest.mark.parametrize("change", [{"horizon": 0}, {"decaying": True}])
def test_what_will_not_change_again_is_rested_from_for_long(change: dict[str, object]) -> None:
    assert not gate().ask(replace(EXACT, **change)).long
    assert gate().ask(replace(EXACT, for_good=True, **change)).long


@pytest.mark.parametrize("ask", [NOISY, EXACT], ids=["noisy", "exact"])
def test_an_untrusted_predictor_is_rested_from(ask: Ask) -> None:
    """It becomes better slowly if at all, and rests begin short."""
    assert gate().ask(replace(ask, trusted=False)).rest
    assert not gate().ask(ask).rest


@pytest.mark.parametrize("ask", [NOISY, EXACT], ids=["noisy", "exact"])
def test_no_move_while_the_rate_decays_but_a_chain(ask: Ask) -> None:
    answer = proven().ask(replace(ask, decaying=True))
    assert not answer.open
    assert answer.rest
    assert "decay" in answer.reason
    assert proven().ask(replace(ask, decaying=True, chained=True)).open
    assert proven().ask(ask).open


def test_exact_moves_need_no_budget() -> None:
    answer = gate(budget=0.0).ask(EXACT)
    assert (answer.open, answer.audited) == (True, False)


def test_the_first_two_exact_moves_are_audited_and_then_every_eighth() -> None:
    made = gate(budget=0.5)
    for _ in range(2):
        assert made.ask(EXACT).audited
        made.audited(20, 20.0, 25.0, exact=True)
    for _ in range(3):
        for _ in range(8):
            assert not made.ask(EXACT).audited
            made.moved(True)
        assert made.ask(EXACT).audited
        made.audited(20, 20.0, 25.0, exact=True)


def test_an_audit_of_an_exact_move_must_be_affordable_too() -> None:
    made = gate(budget=0.03)
    made.spend(10.0)
    answer = made.ask(EXACT)
    assert (answer.open, answer.audited) == (True, False)


def test_moves_that_gained_open_the_gate_without_an_audit() -> None:
    made = proven(0.5)
    assert made.interval()[0] > 0
    answer = made.ask(NOISY)
    assert (answer.open, answer.audited) == (True, False)
    assert f"{made.interval()[0]:.2f}" in answer.reason


def test_a_proven_gate_is_checked_again_after_eight_moves() -> None:
    made = proven(0.5)
    for _ in range(8):
        made.moved(True)
    assert made.ask(NOISY).audited


@pytest.mark.parametrize("worth", [-0.5, 0.0])
def test_moves_that_gained_nothing_shut_it(worth: float) -> None:
    made = proven(worth)
    made.wait = 0
    made.spent = made.allowed
    answer = made.ask(NOISY)
    assert not answer.open
    assert "did not pay in audits" in answer.reason


def test_a_run_too_short_for_an_audit_is_told_so_and_rests_for_long() -> None:
    made = gate(budget=0.001)
    answer = made.ask(NOISY)
    assert (answer.open, answer.rest, answer.long) == (False, True, True)
    assert "not tried" in answer.reason
    assert "audit.time_budget" in answer.reason
    assert made.ask(EXACT).open, "exact losses need no audit"


def test_scattered_audits_prove_nothing() -> None:
    made = gate(budget=0.5)
    for gain in (40.0, -20.0) * 4:
        made.audited(20, gain, 1.0)
    assert made.posterior()[0] > 0
    assert made.interval()[0] < 0


def test_moves_that_overfit_shut_it_for_longer() -> None:
    made = gate()
    waits = []
    for _ in range(4):
        made.overfitted()
        waits.append(made.wait)
    assert waits == [4, 16, 64, 64]
    assert not made.ask(EXACT).open
    made.moved(True)
    made.overfitted()
    assert made.wait == 4


def test_backing_off_doubles_and_ends_with_a_gain() -> None:
    made = gate(budget=1.0)
    waits = []
    for _ in range(9):
        made.moved(False)
        waits.append(made.wait)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    answer = made.ask(NOISY)
    assert not answer.open
    assert "64 more cycles" in answer.reason
    assert answer.rest
    made.new_cycle(63)
    assert not made.ask(NOISY).open
    made.new_cycle()
    assert made.ask(NOISY).open
    made.moved(True)
    made.moved(False)
    assert made.wait == 1


def test_waiting_never_goes_below_zero() -> None:
    made = gate()
    made.moved(False)
    made.new_cycle(100)
    assert made.wait == 0


@pytest.mark.parametrize("gain", [math.nan, math.inf, -math.inf])
def test_a_gain_that_is_no_number_counts_as_the_worst(gain: float) -> None:
    made = gate()
    made.audited(20, gain, 5.0)
    assert made.mean == -1.0
    assert made.wait == 1
    assert math.isfinite(made.interval()[0])


def test_one_wild_audit_counts_for_no_more_than_two_steps_per_step() -> None:
    made = gate()
    made.audited(20, 1e9, 5.0)
    assert made.mean == 2.0


def test_what_moves_surely_gain_pays_for_further_audits() -> None:
    lucky = gate(budget=0.03)
    lucky.audited(20, 15.0, 25.0)
    assert lucky.spent == pytest.approx(25.0)  # one lucky look pays for nothing
    made = proven(0.5, audits=20)
    before, low = made.spent, made.interval()[0]
    made.audited(20, 10.0, 3.0)
    assert made.spent == pytest.approx(max(0.0, before + 3.0 - low * 20), abs=0.2)
    made.audited(20, -500.0, 25.0)
    assert made.spent >= 25.0  # a loss is not charged twice, and nothing is refunded


def test_an_exact_gain_pays_in_full() -> None:
    made = gate(budget=0.03)
    made.audited(20, 15.0, 25.0, exact=True)
    assert made.spent == pytest.approx(10.0)
    made.audited(20, 500.0, 25.0, exact=True)
    assert made.spent == 0.0  # and never more than was spent
    made.audited(20, -5.0, 25.0, exact=True)
    assert made.spent == pytest.approx(25.0)


def credit(made: Gate, moved: int) -> int:
    """Of a move that was not audited."""
    move: Any = SimpleNamespace(moved=moved, plan=SimpleNamespace(least_worth=made.interval()[0]))
    return Trusted().credit(move)


def audited_credit(made: Gate, moved: int, gain: float) -> int:
    keeper: Any = SimpleNamespace(appraiser=SimpleNamespace(gate=made))
    move: Any = SimpleNamespace(moved=moved, chained=False, plan=SimpleNamespace(low_noise=False))
    judgement = Judgement(True, gain, 1.0, audit=Audit(100, moved, 1.0, 1.1, gain, 0.0))
    return Scorekeeper.audited_credit(keeper, move, judgement)


def test_credit_is_what_a_move_is_worth_with_confidence() -> None:
    assert credit(gate(), 60) == 0
    made = proven(0.5)
    assert credit(made, 60) == int(made.interval()[0] * 60)
    assert 0 < credit(made, 60) < 30
    assert credit(proven(2.0, audits=200), 60) == 60  # never more than the move itself


def test_credit_of_an_audited_move_is_bounded_by_everything_known() -> None:
    made = proven(0.5)
    likely = int(made.posterior()[0] * 60)
    assert audited_credit(made, 60, 1000.0) == likely
    assert audited_credit(made, 60, 3.0) == 3
    for nothing in (-5.0, math.nan, math.inf):
        assert audited_credit(made, 60, nothing) == 0
    assert audited_credit(proven(2.0, audits=200), 60, 1000.0) == 60


def test_posterior_is_prior_and_audits_by_weight() -> None:
    made = gate()
    mean, deviation, weight = PRIORS["full weights"]
    assert made.posterior() == pytest.approx((mean, deviation, weight))
    worths = [0.1, 0.4, 0.4, 0.7]
    for worth in worths:
        made.audited(100, 100 * worth, 1.0)
    joint, _, total = made.posterior()
    assert total == weight + 4
    assert joint == pytest.approx((weight * mean + sum(worths)) / total)
    narrow = gate()
    for _ in range(400):
        narrow.audited(100, 40.0, 1.0)
    assert narrow.interval() == pytest.approx((0.4, 0.4), abs=0.01)


def test_state_survives_a_round_trip() -> None:
    one = proven(0.3)
    one.moved(False)
    one.spend(3.0)
    other = gate(budget=0.5)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.ask(NOISY) == one.ask(NOISY)
    other.new_cycle()
    assert one.wait != other.wait
