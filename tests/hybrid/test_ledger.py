"""The ledger claims no more than was measured, and charges everything it cost."""

from __future__ import annotations

import re

import numpy as np
import pytest

from foretrain.hybrid.ledger import Audit, Ledger


def audit(gain: float, step: int = 100) -> Audit:
    return Audit(step, 20, 1.0, 1.1, gain, 0.5)


def ledger(*gains: float, exact: int = 0, unaudited: int = 0, cost: float = 0.0) -> Ledger:
    return Ledger([audit(gain) for gain in gains], exact, unaudited, cost)


def test_without_a_move_nothing_is_said_of_a_gain() -> None:
    gain = Ledger().gain(1000.0)
    assert gain == {"gain_percent": None, "low": None, "high": None, "n": 0, "exact_moves": 0, "cost_percent": 0.0}
    assert Ledger().sentence(1000.0) == "prediction was never tried"
    assert Ledger().sentence(1000.0, "none of 2 moves tried was kept") == "none of 2 moves tried was kept"


def test_trying_alone_is_charged() -> None:
    tried = ledger(cost=10.0)
    assert tried.gain(990.0)["cost_percent"] == 1.0
    assert tried.gain(990.0)["gain_percent"] is None
    assert tried.sentence(990.0) == "prediction was never tried; it cost 1.0 % of the time"


def test_time_saved_is_that_of_the_plain_run_to_the_same_loss() -> None:
    """900 full steps and 100 saved: plain training needs 1000."""
    assert ledger(50.0, 50.0).gain(900.0)["gain_percent"] == 10.0


def test_costs_are_charged_against_gains() -> None:
    assert ledger(50.0, 50.0, cost=40.0).gain(900.0)["gain_percent"] == 6.0
    assert ledger(50.0, 50.0, cost=200.0).gain(900.0)["gain_percent"] == -10.0


def test_a_loss_that_fell_claims_nothing_without_an_audit() -> None:
    """A fall of the exact loss can be the easy part of what full steps would have done."""
    made = ledger(exact=20, cost=10.0)
    found = made.gain(990.0)
    assert (found["gain_percent"], found["low"], found["high"]) == (None, None, None)
    assert (found["exact_moves"], found["cost_percent"]) == (20, 1.0)
    assert "saved" not in made.sentence(990.0)


def test_a_run_that_was_hardly_anything_but_leaps_claims_no_percentage() -> None:
    made = ledger(30.0, -20.0, 5.0, exact=12, cost=980.0)
    assert made.gain(20.0)["gain_percent"] is None
    told = made.sentence(20.0)
    assert "too few full steps to compare with; leaps took 98.0 % of the time" in told
    assert made.gain(100.0)["gain_percent"] is not None


def test_an_audited_run_goes_on_from_the_better_fork_so_a_loss_costs_its_time_only() -> None:
    assert ledger(-500.0, -300.0, cost=50.0).gain(950.0)["gain_percent"] == pytest.approx(-5.26)


def test_a_kept_move_counts_what_moves_gain_on_average() -> None:
    """That one looked better than its fork proves nothing by itself."""
    assert ledger(60.0, -60.0).gain(940.0)["gain_percent"] == 0.0
    assert ledger(90.0, 30.0).gain(880.0)["gain_percent"] == 12.0
    assert ledger(90.0, -30.0).gain(970.0)["gain_percent"] == 3.0


@pytest.mark.parametrize("moves", [{"unaudited": 3}, {"exact": 3}, {"unaudited": 1, "exact": 2}])
def test_moves_without_an_audit_count_what_the_audits_found_on_average(moves: dict[str, int]) -> None:
    assert ledger(30.0, 10.0, **moves).gain(900.0)["gain_percent"] == pytest.approx(100 * 100 / 1000)
    harmful = ledger(-30.0, -10.0, **moves).gain(900.0)
    assert harmful["gain_percent"] == pytest.approx(-100 * 60 / 900, abs=0.01)


