"""Residuals of past forecasts correct a move where states are alike, and only while that helps out of sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.config.schema import CorrectionConfig
from foretrain.hybrid.correction import Correction
from foretrain.motion.predictors.base import Array, Followed, Situation
from foretrain.persist.codec import put_together, snapshot, take_apart

WINDOW, G, R = 10, 3, 2


def correction(**settings: Any) -> Correction:
    return Correction(CorrectionConfig(**settings))


def state(angle: float) -> Array:
    """States in a plane: their cosine is that of the difference of their angles."""
    vector = np.zeros(64)
    vector[:2] = math.cos(angle), math.sin(angle)
    return vector


def followed(
    coefficients: Array, angle: float = 0.0, step: int = 0, horizon: int = WINDOW, lost: float = 0.0
) -> Followed:
    """The weights moved by `coefficients` of an orthonormal basis, and by `lost` outside of it."""
    gram = np.stack([np.eye(R)] * G)
    square = (coefficients**2).sum(axis=1) + lost
    return Followed(Situation(state(angle), gram, WINDOW, 1.0, step), horizon, coefficients.copy(), square, 1.0)


def learned(
    *residuals: float, angles: tuple[float, ...] = (), steps: tuple[int, ...] = (), **settings: Any
) -> Correction:
    """One residual along the first direction per number, for forecasts of zero."""
    made = correction(**settings)
    for index, residual in enumerate(residuals):
        happened = np.zeros((G, R))
        happened[:, 0] = residual * (1 + 0.1)  # the target is shrunk by a ridge of 0.1
        angle = angles[index] if angles else 0.0
        made.observe(followed(happened, angle, steps[index] if steps else 0), np.zeros((G, R)))
    return made


def suggest(made: Correction, angle: float = 0.0, step: int = 0, windows: float = 1.0, move: float = 1e6) -> Any:
    found = made.suggest(state(angle), step, windows, np.full((G, R), move), np.stack([np.eye(R)] * G))
    return None if found is None else (found.coefficients[:, 0], found.used)


def test_nothing_known_nothing_suggested() -> None:
    assert suggest(correction()) is None
    assert correction().error_ratio is None
    assert not correction().active


def test_a_residual_of_the_same_state_is_suggested_in_full() -> None:
    found, used = suggest(learned(0.5))
    assert found == pytest.approx([0.5] * G)
    assert used == 1


def test_it_grows_with_the_length_of_the_move() -> None:
    assert suggest(learned(0.5), windows=3.0)[0] == pytest.approx([1.5] * G)
    long = correction()
    happened = np.zeros((G, R))
    happened[:, 0] = 4 * 0.5 * 1.1
    long.observe(followed(happened, horizon=4 * WINDOW), np.zeros((G, R)))
    assert suggest(long, windows=1.0)[0] == pytest.approx([0.5] * G)


def test_it_is_the_forecasts_error_not_the_motion() -> None:
    made = correction()
    happened = np.full((G, R), 1.1)
    made.observe(followed(happened), np.full((G, R), 0.75))
    assert suggest(made)[0] == pytest.approx([0.25] * G)


@pytest.mark.parametrize(("similarity", "angle", "found"), [(0.7, 0.79, True), (0.7, 0.80, False), (0.9, 0.5, False)])
def test_only_similar_states_count(similarity: float, angle: float, found: bool) -> None:
    assert (suggest(learned(0.5, similarity=similarity), angle=angle) is not None) == found


def test_the_length_of_a_state_does_not_matter() -> None:
    made = learned(0.5)
    gram = np.stack([np.eye(R)] * G)
    found = made.suggest(1000.0 * state(0.0), 0, 1.0, np.full((G, R), 1e6), gram)
    assert found is not None
    assert found.coefficients[:, 0] == pytest.approx([0.5] * G)


def test_the_nearest_neighbours_are_used_by_similarity() -> None:
    angles = (0.6, 0.1, 0.5, 0.2, 0.3)
    made = learned(9.0, 1.0, 7.0, 2.0, 3.0, angles=angles, neighbors=3)
    found, used = suggest(made)
    weights = np.cos([0.1, 0.2, 0.3])
    assert used == 3
    assert found == pytest.approx([weights @ [1.0, 2.0, 3.0] / weights.sum()] * G)


def test_old_residuals_fade() -> None:
    made = learned(1.0, 3.0, steps=(0, 200))
    old, new = math.exp(-1.5), math.exp(-0.5)
    assert suggest(made, step=300)[0] == pytest.approx([(old * 1.0 + new * 3.0) / (old + new)] * G)


def test_age_alone_changes_no_weight_among_equals() -> None:
    assert suggest(learned(1.0, 3.0, steps=(100, 100)), step=900)[0] == pytest.approx([2.0] * G)


def test_the_ring_is_bounded_and_forgets_the_oldest() -> None:
    made = learned(*(float(index) for index in range(10)), residuals=4, neighbors=100)
    assert made.states is not None
    assert made.residuals is not None
    assert made.states.shape == (4, 64)
    assert made.residuals.shape == (4, G, R)
    found, used = suggest(made)
    assert used == 4
    assert found == pytest.approx([np.mean([6.0, 7.0, 8.0, 9.0])] * G)


@pytest.mark.parametrize("limit", [0.0, 0.2, 0.5])
def test_it_is_clipped_per_group_to_a_share_of_the_move(limit: float) -> None:
    """Lengths are those of displacements: the Gram matrix counts."""
    made = correction(limit=limit)
    gram = np.stack([np.diag([4.0, 1.0])] * G)
    residual = np.array([[3.0, 1.0], [0.01, 0.0], [-5.0, 2.0]])
    situation = Situation(state(0.0), gram, WINDOW, 1.0, 0)
    dots = np.einsum("gij,gj->gi", gram, residual)
    square = np.einsum("gi,gij,gj->g", residual, gram, residual)
    made.observe(Followed(situation, WINDOW, dots, square, 1.0), np.zeros((G, R)))
    move = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    found = made.suggest(state(0.0), 0, 1.0, move, gram)
    assert found is not None
    lengths = np.sqrt(np.einsum("gi,gij,gj->g", found.coefficients, gram, found.coefficients))
    assert lengths[0] == pytest.approx(limit * 2.0)
    assert lengths[1] == pytest.approx(min(limit * 2.0, 0.02), rel=0.1)
    assert lengths[2] == 0.0
    if limit:
        assert made.residuals is not None
        assert np.allclose(
            found.coefficients[0] / found.coefficients[0, 0], made.residuals[0, 0] / made.residuals[0, 0, 0]
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_stored(bad: float) -> None:
    made = learned(0.5)
    made.observe(followed(np.full((G, R), math.nan)), np.zeros((G, R)))
    made.observe(followed(np.ones((G, R))), np.full((G, R), bad))
    assert made.stored == 1
    assert suggest(made)[0] == pytest.approx([0.5] * G)
    assert math.isfinite(made.plain_error)
    assert math.isfinite(made.corrected_error)


def test_a_state_of_zeros_is_like_nothing() -> None:
    made = correction()
    one = followed(np.ones((G, R)))
    empty = Situation(np.zeros(64), one.situation.gram, WINDOW, 1.0, 0)
    made.observe(Followed(empty, WINDOW, one.dots, one.square, 1.0), np.zeros((G, R)))
    assert made.stored == 0
    assert learned(0.5).suggest(np.zeros(64), 0, 1.0, np.ones((G, R)), one.situation.gram) is None


# --- only while it helps ---------------------------------------------------------------------------------------------


def world(seed: int, systematic: float, noise: float, windows: int = 120) -> Correction:
    """The forecast misses by something that depends on the state, plus noise that is new every time."""
    draw = np.random.default_rng(seed)
    pattern = draw.normal(size=(2, G, R))
    pattern /= np.linalg.norm(pattern[0])
    made = correction()
    for window in range(windows):
        kind = int(draw.integers(2))
        forecast = draw.normal(size=(G, R))
        forecast *= 2 / np.linalg.norm(forecast)
        happened = forecast + systematic * pattern[kind] + noise * draw.normal(size=(G, R)) / math.sqrt(G * R)
        angle = kind * math.pi / 2 + 0.1 * draw.normal()
        made.observe(followed(happened, angle, window * WINDOW), forecast)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_a_systematic_error_is_found_and_corrected(seed: int) -> None:
    made = world(seed, systematic=0.6, noise=0.3)
    assert made.active
    assert made.error_ratio is not None
    assert made.error_ratio < 0.8


@pytest.mark.parametrize("seed", range(10))
def test_pure_noise_is_never_corrected(seed: int) -> None:
    made = world(seed, systematic=0.0, noise=1.0)
    assert made.tried > 50
    assert not made.active
    assert made.error_ratio is not None
    assert made.error_ratio > 1


def test_it_starts_inactive_whatever_it_knows() -> None:
    made = world(0, systematic=0.6, noise=0.0, windows=5)
    assert made.tried < 5
    assert not made.active


def test_it_stops_when_the_world_turns() -> None:
    made = world(0, systematic=0.6, noise=0.1)
    assert made.active
    draw = np.random.default_rng(1)
    for window in range(120, 260):
        forecast = draw.normal(size=(G, R))
        forecast *= 2 / np.linalg.norm(forecast)
        sign = 1 if window % 2 else -1
        miss = np.zeros((G, R))
        miss[:, 0] = 0.4 * sign
        made.observe(followed(forecast + miss, 0.0, window * WINDOW), forecast)
    assert not made.active


# --- state -----------------------------------------------------------------------------------------------------------


def test_state_survives_a_round_trip_through_files() -> None:
    one = world(3, systematic=0.5, noise=0.3)
    other = correction()
    other.load_state_dict(put_together(snapshot(one.state_dict())))
    assert (other.active, other.error_ratio, other.stored, other.tried) == (
        one.active,
        one.error_ratio,
        one.stored,
        one.tried,
    )
    for window in range(200, 230):
        happened = np.random.default_rng(window).normal(size=(G, R))
        item = followed(happened, 0.1, window * WINDOW)
        one.observe(item, np.ones((G, R)))
        other.observe(item, np.ones((G, R)))
    mine, theirs = take_apart(one.state_dict()), take_apart(other.state_dict())
    assert mine.tree == theirs.tree
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, value in mine.tensors.items():
        assert torch.equal(value, theirs.tensors[name]), name


def test_state_of_a_full_ring_survives_a_round_trip() -> None:
    one = learned(*(float(index) for index in range(10)), residuals=4, neighbors=100)
    other = correction(residuals=4, neighbors=100)
    other.load_state_dict(one.state_dict())
    for made in (one, other):
        made.observe(followed(np.full((G, R), 11.0)), np.zeros((G, R)))
    assert np.array_equal(one.residuals, other.residuals)


def test_an_empty_state_survives_a_round_trip() -> None:
    other = learned(0.5)
    other.load_state_dict(correction().state_dict())
    assert suggest(other) is None
