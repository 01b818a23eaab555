"""Confidence: a sensible prior, calibrated after some outcomes, fast, and blind to the loss's scale."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from foretrain.motion.confidence import MOST_SURE, Confidence, ConfidenceFeatures, expected_calibration_error


def situation(random: np.random.Generator) -> ConfidenceFeatures:
    r2 = float(random.uniform(-0.3, 1.0))
    cosine = math.copysign(math.sqrt(abs(r2)), r2) * random.uniform(0.8, 1.0)
    return ConfidenceFeatures(1 - r2, cosine, float(random.exponential(0.3)), float(random.exponential(0.2)))


WORLDS: dict[str, Callable[[ConfidenceFeatures], float]] = {
    "as the prior says": lambda f: 1 / (1 + math.exp(1.8 - 4 * (1 - f.error))),
    "hardly ever kept": lambda f: 0.15 * min(max(1 - f.error, 0.0), 1.0),
    "nearly always kept": lambda f: 0.9 + 0.08 * min(max(1 - f.error, 0.0), 1.0),
    "a coin": lambda f: 0.5,
    "the other way round": lambda f: 0.9 - 0.7 * min(max(1 - f.error, 0.0), 1.0),
    "a step": lambda f: 0.85 if f.error < 0.6 else 0.1,
    "disagreement decides": lambda f: 0.95 / (1 + 2 * f.disagreement),
}


def live(confidence: Confidence, world: Callable[[ConfidenceFeatures], float], outcomes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(outcomes):
        features = situation(random)
        confidence.learn(features, bool(random.random() < world(features)))


@pytest.mark.parametrize(
    ("r2", "cosine", "low", "high"),
    [
        (0.95, 0.97, 0.85, 1.0),
        (0.9, 0.95, 0.85, 1.0),
        (0.45, 0.67, 0.4, 0.6),
        (0.0, 0.1, 0.0, 0.2),
        (0.0, 1.0, 0.0, 0.2),
    ],
)
def test_the_prior_is_sensible(r2: float, cosine: float, low: float, high: float) -> None:
    confidence = Confidence()
    assert low < confidence.estimate(ConfidenceFeatures(1 - r2, cosine)) < high
    assert low < confidence.estimate(ConfidenceFeatures(1 - r2, cosine, disagreement=0.05, spread=0.05)) < high


def test_each_sign_of_trouble_lowers_it() -> None:
    confidence = Confidence()
    good = ConfidenceFeatures(0.3, 0.8, 0.1, 0.1)
    for worse in (
        ConfidenceFeatures(0.6, 0.8, 0.1, 0.1),
        ConfidenceFeatures(0.3, 0.4, 0.1, 0.1),
        ConfidenceFeatures(0.3, 0.8, 0.9, 0.1),
        ConfidenceFeatures(0.3, 0.8, 0.1, 0.9),
    ):
        assert confidence.estimate(worse) < confidence.estimate(good)


def test_what_is_not_finite_is_no_reason_for_confidence() -> None:
    for value in (math.nan, math.inf):
        assert Confidence().estimate(ConfidenceFeatures(value, value, value, value)) < 0.1


@pytest.mark.parametrize("world", WORLDS)
def test_it_is_calibrated_after_300_outcomes(world: str) -> None:
    errors, sharp = [], []
    for seed in range(10):
        confidence = Confidence()
        live(confidence, WORLDS[world], 300, seed)
        errors.append(confidence.calibration_error)
        random = np.random.default_rng(seed + 99)
        truth = [(confidence.estimate(f), WORLDS[world](f)) for f in (situation(random) for _ in range(200))]
        sharp.append(float(np.mean([abs(said - true) for said, true in truth])))
    limit = 0.11 if world == "a step" else 0.08  # a jump is nothing that a logistic curve can follow
    assert np.mean(errors) < limit
    assert np.mean(sharp) < 0.15  # not only right on average, but right about the single case


def test_it_follows_a_run_that_changes() -> None:
    confidence = Confidence()
    live(confidence, lambda _: 0.95, 200, 0)
    assert confidence.estimate(ConfidenceFeatures(0.5, 0.7, 0.3, 0.2)) > 0.8
    live(confidence, lambda _: 0.05, 200, 1)
    assert confidence.estimate(ConfidenceFeatures(0.5, 0.7, 0.3, 0.2)) < 0.25


def test_a_few_outcomes_do_not_make_it_certain() -> None:
    confidence = Confidence()
    for _ in range(3):
        confidence.learn(ConfidenceFeatures(0.5, 0.7), kept=True)
    assert confidence.estimate(ConfidenceFeatures(0.5, 0.7)) < 0.9


def test_hundreds_of_outcomes_make_it_nearly_certain() -> None:
    for kept, certain in ((True, MOST_SURE), (False, 1 - MOST_SURE)):
        confidence = Confidence()
        confidence.weights = [1000.0 if kept else -1000.0, 0.0, 0.0, 0.0, 0.0]
        assert confidence.estimate(ConfidenceFeatures(0.5, 0.7)) == pytest.approx(certain)
        assert 0 < confidence.estimate(ConfidenceFeatures(0.5, 0.7)) < 1


def test_weight_says_how_much_an_outcome_counts() -> None:
    features = ConfidenceFeatures(0.5, 0.7)
    answers = []
    for weight in (0.0, 0.2, 1.0):
        confidence = Confidence()
        confidence.learn(features, kept=False, weight=weight)
        answers.append(confidence.estimate(features))
    assert answers[0] == Confidence().estimate(features) > answers[1] > answers[2]


def test_the_calibration_error_sees_a_liar() -> None:
    assert math.isnan(Confidence().calibration_error)
    random = np.random.default_rng(0)
    honest = [(p, bool(random.random() < p)) for p in random.uniform(0, 1, 2000).tolist()]
    assert expected_calibration_error(honest) < 0.03
    assert expected_calibration_error([(0.9, kept) for _, kept in honest]) == pytest.approx(0.4, abs=0.03)
    # too low where it is low and too high where it is high: right on average, and wrong
    assert expected_calibration_error([(0.0, True), (1.0, False)] * 100) == pytest.approx(1.0)


def test_state_survives_a_round_trip() -> None:
    first, second = Confidence(), Confidence()
    live(first, WORLDS["a step"], 120, 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    live(first, WORLDS["a step"], 50, 1)
    live(second, WORLDS["a step"], 50, 1)
    assert first.state_dict() == second.state_dict()
    assert first.calibration_error == second.calibration_error