@pytest.mark.parametrize(("count", "student"), [(4, 3.182), (16, 2.131), (17, 2.120), (40, 2.023)])
def test_the_interval_is_students_however_many_audits_there_are(count: int, student: float) -> None:
    gains = [8.0, 12.0, 10.0, 14.0] * (count // 4) + [11.0] * (count % 4)
    half = student * np.std(gains, ddof=1) * count**0.5
    found, total = ledger(*gains).gain(1000.0), sum(gains)
    for name, gain in (("gain_percent", total), ("low", total - half), ("high", total + half)):
        assert found[name] == pytest.approx(100 * gain / (1000 + gain), abs=0.01)


def test_one_measurement_has_no_interval() -> None:
    found = ledger(30.0).gain(1000.0)
    assert found["gain_percent"] is not None
    assert (found["low"], found["high"]) == (None, None)
    assert "1 audit, no interval" in ledger(30.0).sentence(1000.0)


def test_one_measurement_is_no_proof() -> None:
    """Its interval is all numbers, 0 among them."""
    assert "not shown to pay" in ledger(30.0).sentence(1000.0)


def test_one_lucky_audit_beside_exact_moves_is_no_proof_either() -> None:
    made = ledger(300.0, exact=3, cost=100.0)
    assert "not shown to pay" in made.sentence(1000.0)


def test_a_gain_beyond_doubt_is_said_with_its_interval() -> None:
    text = ledger(20.0, 22.0, 21.0, 20.0, 22.0).sentence(900.0)
    assert text.startswith("prediction saved 10.4 % of the time to this loss, 95 % interval [")
    assert text.endswith("5 audits")


def test_exact_moves_are_named_beside_audits() -> None:
    text = ledger(20.0, 21.0, exact=3).sentence(900.0)
    assert "2 audits for 3 further moves that lowered the exact loss" in text


@pytest.mark.parametrize("seed", range(8))
def test_a_gain_whose_interval_holds_zero_is_never_claimed(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(250):
        gains = draw.normal(draw.uniform(-5, 10), draw.uniform(0, 20), draw.integers(2, 30)).tolist()
        exact = int(draw.integers(0, 10))
        made = ledger(*gains, exact=exact, unaudited=int(draw.integers(0, 20)), cost=float(draw.uniform(0, 200)))
        found, text = made.gain(1000.0), made.sentence(1000.0)
        assert found["low"] <= found["gain_percent"] <= found["high"]
        if found["low"] <= 0 or found["gain_percent"] <= 0:
            assert text.startswith("prediction is not shown to pay (")
            assert "it cost" in text
        else:
            said = re.fullmatch(r"prediction saved ([\d.]+) % of the time to this loss, 95 % interval \[.*\], .*", text)
            assert said is not None
            assert float(said[1]) == pytest.approx(found["gain_percent"], abs=0.051)


def test_noise_alone_is_claimed_as_a_gain_at_most_as_often_as_the_interval_allows() -> None:
    draw = np.random.default_rng(0)
    claims = sum(
        "saved" in ledger(*draw.normal(0, 10, 8).tolist(), unaudited=100).sentence(1000.0) for _ in range(1000)
    )
    assert claims <= 50


def test_the_better_of_two_equal_forks_is_no_gain() -> None:
    """Many audits of moves that do nothing, on a slope so flat that noise is worth hundreds of steps."""
    draw = np.random.default_rng(0)
    claims = sum(
        "saved" in ledger(*draw.normal(0, 300, 100).tolist(), cost=2500.0).sentence(5000.0) for _ in range(200)
    )
    assert claims <= 10


def test_a_run_of_no_steps_is_no_error() -> None:
    assert ledger(1.0, 2.0, cost=1.0).gain(0.0)["gain_percent"] is not None
    assert Ledger().gain(0.0)["cost_percent"] == 0.0


def test_state_survives_a_round_trip() -> None:
    one = ledger(3.0, -4.0, exact=2, unaudited=3, cost=17.5)
    other = Ledger()
    other.load_state_dict(one.state_dict())
    assert other == one
    other.audits.append(audit(1.0))
    assert len(one.audits) == 2
