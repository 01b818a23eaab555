"""What the two forks of an audit say: the difference of their losses in full steps, and its standard error."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretrain.hybrid.judges.audit import Audited
from foretrain.hybrid.judges.exact import Exact
from foretrain.hybrid.judges.judgement import Trusted
from foretrain.hybrid.ledger import Audit


def judged(with_move: list[float], without: list[float], low_noise: bool = False) -> Audit:
    """A step is worth 0.1 of loss; where the loss is exact, a fall counts by its ratio."""
    engine = SimpleNamespace(progress=SimpleNamespace(global_step=70))
    tools = SimpleNamespace(engine=engine, worth=SimpleNamespace(noisy=lambda gain: 10 * gain))
    move: Any = SimpleNamespace(moved=20, tools=tools, exact_worth=lambda a, b: 100 * math.log(a / b))
    return Audited(Exact() if low_noise else Trusted()).weigh(move, with_move, without)


def test_a_lower_loss_with_the_move_is_a_gain() -> None:
    audit = judged([1.9, 2.1, 2.0, 2.0], [2.2, 2.2, 2.2, 2.2])
    assert (audit.step, audit.horizon) == (70, 20)
    assert (audit.loss_with, audit.loss_without) == (pytest.approx(2.0), pytest.approx(2.2))
    assert audit.gain_steps == pytest.approx(2.0)
    assert audit.deviation_steps == pytest.approx(10 * np.std([0.3, 0.1, 0.2, 0.2], ddof=1) / 2)
    assert judged([2.2], [2.0]).gain_steps == pytest.approx(-2.0)


def test_exact_losses_are_compared_as_such() -> None:
    audit = judged([1.0, 1.0], [math.e, math.e], low_noise=True)
    assert audit.gain_steps == pytest.approx(100.0)
    assert audit.deviation_steps == 0.0


@pytest.mark.parametrize("low_noise", [False, True])
@pytest.mark.parametrize(("with_move", "without"), [(math.nan, 2.0), (math.inf, 2.0), (2.0, math.nan)])
def test_a_fork_that_ends_at_no_number_has_lost(with_move: float, without: float, low_noise: bool) -> None:
    assert judged([with_move, 2.0], [without, 2.0], low_noise).gain_steps == -20
