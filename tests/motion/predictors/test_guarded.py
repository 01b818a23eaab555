"""A predictor behind the fence; whole runs with misbehaving ones are in tests/faults/test_own_code.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretrain.errors import CheckpointError
from foretrain.motion.predictors.base import Followed, Situation
from foretrain.motion.predictors.guarded import GuardedPredictor
from foretrain.motion.predictors.linear import LinearPredictor

from .motions import WINDOW, Run, geometric
from .test_predictors import RepeatPredictor

HORIZONS = [WINDOW, 2 * WINDOW]


def situations(count: int) -> list[tuple[Situation, list[Followed]]]:
    return [(situation, list(told)) for situation, told, _ in Run(geometric([20, 10], [0.9, 0.8]), count)]


def test_foretrains_own_predictors_say_what_they_say_without_it() -> None:
    bare, guarded = LinearPredictor(), GuardedPredictor(LinearPredictor())
    for situation, told in situations(6):
        bare.observe(situation, told)
        expected, given = bare.forecast(situation, HORIZONS), guarded.learn(situation, told, HORIZONS)
        assert given is not None
        assert np.array_equal(given.coefficients, expected.coefficients)
        assert np.array_equal(given.loss, expected.loss)
    assert not guarded.own


def test_an_error_in_one_of_foretrains_own_ends_no_run_either(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = GuardedPredictor(LinearPredictor())

    def singular(*_: Any) -> Any:
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(guarded.predictor, "observe", singular)
    for situation, told in situations(2):
        assert guarded.learn(situation, told, HORIZONS) is None
    assert guarded.off
    assert [failure.error for failure, _ in guarded.untold] == ["numpy.linalg.LinAlgError: Singular matrix"] * 2


def test_out_of_memory_of_foretrains_own_is_left_to_those_who_free_some(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = GuardedPredictor(LinearPredictor())

    def large(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(guarded.predictor, "forecast", large)
    with pytest.raises(MemoryError):
        guarded.learn(*situations(1)[0], HORIZONS)
    assert guarded.strikes == 0


def test_a_forecast_is_a_copy() -> None:
    class Keeping(RepeatPredictor):
        def forecast(self, situation: Any, horizons: Any) -> Any:
            self.given = super().forecast(situation, horizons)
            return self.given

    predictor = Keeping()
    given = GuardedPredictor(predictor).learn(*situations(1)[0], HORIZONS)
    assert given is not None
    before = given.coefficients.copy()
    predictor.given.coefficients[...] = 9
    assert np.array_equal(given.coefficients, before)


def test_how_often_it_failed_is_saved() -> None:
    class Broken(RepeatPredictor):
        def forecast(self, situation: Any, horizons: Any) -> Any:
            raise ValueError("no")

    one = GuardedPredictor(Broken())
    assert one.learn(*situations(1)[0], HORIZONS) is None
    other = GuardedPredictor(Broken())
    other.load_state_dict(one.state_dict())
    assert (other.strikes, other.off) == (1, False)
    assert other.learn(*situations(1)[0], HORIZONS) is None
    assert other.off
    assert other.state_dict() == {"name": "repeat", "state": None, "strikes": 2}


def test_a_state_without_the_count_of_failures_is_refused() -> None:
    guarded = GuardedPredictor(LinearPredictor())
    with pytest.raises(CheckpointError, match="strikes is missing"):
        guarded.load_state_dict({"name": "linear", "state": LinearPredictor().state_dict()})
