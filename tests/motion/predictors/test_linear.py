from __future__ import annotations

import numpy as np
import pytest

from foretrain.motion.predictors.evidence import Ageing
from foretrain.motion.predictors.linear import LinearPredictor

from .motions import WINDOW, Run, geometric, noisy, out_of_sample


def fitted(predictor: LinearPredictor, run: Run) -> np.ndarray:
    for situation, told, _ in run:
        predictor.observe(situation, told)
    return predictor.forecast(situation, [WINDOW]).coefficients[0]


def test_l2_pulls_to_the_prior_in_noise() -> None:
    lengths = [
        np.abs(fitted(LinearPredictor(l2=l2), Run(noisy([200, 100], 0.4), 12, exact=False))).sum()
        for l2 in (0.0, 1.0, 10.0, 100.0)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.4 * lengths[0]


def test_forgetting_follows_a_change() -> None:
    def turn(window: int, _: np.random.Generator) -> list[np.ndarray]:
        return [np.full(30, 0.9**window if window < 15 else 0.9**15 * (-0.6) ** (window - 15))]

    quick = out_of_sample(LinearPredictor(forgetting=0.6), Run(turn, 24), after=19)
    slow = out_of_sample(LinearPredictor(forgetting=1.0), Run(turn, 24), after=19)
    assert quick[1]["r2"] > slow[1]["r2"] + 0.1
    assert quick[1]["r2"] > 0.7


def test_groups_keep_what_is_their_own() -> None:
    coefficients = fitted(LinearPredictor(), Run(geometric([100, 100], [0.95, 0.6]), 14))
    assert coefficients[0].sum() > coefficients[1].sum() + 0.2


def test_a_tiny_group_listens_to_the_others_in_noise() -> None:
    """Four coefficients cannot be fitted to a single number per window."""
    coefficients = fitted(LinearPredictor(), Run(noisy([3000, 1], 0.5), 25, exact=False))
    assert np.abs(coefficients[1] - coefficients[0]).max() < 0.5


@pytest.mark.parametrize("first", [[0.0, 0.9, 0.0, 0.0], [0.2, 0.1, 0.3, 0.3]])
def test_the_rollout_is_the_recurrence_of_the_basis(first: list[float]) -> None:
    """Against a slow reference that carries real vectors on, window by window."""
    ageing = Ageing()
    random = np.random.default_rng(0)
    basis = random.normal(size=(4, 20))
    table = ageing.roll(np.array([first]), 8)
    keep, moved, now = ageing.keep(), np.zeros(20), basis.copy()
    for window in range(1, 9):
        step = np.asarray(first) @ now
        moved = moved + step
        assert table[window, 0] @ basis == pytest.approx(moved)
        now = np.stack(
            [ageing.step() * step, step, *(k * m + (1 - k) * step for k, m in zip(keep, now[2:], strict=True))]
        )


def test_the_rollout_of_an_unstable_fit_is_bounded() -> None:
    table = Ageing().roll(np.array([[0.0, 3.0, 0.0, 0.0]]), 64)
    assert np.isfinite(table).all()
    assert np.abs(table).max() < 1000


def test_ageing_is_measured() -> None:
    predictor = LinearPredictor()
    fitted(predictor, Run(noisy([50], 0.5), 30, exact=False))
    assert predictor._ageing.keep() == pytest.approx([2 / 3, 0.9], abs=1e-3)


def test_ageing_without_any_evidence_is_a_number() -> None:
    ageing = Ageing()
    ageing.sums[:] = 0  # as a damaged state has it
    assert (ageing.step(), ageing.keep().tolist()) == (0.0, [0.0, 0.0])
